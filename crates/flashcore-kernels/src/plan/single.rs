//! The tiles of the general kernel for f32: one table, the reason beside each row.
//!
//! Elements are twice as wide and every product is three, so tiles are smaller and copy time matters less.

use super::general::{ANY, Row, shape_of};

/// Of the rows for a head dim and sequence, the first whose CTAs fit on an SM is taken.
pub(super) const TABLE: &[Row] = &[
    Row {
        dim: 64,
        queries: 64,
        shape: shape_of([4, 1], [64, 32], 2),
        why: "64 rows are all there are; 16 per warp",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: shape_of([4, 2], [64, 16], 2),
        why: "32 rows per warp use each split key twice, which leaves registers for 16 keys; two CTAs hide each other's latency",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: shape_of([4, 2], [32, 16], 2),
        why: "as with 64 keys, which would leave room for one CTA only",
    },
    Row {
        dim: 64,
        queries: ANY,
        shape: shape_of([4, 1], [32, 32], 2),
        why: "64 rows, so that two CTAs fit in a small shared memory",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: shape_of([4, 1], [32, 32], 2),
        why: "16 rows per warp leave registers for probabilities in two parts; two CTAs hide each other's latency",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: shape_of([8, 1], [32, 32], 1),
        why: "shared memory holds one CTA, which therefore has eight warps",
    },
    Row {
        dim: 128,
        queries: ANY,
        shape: shape_of([4, 1], [32, 32], 1),
        why: "64 rows and 32 keys are what a small shared memory holds",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([8, 1], [16, 16], 1),
        why: "the output takes half of the registers, so that a warp has 16 rows; one CTA fills shared memory",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([4, 1], [16, 16], 1),
        why: "as with 128 rows, which do not fit",
    },
    Row {
        dim: 256,
        queries: ANY,
        shape: shape_of([2, 1], [16, 16], 1),
        why: "32 rows and 16 keys are what a small shared memory holds",
    },
];
