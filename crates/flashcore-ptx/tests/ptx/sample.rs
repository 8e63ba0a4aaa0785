//! Instances of table rows, chosen by a seed: what the round-trip and assembler tests feed on.

use flashcore_ptx::{
    ident::{Ident, Name},
    inst::{Address, Imm, Inst, Operand, RegId, TensorAddress},
    module::{
        Function, Kernel, KernelParam, Length, Linkage, Module, Space, Statement, TargetList, Targets,
        Variable,
    },
    op::{Mod, Op, shape},
    table::{Access, Count, Form, Kind, Row, Slot, Ty, spec::Presence},
    target::Target,
    types::{ScalarType, SpecialReg},
};

/// A small random generator (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.roll(items.len())]
    }
}

pub(crate) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A module for `target` with one kernel, shared memory `smem`, a tensor map `map` and a scalar `p`.
pub(crate) fn module(target: Target) -> Module {
    let mut module = Module::new(target);
    module.variables.push(Variable {
        linkage: Linkage::Extern,
        space: Space::Shared,
        align: Some(1024),
        ty: ScalarType::B8,
        name: name("smem"),
        len: Length::Unsized,
        init: vec![],
    });
    let mut kernel = Kernel::new(&Ident::new("k").unwrap());
    kernel.params.push(KernelParam::bytes_array(&Ident::new("map").unwrap(), 64, 128));
    kernel.params.push(KernelParam::scalar(&Ident::new("p").unwrap(), ScalarType::U64));
    kernel.directives.max_threads = Some([128, 1, 1]);
    add_callees(&mut module, &mut kernel);
    module.kernels.push(kernel);
    module
}

/// Functions `f`, and `g` that returns a number, with what it takes to call them or to branch through a table.
fn add_callees(module: &mut Module, kernel: &mut Kernel) {
    let result = KernelParam::bytes_array(&Ident::new("result").unwrap(), 16, 16);
    let unnamed = KernelParam { name: Name::unnamed(), ..result.clone() };
    for (text, returns) in [("f", vec![]), ("g", vec![result])] {
        let mut code = Kernel::empty(name(text));
        code.returns = returns;
        code.body = vec![Statement::Inst(Inst::new(Op::Ret, [], []).unwrap())];
        module.functions.push(Function { linkage: Linkage::Private, noreturn: false, defined: true, code });
    }
    kernel.variables.push(Variable {
        linkage: Linkage::Private,
        space: Space::Param,
        align: Some(16),
        ty: ScalarType::B8,
        name: name("got"),
        len: Length::Array(16),
        init: vec![],
    });
    let prototype = |returns| TargetList::Prototype { returns, params: vec![], noreturn: false };
    for (text, list) in [
        ("to_f", prototype(vec![])),
        ("to_g", prototype(vec![unnamed])),
        ("ends", TargetList::Branch(vec![name("end")])),
    ] {
        kernel.targets.push(Targets { name: name(text), list });
    }
}

/// Whether a call has a result.
fn returns(form: &Form) -> bool {
    form.row.operands[0].access == Access::Dst
}

pub(crate) struct Sampler<'k> {
    pub(crate) kernel: &'k mut Kernel,
    pub(crate) dice: Dice,
}

impl Sampler<'_> {
    /// Some instance of `row`.
    pub(crate) fn inst(&mut self, row: &'static Row) -> Inst {
        let (form, mods) = loop {
            let mods: Vec<Mod> = row.slots.iter().flat_map(|slot| self.slot(slot)).collect();
            let form = Form::bind(row, &mods).unwrap();
            if form.access_bytes() <= 16 {
                break (form, mods);
            }
        };
        let mut operands = Vec::new();
        for spec in row.operands {
            let present = match spec.presence {
                Presence::Always => true,
                Presence::Optional => self.dice.roll(2) == 0,
                Presence::With(modifier) => mods.contains(&modifier),
            };
            if present && (spec.access, spec.kind) == (Access::Dst, Kind::Group) {
                operands.push(Operand::Group(vec![Operand::Symbol(name("got"))]));
            } else if present {
                operands.push(self.operand(spec.kind, &form, &mods));
            }
        }
        Inst { guard: None, op: row.op, mods, operands }
    }

    fn slot(&mut self, slot: &Slot) -> Vec<Mod> {
        if let Slot::OptPair(first, second) = slot {
            let there = self.dice.roll(2) == 0;
            return if there { vec![self.dice.pick(first), self.dice.pick(second)] } else { vec![] };
        }
        let one = match slot {
            Slot::One(choices) => Some(self.dice.pick(choices)),
            Slot::Opt([]) => None,
            Slot::Opt(choices) => (self.dice.roll(2) == 0).then(|| self.dice.pick(choices)),
            Slot::Type(_, types) => Some(Mod::Type(self.dice.pick(types))),
            Slot::WgmmaShape(k) => Some(Mod::Shape(shape(64, 8 + 8 * self.dice.roll(32) as u16, *k))),
            Slot::WgmmaByteShape(k) => Some(Mod::Shape(shape(64, 16 + 16 * self.dice.roll(16) as u16, *k))),
            Slot::OptPair(..) => None,
        };
        one.into_iter().collect()
    }

    fn reg(&mut self, ty: ScalarType) -> RegId {
        self.kernel.registers.add(ty)
    }

    /// A register that may hold `ty`: of that type, or untyped.
    fn reg_for(&mut self, ty: ScalarType) -> RegId {
        let bits = match ty.bits() {
            1 => ScalarType::Pred,
            8 | 16 => ScalarType::B16,
            32 => ScalarType::B32,
            64 => ScalarType::B64,
            _ => ScalarType::B128,
        };
        let own = ty.can_be_register() && ty.bits() >= 16 && ty != ScalarType::F16x2;
        let ty = if own && self.dice.roll(2) == 0 { ty } else { bits };
        self.reg(ty)
    }

    fn typed_reg(&mut self, ty: Ty, form: &Form) -> RegId {
        match form.resolve(ty) {
            Some(exact) if matches!(ty, Ty::Var(_)) && exact.bits() == 8 => self.reg(ScalarType::B8),
            Some(ty) => self.reg_for(ty),
            None => self.reg(ScalarType::U64),
        }
    }

    fn literal(&mut self, ty: ScalarType) -> Option<Operand> {
        Some(match ty {
            ScalarType::Pred => return None,
            ScalarType::F32 => {
                Operand::Imm(Imm::F32([0x3F80_0000, 0xFF80_0000, 0x7FC0_0001][self.dice.roll(3)]))
            }
            ScalarType::F64 => Operand::Imm(Imm::F64(0x3FF0_0000_0000_0000)),
            ty if ty.is_float() => return None,
            _ => Operand::int([1, 2, 3, 7, 16, 31, 64][self.dice.roll(7)]),
        })
    }

    fn value(&mut self, ty: Ty, form: &Form) -> Operand {
        if form.row.op == Op::Createpolicy && form.resolve(ty) == Some(ScalarType::F32) {
            return Operand::f32(0.5);
        }
        let literal = form.resolve(ty).filter(|_| self.dice.roll(3) == 0).and_then(|ty| self.literal(ty));
        literal.unwrap_or_else(|| Operand::Reg(self.typed_reg(ty, form)))
    }

    fn predicate(&mut self) -> Operand {
        Operand::Reg(self.reg(ScalarType::Pred))
    }

    fn address(&mut self, mods: &[Mod], form: &Form) -> Operand {
        if mods.contains(&Mod::Param) && form.row.op == Op::St {
            return Operand::at_symbol(name("got"), 0);
        }
        if mods.contains(&Mod::Param) {
            return Operand::at_symbol(name("map"), 128 - i64::from(form.access_bytes()));
        }
        let offset = [0, 128, -256, 1024][self.dice.roll(4)];
        let shared = mods.iter().any(|m| matches!(m, Mod::Shared | Mod::SharedCta | Mod::SharedCluster));
        if shared && !mods.contains(&Mod::Global) && self.dice.roll(2) == 0 {
            return Operand::Address(Address::reg(self.reg(ScalarType::B32), offset));
        }
        Operand::Address(Address::reg(self.reg(ScalarType::B64), offset))
    }

    fn vector(&mut self, ty: Ty, count: Count, form: &Form) -> Operand {
        let elements = form.count(count);
        let mut regs: Vec<_> = (0..elements).map(|_| Operand::Reg(self.typed_reg(ty, form))).collect();
        if elements == 1 && count == Count::VecMod { regs.remove(0) } else { Operand::Vector(regs) }
    }

    fn packed(&mut self, ty: Ty, form: &Form) -> Operand {
        let bits = form.resolve(ty).unwrap().bits();
        let part = match bits {
            128 => ScalarType::B64,
            64 => ScalarType::B32,
            32 => ScalarType::B16,
            _ => ScalarType::B8,
        };
        Operand::regs((0..bits / part.bits()).map(|_| self.reg(part)).collect::<Vec<_>>())
    }

    fn tensor(&mut self, form: &Form) -> Operand {
        let coords = (0..form.dims()).map(|_| self.value(Ty::Is(ScalarType::S32), form)).collect();
        Operand::Tensor(TensorAddress { map: Address::reg(self.reg(ScalarType::B64), 0), coords })
    }

    fn operand(&mut self, kind: Kind, form: &Form, mods: &[Mod]) -> Operand {
        match kind {
            Kind::Reg(ty) | Kind::RegOrSink(ty) | Kind::RegOrPair(ty) => {
                Operand::Reg(self.typed_reg(ty, form))
            }
            Kind::Pair(Ty::Is(ScalarType::Pred)) => Operand::pair(self.predicate(), self.predicate()),
            Kind::Pair(ty) => Operand::pair(self.typed_reg(ty, form), self.predicate()),
            Kind::Value(ty) => self.value(ty, form),
            Kind::Movable(ty) => match (form.resolve(ty), self.dice.roll(4)) {
                (Some(ScalarType::U32), 0) if form.row.op == Op::Mov => Operand::Special(self.dice.pick(&[
                    SpecialReg::TidX,
                    SpecialReg::Laneid,
                    SpecialReg::CtaidZ,
                ])),
                (Some(ScalarType::U64), 0) if form.row.op == Op::Mov => Operand::Symbol(name("smem")),
                _ => Operand::Reg(self.typed_reg(ty, form)),
            },
            Kind::Packed(ty) | Kind::PackedValues(ty) => self.packed(ty, form),
            Kind::Vector(ty, count) => self.vector(ty, count, form),
            Kind::Pred if self.dice.roll(2) == 0 => Operand::Not(self.reg(ScalarType::Pred)),
            Kind::Pred | Kind::Bool => self.predicate(),
            Kind::PredPair if self.dice.roll(2) == 0 => {
                Operand::pair(self.reg(ScalarType::Pred), self.predicate())
            }
            Kind::PredPair => self.predicate(),
            Kind::Imm(low, high, step) => {
                let choices = ((high - low) / step + 1).min(5);
                Operand::int(low + step * self.dice.roll(choices as usize) as i64)
            }
            Kind::Ranged(_, low, high, step) if self.dice.roll(3) == 0 => {
                self.operand(Kind::Imm(low, high, step), form, mods)
            }
            Kind::Ranged(ty, ..) => Operand::Reg(self.typed_reg(ty, form)),
            Kind::OneOf(values) => Operand::int(self.dice.pick(values)),
            Kind::Sink => Operand::Sink,
            Kind::Address(_) => self.address(mods, form),
            Kind::Tensor => self.tensor(form),
            Kind::Label => Operand::Label(name("end")),
            Kind::Function => Operand::Symbol(name(if returns(form) { "g" } else { "f" })),
            Kind::Targets if form.row.op == Op::BrxIdx => Operand::Symbol(name("ends")),
            Kind::Targets => Operand::Symbol(name(if returns(form) { "to_g" } else { "to_f" })),
            Kind::Group => Operand::Group(vec![]),
        }
    }
}
