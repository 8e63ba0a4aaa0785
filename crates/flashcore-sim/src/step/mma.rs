//! `mma.sync`: one warp multiplies 16×k by k×8.

use super::{
    Flow, Outcome, Step,
    tensor::{Matrix, packed},
};
use crate::{
    numeric::{F16, Rounding},
    program::{Element, Lanes, Mma, Src},
};
use flashcore_ptx::layout::{Place, fragment_a, fragment_b, fragment_c};

const ROWS: usize = 16;
const COLS: usize = 8;

impl Step<'_, '_> {
    pub(super) fn mma(&mut self, op: &Mma) -> Outcome {
        if let Some(flow) = self.whole_warp("mma.sync")? {
            return Ok(flow);
        }
        self.machine.counters.tensor_macs += (ROWS * COLS * op.k) as u64;
        let a = self.left(op)?;
        let b = self.fragment(&op.b, op.right, (op.k, COLS), fragment_b);
        let c: Vec<Lanes> = op.c.iter().map(|src| self.read(*src)).collect();
        if matches!(op.element, Element::U8 | Element::S8) {
            return self.integer_mma(op, &a, &b, &c);
        }
        let mut d = Matrix::zero(ROWS, COLS);
        each_accumulator(op.accumulate_f16, |lane, at, register, shift| {
            let bits = c[register][lane] >> shift;
            let value = match op.accumulate_f16 {
                true => F16.decode(bits as u32 & 0xffff) as f32,
                false => f32::from_bits(bits as u32),
            };
            d.set(at.row as usize, at.col as usize, value);
        });
        d.add_product(&a, &b);
        let mut results = vec![[0u64; 32]; op.d.len()];
        each_accumulator(op.accumulate_f16, |lane, at, register, shift| {
            let value = d.at(at.row as usize, at.col as usize);
            let bits = match op.accumulate_f16 {
                true => F16.encode(value.into(), Rounding::NearestEven),
                false => canonical(value),
            };
            results[register][lane] |= u64::from(bits) << shift;
        });
        for (reg, values) in op.d.iter().zip(&results) {
            self.write(Some(*reg), values);
        }
        Ok(Flow::Next)
    }

    /// A with all of its columns.
    fn left(&mut self, op: &Mma) -> Outcome<Matrix> {
        let Some(sparse) = &op.sparse else {
            return Ok(self.fragment(&op.a, op.element, (ROWS, op.k), fragment_a));
        };
        let stored = self.fragment(&op.a, op.element, (ROWS, op.k / 2), fragment_a);
        self.expanded(sparse, op.element, &stored, (ROWS, op.k))
    }

    /// An operand as a dense matrix.
    fn fragment(
        &mut self,
        srcs: &[Src],
        element: Element,
        (rows, cols): (usize, usize),
        place: impl Fn(u32, u32, u32) -> Place,
    ) -> Matrix {
        let words: Vec<Lanes> = srcs.iter().map(|src| self.read(*src)).collect();
        let per_register = 32 / element.bits();
        let mut matrix = Matrix::zero(rows, cols);
        let value = packed(element);
        for lane in 0..32 {
            for i in 0..per_register * srcs.len() as u32 {
                let at = place(lane, i, per_register);
                let word = words[(i / per_register) as usize][lane as usize] as u32;
                matrix.set(at.row as usize, at.col as usize, value(word, i % per_register));
            }
        }
        matrix
    }

    /// Bytes into 32-bit integers, which wrap or are clamped.
    fn integer_mma(&mut self, op: &Mma, a: &Matrix, b: &Matrix, c: &[Lanes]) -> Outcome {
        let mut results = vec![[0u64; 32]; op.d.len()];
        each_accumulator(false, |lane, at, register, _| {
            let (row, col) = (at.row as usize, at.col as usize);
            let product: i32 = (0..op.k).map(|k| a.at(row, k) as i32 * b.at(k, col) as i32).sum();
            let sum = integer_sum(c[register][lane] as u32, product, op.saturate);
            results[register][lane] = u64::from(sum);
        });
        for (reg, values) in op.d.iter().zip(&results) {
            self.write(Some(*reg), values);
        }
        Ok(Flow::Next)
    }
}

/// Calls `f(lane, place, register, shift)` for the four accumulator elements of every lane.
fn each_accumulator(halves: bool, mut f: impl FnMut(usize, Place, usize, u32)) {
    for lane in 0..32 {
        for i in 0..4 {
            let (register, shift) = if halves { (i / 2, 16 * (i % 2)) } else { (i, 0) };
            f(lane as usize, fragment_c(lane, i), register as usize, shift);
        }
    }
}

/// What the tensor core adds to a 32-bit integer.
pub(super) fn integer_sum(old: u32, product: i32, saturate: bool) -> u32 {
    let old = old as i32;
    (if saturate { old.saturating_add(product) } else { old.wrapping_add(product) }) as u32
}

/// The bits of a result; NaN is canonical.
pub(super) fn canonical(value: f32) -> u32 {
    if value.is_nan() { crate::numeric::single::NAN_BITS } else { value.to_bits() }
}
