//! The tiles of the general kernels of gradients for f32: a table for each side, the reason beside each row.
//!
//! Elements are twice as wide and every product is three, so that tiles are smaller and the time of copies counts less.

use super::backward_general::{Row, shape};

pub(super) const OF_QUERIES: &[Row] = &[
    Row {
        dim: 64,
        shape: shape([4, 2], [32, 16], 2),
        why: "32 rows per warp use each split fragment twice, which leaves registers for 16 keys; two CTAs hide each other's waits",
    },
    Row { dim: 64, shape: shape([4, 1], [32, 32], 2), why: "64 rows, so that two CTAs fit in shared memory" },
    Row {
        dim: 64,
        shape: shape([8, 1], [32, 32], 1),
        why: "little shared memory holds one CTA, which therefore has eight warps",
    },
    Row {
        dim: 128,
        shape: shape([8, 1], [32, 32], 1),
        why: "16 rows per warp leave registers for dS in two parts; one CTA fills shared memory",
    },
    Row { dim: 128, shape: shape([8, 1], [16, 16], 1), why: "as with 32 keys, which do not fit" },
    Row {
        dim: 128,
        shape: shape([4, 1], [16, 16], 1),
        why: "64 rows and 16 keys are what little shared memory holds",
    },
    Row {
        dim: MOST_FEATURES,
        shape: shape([8, 1], [16, 16], 1),
        why: "two warps share the columns of dQ, as 64 rows are what shared memory holds",
    },
    Row { dim: MOST_FEATURES, shape: shape([4, 1], [16, 16], 1), why: "32 rows, as 64 do not fit" },
    Row {
        dim: MOST_FEATURES,
        shape: shape([2, 1], [16, 16], 1),
        why: "16 rows are what little shared memory holds",
    },
];

pub(super) const OF_KEYS: &[Row] = &[
    Row {
        dim: 64,
        shape: shape([4, 1], [64, 32], 2),
        why: "dK and dV leave registers for 16 keys by 32 queries; two CTAs hide each other's waits",
    },
    Row {
        dim: 64,
        shape: shape([4, 1], [32, 32], 2),
        why: "as with 64 queries, which would leave room for one CTA only",
    },
    Row {
        dim: 64,
        shape: shape([8, 1], [32, 32], 1),
        why: "little shared memory holds one CTA, which therefore has eight warps",
    },
    Row {
        dim: 128,
        shape: shape([8, 1], [32, 16], 1),
        why: "dK and dV take half of the registers, which leaves room for 16 keys by 16 queries; one CTA fills shared memory",
    },
    Row { dim: 128, shape: shape([8, 1], [16, 16], 1), why: "as with 32 queries, which do not fit" },
    Row {
        dim: 128,
        shape: shape([4, 1], [16, 16], 1),
        why: "64 keys and 16 queries are what little shared memory holds",
    },
    Row {
        dim: MOST_FEATURES,
        shape: shape([8, 1], [16, 16], 1),
        why: "two warps share the columns of dK and dV; both multiply queries by keys",
    },
    Row { dim: MOST_FEATURES, shape: shape([4, 1], [16, 16], 1), why: "32 keys, as 64 do not fit" },
    Row {
        dim: MOST_FEATURES,
        shape: shape([2, 1], [16, 16], 1),
        why: "16 keys are what little shared memory holds",
    },
];

/// Most features of a head, as forward has them.
const MOST_FEATURES: usize = 256;
