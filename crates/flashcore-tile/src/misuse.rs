//! Kernels that do not compile: the mistakes that types prevent.
//!
//! In each group the first block is correct; the others differ from it in one thing and must not compile. Mistakes
//! that types cannot catch are rejected by [`Builder::finish`](crate::Builder::finish); see `tests/misuse`.
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.add(x, 2.0);
//! # }
//! ```
//!
//! Integers and floats do not mix:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.add(x, i);
//! # }
//! ```
//!
//! Nor do constants:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.add(i, 2.0);
//! # }
//! ```
//!
//! Nor do operators mix them:
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.let_(i * 2 + i);
//! # }
//! ```
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.let_(i * 2 + x);
//! # }
//! ```
//!
//! An expression that is used twice would be computed twice:
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let twice = b.let_(i * 2);
//! b.let_(twice + twice);
//! # }
//! ```
//!
//! ```compile_fail,E0382
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let twice = i * 2;
//! b.let_(twice + twice);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.shl(i, 2);
//! # }
//! ```
//!
//! Floats have no bits to shift:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.shl(x, 2);
//! # }
//! ```
//!
//! Nor to mask:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (x, i) = (b.var::<F32>(1.0), b.var::<U32>(1));
//! b.and(x, x);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! b.select(p, i, 0);
//! # }
//! ```
//!
//! A condition is not a number:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! b.add(p, p);
//! # }
//! ```
//!
//! A number is not a condition:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! b.select(i, i, 0);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (global, shared) = (b.var::<U64>(0), b.shared_base());
//! b.load_global::<F32, 1>(global);
//! b.load_shared::<F32, 1>(shared);
//! # }
//! ```
//!
//! A shared address cannot read global memory:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (global, shared) = (b.var::<U64>(0), b.shared_base());
//! b.load_global::<F32, 1>(shared);
//! # }
//! ```
//!
//! A global address cannot read shared memory:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (global, shared) = (b.var::<U64>(0), b.shared_base());
//! b.load_shared::<F32, 1>(global);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! let u = b.uniform::<Warpgroup>(p);
//! b.if_uniform(u, |b| b.sync_cta());
//! # }
//! ```
//!
//! A per-lane condition is not uniform until it is shown to be:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! let u = b.uniform::<Warpgroup>(p);
//! b.if_uniform(p, |b| b.sync_cta());
//! # }
//! ```
//!
//! Only a warp, a warpgroup or a CTA can agree:
//!
//! ```compile_fail,E0277
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! let u = b.uniform::<Warpgroup>(p);
//! b.uniform::<U32>(p);
//! # }
//! ```
//!
//! A loop that keeps a warpgroup together needs its agreement:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let i = b.var::<U32>(1);
//! let p = b.test(Cmp::Eq, i, 0);
//! let u = b.uniform::<Warpgroup>(p);
//! b.do_while::<Warpgroup>(|b| b.any(p));
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let pending = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
//! let d = pending.wait(b);
//! d.fill(b, 0.0);
//! # }
//! ```
//!
//! A product in flight is not a tile:
//!
//! ```compile_fail,E0599
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let pending = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
//! pending.fill(b, 0.0);
//! # }
//! ```
//!
//! Its registers are unavailable until it is waited for:
//!
//! ```compile_fail,E0382
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let pending = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
//! d.fill(b, 0.0);
//! # }
//! ```
//!
//! It can be waited for only once:
//!
//! ```compile_fail,E0382
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let pending = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
//! pending.wait(b);
//! pending.wait(b);
//! # }
//! ```
//!
//! It cannot feed another product:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let pending = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
//! b.wgmma_ss(pending, Start::Accumulate, [&x, &x], 64).wait(b);
//! # }
//! ```
//!
//! Nor can a tile be copied to get around that:
//!
//! ```compile_fail,E0599
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! let kept = d.clone();
//! # }
//! ```
//!
//! A descriptor comes from a tile, not from a number:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, tile) = (Acc::zero(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let x = tile.operand(b, Major::K, 0);
//! b.wgmma_ss(d, Start::Zero, [&0x4000, &x], 64).wait(b);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, p, tile) = (Acc::zero(b, 64), Fragment::new(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let v = tile.operand(b, Major::Mn, 0);
//! d.pack_into(b, Half::F16, &p);
//! let (d, p) = b.wgmma_rs(d, Start::Accumulate, p, &v).wait(b);
//! d.pack_into(b, Half::F16, &p);
//! # }
//! ```
//!
//! A fragment in flight cannot be overwritten:
//!
//! ```compile_fail,E0382
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (d, p, tile) = (Acc::zero(b, 64), Fragment::new(b, 64), b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1));
//! let v = tile.operand(b, Major::Mn, 0);
//! d.pack_into(b, Half::F16, &p);
//! let scores = Acc::zero(b, 64);
//! let pending = b.wgmma_rs(d, Start::Accumulate, p, &v);
//! scores.pack_into(b, Half::F16, &p);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (named, at) = (b.named_barrier(64), b.mbarriers(1));
//! let bar = b.mbarrier_at(at);
//! b.sync(named);
//! bar.arrive(b);
//! # }
//! ```
//!
//! A named barrier is not a number:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (named, at) = (b.named_barrier(64), b.mbarriers(1));
//! let bar = b.mbarrier_at(at);
//! b.sync(1);
//! # }
//! ```
//!
//! An mbarrier is not a named barrier:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (named, at) = (b.named_barrier(64), b.mbarriers(1));
//! let bar = b.mbarrier_at(at);
//! b.sync(bar);
//! # }
//! ```
//!
//! An offset is not an mbarrier:
//!
//! ```compile_fail,E0599
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel(b: &mut Builder) {
//! let (named, at) = (b.named_barrier(64), b.mbarriers(1));
//! let bar = b.mbarrier_at(at);
//! at.arrive(b);
//! # }
//! ```
//!
//! ```
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel() {
//! let name = Ident::new("k").unwrap();
//! let mut b = Builder::new(Target::Sm80, &name, 32, 1);
//! let mut params = Params::<u32>::default();
//! params.u32(&mut b, "rows", |&rows| rows);
//! let program = b.finish(&name, params).unwrap();
//! let extent = Extent { grid: [1; 3], workspace: vec![], dependent: false };
//! program.launch(&7, extent);
//! # }
//! ```
//!
//! A kernel can be finished only once:
//!
//! ```compile_fail,E0382
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel() {
//! let name = Ident::new("k").unwrap();
//! let mut b = Builder::new(Target::Sm80, &name, 32, 1);
//! let mut params = Params::<u32>::default();
//! params.u32(&mut b, "rows", |&rows| rows);
//! b.finish(&name, params).unwrap();
//! b.sync_cta();
//! # }
//! ```
//!
//! Arguments must match the parameters:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel() {
//! let name = Ident::new("k").unwrap();
//! let mut b = Builder::new(Target::Sm80, &name, 32, 1);
//! let mut params = Params::<u32>::default();
//! params.u32(&mut b, "rows", |&rows| rows);
//! let program = b.finish(&name, params).unwrap();
//! let extent = Extent { grid: [1; 3], workspace: vec![], dependent: false };
//! program.launch(&7.0, extent);
//! # }
//! ```
//!
//! A name must be checked first:
//!
//! ```compile_fail,E0308
//! # use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
//! # use flashcore_tile::*;
//! # fn kernel() {
//! let name = Ident::new("k").unwrap();
//! let mut b = Builder::new(Target::Sm80, &name, 32, 1);
//! let mut params = Params::<u32>::default();
//! params.u32(&mut b, "rows", |&rows| rows);
//! b.finish("k", params).unwrap();
//! # }
//! ```
