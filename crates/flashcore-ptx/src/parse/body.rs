//! The body of a kernel: scopes, declarations, labels, instructions.

use super::{
    Cursor, ParseError, ParseErrorKind, error_at,
    header::{Names, Reader, space},
    inlined::{Inlined, Position},
    lexer::TokenKind,
    operand, shown,
};
use crate::{
    ident::Name,
    inst::{Guard, Inst, RegId},
    module::{Kernel, Linkage, Statement, TargetList, Targets, Unknown, derived_name},
    op::{Mod, Op},
    provenance::Unit,
    types::ScalarType,
};
use std::collections::HashMap;

/// Most registers of one kernel: far above what compiles, low enough to keep hostile input cheap.
const MAX_REGISTERS: u32 = 1 << 20;
/// Most scopes inside each other.
const MAX_SCOPES: usize = 64;
/// Most parts of a mnemonic, as in `cp.async.bulk.prefetch.tensor`.
const MAX_OP_PARTS: usize = 5;

/// What to say about an instruction that is not in the table.
fn unknown(mnemonic: &str, text: String) -> ParseErrorKind {
    match mnemonic {
        "tex" | "tld4" | "txq" | "suld" | "sust" | "sured" | "suq" | "istypep" => {
            let cure = "textures and surfaces are not supported; pass a buffer and load from it";
            ParseErrorKind::Unsupported(format!("`{text}`: {cure}. A texture"))
        }
        _ => ParseErrorKind::UnknownInstruction(text),
    }
}

/// Puts modifiers where the manual writes them: assemblers take them in any order, and libraries rely on it.
fn reorder(op: Op, mods: &mut [Mod]) {
    match op {
        Op::Ldmatrix | Op::Stmatrix => mods.sort_by_key(|modifier| match modifier {
            Mod::Sync | Mod::Aligned => 0,
            Mod::Shape(_) => 1,
            Mod::X1 | Mod::X2 | Mod::X4 => 2,
            Mod::Trans => 3,
            _ => 4,
        }),
        Op::MmaSync | Op::MmaSp | Op::MmaSpOrdered | Op::WgmmaMmaAsync
            if mods.contains(&Mod::Satfinite) || mods.contains(&Mod::Rn) =>
        {
            mods.sort_by_key(|modifier| match modifier {
                Mod::Type(_) => 2,
                Mod::Satfinite | Mod::Rn => 1,
                _ => 0,
            });
        }
        Op::Cvt if mods.contains(&Mod::Satfinite) => mods.sort_by_key(|modifier| match modifier {
            Mod::Type(_) => 3,
            Mod::Relu => 2,
            Mod::Satfinite => 1,
            _ => 0,
        }),
        Op::Fma => mods.sort_by_key(|modifier| modifier.as_type().is_some()),
        Op::MbarrierExpectTx | Op::MbarrierCompleteTx => mods.sort_by_key(|modifier| match modifier {
            Mod::Relaxed => 0,
            Mod::Cta | Mod::Cluster => 1,
            _ => 2,
        }),
        Op::Atom | Op::Red => mods.sort_by_key(|modifier| match modifier {
            Mod::Relaxed | Mod::Acquire | Mod::Release | Mod::AcqRel => 0,
            Mod::Cta | Mod::Cluster | Mod::Gpu | Mod::Sys => 1,
            Mod::Global | Mod::Shared | Mod::SharedCta | Mod::SharedCluster => 2,
            Mod::Noftz => 4,
            Mod::L2CacheHint => 5,
            Mod::V2 | Mod::V4 | Mod::V8 => 6,
            Mod::Type(_) => 7,
            _ => 3,
        }),
        Op::Ld | Op::St => mods.sort_by_key(|modifier| match modifier {
            Mod::Mmio => 0,
            Mod::Weak | Mod::Volatile | Mod::Relaxed | Mod::Acquire | Mod::Release => 0,
            Mod::Cta | Mod::Cluster | Mod::Gpu | Mod::Sys => 1,
            Mod::Global | Mod::Shared | Mod::SharedCta | Mod::SharedCluster | Mod::Local => 2,
            _ => 3,
        }),
        _ => {}
    }
}

/// Whether a label stands `ahead` places on; lists of targets begin like one.
fn is_label(cursor: &Cursor<'_, '_>, ahead: usize) -> bool {
    let list = [".branchtargets", ".calltargets", ".callprototype"];
    cursor.peek(ahead).kind == TokenKind::Word
        && cursor.peek(ahead + 1).text == ":"
        && !list.contains(&cursor.peek(ahead + 2).text)
}

struct Body<'b, 'a, 't> {
    reader: &'b mut Reader<'a, 't>,
    kernel: &'b mut Kernel,
    names: &'b mut Names,
    unit: Unit,
    /// The last `.loc`: file and line.
    location: Option<(String, u32)>,
    inlined: Inlined,
}

/// Reads `{ … }` into `kernel`, which is that unit of its module.
pub(super) fn kernel_body(
    reader: &mut Reader<'_, '_>,
    kernel: &mut Kernel,
    names: &mut Names,
    unit: Unit,
) -> Result<(), ParseError> {
    let mut body = Body { reader, kernel, names, unit, location: None, inlined: Inlined::default() };
    body.open_scope()?;
    while !body.names.registers.is_empty() {
        body.statement()?;
    }
    Ok(())
}

impl Body<'_, '_, '_> {
    fn open_scope(&mut self) -> Result<(), ParseError> {
        if self.names.registers.len() >= MAX_SCOPES {
            let what = format!("nesting of more than {MAX_SCOPES} scopes");
            return self.reader.cursor.error_here(ParseErrorKind::Unsupported(what));
        }
        self.reader.cursor.expect("{")?;
        self.names.registers.push(HashMap::new());
        self.names.symbols.push(HashMap::new());
        let labels = self.labels_ahead()?;
        self.names.labels.push(labels);
        Ok(())
    }

    fn close_scope(&mut self) {
        self.reader.cursor.bump();
        self.names.registers.pop();
        self.names.symbols.pop();
        self.names.labels.pop();
    }

    /// Labels of the scope that begins here: branches may name them before they stand.
    fn labels_ahead(&mut self) -> Result<HashMap<String, Name>, ParseError> {
        let cursor = self.reader.cursor.clone();
        let mut labels = HashMap::new();
        let mut depth = 0u32;
        for ahead in 0.. {
            let token = cursor.peek(ahead);
            match token.text {
                "{" => depth += 1,
                "}" if depth == 0 => break,
                "}" => depth -= 1,
                _ if token.kind == TokenKind::End => break,
                text if depth == 0 && token.kind == TokenKind::Word && is_label(&cursor, ahead) => {
                    let duplicate = || error_at(token, ParseErrorKind::Duplicate(text.into()));
                    let Some(name) = self.names.unique(text) else { return duplicate() };
                    if labels.insert(text.to_owned(), name).is_some() {
                        return duplicate();
                    }
                }
                _ => {}
            }
        }
        Ok(labels)
    }

    fn statement(&mut self) -> Result<(), ParseError> {
        let token = self.reader.cursor.peek(0);
        match token.text {
            "{" => self.open_scope(),
            "}" => {
                self.close_scope();
                Ok(())
            }
            ";" => self.reader.cursor.expect(";"),
            ".reg" => self.registers(),
            ".loc" => self.loc(),
            ".pragma" => self.reader.cursor.skip_past(";"),
            text if space(text).is_some() => self.variables(),
            _ if token.kind == TokenKind::Dotted => self
                .reader
                .cursor
                .error_here(ParseErrorKind::Unsupported(format!("`{}` in a kernel", token.text))),
            _ if is_label(&self.reader.cursor, 0) => self.label(),
            _ if token.kind == TokenKind::Word && self.reader.cursor.peek(1).text == ":" => self.targets(),
            _ if token.text == "@" || token.kind == TokenKind::Word => {
                self.instruction_or_skip();
                Ok(())
            }
            _ => self.reader.cursor.expected("an instruction, a label or `}`"),
        }
    }

    fn label(&mut self) -> Result<(), ParseError> {
        let token = self.reader.cursor.bump();
        self.reader.cursor.expect(":")?;
        let known = self.names.labels.last().and_then(|l| l.get(token.text)).cloned();
        match known {
            Some(name) => {
                self.push(Statement::Label(name), token.line);
                Ok(())
            }
            None => {
                error_at(token, ParseErrorKind::Expected { expected: "a label".into(), found: shown(token) })
            }
        }
    }

    /// `name: .branchtargets …;` and its like.
    fn targets(&mut self) -> Result<(), ParseError> {
        let token = self.reader.cursor.bump();
        self.reader.cursor.expect(":")?;
        let kind = self.reader.cursor.bump();
        let list = match kind.text {
            ".branchtargets" => TargetList::Branch(self.listed(true)?),
            ".calltargets" => TargetList::Call(self.listed(false)?),
            _ => self.prototype()?,
        };
        self.reader.cursor.expect(";")?;
        let duplicate = || error_at(token, ParseErrorKind::Duplicate(token.text.into()));
        let Some(name) = self.names.unique(token.text) else { return duplicate() };
        self.kernel.targets.push(Targets { name: name.clone(), list });
        let scope = self.names.symbols.last_mut();
        if scope.is_some_and(|scope| scope.insert(token.text.into(), name).is_none()) {
            Ok(())
        } else {
            duplicate()
        }
    }

    /// Names up to a semicolon: of labels, or of functions.
    fn listed(&mut self, labels: bool) -> Result<Vec<Name>, ParseError> {
        let mut names = Vec::new();
        loop {
            let token = self.reader.cursor.peek(0);
            let name = self.reader.name()?;
            names.push(if labels { operand::label(self.names, token)? } else { name });
            if !self.reader.cursor.eat(",") {
                return Ok(names);
            }
        }
    }

    /// `(returns) _ (params)`.
    fn prototype(&mut self) -> Result<TargetList, ParseError> {
        let returns = self.reader.params()?;
        self.reader.cursor.expect("_")?;
        let params = self.reader.params()?;
        let noreturn = self.reader.function_attributes()?;
        Ok(TargetList::Prototype { returns, params, noreturn })
    }

    fn push(&mut self, statement: Statement, text_line: u32) {
        let (file, line) = match &self.location {
            Some((file, line)) => (file.as_str(), *line),
            None => (self.reader.file, text_line),
        };
        self.reader.provenance.record(self.unit, self.kernel.body.len(), file, line);
        self.kernel.body.push(statement);
    }

    /// `.loc file line column …` holds to the end of its line.
    fn loc(&mut self) -> Result<(), ParseError> {
        let start = self.reader.cursor.bump();
        let (own, mut call) = (self.position()?, None);
        while self.reader.cursor.peek(0).line == start.line
            && self.reader.cursor.peek(0).kind != TokenKind::End
        {
            if self.reader.cursor.bump().text == "inlined_at" {
                call = Some(self.position()?);
            }
        }
        let (file, line) = self.inlined.place(own, call);
        self.location = self.reader.files.get(&file).map(|name| (name.clone(), line));
        Ok(())
    }

    fn position(&mut self) -> Result<Position, ParseError> {
        let cursor = &mut self.reader.cursor;
        Ok((cursor.number()?, cursor.number()?, cursor.number()?))
    }

    fn variables(&mut self) -> Result<(), ParseError> {
        let Some(space) = space(self.reader.cursor.peek(0).text) else {
            return self.reader.cursor.expected("a state space");
        };
        let (names, kernel) = (&mut *self.names, &mut *self.kernel);
        self.reader.variables(Linkage::Private, space, &mut |mut variable| {
            let text = variable.name.as_str().to_owned();
            let Some(name) = names.unique(&text) else { return false };
            variable.name = name.clone();
            kernel.variables.push(variable);
            names.symbols.last_mut().is_some_and(|scope| scope.insert(text, name).is_none())
        })
    }

    /// `.reg .type a, b<n>, …;`
    fn registers(&mut self) -> Result<(), ParseError> {
        self.reader.cursor.bump();
        let ty = self.reader.scalar_type()?;
        if !ty.can_be_register() {
            return self.reader.cursor.error_here(ParseErrorKind::Unsupported(format!("a `.{ty}` register")));
        }
        loop {
            self.register(ty)?;
            if !self.reader.cursor.eat(",") {
                return self.reader.cursor.expect(";");
            }
        }
    }

    fn register(&mut self, ty: ScalarType) -> Result<(), ParseError> {
        let token = self.reader.cursor.peek(0);
        self.reader.name()?;
        if !self.reader.cursor.eat("<") {
            return self.declare(ty, token.text.to_owned(), token);
        }
        let count = self.reader.cursor.number()?;
        self.reader.cursor.expect(">")?;
        if count > MAX_REGISTERS {
            return error_at(token, ParseErrorKind::Number(count.to_string()));
        }
        (0..count).try_for_each(|i| self.declare(ty, format!("{}{i}", token.text), token))
    }

    fn declare(&mut self, ty: ScalarType, text: String, at: super::Token<'_>) -> Result<(), ParseError> {
        if self.kernel.registers.len() >= MAX_REGISTERS as usize {
            return error_at(at, ParseErrorKind::Number(text));
        }
        let next = RegId::new(ty, self.kernel.registers.count(ty));
        let reg = if derived_name(next) == text && self.names.taken.insert(text.clone()) {
            self.kernel.registers.add(ty)
        } else {
            match self.names.unique(&text) {
                Some(name) => self.kernel.registers.add_named(ty, name),
                None => return error_at(at, ParseErrorKind::Duplicate(text)),
            }
        };
        match self.names.registers.last_mut().map(|scope| scope.insert(text.clone(), reg)) {
            Some(None) => Ok(()),
            _ => error_at(at, ParseErrorKind::Duplicate(text)),
        }
    }

    /// Reads an instruction; a wrong one is noted, or kept as it is, and skipped up to its semicolon.
    fn instruction_or_skip(&mut self) {
        let before = self.reader.cursor.next;
        let Err(error) = self.instruction() else { return };
        self.reader.cursor.next = before;
        if self.reader.lenient && error.kind.is_gap() {
            return self.keep(&error);
        }
        self.reader.errors.push(error);
        while !matches!(self.reader.cursor.peek(0).text, ";")
            && self.reader.cursor.peek(0).kind != TokenKind::End
        {
            self.reader.cursor.bump();
        }
    }

    /// Keeps an instruction that the table lacks.
    fn keep(&mut self, error: &ParseError) {
        let guard = self.guard().ok().flatten();
        let line = self.reader.cursor.peek(0).line;
        let text = self.reader.cursor.instruction_text();
        let (reason, invalid) = (error.kind.to_string(), error.kind.is_fault());
        self.push(Statement::Unknown(Unknown { guard, text, line, reason, invalid }), line);
    }

    fn instruction(&mut self) -> Result<(), ParseError> {
        let guard = self.guard()?;
        let start = self.reader.cursor.peek(0);
        let (op, mut mods) = self.mnemonic()?;
        reorder(op, &mut mods);
        let mut inst = Inst { guard, op, mods, operands: Vec::new() };
        while !self.reader.cursor.is(";") {
            if !inst.operands.is_empty() {
                self.reader.cursor.expect(",")?;
            }
            let operand = operand::operand(&mut self.reader.cursor, self.names, &inst)?;
            inst.operands.push(operand);
        }
        self.reader.cursor.expect(";")?;
        inst.form().or_else(|error| error_at(start, error.into()))?;
        self.push(Statement::Inst(inst), start.line);
        Ok(())
    }

    fn guard(&mut self) -> Result<Option<Guard>, ParseError> {
        if !self.reader.cursor.eat("@") {
            return Ok(None);
        }
        let negated = self.reader.cursor.eat("!");
        let token = self.reader.cursor.expect_kind(TokenKind::Word, "a predicate register")?;
        match operand::register(self.names, token.text) {
            Some(reg) => Ok(Some(Guard { reg, negated })),
            None => error_at(token, ParseErrorKind::UndeclaredRegister(token.text.into())),
        }
    }

    /// The longest operation that the dotted words begin with, and the modifiers that follow.
    fn mnemonic(&mut self) -> Result<(Op, Vec<Mod>), ParseError> {
        let start = self.reader.cursor.expect_kind(TokenKind::Word, "an instruction")?;
        let mut words = vec![start];
        while self.reader.cursor.peek(0).kind == TokenKind::Dotted {
            words.push(self.reader.cursor.bump());
        }
        // `barrier.cta.sync` is what `barrier.sync` means.
        if matches!(start.text, "bar" | "barrier") && words.get(1).is_some_and(|word| word.text == ".cta") {
            words.remove(1);
        }
        let longest = (1..=words.len().min(MAX_OP_PARTS)).rev().find_map(|parts| {
            let text: String = words[..parts].iter().map(|w| w.text).collect();
            Op::parse(&text).map(|op| (op, parts))
        });
        let Some((op, parts)) = longest else {
            let text: String = words.iter().map(|w| w.text).collect();
            return error_at(start, unknown(start.text, text));
        };
        let modifier = |word: &super::Token<'_>| {
            Mod::parse(word.text.trim_start_matches('.')).map_or_else(
                || error_at(*word, ParseErrorKind::UnknownModifier { op, modifier: word.text.into() }),
                Ok,
            )
        };
        Ok((op, words[parts..].iter().map(modifier).collect::<Result<_, _>>()?))
    }
}
