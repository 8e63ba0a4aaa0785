//! Warp specialisation: one producer and several consumer warpgroups, each with its share of the registers.
//!
//! A producer that gives up registers must be the first warpgroup; if all threads keep their registers from the launch,
//! it is a single warp after the consumers.

use std::panic::Location;

use flashcore_ptx::{
    inst::Operand,
    op::{Mod, Op},
    sm::{REGISTERS, THREAD_REGISTERS},
    types::ScalarType,
};

use crate::{
    builder::Builder,
    error::FaultKind,
    scalar::Cmp,
    scope::{Scope, Warpgroup},
    value::{Reg, U32},
};

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;
/// Threads of a warp.
const WARP: u32 = 32;
/// Parts of an SM among which warps and registers are shared out.
const PARTITIONS: u32 = 4;

/// Registers per thread of each role after reallocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RegisterBudget {
    /// For the producer.
    pub producer: u32,
    /// For each consumer.
    pub consumer: u32,
}

/// One producer and `consumers` consumer warpgroups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Roles {
    /// Number of consumer warpgroups.
    pub consumers: u32,
    /// How they share the registers; with `None` all keep what the launch gave, and the producer is a single warp.
    pub budget: Option<RegisterBudget>,
    /// Registers of a mover, one more warpgroup behind the consumers, where there is one; there is a budget then.
    pub mover: Option<u32>,
}

impl Roles {
    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        let producer = if self.budget.is_some() { WARPGROUP } else { WARP };
        (self.consumers + self.mover.is_some() as u32) * WARPGROUP + producer
    }

    /// Registers per thread at entry, when `ctas` CTAs fill an SM.
    pub const fn registers_at_entry(&self, ctas: u32) -> u32 {
        let warps = (self.threads() / WARP * ctas).div_ceil(PARTITIONS);
        let share = REGISTERS / PARTITIONS / WARP / warps / 8 * 8;
        if share < THREAD_REGISTERS { share } else { THREAD_REGISTERS }
    }

    /// Number of the producer among the warpgroups.
    const fn producer(&self) -> u32 {
        if self.budget.is_some() { 0 } else { self.consumers }
    }

    const fn asked(&self, budget: RegisterBudget) -> u32 {
        let mover = match self.mover {
            Some(registers) => registers,
            None => 0,
        };
        (budget.producer + self.consumers * budget.consumer + mover) * WARPGROUP
    }
}

impl Builder {
    /// Like [`specialise`](Self::specialise), with a mover that `roles` must have.
    #[track_caller]
    pub fn specialise_with_mover(
        &mut self,
        roles: Roles,
        producer: impl FnOnce(&mut Self),
        mover: impl FnOnce(&mut Self),
        consumer: impl FnOnce(&mut Self, Reg<U32>),
    ) {
        let author = Location::caller();
        let group = self.warpgroup();
        let moves = self.test(Cmp::Eq, group, roles.producer() + 1 + roles.consumers);
        let moves = self.uniform::<Warpgroup>(moves);
        self.if_else(
            moves,
            |b| {
                let count = roles.mover;
                let more = count.is_some_and(|count| count > roles.registers_at_entry(1));
                b.in_name_of(author, |b| b.set_registers(if more { Mod::Inc } else { Mod::Dec }, count));
                let all = std::mem::replace(&mut b.executing, WARPGROUP);
                mover(b);
                b.executing = all;
            },
            |b| b.in_name_of(author, |b| b.specialise(roles, producer, consumer)),
        );
    }

    /// Runs `producer` in its warps and `consumer` in the others, which learn their number from 0.
    #[track_caller]
    pub fn specialise(
        &mut self,
        roles: Roles,
        producer: impl FnOnce(&mut Self),
        consumer: impl FnOnce(&mut Self, Reg<U32>),
    ) {
        self.check_budget(roles);
        let author = Location::caller();
        let group = self.warpgroup();
        let is_producer = self.test(Cmp::Eq, group, roles.producer());
        let is_producer = self.uniform::<Warpgroup>(is_producer);
        self.if_else(
            is_producer,
            |b| {
                b.in_name_of(author, |b| b.set_registers(Mod::Dec, roles.budget.map(|r| r.producer)));
                producer(b);
            },
            |b| {
                let number = b.in_name_of(author, |b| {
                    b.set_registers(Mod::Inc, roles.budget.map(|r| r.consumer));
                    if roles.producer() == 0 { b.sub(group, 1) } else { group }
                });
                let all = std::mem::replace(&mut b.executing, roles.consumers * WARPGROUP);
                consumer(b, number);
                b.executing = all;
            },
        );
    }

    #[track_caller]
    fn check_budget(&mut self, roles: Roles) {
        let (threads, ctas) = (roles.threads(), self.kernel.directives.min_ctas_per_sm.unwrap_or(1));
        if threads != self.threads {
            return self.fault(FaultKind::Roles { threads, block: self.threads });
        }
        let Some(budget) = roles.budget else { return };
        let entry = roles.registers_at_entry(ctas.max(1));
        let (asked, pool) = (roles.asked(budget), threads * entry);
        // A producer can only give registers away, a consumer only take some.
        if asked > pool || budget.producer > entry || budget.consumer < entry {
            let RegisterBudget { producer, consumer } = budget;
            self.fault(FaultKind::RegisterBudget { producer, consumer, asked, threads, entry, pool });
        }
    }

    #[track_caller]
    fn set_registers(&mut self, direction: Mod, count: Option<u32>) {
        let Some(count) = count else { return };
        self.require("setmaxnreg", Scope::Warpgroup);
        let mods = [direction, Mod::Sync, Mod::Aligned, Mod::Type(ScalarType::U32)];
        self.emit(Op::Setmaxnreg, &mods, [Operand::int(i64::from(count))]);
    }
}
