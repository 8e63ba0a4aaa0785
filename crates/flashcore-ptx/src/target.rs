//! Architectures a program can be built for, and which device runs which.

use std::fmt;

/// A `.target` of PTX: compute capability 7.5 and later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Target {
    /// RTX 20, T4.
    Sm75,
    /// A100.
    Sm80,
    /// RTX 30.
    Sm86,
    /// RTX 40, L4, L40.
    Sm89,
    /// H100, H200 without the architecture-specific instructions.
    Sm90,
    /// H100, H200 with wgmma and setmaxnreg; runs on compute capability 9.0 alone.
    Sm90a,
    /// B100, B200.
    Sm100,
    /// RTX 50.
    Sm120,
}

impl Target {
    /// Every target, oldest first.
    pub const ALL: [Self; 8] =
        [Self::Sm75, Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90, Self::Sm90a, Self::Sm100, Self::Sm120];

    /// The compute capability as `major * 10 + minor`.
    pub const fn number(self) -> u32 {
        match self {
            Self::Sm75 => 75,
            Self::Sm80 => 80,
            Self::Sm86 => 86,
            Self::Sm89 => 89,
            Self::Sm90 | Self::Sm90a => 90,
            Self::Sm100 => 100,
            Self::Sm120 => 120,
        }
    }

    /// The compute capability, major and minor.
    pub const fn capability(self) -> (u32, u32) {
        (self.number() / 10, self.number() % 10)
    }

    /// Whether the target has the instructions of one architecture only (the `a` suffix).
    pub const fn is_arch_specific(self) -> bool {
        matches!(self, Self::Sm90a)
    }

    /// Whether this target has what `other` introduced.
    pub const fn includes(self, other: Self) -> bool {
        if other.is_arch_specific() { self as u8 == other as u8 } else { self.number() >= other.number() }
    }

    /// Whether PTX for this target runs on a device of the given compute capability.
    pub const fn runs_on(self, major: u32, minor: u32) -> bool {
        let device = major * 10 + minor;
        if self.is_arch_specific() { device == self.number() } else { device >= self.number() }
    }

    /// Reads `sm_90a` and its like.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.to_string() == text)
    }

    /// Reads any `sm_…`, also those that are not listed here: as the newest listed target that is no newer, or as
    /// sm_75 where it is older than all, since what an older GPU runs sm_75 runs too.
    pub fn parse_nearest(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sm_")?.trim_end_matches(['a', 'f']);
        let number: u32 = digits.parse().ok()?;
        let no_newer = |t: &Self| !t.is_arch_specific() && t.number() <= number;
        Self::parse(text).or_else(|| Some(Self::ALL.into_iter().rfind(no_newer).unwrap_or(Self::Sm75)))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number(), if self.is_arch_specific() { "a" } else { "" })
    }
}
