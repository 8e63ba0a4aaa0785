//! One operand, and literals.

use super::{Cursor, ParseError, ParseErrorKind, error_at, header::Names, lexer::TokenKind};
use crate::{
    ident::Name,
    inst::{Address, Base, Imm, Inst, Operand, RegId, TensorAddress},
    op::Op,
    types::{ScalarType, SpecialReg},
};

/// Reads the next operand of `inst`, whose operation and modifiers are known.
pub(super) fn operand(
    cursor: &mut Cursor<'_, '_>,
    names: &Names,
    inst: &Inst,
) -> Result<Operand, ParseError> {
    let first = match cursor.peek(0).text {
        "{" => Operand::Vector(list(cursor, names, inst)?),
        "[" => bracketed(cursor, names, inst)?,
        "(" => Operand::Group(group(cursor, names, inst)?),
        _ => scalar(cursor, names, inst)?,
    };
    if !cursor.eat("|") {
        return Ok(first);
    }
    let second = scalar(cursor, names, inst)?;
    Ok(Operand::pair(first, second))
}

/// `{a, b, …}`.
fn list(cursor: &mut Cursor<'_, '_>, names: &Names, inst: &Inst) -> Result<Vec<Operand>, ParseError> {
    cursor.expect("{")?;
    let mut items = vec![scalar(cursor, names, inst)?];
    while cursor.eat(",") {
        items.push(scalar(cursor, names, inst)?);
    }
    cursor.expect("}")?;
    Ok(items)
}

/// `(a, b, …)`, perhaps empty.
fn group(cursor: &mut Cursor<'_, '_>, names: &Names, inst: &Inst) -> Result<Vec<Operand>, ParseError> {
    cursor.expect("(")?;
    let mut items = Vec::new();
    while !cursor.eat(")") {
        if !items.is_empty() {
            cursor.expect(",")?;
        }
        items.push(scalar(cursor, names, inst)?);
    }
    Ok(items)
}

/// `[base+offset]` or `[map, {…}]`.
fn bracketed(cursor: &mut Cursor<'_, '_>, names: &Names, inst: &Inst) -> Result<Operand, ParseError> {
    cursor.expect("[")?;
    let address = address(cursor, names)?;
    let operand = if cursor.eat(",") {
        Operand::Tensor(TensorAddress { map: address, coords: list(cursor, names, inst)? })
    } else {
        Operand::Address(address)
    };
    cursor.expect("]")?;
    Ok(operand)
}

fn address(cursor: &mut Cursor<'_, '_>, names: &Names) -> Result<Address, ParseError> {
    let token = cursor.peek(0);
    if token.kind != TokenKind::Word {
        return Ok(Address { base: Base::Absolute, offset: signed(cursor)? });
    }
    cursor.bump();
    let base = match register(names, token.text) {
        Some(reg) => Base::Reg(reg),
        None if token.text.starts_with('%') => {
            return error_at(token, undeclared(token.text));
        }
        None => Base::Symbol(symbol(names, token)?),
    };
    Ok(Address { base, offset: offset(cursor)? })
}

/// `+n`, `-n` or nothing.
pub(super) fn offset(cursor: &mut Cursor<'_, '_>) -> Result<i64, ParseError> {
    let plus = cursor.eat("+");
    if plus || cursor.is("-") { signed(cursor) } else { Ok(0) }
}

/// An integer with an optional sign.
fn signed(cursor: &mut Cursor<'_, '_>) -> Result<i64, ParseError> {
    match literal(cursor, false)? {
        Imm::Int(value) => Ok(value),
        _ => cursor.expected("an integer"),
    }
}

/// What to say about a register that is not declared: it may be one of the ISA's that is missing here.
fn undeclared(text: &str) -> ParseErrorKind {
    const SPECIAL: [&str; 5] = ["%envreg", "%pm", "%globaltimer_", "%aggr_smem_size", "%current_graph_exec"];
    match SPECIAL.iter().any(|name| text.starts_with(name)) {
        true => ParseErrorKind::Unsupported(format!("the special register `{text}`")),
        false => ParseErrorKind::UndeclaredRegister(text.into()),
    }
}

/// A register, literal, special register, symbol, label or `_`.
fn scalar(cursor: &mut Cursor<'_, '_>, names: &Names, inst: &Inst) -> Result<Operand, ParseError> {
    if cursor.eat("!") {
        let token = cursor.expect_kind(TokenKind::Word, "a predicate register")?;
        return match register(names, token.text) {
            Some(reg) => Ok(Operand::Not(reg)),
            None => error_at(token, undeclared(token.text)),
        };
    }
    match cursor.peek(0).kind {
        TokenKind::Word => word(cursor, names, inst),
        TokenKind::Number => literal(cursor, wants_f64(inst)).map(Operand::Imm),
        TokenKind::Punct if cursor.is("-") => literal(cursor, wants_f64(inst)).map(Operand::Imm),
        _ => cursor.expected("an operand"),
    }
}

/// Decimal floats are `f32` unless the instruction computes in `f64`.
fn wants_f64(inst: &Inst) -> bool {
    inst.mods.iter().rev().find_map(|m| m.as_type()) == Some(ScalarType::F64)
}

fn word(cursor: &mut Cursor<'_, '_>, names: &Names, inst: &Inst) -> Result<Operand, ParseError> {
    let token = cursor.bump();
    if token.text == "_" {
        return Ok(Operand::Sink);
    }
    if inst.op == Op::Bra {
        return label(names, token).map(Operand::Label);
    }
    if let Some(reg) = register(names, token.text) {
        return Ok(Operand::Reg(reg));
    }
    if let Some(special) = special(cursor, token.text) {
        return Ok(Operand::Special(special));
    }
    match token.text {
        "WARP_SZ" => Ok(Operand::int(32)),
        text if text.starts_with('%') => error_at(token, undeclared(text)),
        _ if cursor.is("+") => {
            let name = symbol(names, token)?;
            Ok(Operand::Offset(name, offset(cursor)?))
        }
        _ => symbol(names, token).map(Operand::Symbol),
    }
}

/// The label of that name, innermost scope first.
pub(super) fn label(names: &Names, token: super::Token<'_>) -> Result<Name, ParseError> {
    let known = names.labels.iter().rev().find_map(|scope| scope.get(token.text)).cloned();
    let undefined =
        ParseErrorKind::Expected { expected: "a label of this kernel".into(), found: token.text.into() };
    known.map_or_else(|| error_at(token, undefined), Ok)
}

/// A special register, whose second part (`.x`) is a token of its own.
fn special(cursor: &mut Cursor<'_, '_>, text: &str) -> Option<SpecialReg> {
    let next = cursor.peek(0);
    if next.kind == TokenKind::Dotted {
        let special = SpecialReg::parse(&format!("{text}{}", next.text))?;
        cursor.bump();
        return Some(special);
    }
    SpecialReg::parse(text)
}

/// The register of that name, innermost scope first.
pub(super) fn register(names: &Names, text: &str) -> Option<RegId> {
    names.registers.iter().rev().find_map(|scope| scope.get(text)).copied()
}

/// The variable or parameter of that name; unknown names are kept for the verifier to judge.
fn symbol(names: &Names, token: super::Token<'_>) -> Result<Name, ParseError> {
    if let Some(name) = names.symbols.iter().rev().find_map(|scope| scope.get(token.text)) {
        return Ok(name.clone());
    }
    let bad =
        ParseErrorKind::Expected { expected: "a name".into(), found: token.text.chars().take(80).collect() };
    Name::new(token.text).or_else(|_| error_at(token, bad))
}

/// A number with an optional sign.
pub(super) fn literal(cursor: &mut Cursor<'_, '_>, wants_f64: bool) -> Result<Imm, ParseError> {
    let negative = cursor.eat("-");
    let token = cursor.expect_kind(TokenKind::Number, "a number")?;
    let value = hex_float(token.text)
        .or_else(|| integer(token.text).map(Imm::Int))
        .or_else(|| decimal_float(token.text, wants_f64));
    match value {
        Some(Imm::Int(value)) if negative => Ok(Imm::Int(value.wrapping_neg())),
        Some(Imm::F32(bits)) if negative => Ok(Imm::F32(bits ^ 1 << 31)),
        Some(Imm::F64(bits)) if negative => Ok(Imm::F64(bits ^ 1 << 63)),
        Some(value) => Ok(value),
        None => error_at(token, ParseErrorKind::Number(token.text.into())),
    }
}

/// `0f3F800000`, `0d3FF0000000000000`.
fn hex_float(text: &str) -> Option<Imm> {
    let digits = |prefix: [&str; 2], len| {
        let rest = text.strip_prefix(prefix[0]).or_else(|| text.strip_prefix(prefix[1]))?;
        (rest.len() == len).then_some(rest)
    };
    let single = digits(["0f", "0F"], 8).and_then(|d| u32::from_str_radix(d, 16).ok()).map(Imm::F32);
    single.or_else(|| digits(["0d", "0D"], 16).and_then(|d| u64::from_str_radix(d, 16).ok()).map(Imm::F64))
}

/// Decimal, `0x`, `0b` and octal integers of 64 bits, with or without `U`.
pub(super) fn integer(text: &str) -> Option<i64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    let radix = |prefix: [&str; 2], radix| {
        let digits = text.strip_prefix(prefix[0]).or_else(|| text.strip_prefix(prefix[1]))?;
        u64::from_str_radix(digits, radix).ok()
    };
    let plain = || {
        let octal = text.len() > 1 && text.starts_with('0');
        u64::from_str_radix(text, if octal { 8 } else { 10 }).ok()
    };
    let value = radix(["0x", "0X"], 16).or_else(|| radix(["0b", "0B"], 2)).or_else(plain)?;
    Some(value as i64)
}

fn decimal_float(text: &str, wants_f64: bool) -> Option<Imm> {
    if !text.contains('.') {
        return None;
    }
    if wants_f64 { text.parse().ok().map(Imm::f64) } else { text.parse().ok().map(Imm::f32) }
}
