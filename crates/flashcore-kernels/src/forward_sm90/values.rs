//! Keeps data beyond a used length out of the result.
//!
//! Masked keys have probability 0, but 0 · NaN is NaN: unused rows of V in a batch entry are overwritten with zeros in
//! shared memory before they are multiplied. Beyond the whole tensor, tensor copies zero-fill by themselves.

use flashcore_tile::{Builder, Reg, S32, Shared, U32, Val, WARPGROUP, Warpgroup};

use super::{consumer::Consumer, schedule::Tile};

/// Bytes that one thread clears at a time.
const CHUNK: u32 = 16;

/// Clears the rows of the V tile of key tile `block` that lie beyond the used keys; all consumers do it together.
pub(super) fn clean_values(b: &mut Builder, consumer: &Consumer<'_>, tile: &Tile, block: Reg<S32>) {
    let tile_n = consumer.cfg.tile_n();
    let used = b.let_(tile.kv_len - block.unsigned() * tile_n);
    let partial = b.uniform::<Warpgroup>(used.lt(tile_n));
    b.if_uniform(partial, |b| {
        let stage = consumer.layout.v.stage(b, consumer.kv_count);
        stage.wait_full(b);
        let values = stage.at(b);
        clear(b, consumer, values, used);
        // Writes of threads become visible to the tensor cores of every consumer.
        b.fence_async();
        b.sync(consumer.layout.consumers);
    });
}

/// Zeros from row `used` to the end of every slab.
fn clear(b: &mut Builder, consumer: &Consumer<'_>, values: Shared, used: Reg<U32>) {
    let v = consumer.layout.v.tile();
    let start = b.let_(used * v.slab_width());
    let at = b.var(consumer.thread * CHUNK + start);
    let stride = consumer.cfg.shape.consumers * WARPGROUP * CHUNK;
    b.while_(
        |_| at.lt(v.slab_bytes()),
        |b| {
            let row = values.plus(b, at);
            for slab in 0..v.slabs() {
                b.store_shared::<U32>(row.at(slab * v.slab_bytes()), &[Val::Const(0); 4]);
            }
            b.add_to(at, stride);
        },
    );
}
