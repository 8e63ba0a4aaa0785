//! Columns of tiles and of outputs, and how warps share them.

/// Columns of a tile for `dim` features: whole slabs of the widest swizzle that wastes little.
pub(crate) const fn padded(dim: u32) -> u32 {
    if dim <= 16 { 16 } else { dim.next_multiple_of(32) }
}

/// How warps share the columns of the output; each multiplies queries by keys for itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// Warps that share a row.
    pub(crate) groups: u32,
    /// Columns of a warp.
    pub(crate) each: u32,
}

impl Columns {
    /// The columns of `dim` features, where a warp can have `most` of them.
    pub(crate) const fn of(dim: u32, most: u32) -> Self {
        Self::shared(dim, dim.div_ceil(most))
    }

    /// The columns of `dim` features for `groups` warps: in whole slabs of the widest swizzle, where they share them.
    pub(crate) const fn shared(dim: u32, groups: u32) -> Self {
        let each = if groups == 1 { padded(dim) } else { dim.div_ceil(groups).next_multiple_of(64) };
        Self { groups, each }
    }

    /// Columns of all warps.
    pub(crate) const fn all(self) -> u32 {
        self.groups * self.each
    }
}
