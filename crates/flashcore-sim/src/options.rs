//! How to run a launch: schedule, timing of asynchronous work, checks, limits.

/// Which warp runs next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Schedule {
    /// Each warp in turn.
    #[default]
    RoundRobin,
    /// Any warp, for a random while.
    Random,
    /// Warps that have issued most asynchronous copies run as far as they can.
    ProducerFirst,
    /// Warps that have issued fewest asynchronous copies run as far as they can.
    ConsumerFirst,
    /// As random; lanes that a branch has led apart join only where an instruction names them.
    Apart,
}

impl Schedule {
    /// Every schedule.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::Random, Self::ProducerFirst, Self::ConsumerFirst, Self::Apart];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::ProducerFirst => "producer-first",
            Self::ConsumerFirst => "consumer-first",
            Self::Apart => "apart",
        }
    }

    /// The schedule of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// When asynchronous copies and wgmma complete.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Timing {
    /// When they are issued.
    Early,
    /// When no warp can continue without them, or one waits for them.
    #[default]
    Late,
    /// At random, in any order that the ISA allows.
    OutOfOrder,
}

/// Which checkers report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CheckSet {
    /// Accesses outside of an allocation, or not aligned. Switched off, they still end the launch.
    pub bounds: bool,
    /// Registers, shared and global memory read before anything was written.
    pub init: bool,
    /// Conflicting accesses without order.
    pub race: bool,
    /// Generic writes that the async proxy meets without `fence.proxy.async`.
    pub proxy: bool,
    /// Registers, sources and destinations of unfinished asynchronous work.
    pub in_flight: bool,
    /// Misuse of mbarriers, named barriers, cluster barriers, register budgets, convergence.
    pub barrier: bool,
}

impl CheckSet {
    /// Every checker.
    pub const ALL: Self =
        Self { bounds: true, init: true, race: true, proxy: true, in_flight: true, barrier: true };
    /// None but those that end a launch.
    pub const NONE: Self =
        Self { bounds: false, init: false, race: false, proxy: false, in_flight: false, barrier: false };

    /// Reads `all`, `none` or a list such as `race,bounds`; the error is the word that names no checker.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "all" => return Ok(Self::ALL),
            "none" => return Ok(Self::NONE),
            _ => {}
        }
        let mut set = Self::NONE;
        for word in text.split(',') {
            *set.flag(word).ok_or_else(|| word.to_string())? = true;
        }
        Ok(set)
    }

    fn flag(&mut self, word: &str) -> Option<&mut bool> {
        Some(match word {
            "bounds" => &mut self.bounds,
            "init" => &mut self.init,
            "race" => &mut self.race,
            "proxy" => &mut self.proxy,
            "inflight" => &mut self.in_flight,
            "barrier" => &mut self.barrier,
            _ => return None,
        })
    }

    /// Whether shadow clocks have to be kept.
    pub(crate) const fn tracks_order(self) -> bool {
        self.race || self.proxy || self.in_flight
    }
}

/// How to run a launch. Equal options and equal inputs give equal outcomes, bit for bit.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Which warp runs next.
    pub schedule: Schedule,
    /// When asynchronous work completes.
    pub timing: Timing,
    /// Whether `try_wait` sometimes fails though nothing is wrong, as it may.
    pub spurious_failures: bool,
    /// Whether `elect.sync` picks a lane other than the lowest, as it may.
    pub unusual_leader: bool,
    /// Seed of everything random.
    pub seed: u64,
    /// Which checkers report.
    pub checks: CheckSet,
    /// How many clusters are resident at once and run interleaved.
    pub resident_clusters: u32,
    /// Warp instructions after which the launch is given up.
    pub step_limit: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            schedule: Schedule::default(),
            timing: Timing::default(),
            spurious_failures: false,
            unusual_leader: false,
            seed: 0,
            checks: CheckSet::ALL,
            resident_clusters: 2,
            step_limit: 400_000_000,
        }
    }
}

impl Options {
    /// The default: round-robin, late completion, every check.
    pub fn new() -> Self {
        Self::default()
    }

    /// As hostile as the ISA allows, different for every seed.
    pub fn adversarial(schedule: Schedule, timing: Timing, seed: u64) -> Self {
        Self { schedule, timing, seed, spurious_failures: true, unusual_leader: true, ..Self::default() }
    }

    /// One hostile run for each schedule, with timings mixed: what a kernel should survive in a test.
    pub fn gauntlet(seed: u64) -> Vec<Self> {
        let timings = [Timing::Late, Timing::OutOfOrder, Timing::Late, Timing::Early, Timing::OutOfOrder];
        let pairs = Schedule::ALL.into_iter().zip(timings);
        pairs.map(|(schedule, timing)| Self::adversarial(schedule, timing, seed)).collect()
    }

    /// The seed by which lanes run apart, if they do.
    pub(crate) fn apart(&self) -> Option<u64> {
        (self.schedule == Schedule::Apart).then_some(self.seed)
    }

    /// The same with another set of checkers.
    pub fn with_checks(self, checks: CheckSet) -> Self {
        Self { checks, ..self }
    }
}
