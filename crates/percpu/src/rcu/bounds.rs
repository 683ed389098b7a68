//! How much may wait.

use std::time::Duration;

/// How much may wait before a thread that retires looks whether readers allow some of it to go.
///
/// A reader that stays inside holds up more than that: nobody waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bounds {
    /// Bytes on one CPU. 4 MiB if not set; a guess. Of a retired value its size counts, without what
    /// it owns; [`Unlinked::retire_sized`](super::Unlinked::retire_sized) and
    /// [`defer`](super::defer) are told that.
    pub bytes: usize,
    /// How long the oldest object on a CPU waits for others. Kept by a
    /// [`Reclaimer`](super::Reclaimer); without one it is looked at with each object retired on that
    /// CPU while up to 64 of them wait for others, and from there on with every sixteenth. Where
    /// nobody retires, on that CPU, nobody looks. 100 ms if not set; a guess. The clock is coarse:
    /// some milliseconds.
    pub age: Duration,
}

impl Bounds {
    pub(super) const DEFAULT: Self = Self { bytes: 4 << 20, age: Duration::from_millis(100) };

    /// These bounds: `bytes` per CPU, and an age.
    #[must_use]
    pub const fn new(bytes: usize, age: Duration) -> Self {
        Self { bytes, age }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self::DEFAULT
    }
}
