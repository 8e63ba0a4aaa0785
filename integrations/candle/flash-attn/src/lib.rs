//! candle-flash-attn's functions, by FlashCore: what `[patch.crates-io]` puts in the place of the crate of that name.

#![forbid(unsafe_code)]

pub use flashcore_candle::*;
