//! The log positions of blocks whose changes the device does not have: what a checkpoint keeps of
//! the log.
//!
//! A position is noted when it is set, under the block's write guard, not when the guard drops: a
//! checkpoint beside a guard that is held must keep the log of its changes. It is forgotten when the
//! block becomes clean or is dropped, before another thread can write the block.

use std::collections::BTreeSet;

use offlock_sync::WordLock;

use crate::frames::{Frame, Frames};

/// The smallest position of each such block of a device.
#[derive(Debug)]
pub(crate) struct Positions(WordLock<BTreeSet<(u64, Frame)>>);

impl Positions {
    pub(crate) fn new() -> Self {
        Self(WordLock::new(BTreeSet::new()))
    }

    /// Notes a position of a block. The caller has marked its entry `WRITE`.
    pub(crate) fn add(&self, frames: &Frames, frame: Frame, lsn: u64) {
        let mut all = self.0.lock();
        let header = frames.header(frame);
        let before = header.replace_first_lsn(lsn);
        if before <= lsn {
            header.replace_first_lsn(before);
            return;
        }
        all.remove(&(before, frame));
        all.insert((lsn, frame));
    }

    /// Forgets the position of a block that is clean or dropped. The caller keeps other threads from
    /// writing it.
    pub(crate) fn remove(&self, frames: &Frames, frame: Frame) {
        let mut all = self.0.lock();
        let before = frames.header(frame).replace_first_lsn(u64::MAX);
        if before != u64::MAX {
            all.remove(&(before, frame));
        }
    }

    /// Returns the smallest position.
    pub(crate) fn first(&self) -> Option<u64> {
        self.0.lock().first().map(|&(lsn, _)| lsn)
    }
}
