//! `wmma`: one warp multiplies matrices whose register layout the ISA leaves open, and `movmatrix`.
//!
//! Here element `e`, counted along rows, is at place `e` of the warp's registers, lane by lane; if there are more
//! places than elements, the matrix is stored twice.

use super::{Flow, Outcome, Step, mma::canonical};
use crate::{
    finding::FindingKind,
    memory::{Place, resolve},
    numeric::{BF16, F16, Rounding, double, small::tf32},
    program::{Combine, Dst, Fragment, Lanes, Order, Reg, Src, Wmma, WmmaPlace},
};
use flashcore_ptx::{
    layout::{self, fragment_a, fragment_b, fragment_c, ldmatrix_element},
    types::ScalarType,
};

impl Fragment {
    const fn elements(self) -> u32 {
        self.rows * self.cols
    }

    /// Bits of a register.
    const fn register_bits(self) -> u32 {
        if matches!(self.element, ScalarType::F64) { 64 } else { 32 }
    }

    /// Elements of a register.
    const fn per_register(self) -> u32 {
        self.register_bits() / self.element.bits()
    }

    /// For each place in `count` registers of the warp: lane, register, shift and element.
    fn places(self, count: usize) -> impl Iterator<Item = (usize, usize, u32, u32)> {
        let (per, elements) = (self.per_register(), self.elements());
        let in_lane = per * count as u32;
        (0..32 * in_lane).map(move |at| {
            let (lane, i) = (at / in_lane, at % in_lane);
            (lane as usize, (i / per) as usize, i % per * self.element.bits(), at % elements)
        })
    }

    fn mask(self) -> u64 {
        u64::MAX >> (64 - self.element.bits())
    }

    /// The number that bits of an element mean.
    fn value(self, bits: u64) -> f64 {
        let signed = |width: u32| ((bits << (64 - width)) as i64 >> (64 - width)) as f64;
        match self.element {
            ScalarType::F16 => F16.decode(bits as u32),
            ScalarType::Bf16 => BF16.decode(bits as u32),
            ScalarType::Tf32 => {
                f32::from_bits(tf32(f32::from_bits(bits as u32), Rounding::Zero, false)).into()
            }
            ScalarType::F32 => f32::from_bits(bits as u32).into(),
            ScalarType::F64 => f64::from_bits(bits),
            ScalarType::S4 => signed(4),
            ScalarType::S8 => signed(8),
            ScalarType::S32 => signed(32),
            _ => bits as f64,
        }
    }
}

impl Step<'_, '_> {
    /// Where each element lies: its byte, and its bit in it.
    fn element_places(
        &mut self,
        fragment: Fragment,
        place: &WmmaPlace,
    ) -> Outcome<impl Fn(u32) -> (u64, u32) + use<>> {
        let (addresses, strides) = (self.address(&place.addr), self.read(place.stride));
        let (base, stride) = (addresses[0], u64::from(strides[0] as u32));
        if addresses.iter().any(|a| *a != base) || strides.iter().any(|s| *s != strides[0]) {
            let text = "the lanes disagree about the address or the stride of a matrix".into();
            return self.halt(FindingKind::DescriptorMismatch, 0, text);
        }
        let (cols, bits, col_major) = (fragment.cols, u64::from(fragment.element.bits()), place.col_major);
        Ok(move |element: u32| {
            let (row, col) = (u64::from(element / cols), u64::from(element % cols));
            let index = if col_major { col * stride + row } else { row * stride + col };
            (base + index * bits / 8, (index * bits % 8) as u32)
        })
    }

    pub(super) fn wmma_load(&mut self, fragment: Fragment, place: &WmmaPlace, dsts: &[Reg]) -> Outcome {
        if let Some(flow) = self.whole_warp("wmma.load")? {
            return Ok(flow);
        }
        let places = self.element_places(fragment, place)?;
        let width = fragment.element.bytes() as usize;
        let mut values = vec![[0u64; 32]; dsts.len()];
        for (lane, register, shift, element) in fragment.places(dsts.len()) {
            let (address, bit) = places(element);
            let mut bytes = [0; 8];
            let at = resolve(place.space, address);
            self.read_place(lane, at, place.space, &mut bytes[..width], Order::default())?;
            values[register][lane] |= (u64::from_le_bytes(bytes) >> bit & fragment.mask()) << shift;
        }
        for (dst, value) in dsts.iter().zip(&values) {
            self.write(Some(*dst), value);
        }
        Ok(Flow::Next)
    }

    pub(super) fn wmma_store(&mut self, fragment: Fragment, place: &WmmaPlace, srcs: &[Src]) -> Outcome {
        if let Some(flow) = self.whole_warp("wmma.store")? {
            return Ok(flow);
        }
        let places = self.element_places(fragment, place)?;
        let values: Vec<Lanes> = srcs.iter().map(|src| self.read(*src)).collect();
        let width = fragment.element.bytes() as usize;
        self.machine.warps[self.warp].clock.tick();
        for (lane, register, shift, element) in fragment.places(srcs.len()) {
            let bytes = (values[register][lane] >> shift).to_le_bytes();
            let at: Place = resolve(place.space, places(element).0);
            self.write_place(lane, at, place.space, &bytes[..width], Order::default())?;
        }
        self.machine.warps[self.warp].clock.tick();
        self.machine.effect();
        Ok(Flow::Next)
    }

    /// The bits of a fragment's elements, along rows.
    fn elements(&mut self, fragment: Fragment, srcs: &[Src]) -> Vec<u64> {
        let values: Vec<Lanes> = srcs.iter().map(|src| self.read(*src)).collect();
        let mut elements = vec![0; fragment.elements() as usize];
        for (lane, register, shift, element) in fragment.places(srcs.len()) {
            elements[element as usize] = values[register][lane] >> shift & fragment.mask();
        }
        elements
    }

    pub(super) fn wmma(&mut self, op: &Wmma) -> Outcome {
        if let Some(flow) = self.whole_warp("wmma.mma")? {
            return Ok(flow);
        }
        let [d, left, right, _] = op.fragments;
        self.machine.counters.tensor_macs += u64::from(d.elements() * left.cols);
        let [a, b, c] = std::array::from_fn(|i| self.elements(op.fragments[i + 1], &op.sources[i]));
        let mut results = vec![[0u64; 32]; op.d.len()];
        let sums: Vec<u64> = (0..d.elements()).map(|e| op.element(e, &a, &b, &c)).collect();
        debug_assert_eq!(left.cols, right.rows);
        for (lane, register, shift, element) in d.places(op.d.len()) {
            results[register][lane] |= sums[element as usize] << shift;
        }
        for (reg, values) in op.d.iter().zip(&results) {
            self.write(Some(*reg), values);
        }
        Ok(Flow::Next)
    }

    /// `mma` with the fragments of `mma.sync`, whatever its elements.
    pub(super) fn mma_other(&mut self, op: &Wmma) -> Outcome {
        if let Some(flow) = self.whole_warp("mma.sync")? {
            return Ok(flow);
        }
        let [d, left, right, sum] = op.fragments;
        self.machine.counters.tensor_macs += u64::from(d.elements() * left.cols);
        let accumulator = |lane, i, _| fragment_c(lane, i);
        let a = self.spread(left, &op.sources[0], fragment_a);
        let b = self.spread(right, &op.sources[1], fragment_b);
        let c = self.spread(sum, &op.sources[2], accumulator);
        for (i, reg) in op.d.iter().enumerate() {
            let value = |lane: usize| {
                let at = fragment_c(lane as u32, i as u32);
                op.element(at.row * d.cols + at.col, &a, &b, &c)
            };
            self.write(Some(*reg), &std::array::from_fn(value));
        }
        Ok(Flow::Next)
    }

    /// The bits of the elements of a fragment of `mma.sync`, along rows.
    fn spread(
        &mut self,
        fragment: Fragment,
        srcs: &[Src],
        place: impl Fn(u32, u32, u32) -> layout::Place,
    ) -> Vec<u64> {
        let bits = fragment.element.bits();
        let per_register = (32 / bits).max(1);
        let mut elements = vec![0; fragment.elements() as usize];
        for (register, src) in srcs.iter().enumerate() {
            for (lane, word) in self.read(*src).into_iter().enumerate() {
                for i in 0..per_register {
                    let at = place(lane as u32, register as u32 * per_register + i, per_register);
                    let index = at.row * fragment.cols + at.col;
                    elements[index as usize] = word >> (bits * i) & fragment.mask();
                }
            }
        }
        elements
    }

    /// `movmatrix`: the transpose of an 8×8 matrix of halves.
    pub(super) fn move_matrix(&mut self, dst: Dst, src: Src) -> Outcome {
        if let Some(flow) = self.whole_warp("movmatrix")? {
            return Ok(flow);
        }
        let values = self.read(src);
        let mut matrix = [[0u64; 8]; 8];
        for (lane, value) in values.iter().enumerate() {
            for half in 0..2 {
                let at = ldmatrix_element(lane as u32, half, false);
                matrix[at.row as usize][at.col as usize] = value >> (16 * half) & 0xffff;
            }
        }
        let moved = |lane: usize, half: u32| {
            let at = ldmatrix_element(lane as u32, half, true);
            matrix[at.row as usize][at.col as usize] << (16 * half)
        };
        self.write(dst, &std::array::from_fn(|lane| moved(lane, 0) | moved(lane, 1)));
        Ok(Flow::Next)
    }
}

impl Wmma {
    /// The bits of one element of D.
    fn element(&self, index: u32, a: &[u64], b: &[u64], c: &[u64]) -> u64 {
        let [d, left, right, sum] = self.fragments;
        let (row, col) = ((index / d.cols) as usize, (index % d.cols) as usize);
        let depth = left.cols as usize;
        let pairs = (0..depth).map(|k| (a[row * depth + k], b[k * right.cols as usize + col]));
        let start = c[index as usize];
        if let Some(operator) = self.bits {
            let multiply = |(x, y): (u64, u64)| if operator == Combine::And { x & y } else { x ^ y };
            return u64::from((start as u32).wrapping_add(pairs.map(multiply).sum::<u64>() as u32));
        }
        let factors = pairs.map(|(x, y)| (left.value(x), right.value(y)));
        match d.element {
            ScalarType::F64 => {
                factors.fold(f64::from_bits(start), |s, (x, y)| double::fma(x, y, s, self.rounding)).to_bits()
            }
            ScalarType::S32 => {
                let total = factors.fold(i64::from(start as i32), |s, (x, y)| s + (x * y) as i64);
                let clamped = total.clamp(i32::MIN.into(), i32::MAX.into());
                u64::from(if self.saturate { clamped as u32 } else { total as u32 })
            }
            // As in `mma.sync`: products are exact, sums are rounded to f32 with k ascending.
            element => {
                let total = factors.fold(sum.value(start) as f32, |s, (x, y)| s + (x * y) as f32);
                u64::from(match element {
                    ScalarType::F16 => F16.encode(total.into(), Rounding::NearestEven),
                    _ => canonical(total),
                })
            }
        }
    }
}
