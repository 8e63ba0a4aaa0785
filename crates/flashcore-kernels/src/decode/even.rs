//! All keys of all sequences, split evenly over as many CTAs as the GPU holds.
//!
//! CTAs form teams, whose members read the same keys, each for its own head: in caches where heads of a key are adjacent, a
//! team reads one piece of memory at a time. Turns of all sequences, one after another, are split into ranges of equal
//! length, one for each team, whatever lengths the kernel finds; if all sequences are equally long, slightly longer ranges
//! may end where sequences do. Each CTA counts all turns for itself: the host knows upper bounds at most, and no state is
//! kept between launches.

use flashcore_core::Problem;
use flashcore_tile::{Builder, Cta, Reg, Scope, Shared, U32};

use super::{
    Arguments, Config,
    config::Copies,
    unit::{Seats, Sequence, Unit},
};
use crate::parts::{search, share::Share};

const WARP: u32 = 32;
/// Sequences at most: their turns are noted in the shared memory of a CTA.
pub const MOST_SEQUENCES: u32 = 2048;
/// One of so many CTAs may have nothing to do, so that the others form teams.
const IDLE: u32 = 32;
/// By one part in so many, ranges may be longer so that they end where sequences do.
const LONGER: u32 = 16;

/// Members of a team, where there are so many CTAs: as many key heads as leave few CTAs over, if heads of a key lie side by
/// side.
pub(super) fn members(problem: &Problem, ctas: u32) -> u32 {
    let (heads, [_, head, row, _]) = (problem.heads_kv() as u32, problem.k().strides());
    let suits =
        |&members: &u32| heads.is_multiple_of(members) && members <= ctas && ctas % members <= ctas / IDLE;
    if head < row { (1..=heads).rev().find(suits).unwrap_or(1) } else { 1 }
}

/// Turns of a range, where `teams` share `rows` of so many turns each.
pub(super) fn range(rows: u64, turns: u64, teams: u64) -> u64 {
    // Without rows there is nothing to share.
    let even = (rows * turns).div_ceil(teams).max(1);
    let whole = if even >= turns { even.next_multiple_of(turns) } else { turns / (turns / even) };
    let ends = even >= turns || turns.is_multiple_of(whole);
    if ends && whole <= even + even / u64::from(LONGER) { whole.max(even) } else { even }
}

/// Runs `work` for every unit of this CTA.
pub(super) fn each_unit(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    work: impl FnOnce(&mut Builder, &Unit),
) {
    note_turns(b, cfg, args);
    if cfg.shape.copies == Copies::Tensor {
        b.fence_async();
    }
    b.sync_cta();
    let team = Team::of(b, args);
    let at = b.var_in(Scope::Cta, team.number * team.range);
    let end = b.let_((at + team.range).min(team.all));
    let none = b.uniform::<Cta>(at.ge(team.all));
    b.if_uniform(none, |b| b.exit());
    let place = Place::find(b, args, &team, at);
    // What was noted is overwritten from here on.
    b.sync_cta();
    b.while_(
        |_| at.lt(end),
        |b| {
            let sequence = Sequence::find(b, cfg, args, place.sequence);
            let turns = sequence.turns(b, cfg, args);
            let to = b.let_((end - at + place.turn).min(turns));
            let start = b.let_(at - place.turn);
            let head = b.let_(place.block * team.members + team.member);
            let seats = team.seats(b, start, turns);
            let unit = Unit::of_turns(b, (cfg, args), (sequence, head), [place.turn, to], &seats);
            match (cfg.share, unit.pieces) {
                (Share::All, None) => work(b, &unit),
                // Sequences of others have no turns, and pieces may start before this CTA and end behind it.
                (_, pieces) => {
                    let some = pieces.map_or(turns, |pieces| unit.sequence.if_mine(b, pieces.count));
                    let some = b.uniform::<Cta>(some.gt(0));
                    b.if_uniform(some, |b| work(b, &unit));
                }
            }
            b.set(at, at + to - place.turn);
            place.next_row(b, &team);
            b.sync_cta();
        },
    );
}

/// CTAs that read the same keys, and this one among them.
struct Team {
    number: Reg<U32>,
    member: Reg<U32>,
    /// Members of each team, and teams.
    members: Reg<U32>,
    teams: Reg<U32>,
    /// Blocks of as many key heads as there are members.
    blocks: Reg<U32>,
    /// Turns of all blocks of all sequences, and of each team.
    all: Reg<U32>,
    range: Reg<U32>,
}

impl Team {
    fn of(b: &mut Builder, args: &Arguments) -> Self {
        let ([number, member, _], teams, members) = (b.cta_xyz(), b.ctas(), b.ctas_y());
        let blocks = b.let_(args.heads_kv / members);
        let turns = all_turns(b, args);
        let all = b.let_(turns * blocks);
        let even = b.let_((all + teams - 1) / teams);
        Self { number, member, members, teams, blocks, all, range: whole_rows(b, args, turns, even) }
    }

    /// CTAs that share the row that begins at `start` and has so many turns.
    fn seats(&self, b: &mut Builder, start: Reg<U32>, turns: Reg<U32>) -> Seats {
        let before = b.let_(self.member * self.teams);
        let first = b.let_(start / self.range);
        Seats {
            own: b.let_(before + self.number),
            first: b.let_(before + first),
            last: b.let_((start + turns - 1) / self.range + before),
            all: b.let_(self.teams * self.members),
            turns: b.let_((first + 1) * self.range - start),
        }
    }
}

/// Ranges of `even` turns, or a little more so that they end where sequences do, if those have as many turns as the first.
fn whole_rows(b: &mut Builder, args: &Arguments, all: Reg<U32>, even: Reg<U32>) -> Reg<U32> {
    let zero = b.var(0);
    let turns = turns_of(b, zero);
    let turns = b.let_(turns.max(1));
    let rows = b.let_((even + turns - 1) / turns);
    let parts = b.let_((turns / even.max(1)).max(1));
    let part = b.let_(turns / parts);
    let long = b.let_(even.ge(turns));
    let whole = b.select(long, rows * turns, part);
    let multiple = b.select(long, turns, part * parts);
    let equal = b.both(all.eq(turns * args.sequences), multiple.eq(turns));
    let near = b.both(whole.ge(even), whole.le(even / LONGER + even));
    let takes = b.both(equal, near);
    let range = b.select(takes, whole, even);
    b.broadcast(range, Scope::Cta)
}

/// The turns of every sequence, in shared memory.
fn note_turns(b: &mut Builder, cfg: &Config, args: &Arguments) {
    let thread = b.thread();
    let index = b.var_in(Scope::Lane, thread);
    b.while_(
        |_| index.lt(args.sequences),
        |b| {
            let turns = Sequence::find(b, cfg, args, index).turns(b, cfg, args);
            let at = noted(b, index);
            b.store_shared(at, &[turns.into()]);
            b.add_to(index, cfg.shape.threads());
        },
    );
}

/// Where the turns of a sequence are noted.
fn noted(b: &mut Builder, sequence: Reg<U32>) -> Shared {
    let base = b.shared_base();
    b.let_(sequence * 4 + base).into()
}

/// The turns of a sequence, as noted; each lane may ask for another.
fn turns_of(b: &mut Builder, sequence: Reg<U32>) -> Reg<U32> {
    let at = noted(b, sequence);
    let [turns] = b.load_shared::<U32, 1>(at);
    turns
}

/// The turns of all sequences.
fn all_turns(b: &mut Builder, args: &Arguments) -> Reg<U32> {
    let (lane, sum) = (b.lane(), b.var_in(Scope::Lane, 0));
    let index = b.var_in(Scope::Lane, lane);
    b.while_(
        |_| index.lt(args.sequences),
        |b| {
            let turns = turns_of(b, index);
            b.add_to(sum, turns);
            b.add_to(index, WARP);
        },
    );
    let all = b.warp_sum(sum);
    b.broadcast(all, Scope::Cta)
}

/// Where a team stands: a turn of a block of key heads of a sequence.
struct Place {
    sequence: Reg<U32>,
    block: Reg<U32>,
    turn: Reg<U32>,
}

impl Place {
    /// The place of turn number `at` of all; every warp finds it for itself.
    fn find(b: &mut Builder, args: &Arguments, team: &Team, at: Reg<U32>) -> Self {
        let of_blocks = b.let_(at / team.blocks);
        let found = search::find(b, of_blocks, args.sequences, turns_of);
        let rest = b.let_(at - found.before * team.blocks);
        let values = [found.index, b.let_(rest / found.own), b.let_(rest % found.own)];
        let [sequence, block, turn] = values.map(|value| {
            let agreed = b.broadcast(value, Scope::Cta);
            b.var_in(Scope::Cta, agreed)
        });
        Self { sequence, block, turn }
    }

    /// Goes on to the first turn of the next block of heads, or of the next sequence's first.
    fn next_row(&self, b: &mut Builder, team: &Team) {
        let next = b.let_(self.block + 1);
        let last = b.let_(next.eq(team.blocks));
        b.select_into(self.sequence, last, self.sequence + 1, self.sequence);
        b.select_into(self.block, last, 0, next);
        b.set(self.turn, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::range;

    #[test]
    fn ranges_end_where_rows_do_if_that_is_near() {
        // 64 sequences of 128 turns and 128 of 32, for 33 teams of eight.
        assert_eq!([range(64, 128, 33), range(128, 32, 33)], [256, 128]);
        // Sixteen ranges for each of eight rows, and as many for a row of 130 turns.
        assert_eq!([range(8, 128, 132), range(8, 130, 132)], [8, 8]);
        // One row and a half for each.
        assert_eq!(range(12, 100, 8), 150);
    }
}
