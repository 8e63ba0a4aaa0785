//! A ring of ranks, each a thread with a part of one sequence: keys and values go round by channels, partial results are
//! accumulated in f32, and a shifted diagonal masks each part. `cargo run --release --example 08_ring`
//!
//! Between GPUs the channels become NCCL's send and receive; nothing else changes.
use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

use flashcore::{Error, Mask, Tensor, TensorView, TensorViewMut, attention};

const RANKS: usize = 4;
const TOKENS: usize = 250; // of each rank
const DIM: usize = 64;
const SHAPE: [usize; 4] = [1, 1, TOKENS, DIM];

/// One rank's tokens: those from `rank * TOKENS` on. Keys and values are the same here.
#[derive(Clone)]
struct Part {
    rank: usize,
    keys: Vec<f32>,
}

fn main() -> Result<(), Error> {
    let data: Vec<f32> = (0..RANKS * TOKENS * DIM).map(|i| (i as f32 * 0.73).sin()).collect();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel::<Part>()).unzip();
    let mut joined = Vec::new();
    thread::scope(|scope| -> Result<(), Error> {
        let ranks: Vec<_> = receivers
            .into_iter()
            .enumerate()
            .map(|(rank, before)| {
                let after = senders[(rank + 1) % RANKS].clone();
                let own = Part { rank, keys: data[rank * TOKENS * DIM..(rank + 1) * TOKENS * DIM].to_vec() };
                scope.spawn(move || go_round(own, &after, &before))
            })
            .collect();
        for rank in ranks {
            joined.extend(rank.join().expect("a rank")?);
        }
        Ok(())
    })?;

    let all = Tensor::bhsd(data, [1, 1, RANKS * TOKENS, DIM])?;
    let whole = attention(all.view(), all.view(), all.view()).mask(Mask::CAUSAL).run()?;
    let pairs = joined.iter().zip(whole.out.data());
    let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{RANKS} ranks of {TOKENS} tokens differ from one of all by at most {off:.1e}");
    Ok(())
}

/// The output of a rank's queries over the keys of all ranks.
fn go_round(own: Part, after: &Sender<Part>, before: &Receiver<Part>) -> Result<Vec<f32>, Error> {
    let q = TensorView::bhsd(&own.keys, SHAPE)?;
    let (mut out, mut lse) = (vec![0.0; TOKENS * DIM], vec![f32::NEG_INFINITY; TOKENS]);
    let mut part = own.clone();
    for step in 0..RANKS {
        if step + 1 < RANKS {
            // The next part is on its way while this one is multiplied.
            after.send(part.clone()).expect("the next rank");
        }
        // The first query stands so many keys behind the first key of the part; before it nothing is seen.
        let apart = (own.rank as i32 - part.rank as i32) * TOKENS as i32;
        let kv = TensorView::bhsd(&part.keys, SHAPE)?;
        attention(q, kv, kv)
            .mask(Mask::CAUSAL.top_left().shifted(apart))
            .accumulate_into(TensorViewMut::bhsd(&mut out, SHAPE)?, &mut lse)?;
        if step + 1 < RANKS {
            part = before.recv().expect("the rank before");
        }
    }
    Ok(out)
}
