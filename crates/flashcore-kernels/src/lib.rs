//! FlashCore's GPU attention kernels and the plan that chooses among them.
//!
//! A kernel is a function from a frozen config to a [`flashcore_tile::Program`]: PTX text and how to launch it.
#![forbid(unsafe_code)]

mod covering;
pub mod forward_sm80;
pub mod forward_sm90;
mod plan;
pub mod shared;
mod side;
pub mod slots;
pub mod untrusted;

pub use covering::{Member, covering_set};
pub use flashcore_tile::RegisterBudget;
pub use plan::{
    ALLOCATED_ALIGNMENT, Gpu, KernelConfig, Misfit, Plan, PlanError, Tile, plan, plan_by, plan_general,
    plan_tile, tuned,
};
pub use side::SideArrays;
