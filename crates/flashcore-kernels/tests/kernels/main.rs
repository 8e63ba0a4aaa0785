//! Tests of kernels and plans, without a GPU.

mod assemble;
mod backward;
mod covering;
mod dropout;
mod experts;
mod invariant;
mod latent;
mod mutation;
mod packed;
mod packed_gradients;
mod plan;
mod policy;
mod quantise;
mod ranges;
mod simulator;
mod single_gradients;
mod tuned;
