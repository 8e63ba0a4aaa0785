//! Loads and stores: global memory by 64-bit address, shared memory by 32-bit address, parameters by name.

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    expr::Expr,
    scalar::Cmp,
    scope::Scope,
    value::{Bits, F32, Reg, Type, U32, U64, Val},
};

const B8: Mod = Mod::Type(ScalarType::B8);
const B16: Mod = Mod::Type(ScalarType::B16);
/// Not from L1. ptxas makes it a strong load of the GPU's scope (`LDG.E.STRONG.GPU`), which all lanes of a warp see alike.
const FRESH: [Mod; 2] = [Mod::Global, Mod::Cg];

/// A place in global memory.
#[derive(Clone, Copy, Debug)]
pub struct Global {
    /// The address.
    pub base: Reg<U64>,
    /// Bytes added to it.
    pub offset: i32,
}

/// A place in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// The address.
    pub base: Reg<U32>,
    /// Bytes added to it.
    pub offset: u32,
}

impl Global {
    /// `bytes` further on.
    #[must_use]
    pub const fn at(self, bytes: i32) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    pub(crate) fn operand(self) -> Operand {
        Operand::at(self.base.id(), i64::from(self.offset))
    }
}

impl From<Reg<U64>> for Global {
    fn from(base: Reg<U64>) -> Self {
        Self { base, offset: 0 }
    }
}

impl Shared {
    /// `bytes` further on.
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    /// The address in one register.
    #[track_caller]
    pub fn address(self, b: &mut Builder) -> Reg<U32> {
        if self.offset == 0 { self.base } else { b.add(self.base, self.offset) }
    }

    /// `bytes`, known at run time, further on.
    #[track_caller]
    #[must_use]
    pub fn plus(self, b: &mut Builder, bytes: impl Into<Expr<U32>>) -> Self {
        Self { base: b.add(self.base, bytes), offset: self.offset }
    }

    pub(crate) fn operand(self) -> Operand {
        Operand::at(self.base.id(), i64::from(self.offset))
    }
}

impl From<Reg<U32>> for Shared {
    fn from(base: Reg<U32>) -> Self {
        Self { base, offset: 0 }
    }
}

impl Builder {
    /// Reads `N` neighbouring values (1, 2 or 4) from global memory.
    #[track_caller]
    pub fn load_global<T: Type, const N: usize>(&mut self, from: impl Into<Global>) -> [Reg<T>; N] {
        let from = from.into();
        self.load(&[Mod::Global], from.operand(), from.base.scope())
    }

    /// Reads `N` neighbouring values (1, 2 or 4) from global memory into variables. What is read under a condition should
    /// come this way, into variables that hold something already: a register that only a condition fills counts as used in
    /// all of a loop around it.
    #[track_caller]
    pub fn load_global_into<T: Type, const N: usize>(&mut self, vars: [Reg<T>; N], from: impl Into<Global>) {
        let from = from.into();
        vars.into_iter().for_each(|var| self.check_set(var, from.base.scope()));
        let mods: Vec<_> = std::iter::once(Mod::Global).chain(vector(N)).chain([Mod::Type(T::PTX)]).collect();
        self.emit(Op::Ld, &mods, [group(vars.map(Reg::operand).into()), from.operand()]);
    }

    /// [`load_global_into`](Self::load_global_into) from L2: for what an earlier kernel wrote and this one reads before it
    /// [waits](Self::wait_for_predecessor), while L1 may still hold the line from before.
    #[track_caller]
    pub fn load_global_fresh_into<T: Type, const N: usize>(
        &mut self,
        vars: [Reg<T>; N],
        from: impl Into<Global>,
    ) {
        let from = from.into();
        vars.into_iter().for_each(|var| self.check_set(var, from.base.scope()));
        let mods: Vec<_> = FRESH.into_iter().chain(vector(N)).chain([Mod::Type(T::PTX)]).collect();
        self.emit(Op::Ld, &mods, [group(vars.map(Reg::operand).into()), from.operand()]);
    }

    /// Reads one number as [`load_global_fresh_into`](Self::load_global_fresh_into) does.
    #[track_caller]
    pub fn load_global_fresh<T: Type>(&mut self, from: impl Into<Global>) -> Reg<T> {
        let from = from.into();
        let [value] = self.load(&FRESH, from.operand(), from.base.scope());
        value
    }

    /// Writes neighbouring values (1, 2 or 4) to global memory.
    #[track_caller]
    pub fn store_global<T: Type>(&mut self, to: impl Into<Global>, values: &[Val<T>]) {
        self.store(Mod::Global, to.into().operand(), values);
    }

    /// Reads one 16-bit value from global memory, widened with zeros.
    #[track_caller]
    pub fn load_global_16(&mut self, from: impl Into<Global>) -> Reg<U32> {
        let from = from.into();
        let dst = self.fresh::<U32>(from.base.scope());
        self.emit(Op::Ld, &[Mod::Global, B16], [dst.operand(), from.operand()]);
        dst
    }

    /// Reads one 16-bit value from global memory into a variable, widened with zeros.
    #[track_caller]
    pub fn load_global_16_into(&mut self, var: Reg<U32>, from: impl Into<Global>) {
        let from = from.into();
        self.check_set(var, from.base.scope());
        self.emit(Op::Ld, &[Mod::Global, B16], [var.operand(), from.operand()]);
    }

    /// Writes the low 16 bits of a value to global memory.
    #[track_caller]
    pub fn store_global_16<T: Bits>(&mut self, to: impl Into<Global>, value: Reg<T>) {
        self.emit(Op::St, &[Mod::Global, B16], [to.into().operand(), value.operand()]);
    }

    /// Writes the low 8 bits of a value to global memory.
    #[track_caller]
    pub fn store_global_8<T: Bits>(&mut self, to: impl Into<Global>, value: Reg<T>) {
        self.emit(Op::St, &[Mod::Global, B8], [to.into().operand(), value.operand()]);
    }

    /// Reads `N` neighbouring values from shared memory.
    ///
    /// Threads that read one address agree on what they read: nobody may write it meanwhile.
    #[track_caller]
    pub fn load_shared<T: Type, const N: usize>(&mut self, from: impl Into<Shared>) -> [Reg<T>; N] {
        let from = from.into();
        self.load(&[Mod::Shared], from.operand(), from.base.scope())
    }

    /// Writes neighbouring values to shared memory.
    #[track_caller]
    pub fn store_shared<T: Type>(&mut self, to: impl Into<Shared>, values: &[Val<T>]) {
        self.store(Mod::Shared, to.into().operand(), values);
    }

    /// The address, in the cluster's window, of what lies at `address` in the shared memory of CTA `rank`.
    #[track_caller]
    pub fn peer_address(&mut self, address: Reg<U32>, rank: impl Into<Expr<U32>>) -> Reg<U32> {
        let rank = self.arg(rank);
        let dst = self.fresh::<U32>(Scope::Lane);
        let operands = [dst.operand(), address.operand(), rank.operand];
        self.emit(Op::Mapa, &[Mod::SharedCluster, Mod::Type(U32::PTX)], operands);
        dst
    }

    /// Reads `N` neighbouring values from the shared memory of a CTA of the cluster.
    #[track_caller]
    pub fn load_peer<T: Type, const N: usize>(&mut self, from: impl Into<Shared>) -> [Reg<T>; N] {
        let from = from.into();
        self.load(&[Mod::SharedCluster], from.operand(), Scope::Lane)
    }

    /// Sends neighbouring values to the shared memory of another CTA of the cluster; they complete on the mbarrier at
    /// `done` there. Both are addresses in the cluster's window.
    #[track_caller]
    pub fn send_to_peer<T: Type>(&mut self, to: impl Into<Shared>, values: &[Val<T>], done: Reg<U32>) {
        let mods = [Mod::SharedCluster, Mod::CompleteTxBytes];
        let mods: Vec<_> = mods.into_iter().chain(vector(values.len())).chain([Mod::Type(T::PTX)]).collect();
        let data = group(values.iter().map(|v| v.operand()).collect());
        self.emit(Op::StAsync, &mods, [to.into().operand(), data, Shared::from(done).operand()]);
    }

    /// Adds to a number in global memory and returns what was there before.
    #[track_caller]
    pub fn atomic_add(&mut self, at: impl Into<Global>, value: impl Into<Expr<U32>>) -> Reg<U32> {
        let value = self.arg(value);
        let dst = self.fresh::<U32>(Scope::Lane);
        let operands = [dst.operand(), at.into().operand(), value.operand];
        self.emit(Op::Atom, &[Mod::Global, Mod::Add, Mod::Type(U32::PTX)], operands);
        dst
    }

    /// Like [`atomic_add`](Self::atomic_add), ordered over the whole GPU: what this thread knows to be written is visible
    /// to whoever adds after it, and what those before it knew is visible to this thread.
    #[track_caller]
    pub fn atomic_add_ordered(&mut self, at: impl Into<Global>, value: impl Into<Expr<U32>>) -> Reg<U32> {
        let value = self.arg(value);
        let dst = self.fresh::<U32>(Scope::Lane);
        let operands = [dst.operand(), at.into().operand(), value.operand];
        let mods = [Mod::AcqRel, Mod::Gpu, Mod::Global, Mod::Add, Mod::Type(U32::PTX)];
        self.emit(Op::Atom, &mods, operands);
        dst
    }

    /// Adds four neighbouring values, which start at a multiple of 16 bytes, to global memory.
    #[track_caller]
    pub fn add_global(&mut self, at: impl Into<Global>, values: [Reg<F32>; 4]) {
        let mods = [Mod::Global, Mod::Add, Mod::V4, Mod::Type(F32::PTX)];
        self.emit(Op::Red, &mods, [at.into().operand(), group(values.map(Reg::operand).into())]);
    }

    /// Prefetches the line around an address of global memory to L2, for a later read.
    #[track_caller]
    pub fn prefetch_global(&mut self, at: impl Into<Global>) {
        self.emit(Op::Prefetch, &[Mod::Global, Mod::L2], [at.into().operand()]);
    }

    /// Waits until a number in global memory is above `bound` and returns it. Lanes may read different numbers. Nothing else
    /// is ordered by it: see [`tell`](Self::tell).
    #[track_caller]
    pub fn wait_above(&mut self, at: impl Into<Global>, bound: impl Into<Expr<U32>>) -> Reg<U32> {
        let (at, bound) = (at.into(), self.let_(bound.into()));
        let again = self.label("above");
        self.place(&again);
        let [seen] = self.load::<U32, 1>(&[Mod::Relaxed, Mod::Gpu, Mod::Global], at.operand(), Scope::Lane);
        let done = self.test(Cmp::Gt, seen, bound);
        self.spin(done, &again);
        seen
    }

    /// Writes a number to global memory for those who [wait](Self::wait_above) for it. It is not ordered with what this
    /// thread wrote before: an order would have to wait for all that is in flight, which takes as long as memory does.
    #[track_caller]
    pub fn tell(&mut self, at: impl Into<Global>, value: impl Into<Expr<U32>>) {
        let value = self.arg(value);
        let mods = [Mod::Relaxed, Mod::Gpu, Mod::Global, Mod::Type(U32::PTX)];
        self.emit(Op::St, &mods, [at.into().operand(), value.operand]);
    }

    /// Adds to a number in shared memory and returns what was there before.
    #[track_caller]
    pub fn atomic_add_shared(&mut self, at: impl Into<Shared>, value: impl Into<Expr<U32>>) -> Reg<U32> {
        let value = self.arg(value);
        let dst = self.fresh::<U32>(Scope::Lane);
        let operands = [dst.operand(), at.into().operand(), value.operand];
        self.emit(Op::Atom, &[Mod::Shared, Mod::Add, Mod::Type(U32::PTX)], operands);
        dst
    }

    #[track_caller]
    pub(crate) fn load<T: Type, const N: usize>(
        &mut self,
        space: &[Mod],
        from: Operand,
        scope: Scope,
    ) -> [Reg<T>; N] {
        let dst: [Reg<T>; N] = std::array::from_fn(|_| self.fresh(scope));
        let mods: Vec<_> = space.iter().copied().chain(vector(N)).chain([Mod::Type(T::PTX)]).collect();
        self.emit(Op::Ld, &mods, [group(dst.map(Reg::operand).into()), from]);
        dst
    }

    #[track_caller]
    fn store<T: Type>(&mut self, space: Mod, to: Operand, values: &[Val<T>]) {
        let mods: Vec<_> =
            std::iter::once(space).chain(vector(values.len())).chain([Mod::Type(T::PTX)]).collect();
        let data = group(values.iter().map(|v| v.operand()).collect());
        self.emit(Op::St, &mods, [to, data]);
    }
}

fn vector(count: usize) -> Option<Mod> {
    match count {
        2 => Some(Mod::V2),
        4 => Some(Mod::V4),
        _ => None,
    }
}

fn group(mut operands: Vec<Operand>) -> Operand {
    if operands.len() == 1 { operands.remove(0) } else { Operand::Vector(operands) }
}
