//! The canonical text of a module. The parser reads it back to an equal module.
//!
//! [`Module`] and the parts of an instruction implement [`Display`]; inside a kernel, registers are printed
//! with the names the kernel keeps for them.

use crate::{
    inst::{Address, Base, Imm, Inst, Operand, RegId},
    module::{
        Directives, Function, Initial, Kernel, KernelParam, Length, Linkage, Module, Registers, Space,
        Statement, TargetList, Targets, Variable, derived_name,
    },
    types::ScalarType,
};
use std::fmt::{self, Display, Formatter, Write};

/// Something with registers in it, shown with the names that a kernel gives them.
struct Named<'a, T>(&'a T, Option<&'a Registers>);

/// The text of `inst` in a kernel with these registers, without the semicolon.
pub fn inst_text(inst: &Inst, registers: &Registers) -> String {
    Named(inst, Some(registers)).to_string()
}

/// The text of `operand` in a kernel with these registers.
pub fn operand_text(operand: &Operand, registers: &Registers) -> String {
    Named(operand, Some(registers)).to_string()
}

fn separated<T: Display>(f: &mut Formatter<'_>, items: impl IntoIterator<Item = T>) -> fmt::Result {
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            f.write_str(", ")?;
        }
        item.fmt(f)?;
    }
    Ok(())
}

impl<T> Named<'_, T> {
    fn with<'b, U>(&'b self, other: &'b U) -> Named<'b, U> {
        Named(other, self.1)
    }
}

impl Display for Named<'_, RegId> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(registers) => f.write_str(&registers.name(*self.0)),
            None => f.write_str(&derived_name(*self.0)),
        }
    }
}

impl Display for Named<'_, Address> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.0.base {
            Base::Reg(reg) => self.with(reg).fmt(f)?,
            Base::Symbol(name) => name.fmt(f)?,
            Base::Absolute => return self.0.offset.fmt(f),
        }
        if self.0.offset == 0 { Ok(()) } else { write!(f, "+{}", self.0.offset) }
    }
}

impl Display for Named<'_, Operand> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Operand::Reg(reg) => self.with(reg).fmt(f),
            Operand::Not(reg) => write!(f, "!{}", self.with(reg)),
            Operand::Imm(imm) => imm.fmt(f),
            Operand::Special(special) => special.fmt(f),
            Operand::Symbol(name) | Operand::Label(name) => name.fmt(f),
            Operand::Offset(name, offset) => write!(f, "{name}+{offset}"),
            Operand::Address(address) => write!(f, "[{}]", self.with(address)),
            Operand::Tensor(tensor) => {
                write!(f, "[{}, {{", self.with(&tensor.map))?;
                separated(f, tensor.coords.iter().map(|c| self.with(c)))?;
                f.write_str("}]")
            }
            Operand::Vector(items) => {
                f.write_char('{')?;
                separated(f, items.iter().map(|i| self.with(i)))?;
                f.write_char('}')
            }
            Operand::Group(items) => {
                f.write_char('(')?;
                separated(f, items.iter().map(|i| self.with(i)))?;
                f.write_char(')')
            }
            Operand::Pair(pair) => write!(f, "{}|{}", self.with(&pair.0), self.with(&pair.1)),
            Operand::Sink => f.write_char('_'),
        }
    }
}

impl Display for Named<'_, Inst> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(guard) = &self.0.guard {
            write!(f, "@{}{} ", if guard.negated { "!" } else { "" }, self.with(&guard.reg))?;
        }
        self.0.op.fmt(f)?;
        self.0.mods.iter().try_for_each(|m| write!(f, ".{m}"))?;
        if !self.0.operands.is_empty() {
            f.write_char(' ')?;
        }
        separated(f, self.0.operands.iter().map(|o| self.with(o)))
    }
}

impl Display for Operand {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Named(self, None).fmt(f)
    }
}

impl Display for Inst {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Named(self, None).fmt(f)
    }
}

impl Display for RegId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Named(self, None).fmt(f)
    }
}

impl Display for Imm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => value.fmt(f),
            Self::F32(bits) => write!(f, "0f{bits:08X}"),
            Self::F64(bits) => write!(f, "0d{bits:016X}"),
        }
    }
}

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, ".version {}\n.target {}\n.address_size 64\n", self.version, self.target)?;
        // Variables may start as addresses of functions, and functions use variables: declarations come first.
        let declared = self.functions.iter().take_while(|function| !function.defined).count();
        let (declared, others) = self.functions.split_at(declared);
        declared.iter().try_for_each(|function| write!(f, "{function}"))?;
        self.variables.iter().try_for_each(|v| writeln!(f, "{v};"))?;
        others.iter().try_for_each(|function| write!(f, "{function}"))?;
        self.kernels.iter().try_for_each(|k| write!(f, "{k}"))
    }
}

impl Display for Linkage {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Private => "",
            Self::Visible => ".visible ",
            Self::Extern => ".extern ",
            Self::Weak => ".weak ",
        })
    }
}

impl Display for Initial {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self::Address { name, offset, generic } = self else {
            let Self::Value(value) = self else { return Ok(()) };
            return value.fmt(f);
        };
        if *generic { write!(f, "generic({name})") } else { name.fmt(f) }?;
        if *offset == 0 { Ok(()) } else { write!(f, "+{offset}") }
    }
}

impl Display for Space {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Global => ".global",
            Self::Shared => ".shared",
            Self::Const => ".const",
            Self::Local => ".local",
            Self::Param => ".param",
        })
    }
}

impl Display for Variable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.linkage, self.space)?;
        write_align(f, self.align)?;
        write!(f, " .{} {}", self.ty, self.name)?;
        match self.len {
            Length::Scalar => {}
            Length::Array(n) => write!(f, "[{n}]")?,
            Length::Unsized => f.write_str("[]")?,
        }
        self.write_init(f)
    }
}

impl Variable {
    fn write_init(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match (self.init.as_slice(), self.len) {
            ([], _) => Ok(()),
            ([value], Length::Scalar) => write!(f, " = {value}"),
            (values, _) => {
                f.write_str(" = {")?;
                separated(f, values)?;
                f.write_char('}')
            }
        }
    }
}

fn write_align(f: &mut Formatter<'_>, align: Option<u32>) -> fmt::Result {
    align.map_or(Ok(()), |align| write!(f, " .align {align}"))
}

impl Display for KernelParam {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(".param")?;
        write_align(f, self.align)?;
        write!(f, " .{} {}", self.ty, self.name)?;
        self.len.map_or(Ok(()), |len| write!(f, "[{len}]"))
    }
}

impl Display for Directives {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let triple = |f: &mut Formatter<'_>, name: &str, value: Option<[u32; 3]>| match value {
            Some([x, y, z]) => writeln!(f, ".{name} {x}, {y}, {z}"),
            None => Ok(()),
        };
        let single = |f: &mut Formatter<'_>, name: &str, value: Option<u32>| match value {
            Some(n) => writeln!(f, ".{name} {n}"),
            None => Ok(()),
        };
        triple(f, "maxntid", self.max_threads)?;
        triple(f, "reqntid", self.required_threads)?;
        single(f, "minnctapersm", self.min_ctas_per_sm)?;
        single(f, "maxnreg", self.max_registers)?;
        if self.explicit_cluster {
            writeln!(f, ".explicitcluster")?;
        }
        triple(f, "reqnctapercluster", self.required_cluster)?;
        single(f, "maxclusterrank", self.max_cluster_rank)
    }
}

impl Display for Kernel {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "\n.visible .entry {}", self.name)?;
        write_params(f, &self.params)?;
        write!(f, "\n{}", self.directives)?;
        self.write_body(f)
    }
}

impl Display for Function {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "\n{}.func ", self.linkage)?;
        if !self.code.returns.is_empty() {
            f.write_char('(')?;
            separated(f, &self.code.returns)?;
            f.write_str(") ")?;
        }
        self.code.name.fmt(f)?;
        write_params(f, &self.code.params)?;
        f.write_str(if self.noreturn { "\n.noreturn" } else { "" })?;
        if !self.defined {
            return f.write_str(";\n");
        }
        f.write_char('\n')?;
        self.code.write_body(f)
    }
}

impl Display for Targets {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match &self.list {
            TargetList::Branch(labels) => {
                f.write_str(".branchtargets ")?;
                separated(f, labels)
            }
            TargetList::Call(functions) => {
                f.write_str(".calltargets ")?;
                separated(f, functions)
            }
            TargetList::Prototype { returns, params, noreturn } => {
                f.write_str(".callprototype ")?;
                if !returns.is_empty() {
                    f.write_char('(')?;
                    separated(f, returns)?;
                    f.write_str(") ")?;
                }
                f.write_str("_ (")?;
                separated(f, params)?;
                f.write_str(if *noreturn { ") .noreturn" } else { ")" })
            }
        }
    }
}

/// `(…)` with a parameter a line.
fn write_params(f: &mut Formatter<'_>, params: &[KernelParam]) -> fmt::Result {
    f.write_char('(')?;
    for (i, param) in params.iter().enumerate() {
        write!(f, "{}\n    {param}", if i > 0 { "," } else { "" })?;
    }
    f.write_str(if params.is_empty() { ")" } else { "\n)" })
}

impl Kernel {
    fn write_body(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("{\n")?;
        self.registers.types().try_for_each(|(ty, count)| self.write_registers(f, ty, count))?;
        self.variables.iter().try_for_each(|v| writeln!(f, "    {v};"))?;
        self.targets.iter().try_for_each(|t| writeln!(f, "    {t};"))?;
        for statement in &self.body {
            match statement {
                Statement::Label(name) => writeln!(f, "{name}:")?,
                Statement::Inst(inst) => writeln!(f, "    {};", Named(inst, Some(&self.registers)))?,
                Statement::Unknown(unknown) => {
                    let guard = unknown.guard.map(|g| {
                        format!("@{}{} ", if g.negated { "!" } else { "" }, self.registers.name(g.reg))
                    });
                    writeln!(f, "    {}{};", guard.unwrap_or_default(), unknown.text)?;
                }
            }
        }
        f.write_str("}\n")
    }

    fn write_registers(&self, f: &mut Formatter<'_>, ty: ScalarType, count: u32) -> fmt::Result {
        if !self.registers.has_names(ty) {
            return writeln!(f, "    .reg .{ty} {}<{count}>;", ty.register_prefix());
        }
        write!(f, "    .reg .{ty} ")?;
        separated(f, (0..count).map(|index| self.registers.name(RegId { ty, index })))?;
        f.write_str(";\n")
    }
}
