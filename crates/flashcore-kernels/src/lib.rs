//! FlashCore's GPU attention kernels and the plan that chooses among them.
//!
//! A kernel is a function from a frozen config to a [`flashcore_tile::Program`]: PTX text and how to launch it.
#![forbid(unsafe_code)]

pub mod append;
pub mod backward_rows;
pub mod backward_sm80;
pub mod backward_sm90;
pub mod backward_sums;
pub mod combine;
mod covering;
mod covering_append;
mod covering_backward;
mod covering_bias;
mod covering_cache;
mod covering_decode;
mod covering_dropout;
mod covering_grouped;
mod covering_merge;
mod covering_moe;
mod covering_quantise;
mod covering_split;
pub mod decode;
pub mod forward_sm80;
pub mod forward_sm90;
pub mod grouped;
mod launch;
pub mod merge;
pub mod moe;
pub mod parts;
mod plan;
pub mod quantise;
mod side;
pub mod slots;
pub mod turn_values;
pub mod untrusted;

pub use covering::{Member, covering_set};
pub use covering_append::covering_appends;
pub use covering_backward::{BackwardMember, covering_backward};
pub use covering_cache::covering_caches;
pub use covering_decode::covering_decode;
pub use covering_grouped::covering_grouped;
pub use covering_merge::covering_merges;
pub use covering_moe::covering_experts;
pub use covering_quantise::covering_quantised;
pub use covering_split::covering_split;
pub use flashcore_tile::RegisterBudget;
pub use launch::{AnyProgram, KernelConfig, Launch};
pub use plan::{
    ALLOCATED_ALIGNMENT, Choice, Family, Form, Gpu, Misfit, NarrowForm, Plan, PlanError, Tile, UnknownKernel,
    plan, plan_append, plan_backward, plan_backward_by, plan_backward_general, plan_backward_tiles, plan_by,
    plan_general, plan_grouped, plan_grouped_tile, plan_merge, plan_moe, plan_moe_tiles, plan_quantise,
    plan_tile, tuned,
};
pub use side::{append_values, host_values, quantise_values};
