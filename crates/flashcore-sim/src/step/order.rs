//! What accesses, fences and synchronisation mean for ordering: clocks, proxies, acquire and release.

use super::{Flow, Outcome, Step};
use crate::{
    check::{
        clock::{AgentKind, Knowledge, VClock},
        global::{GlobalAccess, GlobalConflict, GlobalFault},
        race::{Accessor, Conflict, Proxy},
    },
    finding::FindingKind,
    memory::Place,
    options::CheckSet,
    program::{Fence, Order},
};
use std::ops::Range;

/// Under whose name, through which proxy, an access is entered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name {
    pub(super) agent: u32,
    pub(super) clock: u32,
    pub(super) proxy: Proxy,
    pub(super) strong: bool,
    /// Strong for the own CTA alone.
    pub(super) within_cta: bool,
}

impl Step<'_, '_> {
    /// The warp's own name.
    pub(super) fn own_name(&self, strong: bool) -> Name {
        let warp = &self.machine.warps[self.warp];
        let (agent, clock) = (warp.agent, warp.clock.now);
        Name { agent, clock, proxy: Proxy::Generic, strong, within_cta: false }
    }

    /// The warp's own name in an access of that order.
    pub(super) fn name_for(&self, order: Order) -> Name {
        let proxy = if order.non_coherent { Proxy::NonCoherent } else { Proxy::Generic };
        Name { within_cta: order.within_cta, proxy, ..self.own_name(order.strong) }
    }

    /// The number of the cluster in the grid.
    pub(crate) fn cluster_number(&self) -> u32 {
        self.machine.clusters[self.machine.ctas[self.cta].cluster].number
    }

    /// Judges and enters an access of `lane` to shared memory of the resident CTA `cta`.
    pub(super) fn order_shared(
        &mut self,
        lane: usize,
        cta: usize,
        range: Range<usize>,
        write: bool,
        name: Name,
    ) {
        if !self.machine.context.options.checks.tracks_order() {
            return;
        }
        if name.proxy == Proxy::Generic {
            self.visit(lane, cta);
        }
        let warp = &mut self.machine.warps[self.warp];
        if write && name.proxy == Proxy::Generic {
            warp.clock.unfenced |= 1 << lane;
            warp.clock.wrote |= 1 << lane;
        }
        let who = Accessor {
            knowledge: warp.clock.view(1 << lane),
            agent: name.agent,
            clock: name.clock,
            home: warp.agent,
            lane: lane as u8,
            synced: warp.clock.synced,
            copies: warp.clock.waited_by_all,
            peer: warp.clock.peer(lane),
            proxy: name.proxy,
            strong: name.strong,
            pc: self.pc,
        };
        let start = range.start;
        let shared = &mut self.machine.ctas[cta].shared;
        if write {
            // what is in flight counts as written: reading it early is another fault
            shared.written.mark(range.clone());
        }
        let shadow = &mut shared.shadow;
        let verdict = if write { shadow.write(range, &who) } else { shadow.read(range, &who) };
        if let Err(conflict) = verdict {
            let reader = excusable(conflict, write, name);
            let word = (Some(cta), start as u64 / 4);
            self.defer_or(reader.map(|reader| (self.cluster_number(), reader)), word, |step| {
                step.report_conflict(conflict, lane, write, name.proxy);
            });
        }
    }

    /// Reports a conflict that a shadow has found, if its checker is on.
    pub(super) fn report_conflict(&mut self, conflict: Conflict, lane: usize, write: bool, proxy: Proxy) {
        let checks = self.machine.context.options.checks;
        let verb = if write { "write to" } else { "read of" };
        let (kind, on, message) = match conflict {
            Conflict::Lanes { other, pc } => {
                let at = self.place_of(pc);
                let text = format!(
                    "{verb} shared memory that lane {other} wrote{at}, without bar.warp.sync between"
                );
                (FindingKind::WarpRace, checks.race, text)
            }
            Conflict::LanesRead { pc } => {
                let at = self.place_of(pc);
                let text = format!(
                    "write to shared memory that other lanes read{at}, without bar.warp.sync between"
                );
                (FindingKind::WarpRace, checks.race, text)
            }
            Conflict::Unfenced { writer, pc } => {
                let kind = match writer {
                    AgentKind::CpAsync(_) => FindingKind::UnfencedCopy,
                    _ => FindingKind::MissingProxyFence,
                };
                let (writer, at) = (name(writer), self.place_of(pc));
                let text = format!(
                    "the async proxy reads or writes what {writer} wrote{at}, without fence.proxy.async"
                );
                (kind, checks.proxy, text)
            }
            Conflict::UnfencedRead => {
                let text = "the async proxy overwrites what was read, without fence.proxy.async".to_string();
                (FindingKind::UnfencedRead, checks.proxy, text)
            }
            Conflict::Written { other, pc, .. } => {
                let what = format!("{verb} shared memory written by {}{}", name(other), self.place_of(pc));
                unordered(what, other, proxy, checks)
            }
            Conflict::Read { other, pc } => {
                let what = format!("{verb} shared memory read by {}{}", name(other), self.place_of(pc));
                unordered(what, other, proxy, checks)
            }
        };
        if on {
            let weak = matches!(conflict, Conflict::Written { strong: false, .. } | Conflict::Lanes { .. });
            let same = write && weak && proxy == Proxy::Generic && self.rewrites;
            let race = matches!(kind, FindingKind::SharedRace | FindingKind::WarpRace);
            let kind = if same && race { FindingKind::SameValueRace } else { kind };
            self.report(kind, lane, message);
        }
    }

    /// Where the other instruction of a conflict is, as far as that is known.
    pub(super) fn place_of(&self, pc: u32) -> String {
        let site = self.machine.context.site(pc);
        format!(" ({})", site.source.unwrap_or(site.text))
    }

    /// Judges and enters an access to global memory.
    pub(super) fn order_global(&mut self, lane: usize, address: u64, len: usize, write: bool, name: Name) {
        let checks = self.machine.context.options.checks;
        if !(checks.race || checks.proxy) || len == 0 {
            return;
        }
        let cluster = self.cluster_number();
        self.machine.wrote_global |= write && name.proxy == Proxy::Generic;
        if !write && self.is_suspect(address, len, name.clock) {
            return self.tolerate(address, "somebody else");
        }
        let warp = &self.machine.warps[self.warp];
        let who = GlobalAccess {
            knowledge: warp.clock.view(1 << lane),
            cluster,
            agent: name.agent,
            clock: name.clock,
            home: warp.agent,
            strong: name.strong,
            within_cta: name.within_cta,
            proxy: name.proxy,
        };
        let verdict = match self.machine.global.find(address, len) {
            Ok((allocation, range)) if write => allocation.shadow.write(range, &who),
            Ok((allocation, range)) => allocation.shadow.read(range, &who),
            Err(_) => Ok(()),
        };
        match verdict {
            Err(GlobalFault::Unordered(conflict)) if checks.race => {
                self.report_global_race(lane, (address, len), write, name, conflict);
            }
            Err(GlobalFault::Unfenced { cluster: other }) if checks.proxy => {
                let (writer, what) =
                    (cluster_in_words(other, cluster), self.machine.global.describe(address));
                let verb = if write { "overwrites" } else { "reads" };
                let text = format!(
                    "the async proxy {verb} global memory written by {writer}, without fence.proxy.async: {what}"
                );
                self.report(FindingKind::MissingProxyFence, lane, text);
            }
            Err(GlobalFault::Stale { cluster: other }) if checks.race => {
                let (writer, what) =
                    (cluster_in_words(other, cluster), self.machine.global.describe(address));
                let text = format!("ld.global.nc of memory that {writer} has written: {what}");
                self.report(FindingKind::NonCoherentRead, lane, text);
            }
            _ => {}
        }
    }

    /// Reports an access to global memory that nothing orders after an earlier one, or leaves that for later.
    fn report_global_race(
        &mut self,
        lane: usize,
        (address, len): (u64, usize),
        write: bool,
        name: Name,
        conflict: GlobalConflict,
    ) {
        let GlobalConflict { cluster: other, agent, clock, was_write, was_strong } = conflict;
        let cluster = self.cluster_number();
        let plain = !name.strong && !was_strong && name.proxy != Proxy::Async;
        if plain && !write && self.tolerant {
            return self.tolerate(address, &cluster_in_words(other, cluster));
        }
        if plain && write && !was_write && self.suspect((other, agent, clock), address, len) {
            return;
        }
        let own = self.machine.warps[self.warp].agent;
        let reader = match (write, was_write) {
            (false, true) if was_strong && !name.strong => Some((cluster, own)),
            (true, false) if name.strong => Some((other, agent)),
            _ => None,
        };
        let (verb, past) =
            (if write { "write to" } else { "read of" }, if was_write { "written" } else { "read" });
        let place = cluster_in_words(other, cluster);
        let what = self.machine.global.describe(address);
        let text = format!("{verb} global memory {past} by {place}, without order between: {what}");
        let same = write && was_write && !name.strong && !was_strong && self.rewrites;
        let kind = if same { FindingKind::SameValueRace } else { FindingKind::GlobalRace };
        self.defer_or(reader, (None, address / 4), |step| step.report(kind, lane, text));
    }

    /// Acquire and release through a location: what strong accesses publish and learn.
    pub(super) fn synchronise(&mut self, lane: usize, place: Place, order: Order, reads: bool, writes: bool) {
        if !order.strong || !self.machine.context.options.checks.tracks_order() {
            return;
        }
        if reads {
            let news = self.published_at(place, order.within_cta);
            if order.acquire {
                self.learn(1 << lane, &news);
            } else {
                self.meet_news(lane, news);
            }
        }
        if writes {
            let warp = &mut self.machine.warps[self.warp];
            let (wide, near) = match (order.release, order.within_cta) {
                (true, false) => (warp.clock.release(warp.agent, 1 << lane), Knowledge::default()),
                (true, true) => (Knowledge::default(), warp.clock.release(warp.agent, 1 << lane)),
                (false, false) => (warp.clock.at_fence.clone(), warp.clock.at_cta_fence.clone()),
                (false, true) => (Knowledge::default(), warp.clock.at_cta_fence.clone()),
            };
            self.publish_at(place, &wide, &near);
        }
    }

    /// A relaxed read: what it met counts from the next fence on.
    fn meet_news(&mut self, lane: usize, news: Knowledge) {
        let clock = &mut self.machine.warps[self.warp].clock;
        clock.before_fence.join(&news);
        let known = |(cluster, met): (&u32, &VClock)| clock.view(1 << lane).met.get(cluster) == Some(met);
        if !news.foreign.iter().all(known) {
            self.learn(1 << lane, &Knowledge { met: news.foreign, ..Knowledge::default() });
        }
    }

    fn published_at(&self, place: Place, within_cta: bool) -> Knowledge {
        let mut news = Knowledge::default();
        match place {
            Place::Global(address) => {
                let here = self.cluster_number();
                let wide = self.machine.global_sync.get(&address).filter(|_| !within_cta);
                let near = self.machine.cta_sync.get(&(address, here));
                wide.into_iter().chain(near).for_each(|clocks| news.import(here, clocks));
            }
            Place::Shared { rank, offset } => {
                if let Some(known) =
                    self.machine.peer(self.cta, rank).and_then(|cta| self.machine.ctas[cta].sync.get(&offset))
                {
                    news.join(known);
                }
            }
            _ => {}
        }
        news
    }

    /// What everybody learns there, and what the own CTA learns besides.
    fn publish_at(&mut self, place: Place, wide: &Knowledge, near: &Knowledge) {
        match place {
            Place::Global(address) => {
                let cluster = self.cluster_number();
                self.machine.publish_global(address, cluster, wide, near);
            }
            Place::Shared { rank, offset } => {
                if let Some(cta) = self.machine.peer(self.cta, rank) {
                    self.machine.ctas[cta].sync.entry(offset).or_default().join(wide);
                    self.machine.ctas[cta].sync.entry(offset).or_default().join(near);
                }
            }
            _ => {}
        }
    }

    /// Lanes learn what was published.
    pub(super) fn learn(&mut self, mask: u32, news: &Knowledge) {
        let live = self.live();
        self.machine.warps[self.warp].clock.learn(mask, live, news);
    }

    /// What the acting lanes publish.
    pub(super) fn release(&mut self) -> Knowledge {
        let agents = self.machine.clusters[self.machine.ctas[self.cta].cluster].agents;
        let warp = &mut self.machine.warps[self.warp];
        let mut knowledge = warp.clock.release(warp.agent, self.mask);
        if warp.clock.waited > 0 {
            knowledge.lanes.raise(agents.cp_async(warp.agent), warp.clock.waited);
        }
        knowledge
    }

    /// All lanes of the warp meet.
    pub(super) fn meet(&mut self) {
        self.machine.warps[self.warp].clock.sync();
    }

    /// Some lanes of the warp meet.
    pub(super) fn meet_some(&mut self, members: u32) {
        let live = self.live();
        self.machine.warps[self.warp].clock.sync_some(members, live);
    }

    pub(super) fn fence(&mut self, kind: Fence) -> Outcome {
        let (mask, live) = (self.mask, self.live());
        let cluster = self.cluster_number();
        let wrote_global = self.machine.wrote_global;
        let warp = &mut self.machine.warps[self.warp];
        match kind {
            Fence::Memory { within_cta, acquire, release } => {
                if acquire && within_cta {
                    let met = warp.clock.before_fence.at_home();
                    warp.clock.learn(mask, live, &met);
                } else if acquire {
                    let met = std::mem::take(&mut warp.clock.before_fence);
                    warp.clock.learn(mask, live, &met);
                    warp.clock.know_what_was_met(mask, live);
                }
                if release {
                    warp.clock.at_cta_fence = warp.clock.release(warp.agent, mask);
                }
                if release && !within_cta {
                    warp.clock.at_fence = warp.clock.at_cta_fence.clone();
                }
            }
            Fence::ProxyAsync { shared, global } => {
                if global && wrote_global {
                    warp.clock.global_proxy_fence(warp.agent, cluster);
                }
                if shared {
                    warp.clock.proxy_fence(warp.agent, mask);
                }
            }
            Fence::MbarrierInit => warp.clock.inits_at_fence = warp.clock.release(warp.agent, mask).seen,
            Fence::Other => {}
        }
        Ok(Flow::Next)
    }
}

/// The warp whose plain read met an atomic, if that is what a conflict is about.
fn excusable(conflict: Conflict, write: bool, name: Name) -> Option<u32> {
    match conflict {
        Conflict::Written { strong: true, .. } if !write && !name.strong => Some(name.agent),
        Conflict::Read { other: AgentKind::Warp(reader), .. } if write && name.strong => Some(reader),
        _ => None,
    }
}

/// A conflict with an access that came before: without order where a thread made it, else perhaps not complete.
fn unordered(what: String, other: AgentKind, proxy: Proxy, checks: CheckSet) -> (FindingKind, bool, String) {
    match other {
        AgentKind::Warp(_) | AgentKind::Named => {
            let who = if proxy == Proxy::Async { "asynchronous " } else { "" };
            (FindingKind::SharedRace, checks.race, format!("{who}{what}, without order between"))
        }
        _ => (FindingKind::InFlightMemory, checks.in_flight, format!("{what}, which may not be complete")),
    }
}

/// A cluster in words, as another one calls it.
fn cluster_in_words(other: u32, own: u32) -> String {
    if other == own { "the same cluster".into() } else { format!("cluster {other}") }
}

/// An agent in words.
fn name(agent: AgentKind) -> String {
    match agent {
        AgentKind::Warp(warp) => format!("warp {warp} of the cluster"),
        AgentKind::BulkRead(warp) => format!("a bulk store of warp {warp}"),
        AgentKind::BulkWrite(warp) => format!("a bulk copy of warp {warp}"),
        AgentKind::Wgmma(warp) => format!("a wgmma of the warpgroup of warp {warp}"),
        AgentKind::CpAsync(warp) => format!("a cp.async of warp {warp}"),
        AgentKind::Named => "a barrier".into(),
        AgentKind::Mbarrier => "an asynchronous copy".into(),
    }
}
