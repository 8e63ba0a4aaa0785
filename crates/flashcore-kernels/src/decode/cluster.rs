//! Units of a row as CTAs of one cluster: their parts are merged in shared memory.
//!
//! Every CTA finishes a share of the row's columns, and the others send it their values of those. A store that completes
//! on the receiver's barrier needs no fence, no counter and no second trip to memory.

use flashcore_tile::{Builder, Mbarrier, Reg, Scope, Shared, U32, Val};

use super::{
    Config,
    config::Order,
    end::{End, Place},
    part::{COLUMNS, Share},
    unit::Unit,
};

/// Bytes of what one CTA sends of a place: a head and four columns.
const MESSAGE: u32 = 32;

/// Where messages of a cluster arrive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    parts: u32,
    /// Messages of each part, and how many there is room for.
    inbox: u32,
    room: u32,
    /// Where they are counted.
    arrived: u32,
}

impl Exchange {
    /// Reserves what a cluster needs, if there is one.
    pub(super) fn reserve(b: &mut Builder, cfg: &Config) -> Option<Self> {
        let Order::Cluster { parts } = cfg.shape.order else { return None };
        let room = cfg.places().div_ceil(parts);
        let inbox = b.shared(cfg.messages * room * MESSAGE, 16);
        Some(Self { parts, inbox, room, arrived: b.mbarriers(1) })
    }

    /// Bytes that it takes.
    pub(super) const fn bytes(places: u32, parts: u32, messages: u32) -> u32 {
        messages * places.div_ceil(parts) * MESSAGE + 16
    }

    /// Places that each CTA ends, and that this one does.
    fn shares(&self, b: &mut Builder, cfg: &Config, unit: &Unit) -> [Reg<U32>; 2] {
        let all = b.let_(unit.sequence.written * (cfg.dim_v / COLUMNS));
        let each = b.let_(all.div_ceil(self.parts));
        let rank = b.cluster_rank();
        let before = b.let_((rank * each).min(all));
        [each, b.let_((all - before).min(each))]
    }

    /// Prepares to count messages, and signals that to the cluster.
    pub(super) fn open(&self, b: &mut Builder, cfg: &Config, unit: &Unit) {
        let [_, own] = self.shares(b, cfg, unit);
        let bytes = match cfg.invariant {
            true => b.let_(own * unit.count * MESSAGE),
            false => b.let_(own * (self.parts * MESSAGE)),
        };
        let (thread, arrived) = (b.thread(), self.arrived(b));
        b.if_(thread.eq(0), |b| {
            arrived.init(b, 1);
            b.fence_mbarrier_init();
            arrived.arrive_expecting_some(b, bytes);
        });
        b.arrive_cluster_relaxed();
    }

    fn arrived(&self, b: &mut Builder) -> Mbarrier {
        b.mbarrier_at(self.arrived)
    }

    /// Where the message of part `number` about the `slot`-th place of a CTA arrives there.
    fn message(
        &self,
        b: &mut Builder,
        number: impl Into<flashcore_tile::Expr<U32>>,
        slot: Reg<U32>,
    ) -> Shared {
        let first = b.let_(number.into() * self.room + slot);
        b.shared_at(self.inbox).plus(b, first * MESSAGE)
    }

    /// Sends this CTA's part of all places to those who end them, and ends its own.
    pub(super) fn merge(&self, b: &mut Builder, end: &End<'_>) {
        let [each, own] = self.shares(b, end.cfg, end.unit);
        let rank = b.cluster_rank();
        let done = self.arrived(b).address(b);
        b.wait_cluster();
        end.each_place(b, |b, place| {
            let share = end.of_warps(b, place);
            self.send(b, (&share, place), rank, (each, done));
        });
        // Whoever has all its messages may end: nobody has anything more for it.
        self.arrived(b).wait_for_peers(b, 0);
        self.end_own(b, end, (each, own));
    }

    /// Sends a place of part `number` to the CTA that finishes it.
    fn send(
        &self,
        b: &mut Builder,
        (share, place): (&Share, Place),
        number: Reg<U32>,
        (each, done): (Reg<U32>, Reg<U32>),
    ) {
        let (owner, slot) = (b.let_(place.index / each), b.let_(place.index % each));
        let to = self.message(b, number, slot).address(b);
        let [to, done] = [to, done].map(|at| b.peer_address(at, owner));
        b.send_to_peer(to, &share.head().map(Val::from), done);
        b.send_to_peer(Shared::from(to).at(MESSAGE / 2), &share.values.map(Val::from), done);
    }

    /// Sends a place of part `number`, where a row has more parts than CTAs; the cluster has been waited for.
    pub(super) fn send_piece(
        &self,
        b: &mut Builder,
        end: &End<'_>,
        (share, place): (&Share, Place),
        number: Reg<U32>,
    ) {
        let [each, _] = self.shares(b, end.cfg, end.unit);
        let done = self.arrived(b).address(b);
        self.send(b, (share, place), number, (each, done));
    }

    /// Folds the pieces of this CTA's places when all have arrived.
    pub(super) fn fold(&self, b: &mut Builder, end: &End<'_>) {
        self.arrived(b).wait_for_peers(b, 0);
        let [each, own] = self.shares(b, end.cfg, end.unit);
        self.each_own(b, end, (each, own), |b, slot| {
            let message = |b: &mut Builder, number: Reg<U32>| {
                let message = self.message(b, number, slot);
                (message, message.at(MESSAGE / 2))
            };
            Share::fold_messages(b, end.unit.count, message)
        });
    }

    /// Ends the places of this CTA.
    fn end_own(&self, b: &mut Builder, end: &End<'_>, shares: (Reg<U32>, Reg<U32>)) {
        self.each_own(b, end, shares, |b, slot| {
            let part = |rank: u32| {
                let message = self.message(b, rank, slot);
                Share::read(b, message, message.at(MESSAGE / 2))
            };
            let parts: Vec<_> = (0..self.parts).map(part).collect();
            Share::join(b, &parts)
        });
    }

    /// Ends the places of this CTA, each as `whole` finds it.
    fn each_own(
        &self,
        b: &mut Builder,
        end: &End<'_>,
        (each, own): (Reg<U32>, Reg<U32>),
        whole: impl FnOnce(&mut Builder, Reg<U32>) -> Share,
    ) {
        let (thread, rank) = (b.thread(), b.cluster_rank());
        let slot = b.var_in(Scope::Lane, thread);
        b.while_(
            |_| slot.lt(own),
            |b| {
                let index = b.let_(rank * each + slot);
                let place = Place::new(b, end.cfg, index);
                let share = whole(b, slot);
                end.finish(b, place, &share);
                b.add_to(slot, end.cfg.shape.threads());
            },
        );
    }
}
