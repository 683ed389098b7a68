//! Where a cyclic allocation begins, and what it returns.

/// Where the next cyclic allocation begins to look. For several rows of ids in one array; one of them is
/// in the array itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// `None`: behind the last index there is.
    pub(super) next: Option<u64>,
}

impl Cycle {
    /// Begins with the first index of the range.
    #[must_use]
    pub const fn new() -> Self {
        Self { next: Some(0) }
    }

    /// Begins with `index`, if it is in the range.
    #[must_use]
    pub const fn starting_at(index: u64) -> Self {
        Self { next: Some(index) }
    }

    /// The index after the last one that was allocated; `None` if that was `u64::MAX`.
    #[must_use]
    pub const fn next_index(&self) -> Option<u64> {
        self.next
    }
}

impl Default for Cycle {
    fn default() -> Self {
        Self::new()
    }
}

/// What a cyclic allocation gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The index.
    pub index: u64,
    /// Whether the search came to the end of the range, and began anew to find this index.
    pub wrapped: bool,
}
