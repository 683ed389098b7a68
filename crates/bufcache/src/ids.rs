//! Numbers of devices, which are reused after the buffers of the old device are gone.
//!
//! Buffers of a detached device stay in the table under its number until they are evicted. So its
//! number is retired first. When no other number is left, one scan of the table drops the buffers
//! of all retired numbers: once in 65,535 devices if few are attached at a time.

use std::collections::BTreeSet;

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

    /// Frees the retired numbers except `kept`, of which a buffer is still in the table. No number
    /// was free.
    pub(crate) fn clean(&mut self, kept: BTreeSet<u16>) {
        debug_assert!(self.clean.is_empty());
        self.clean = &self.retired - &kept;
        self.retired = kept;
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
        assert_eq!(ids.take(), None);
        assert!(ids.is_retired(64) && !ids.is_retired(65));
        ids.clean(BTreeSet::new());
        assert!(!ids.is_retired(64));
        ids.retire(65);
        let again: Vec<_> = std::iter::from_fn(|| ids.take()).collect();
        assert_eq!(again, [1, 64, 700, u16::MAX]);
        [3, 64].into_iter().for_each(|id| ids.retire(id));
        ids.clean(BTreeSet::from([64]));
        assert_eq!((ids.take(), ids.take(), ids.take()), (Some(3), Some(65), None));
        assert!(ids.is_retired(64), "a buffer of it is in the table");
    }
}
