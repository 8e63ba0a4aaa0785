//! Lengths, sinks, factors, biases, seed and page table of a call on the host, as the bytes that an executor uploads.

use flashcore_core::{
    AppendCall, Bias, DType, Factors, Index, Instance, Lengths, PageTable, QuantiseCall, Slots,
};
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
    // A cache under wider queries has factors of its own alone.
    let factors =
        |n: usize| factor_bytes(call.values().factors.as_ref(), n).filter(|bytes| !bytes.is_empty());
    let sinks = call.sink_logits().map(|sinks| floats(sinks, call.sinks()));
    let of_pairs = match call.bias() {
        Some(Bias::Pairs { dtype, .. }) => Some(dtype),
        _ => None,
    };
    let bias = call.values().bias.as_deref().map(|bias| floats(bias, of_pairs));
    let seed = call.dropout().and(call.values().seed).map(|seed| seed.to_le_bytes().to_vec());
    let arrays = [
        (slots::LENGTHS_Q, q.map(numbers)),
        (slots::LENGTHS_KV, kv.map(numbers)),
        (slots::TABLE, table(call)),
        (slots::SINKS, sinks),
        (slots::FACTORS_Q, factors(0)),
        (slots::FACTORS_K, factors(1)),
        (slots::FACTORS_V, factors(2)),
        (slots::BIAS, bias),
        (slots::SEED, seed),
    ];
    arrays.into_iter().filter_map(|(slot, bytes)| Some((slot, bytes?))).collect()
}

/// Numbers in their own type; f32 where there is none.
fn floats(numbers: &[f32], dtype: Option<DType>) -> Vec<u8> {
    match dtype {
        Some(DType::F16) => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Some(DType::BF16) => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// The rows of the page table, as far apart as the problem says; nothing is read between them.
fn table(call: Instance<'_>) -> Option<Vec<u8>> {
    let (table, pages) = (call.values().table.as_ref()?, call.pages()?);
    Some(table_bytes(table, call.sequences(), pages.row_stride))
}

fn table_bytes(table: &PageTable, rows: usize, row_stride: usize) -> Vec<u8> {
    let gap = row_stride.saturating_sub(table.columns());
    let row = |n: usize| table.row(n).iter().copied().chain(std::iter::repeat_n(i32::MIN, gap));
    (0..rows).flat_map(row).flat_map(i32::to_le_bytes).collect()
}

/// Lengths, slots, page table and factors of new rows, each with its slot of [`slots::append`].
pub fn append_values(call: &AppendCall<'_>) -> Vec<(Slot, Vec<u8>)> {
    let (spec, values) = (call.problem().spec(), call.values());
    let lengths = values.lengths.iter().flat_map(|&length| match spec.index {
        Index::I32 => length.to_le_bytes().to_vec(),
        Index::I64 => i64::from(length).to_le_bytes().to_vec(),
    });
    let numbers = match spec.slots {
        Slots::Behind => (slots::append::LENGTHS, lengths.collect()),
        Slots::Listed => {
            (slots::append::SLOTS, values.slots.iter().flat_map(|slot| slot.to_le_bytes()).collect())
        }
    };
    let table = values.table.as_ref().zip(spec.pages);
    let table = table.map(|(table, pages)| table_bytes(table, spec.k.dims().batch, pages.row_stride));
    let factors = [(slots::append::FACTORS_K, 1), (slots::append::FACTORS_V, 2)]
        .into_iter()
        .filter_map(|(slot, n)| Some((slot, factor_bytes(values.factors.as_ref(), n)?)));
    let table = table.map(|bytes| (slots::append::TABLE, bytes));
    std::iter::once(numbers).chain(table).chain(factors).collect()
}

/// The factors of Q, K or V.
fn factor_bytes(factors: Option<&Factors>, n: usize) -> Option<Vec<u8>> {
    Some(factors?.all()[n].iter().flat_map(|factor| factor.to_le_bytes()).collect())
}

/// Used lengths of a tensor that is quantised, with their slot of [`slots::quantise`]; nothing where all rows are used.
pub fn quantise_values(call: &QuantiseCall<'_>) -> Vec<(Slot, Vec<u8>)> {
    let bytes = |length: &u32| match call.problem().spec().used {
        Some(Index::I64) => u64::from(*length).to_le_bytes().to_vec(),
        _ => length.to_le_bytes().to_vec(),
    };
    let lengths = call.used().map(|used| used.iter().flat_map(bytes).collect());
    lengths.into_iter().map(|bytes| (slots::quantise::LENGTHS, bytes)).collect()
}
