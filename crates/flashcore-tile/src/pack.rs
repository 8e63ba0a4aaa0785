//! Several small numbers in one register: rounding and packing f32, unpacking, and permuting bytes.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    target::Target,
    types::ScalarType,
};

use crate::{
    builder::Builder,
    element::Element,
    error::FaultKind,
    expr::Expr,
    lower::{Arg, join},
    scalar::Half,
    scope::Scope,
    value::{B16, B32, Bits, F32, Reg},
};

impl Builder {
    /// Two f32 rounded to a 16-bit float and packed, `low` in the low half.
    #[track_caller]
    pub fn pack(
        &mut self,
        element: impl Into<Element>,
        low: impl Into<Expr<F32>>,
        high: impl Into<Expr<F32>>,
    ) -> Reg<B32> {
        let args = self.packed(low, high);
        let dst = self.fresh::<B32>(join(&args));
        self.pack_args(dst, element.into(), args);
        dst
    }

    /// Like [`pack`](Self::pack), into an existing register.
    #[track_caller]
    pub fn pack_into(
        &mut self,
        dst: Reg<B32>,
        element: impl Into<Element>,
        low: impl Into<Expr<F32>>,
        high: impl Into<Expr<F32>>,
    ) {
        let args = self.packed(low, high);
        self.pack_args(dst, element.into(), args);
    }

    /// Four f32 rounded to an 8-bit float and packed, the first in the lowest byte; what is too large becomes the largest
    /// number there is.
    #[track_caller]
    pub fn pack_four_into(&mut self, dst: Reg<B32>, element: Element, values: [Reg<F32>; 4]) {
        let [low, high] = [0, 2].map(|n| self.pack_narrow(element, values[n], values[n + 1]).operand());
        self.check_set(dst, values.iter().map(|value| value.scope()).min().unwrap_or(Scope::Lane));
        let halves = Operand::Vector(vec![low, high]);
        self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [dst.operand(), halves]);
    }

    /// Two f32 as they are when they have been rounded to an element of 8 or 16 bits.
    #[track_caller]
    pub fn rounded(&mut self, element: Element, low: Reg<F32>, high: Reg<F32>) -> [Reg<F32>; 2] {
        if let Some(half) = element.half() {
            let packed = self.pack(half, low, high);
            return self.unpack(half, packed);
        }
        let packed = self.pack_narrow(element, low, high);
        let wide = self.fresh::<B32>(packed.scope());
        let mods = [Mod::Rn, Mod::Type(ScalarType::F16x2), Mod::Type(narrow_pair(element))];
        self.emit(Op::Cvt, &mods, [wide.operand(), packed.operand()]);
        self.unpack(Half::F16, wide)
    }

    /// Four E4M3 numbers as two pairs of 16 bits: the two lowest bytes, and the two highest. Before sm_89, which has no
    /// instruction for it, bits are moved to where they belong; NaN is ±480 then.
    #[track_caller]
    pub fn widen_four<T: Bits>(&mut self, half: Half, word: Reg<T>) -> [Reg<B32>; 2] {
        if !self.target.includes(Target::Sm89) {
            return [0x1404, 0x3424].map(|order| self.widen_by_bits(half, word, order));
        }
        let pairs = [(); 2].map(|()| self.fresh::<B16>(word.scope()));
        let both = Operand::Vector(pairs.map(Reg::operand).to_vec());
        self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [both, word.operand()]);
        pairs.map(|pair| {
            let wide = self.fresh::<B32>(pair.scope());
            let mods = [Mod::Rn, Mod::Type(ScalarType::F16x2), Mod::Type(ScalarType::E4m3x2)];
            self.emit(Op::Cvt, &mods, [wide.operand(), pair.operand()]);
            match half {
                Half::F16 => wide,
                Half::Bf16 => {
                    let [low, high] = self.unpack(Half::F16, wide);
                    self.pack(Half::Bf16, low, high)
                }
            }
        })
    }

    /// Two bytes, which `order` brings to the upper halves of 16 bits: their exponents move to where a 16-bit float has its
    /// own, and the difference of the biases is made up for by a product, which is exact.
    #[track_caller]
    fn widen_by_bits<T: Bits>(&mut self, half: Half, word: Reg<T>, order: i64) -> Reg<B32> {
        let (shift, factor, mods) = match half {
            // 2^8 and 2^120.
            Half::F16 => (1, 0x5c00_5c00, [Mod::Rn, Mod::Type(ScalarType::F16x2)]),
            Half::Bf16 => (4, 0x7b80_7b80, [Mod::Rn, Mod::Type(ScalarType::Bf16x2)]),
        };
        let bits = |b: &mut Self, op, x: Operand, y: Operand| {
            let dst = b.fresh::<B32>(word.scope());
            b.emit(op, &[Mod::Type(ScalarType::B32)], [dst.operand(), x, y]);
            dst.operand()
        };
        let spread = self.fresh::<B32>(word.scope());
        let operands = [spread.operand(), word.operand(), Operand::int(0), Operand::int(order)];
        self.emit(Op::Prmt, &[Mod::Type(ScalarType::B32)], operands);
        let magnitude = bits(self, Op::And, spread.operand(), Operand::int(0x7f00_7f00));
        let magnitude = bits(self, Op::Shr, magnitude, Operand::int(shift));
        let sign = bits(self, Op::And, spread.operand(), Operand::int(0x8000_8000));
        let joined = bits(self, Op::Or, magnitude, sign);
        let [factor, zero] = [factor, 0x8000_8000u32].map(|constant| {
            let dst = self.fresh::<B32>(Scope::Grid);
            self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [dst.operand(), Operand::int(constant.into())]);
            dst.operand()
        });
        let wide = self.fresh::<B32>(word.scope());
        self.emit(Op::Fma, &mods, [wide.operand(), joined, factor, zero]);
        wide
    }

    /// Four bytes of eight, those of `x` and then those of `y`; the lowest hexadecimal digit of `order` names the lowest.
    #[track_caller]
    pub fn bytes_of<T: Bits>(&mut self, x: Reg<T>, y: Reg<T>, order: u32) -> Reg<T> {
        let dst = self.fresh::<T>(x.scope().min(y.scope()));
        let operands = [dst.operand(), x.operand(), y.operand(), Operand::int(i64::from(order))];
        self.emit(Op::Prmt, &[Mod::Type(ScalarType::B32)], operands);
        dst
    }

    /// The two values that are packed in `word`, widened to f32, the low half first.
    #[track_caller]
    pub fn unpack<T: Bits>(&mut self, half: Half, word: Reg<T>) -> [Reg<F32>; 2] {
        match half {
            // A bf16 is the upper half of an f32.
            Half::Bf16 => [(Op::Shl, 16), (Op::And, 0xffff_0000)].map(|(op, by)| {
                let bits = self.fresh::<B32>(word.scope());
                self.emit(
                    op,
                    &[Mod::Type(ScalarType::B32)],
                    [bits.operand(), word.operand(), Operand::int(by)],
                );
                self.same_bits(bits)
            }),
            Half::F16 => {
                let halves = [(); 2].map(|()| self.fresh::<B16>(word.scope()));
                let both = Operand::Vector(halves.map(Reg::operand).to_vec());
                self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [both, word.operand()]);
                halves.map(|half| {
                    let dst = self.fresh::<F32>(half.scope());
                    let mods = [Mod::Type(ScalarType::F32), Mod::Type(ScalarType::F16)];
                    self.emit(Op::Cvt, &mods, [dst.operand(), half.operand()]);
                    dst
                })
            }
        }
    }

    /// Two f32 rounded to an 8-bit float, `low` in the low byte.
    #[track_caller]
    fn pack_narrow(&mut self, element: Element, low: Reg<F32>, high: Reg<F32>) -> Reg<B16> {
        if element.bytes() != 1 {
            self.fault(FaultKind::Pack { element });
        }
        let dst = self.fresh::<B16>(low.scope().min(high.scope()));
        let mods = [Mod::Rn, Mod::Satfinite, Mod::Type(narrow_pair(element)), Mod::Type(ScalarType::F32)];
        // The first source goes to the upper byte (PTX ISA, cvt).
        self.emit(Op::Cvt, &mods, [dst.operand(), high.operand(), low.operand()]);
        dst
    }

    /// What is packed, in the order of the instruction: the first source goes to the upper half (PTX ISA, cvt).
    #[track_caller]
    fn packed(&mut self, low: impl Into<Expr<F32>>, high: impl Into<Expr<F32>>) -> [Arg; 2] {
        let low = self.arg(low);
        [self.arg(high), low]
    }

    #[track_caller]
    fn pack_args(&mut self, dst: Reg<B32>, element: Element, args: [Arg; 2]) {
        let Some(half) = element.half() else {
            return self.fault(FaultKind::Pack { element });
        };
        if half == Half::F16 && !self.target.includes(Target::Sm80) {
            return self.pack_one_by_one(dst, args);
        }
        let mods = [Mod::Rn, Mod::Type(half.packed()), Mod::Type(ScalarType::F32)];
        self.op_into(dst, Op::Cvt, &mods, args);
    }

    /// The expansion of packing two f16 at once, where there is no such instruction.
    #[track_caller]
    fn pack_one_by_one(&mut self, dst: Reg<B32>, [high, low]: [Arg; 2]) {
        self.check_set(dst, high.scope.min(low.scope));
        let mods = [Mod::Rn, Mod::Type(ScalarType::F16), Mod::Type(ScalarType::F32)];
        let halves = [low, high].map(|value| {
            let half = self.fresh::<B16>(value.scope);
            self.emit(Op::Cvt, &mods, [half.operand(), value.operand]);
            half.operand()
        });
        self.emit(Op::Mov, &[Mod::Type(ScalarType::B32)], [dst.operand(), Operand::Vector(halves.to_vec())]);
    }
}

/// The type of two 8-bit floats in one register.
const fn narrow_pair(element: Element) -> ScalarType {
    match element {
        Element::E5m2 => ScalarType::E5m2x2,
        _ => ScalarType::E4m3x2,
    }
}
