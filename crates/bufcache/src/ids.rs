//! Numbers of devices, which are reused after the buffers of the old device are gone.
//!
//! Buffers of a detached device stay in the table under its number until they are evicted. So its
//! number is retired first. When no other number is left, one scan of the table drops the buffers
//! of all retired numbers: once in 65,535 devices if few are attached at a time.

use std::collections::BTreeSet;
use std::mem;

/// The identity of a device: see [`BlockDevice::identity`](crate::BlockDevice::identity).
pub(crate) type Identity = (u64, u64);

/// The free and the retired numbers. 0 is no number of a device.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    /// The identity of each attached device that has one.
    attached: Vec<Identity>,
    /// The largest number that [`take`](Self::take) has returned.
    given: u16,
    /// Numbers of detached devices that may have buffers in the table.
    retired: BTreeSet<u16>,
    /// Retired numbers of which a buffer could not be dropped: retired again by [`clean`](Self::clean).
    kept: BTreeSet<u16>,
    /// Numbers of detached devices without buffers in the table.
    clean: BTreeSet<u16>,
}

impl Ids {
    /// Notes an attached device. Returns false if it is attached already.
    pub(crate) fn attach(&mut self, identity: Identity) -> bool {
        let is_new = !self.attached.contains(&identity);
        if is_new {
            self.attached.push(identity);
        }
        is_new
    }

    /// Lets the device be attached again.
    pub(crate) fn detach(&mut self, identity: Identity) {
        self.attached.retain(|known| *known != identity);
    }

    /// Returns a number that no device and no buffer has, or `None` if there is none.
    pub(crate) fn take(&mut self) -> Option<u16> {
        self.clean.pop_first().or_else(|| {
            self.given = self.given.checked_add(1)?;
            Some(self.given)
        })
    }

    /// Retires the number of a detached device. No thread can insert a block of that device any
    /// more.
    pub(crate) fn retire(&mut self, id: u16) {
        self.retired.insert(id);
    }

    /// Returns whether the number is retired.
    pub(crate) fn is_retired(&self, id: u16) -> bool {
        self.retired.contains(&id)
    }

    /// Returns how many numbers are retired.
    pub(crate) fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Keeps a retired number from the next [`clean`](Self::clean): a buffer of its is still in the
    /// table.
    pub(crate) fn keep(&mut self, id: u16) {
        self.retired.remove(&id);
        self.kept.insert(id);
    }

    /// Frees all retired numbers but those that are kept. The table has no buffers of theirs, and no
    /// number was free.
    pub(crate) fn clean(&mut self) {
        debug_assert!(self.clean.is_empty());
        self.clean = mem::replace(&mut self.retired, mem::take(&mut self.kept));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_only_once_they_are_clean() {
        let mut ids = Ids::default();
        for id in 1..=u16::MAX {
            assert_eq!(ids.take(), Some(id));
        }
        assert_eq!(ids.take(), None);
        for id in [u16::MAX, 1, 700, 64] {
            ids.retire(id);
        }
        assert_eq!((ids.take(), ids.retired()), (None, 4));
        assert!(ids.is_retired(64) && !ids.is_retired(65));
        ids.clean();
        assert!(!ids.is_retired(64));
        ids.retire(65);
        let again: Vec<_> = std::iter::from_fn(|| ids.take()).collect();
        assert_eq!(again, [1, 64, 700, u16::MAX]);
        ids.clean();
        assert_eq!((ids.take(), ids.take()), (Some(65), None));
        [3, 64, 65].into_iter().for_each(|id| ids.retire(id));
        ids.keep(64);
        assert_eq!((ids.retired(), ids.is_retired(64)), (2, false));
        ids.clean();
        assert_eq!((ids.take(), ids.take(), ids.take()), (Some(3), Some(65), None));
        assert_eq!((ids.retired(), ids.is_retired(64)), (1, true));
    }
}
