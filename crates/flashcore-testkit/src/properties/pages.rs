//! Laws of keys in pages.

use flashcore_core::{Backend, Dims, Element, Lengths, Mask, PageTable};

use super::{draw, expect, expect_same_bits, pick_rows, run};
use crate::{
    answer::Answer,
    cases::{Case, Tag},
    pages::Paging,
    rng::Rng,
    suite::Outcome,
};

const PAIRS: [(u32, u32); 5] = [(5, 40), (1, 150), (64, 64), (0, 9), (3, 0)];

fn paged(size: usize) -> Case {
    paged_of(size, &PAIRS)
}

fn paged_of(size: usize, pairs: &[(u32, u32)]) -> Case {
    let paging = Paging { packed: true, ..Paging::of(size) };
    Case { mask: Mask::CAUSAL, ..Case::paged(format!("law {size}"), paging, pairs, [4, 2], 64) }
}

/// Packed rows of the keys, moved to where the case's table says.
fn into_pages(case: &Case, table: &PageTable, packed: &[f32], total: usize) -> Vec<f32> {
    let Dims { heads, seq: size, dim, .. } = case.k;
    let mut pool = vec![0.0; case.k.count().unwrap_or(0)];
    let mut first = 0;
    for (n, keys) in PAIRS.map(|pair| pair.1 as usize).into_iter().enumerate() {
        for (head, key) in (0..heads).flat_map(|head| (0..keys).map(move |key| (head, key))) {
            let page = table.row(n)[key / size] as usize;
            let to = ((page * heads + head) * size + key % size) * dim;
            let from = (head * total + first + key) * dim;
            pool[to..to + dim].copy_from_slice(&packed[from..from + dim]);
        }
        first += keys;
    }
    pool
}

pub(super) fn equal_keys_together<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let together = Case { mask: Mask::CAUSAL, ..Case::ragged(Tag::Random, "property", &PAIRS, [4, 2], 64) };
    let [q, k, v] = draw(&together, seed);
    for size in [1, 3, 16, 64] {
        let case = paged(size);
        let table = case.table.as_ref().expect("a paged case");
        let [k, v] = [&k, &v].map(|rows| into_pages(&case, table, rows, together.k.seq));
        let got = run::<T>(backend, &case, &[q.clone(), k, v], seed)?;
        expect::<T>(&got, &together, &draw(&together, seed), seed)?;
    }
    Ok(())
}

pub(super) fn order_does_not_matter<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    let [(one, values), (other, moved)] = in_two_orders(seed);
    let before = run::<T>(backend, &one, &values, seed)?;
    expect_same_bits(&before, &run::<T>(backend, &other, &moved, seed)?)
}

/// A case with its numbers, and the same with its pages in another order.
pub(crate) fn in_two_orders(seed: u64) -> [(Case, [Vec<f32>; 3]); 2] {
    let case = paged(16);
    let [q, k, v] = draw(&case, seed);
    let to = Rng::new(seed).permutation(case.k.batch);
    let page = case.k.heads * case.k.seq * case.k.dim;
    let moved = |pool: &[f32]| {
        let mut pages = vec![0.0; pool.len()];
        for (from, &to) in pool.chunks_exact(page).zip(&to) {
            pages[to * page..][..page].copy_from_slice(from);
        }
        pages
    };
    let table = case.table.as_ref().expect("a paged case");
    // Whatever stands beyond a sequence's keys may change, too.
    let number =
        |&old: &i32| usize::try_from(old).ok().and_then(|old| to.get(old)).map_or(7, |&to| to as i32);
    let numbers: Vec<i32> = (0..PAIRS.len()).flat_map(|n| table.row(n)).map(number).collect();
    let other = Case { table: Some(PageTable::new(numbers, table.columns())), ..case.clone() };
    let after = [q.clone(), moved(&k), moved(&v)];
    [(case, [q, k, v]), (other, after)]
}

/// Prompts, chunks and single queries in one batch, and each of them alone.
pub(super) fn others_do_not_matter<T: Element>(backend: &dyn Backend, seed: u64) -> Result<(), Outcome> {
    others_do_not_matter_to(|case, values| run::<T>(backend, case, values, seed), seed)
}

/// The same for whatever runs a case on some numbers.
pub(crate) fn others_do_not_matter_to(
    run: impl Fn(&Case, &[Vec<f32>; 3]) -> Result<Answer, Outcome>,
    seed: u64,
) -> Result<(), Outcome> {
    const MIXED: [(u32, u32); 5] = [(1, 700), (70, 90), (2, 300), (16, 20), (17, 40)];
    let case = Case { batch_invariant: true, ..paged_of(16, &MIXED) };
    let [q, k, v] = draw(&case, seed);
    let whole = run(&case, &[q.clone(), k.clone(), v.clone()])?;
    let table = case.table.as_ref().expect("a paged case");
    let mut first = 0;
    for (n, (queries, keys)) in MIXED.into_iter().enumerate() {
        let rows: Vec<usize> = (first..first + queries as usize).collect();
        first += rows.len();
        let alone = Case {
            q: Dims { seq: rows.len(), ..case.q },
            lengths: Lengths::packed_queries([0, queries], [keys]),
            table: Some(PageTable::new(table.row(n), table.columns())),
            ..case.clone()
        };
        let own = pick_rows(&q, case.q, &rows);
        let got = run(&alone, &[own, k.clone(), v.clone()])?;
        expect_same_bits(&got, &whole.part(0, 0..4, rows[0]..first))?;
    }
    Ok(())
}
