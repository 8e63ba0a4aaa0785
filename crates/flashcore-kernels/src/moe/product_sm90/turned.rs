//! The epilogue of a transposed tile, whose rows are features and whose columns are rows of the result: bias, gate and up
//! joined, rounding, and a direct store to global memory. A tile has few of these compared with the weights read for it.

use flashcore_tile::{Acc, Builder, F32, Pred, Reg, U32, WARPGROUP};

use super::{
    super::product::Kind,
    config::{BYTES, Config, ROWS, WARP_ROWS},
    epilogue::Output,
    place::{Arguments, Place},
};

impl Output {
    /// Writes the sums of a warp: of each block of 64 features, or of each pair of gates and ups.
    pub(super) fn write_turned(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        place: Place,
        sums: &[Acc],
    ) {
        let (thread, lane) = (b.thread(), b.lane());
        let own = b.let_(thread % WARPGROUP / 32 * WARP_ROWS + lane / 4);
        let blocks = (cfg.features() / ROWS) as usize;
        for (block, gates) in sums[..blocks].iter().enumerate() {
            for row in 0..2 {
                let down = block as u32 * ROWS + 8 * row as u32;
                let feature = b.let_(place.feature + own + down);
                let ups = sums.get(blocks + block);
                self.write_feature(b, cfg, args, (place, feature), row, [Some(gates), ups]);
            }
        }
    }

    /// One feature of all rows of a thread.
    fn write_feature(
        &self,
        b: &mut Builder,
        cfg: &Config,
        args: &Arguments,
        (place, feature): (Place, Reg<U32>),
        row: usize,
        sums: [Option<&Acc>; 2],
    ) {
        let [base, stride] = self.rows.expect("turned tiles are written to an address");
        let lane = b.lane();
        let inside: Pred = b.let_(feature.lt(args.features));
        let known = b.select(inside, feature, 0);
        let kinds: &[bool] = if cfg.kind == Kind::Down { &[false] } else { &[false, true] };
        let biases: Vec<Reg<F32>> = self
            .bias
            .iter()
            .flat_map(|bias| kinds.iter().map(move |&up| (bias, up)))
            .map(|(bias, up)| bias.at(b, cfg.half, place.expert, known, up))
            .collect();
        let line = b.let_(place.tile * cfg.shape.rows + lane % 4 * 2);
        let start = b.let_(line.widen() * stride + base);
        let start = b.let_(start + feature.mul_wide(BYTES));
        let count = sums[0].map_or(0, |sums| sums.regs().len());
        for n in (0..count).filter(|&n| Acc::row(n) == row) {
            let values: Vec<_> = sums
                .into_iter()
                .flatten()
                .enumerate()
                .map(|(which, sums)| {
                    let sum = sums.regs()[n];
                    biases.get(which).map_or(sum, |&bias| b.add(sum, bias))
                })
                .collect();
            let value = self.join.map_or(values[0], |join| join.apply(b, values[0], values[1]));
            let word = b.pack(cfg.half, value, value);
            let to = b.let_(stride * Acc::col(n) as u64 + start);
            b.predicated(inside, |b| b.store_global_16(to, word));
        }
    }
}
