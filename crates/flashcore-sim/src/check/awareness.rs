//! What the lanes of a warp know, and when: the warp's clock, what all its lanes know, and what only some know.

use super::clock::{Knowledge, VClock};
use crate::regfile::lanes_of;

/// A warp's place in time, and what it knows.
#[derive(Clone, Default, Debug)]
pub(crate) struct WarpClock {
    /// The warp's own clock, from 1.
    pub(crate) now: u32,
    /// The clock at the last warp-wide synchronisation.
    pub(crate) synced: u32,
    /// What every lane knows.
    pub(crate) knowledge: Knowledge,
    /// Lanes that know more than all, and what: until the next warp-wide synchronisation.
    ahead: Vec<(u32, Knowledge)>,
    /// What relaxed writes publish: knowledge at the last fence.
    pub(crate) at_fence: Knowledge,
    /// The same for relaxed writes that the own CTA reads: knowledge at the last fence of any scope.
    pub(crate) at_cta_fence: Knowledge,
    /// What relaxed reads have met: becomes knowledge at the next fence.
    pub(crate) before_fence: Knowledge,
    /// What a relaxed arrival at the cluster's barrier publishes: initialisations of mbarriers, at their last fence.
    pub(crate) inits_at_fence: VClock,
    /// Initialisations of mbarriers that such arrivals have told of.
    pub(crate) inits: VClock,
    /// Lanes that wrote shared memory since the last warp-wide synchronisation, without a proxy fence of their own.
    pub(crate) unfenced: u32,
    /// Lanes that wrote shared memory since the last warp-wide synchronisation.
    pub(crate) wrote: u32,
    /// The last group of `cp.async` that its lanes have waited for, and the last that all lanes know of.
    pub(crate) waited: u32,
    pub(crate) waited_by_all: u32,
    /// What lanes know of each other from synchronisations of some of them, since the last of all.
    peers: Option<Box<[Peer; 32]>>,
}

/// What a lane knows of the other lanes of its warp.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Peer {
    /// How far it knows each lane's writes.
    pub(crate) writes: [u32; 32],
    /// The last group of `cp.async` that it knows to be complete in all lanes it has met.
    pub(crate) copies: u32,
}

impl WarpClock {
    /// The clock of a warp that begins.
    pub(crate) fn started() -> Self {
        Self { now: 1, ..Self::default() }
    }

    /// What the lanes of `mask` know; for lanes of different knowledge, what all lanes know.
    pub(crate) fn view(&self, mask: u32) -> &Knowledge {
        let found = self.ahead.iter().find(|(lanes, _)| mask & !lanes == 0);
        found.map_or(&self.knowledge, |(_, knowledge)| knowledge)
    }

    /// Everything that a lane of `mask` knows.
    pub(crate) fn union(&self, mask: u32) -> Knowledge {
        let mut all = self.view(mask).clone();
        let others = self.ahead.iter().filter(|(lanes, _)| lanes & mask != 0);
        others.for_each(|(_, knowledge)| all.join(knowledge));
        all
    }

    /// Lanes of `mask` out of `live` learn something.
    pub(crate) fn learn(&mut self, mask: u32, live: u32, news: &Knowledge) {
        if mask == live {
            self.knowledge.join(news);
            self.ahead.iter_mut().for_each(|(_, knowledge)| knowledge.join(news));
            return;
        }
        let mut new = mask;
        for at in 0..self.ahead.len() {
            let (lanes, knowledge) = &mut self.ahead[at];
            let (here, rest) = (*lanes & mask, *lanes & !mask);
            new &= !*lanes;
            if here == 0 {
                continue;
            }
            let before = (rest != 0).then(|| (rest, knowledge.clone()));
            *lanes = here;
            knowledge.join(news);
            self.ahead.extend(before);
        }
        if new != 0 {
            let mut knowledge = self.knowledge.clone();
            knowledge.join(news);
            self.ahead.push((new, knowledge));
        }
        self.tidy(live);
    }

    /// Lanes that know the same are listed once; what all lanes know is listed nowhere.
    fn tidy(&mut self, live: u32) {
        let mut listed: Vec<(u32, Knowledge)> = Vec::with_capacity(self.ahead.len());
        for (lanes, knowledge) in self.ahead.drain(..) {
            match listed.iter_mut().find(|(_, known)| *known == knowledge) {
                Some((others, _)) => *others |= lanes,
                None => listed.push((lanes, knowledge)),
            }
        }
        if listed.iter().any(|(lanes, _)| live & !lanes == 0) {
            self.knowledge = listed.swap_remove(0).1;
        } else {
            self.ahead = listed;
        }
    }

    /// A fence of lanes of `mask` out of `live`: what they met, they know.
    pub(crate) fn know_what_was_met(&mut self, mask: u32, live: u32) {
        for (_, knowledge) in self.ahead.iter_mut().filter(|(lanes, _)| lanes & !mask == 0) {
            knowledge.know_what_was_met();
        }
        if mask == live {
            self.knowledge.know_what_was_met();
        }
    }

    /// What the lanes of `mask` make known, their own past included; the clock goes on.
    pub(crate) fn release(&mut self, agent: u32, mask: u32) -> Knowledge {
        let mut knowledge = self.union(mask);
        knowledge.seen.raise(agent, self.now);
        // Only those who release tell of their own writes.
        let told = if self.wrote & !mask == 0 { self.now } else { self.synced };
        knowledge.lanes.raise(agent, told);
        self.now += 1;
        knowledge
    }

    /// A new instruction that writes memory: its lanes act at one time, later than all before.
    pub(crate) const fn tick(&mut self) {
        self.now += 1;
    }

    /// All lanes meet: what one knew, all know.
    pub(crate) fn sync(&mut self) {
        self.ahead.drain(..).for_each(|(_, knowledge)| self.knowledge.join(&knowledge));
        self.synced = self.now;
        self.peers = None;
        self.waited_by_all = self.waited;
        self.now += 1;
        self.unfenced = 0;
        self.wrote = 0;
    }

    /// Some lanes meet: what one of them knew, they all know.
    pub(crate) fn sync_some(&mut self, members: u32, live: u32) {
        let known = self.union(members);
        self.learn(members, live, &known);
        let (now, copies) = (self.now, self.waited);
        let peers = self.peers.get_or_insert_default();
        let mut writes = [0; 32];
        for lane in lanes_of(members) {
            let all = writes.iter_mut().zip(peers[lane].writes);
            all.for_each(|(most, one): (&mut u32, u32)| *most = one.max(*most));
        }
        lanes_of(members).for_each(|lane| writes[lane] = now);
        lanes_of(members).for_each(|lane| peers[lane] = Peer { writes, copies });
        self.now += 1;
    }

    /// What a lane knows of others beside what all know.
    pub(crate) fn peer(&self, lane: usize) -> Option<&Peer> {
        self.peers.as_ref().map(|peers| &peers[lane])
    }

    /// `fence.proxy.async` by the lanes of `mask`: what they know of generic writes, the async proxy knows.
    pub(crate) fn proxy_fence(&mut self, agent: u32, mask: u32) {
        self.unfenced &= !mask;
        let own = if self.unfenced == 0 { self.now } else { self.synced };
        let pass_on = |knowledge: &mut Knowledge| {
            let seen: VClock = knowledge.seen.clone();
            knowledge.fenced.join(&seen);
            knowledge.fenced.raise(agent, own);
        };
        pass_on(&mut self.knowledge);
        self.ahead.iter_mut().for_each(|(_, knowledge)| pass_on(knowledge));
        self.now += 1;
    }

    /// The same for global memory, where the lanes of a warp are not told apart.
    pub(crate) fn global_proxy_fence(&mut self, agent: u32, cluster: u32) {
        let now = self.now;
        self.knowledge.pass_on(cluster, agent, now);
        self.ahead.iter_mut().for_each(|(_, knowledge)| knowledge.pass_on(cluster, agent, now));
        self.now += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIVE: u32 = u32::MAX;

    fn news(agent: u32) -> Knowledge {
        let mut knowledge = Knowledge::default();
        knowledge.seen.raise(agent, 1);
        knowledge
    }

    fn knows(clock: &WarpClock, lane: usize, agent: u32) -> bool {
        clock.view(1 << lane).seen.get(agent) == 1
    }

    #[test]
    fn lanes_know_what_they_have_learned_and_no_more() {
        let mut clock = WarpClock::started();
        clock.learn(0b0011, LIVE, &news(1));
        clock.learn(0b0110, LIVE, &news(2));
        let known = |clock: &WarpClock, agent| [0, 1, 2, 3].map(|lane| knows(clock, lane, agent));
        assert_eq!(known(&clock, 1), [true, true, false, false]);
        assert_eq!(known(&clock, 2), [false, true, true, false]);
        clock.learn(LIVE, LIVE, &news(3));
        assert_eq!(known(&clock, 3), [true; 4]);
        clock.sync_some(0b1001, LIVE);
        assert_eq!(known(&clock, 1), [true, true, false, true]);
        clock.sync();
        assert_eq!([known(&clock, 1), known(&clock, 2)], [[true; 4]; 2]);
    }

    #[test]
    fn groups_pass_on_what_was_written() {
        let mut clock = WarpClock::started();
        clock.sync_some(0b0011, LIVE);
        let first = clock.now - 1;
        clock.sync_some(0b0110, LIVE);
        assert_eq!(clock.peer(2).map(|peer| peer.writes[0]), Some(first));
        assert_eq!(clock.peer(3).map(|peer| peer.writes[0]), Some(0));
        clock.sync();
        assert!(clock.peer(2).is_none());
    }
}
