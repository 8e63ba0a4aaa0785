//! Lengths, sinks and page table of a call on the host, as the bytes that an executor uploads.

use flashcore_core::{DType, Instance, Lengths};
use flashcore_ptx::launch::Slot;
use half::{bf16, f16};

use crate::slots;

/// The arrays of a call, each with its slot; see [`crate::slots`] for what each expects.
pub fn host_values(call: Instance<'_>) -> Vec<(Slot, Vec<u8>)> {
    let numbers = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let [q, kv] = match &call.values().lengths {
        Lengths::Used { q, kv } => [q.as_deref(), kv.as_deref()],
        Lengths::Ragged { q, kv } | Lengths::PackedQueries { q, kv } => [Some(&**q), Some(&**kv)],
        _ => [None, None],
    };
    let sinks = call.sink_logits().map(|sinks| match call.sinks() {
        Some(DType::F16) => sinks.iter().flat_map(|&s| f16::from_f32(s).to_le_bytes()).collect(),
        Some(DType::BF16) => sinks.iter().flat_map(|&s| bf16::from_f32(s).to_le_bytes()).collect(),
        _ => sinks.iter().flat_map(|s| s.to_le_bytes()).collect(),
    });
    let arrays = [
        (slots::LENGTHS_Q, q.map(numbers)),
        (slots::LENGTHS_KV, kv.map(numbers)),
        (slots::TABLE, table(call)),
        (slots::SINKS, sinks),
    ];
    arrays.into_iter().filter_map(|(slot, bytes)| Some((slot, bytes?))).collect()
}

/// The rows of the page table, as far apart as the problem says; nothing is read between them.
fn table(call: Instance<'_>) -> Option<Vec<u8>> {
    let (table, pages) = (call.values().table.as_ref()?, call.pages()?);
    let gap = pages.row_stride.saturating_sub(pages.columns);
    let row = |n: usize| table.row(n).iter().copied().chain(std::iter::repeat_n(i32::MIN, gap));
    Some((0..call.sequences()).flat_map(row).flat_map(i32::to_le_bytes).collect())
}
