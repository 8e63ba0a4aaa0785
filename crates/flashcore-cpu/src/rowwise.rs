//! One row at a time, its visible keys only.

use std::ops::Range;

use flashcore_core::{Element, Layout};

/// Keys and values of one sequence and head.
pub(crate) struct KeyValues<'a, T> {
    pub(crate) k: &'a [T],
    pub(crate) v: &'a [T],
    pub(crate) k_stride: usize,
    pub(crate) v_stride: usize,
    pub(crate) dim_v: usize,
}

impl<'a, T: Element> KeyValues<'a, T> {
    pub(crate) fn new(
        [k, v]: [&'a [T]; 2],
        [k_layout, v_layout]: [&Layout; 2],
        batch: usize,
        head: usize,
        start: usize,
    ) -> Self {
        Self {
            k: &k[k_layout.row(batch, head, start).min(k.len())..],
            v: &v[v_layout.row(batch, head, start).min(v.len())..],
            k_stride: k_layout.strides()[2],
            v_stride: v_layout.strides()[2],
            dim_v: v_layout.dims().dim,
        }
    }
}

/// Running state of one row.
pub(crate) struct Row {
    pub(crate) max: f32,
    pub(crate) sum: f32,
    pub(crate) out: Vec<f32>,
}

/// Scores in natural-log units from dot products.
#[derive(Clone, Copy)]
pub(crate) struct Logit {
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
}

impl Logit {
    fn of(self, dot: f32) -> f32 {
        let scaled = dot * self.scale;
        self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
    }
}

impl Row {
    pub(crate) fn new(dim: usize, sink: Option<f32>) -> Self {
        let max = sink.unwrap_or(f32::NEG_INFINITY);
        Self { max, sum: if max > f32::NEG_INFINITY { 1.0 } else { 0.0 }, out: vec![0.0; dim] }
    }

    /// Folds the visible `keys` in.
    pub(crate) fn attend<T: Element>(&mut self, q: &[T], kv: &KeyValues<'_, T>, keys: Range<usize>, f: Logit) {
        for n in keys {
            let k = &kv.k[n * kv.k_stride..][..q.len()];
            let dot: f32 = q.iter().zip(k).map(|(a, b)| a.to_f32() * b.to_f32()).sum();
            self.fold(f.of(dot), &kv.v[n * kv.v_stride..][..kv.dim_v]);
        }
    }

    fn fold<T: Element>(&mut self, score: f32, v: &[T]) {
        if score > self.max {
            let shrink = (self.max - score).exp();
            self.sum *= shrink;
            self.out.iter_mut().for_each(|o| *o *= shrink);
            self.max = score;
        }
        if self.max == f32::NEG_INFINITY && !score.is_nan() {
            return;
        }
        let p = (score - self.max).exp();
        self.sum += p;
        self.out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v.to_f32());
    }

    pub(crate) fn lse(&self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max + self.sum.ln() }
    }

    pub(crate) fn store<T: Element>(&self, row: &mut [T]) {
        let factor = if self.sum == 0.0 { 0.0 } else { 1.0 / self.sum };
        row.iter_mut().zip(&self.out).for_each(|(to, o)| *to = T::from_f32(o * factor));
    }
}
