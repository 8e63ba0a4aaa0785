//! Tests of the CPU backend. What counts allocations and what miri runs are programs of their own.

mod backward;
mod conformance;
mod pages;
mod threads;
