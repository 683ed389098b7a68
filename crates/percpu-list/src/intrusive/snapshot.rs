//! A snapshot of an intrusive list, which shows one instant.

use std::fmt;
use std::iter::FusedIterator;
use std::pin::Pin;

use percpu::CpuId;
use percpu::lglock::{GlobalGuard, LockError};

use crate::array::Array;

use super::items::Items;
use super::link::Linked;

/// A list while all slots of its domain are locked, for
/// [`IntrusiveList::lock_all`](crate::IntrusiveList::lock_all).
///
/// While the snapshot exists, other threads that add or remove wait, in all lists of the domain. If
/// the thread of the snapshot drops an item that is on a list of the domain, the process aborts. A
/// snapshot is `!Send`.
///
/// ```
/// use percpu_list::{IntrusiveList, Link, linked};
///
/// struct Session {
///     number: u32,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// let sessions = IntrusiveList::new();
/// let session = Box::pin(Session { number: 7, link: Link::new(sessions.domain()) });
/// sessions.insert(session.as_ref())?;
/// let snapshot = sessions.lock_all()?;
/// assert_eq!(snapshot.len(), 1); // at one instant
/// snapshot.for_each(|session| assert_eq!(session.number, 7));
/// drop(snapshot); // unlocks the slots
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the slots are unlocked when the snapshot drops"]
pub struct IntrusiveSnapshot<'a, T: Linked> {
    items: &'a Items<T>,
    _guard: GlobalGuard<'a, ()>,
}

impl<'a, T: Linked> IntrusiveSnapshot<'a, T> {
    pub(super) fn new(items: &'a Items<T>) -> Result<Self, LockError> {
        Ok(Self { items, _guard: items.core().lock_all()? })
    }

    fn array(&self, slot: CpuId) -> Option<&Array> {
        let shard = self.items.core().shard(slot)?;
        // SAFETY: `self` holds the locks of all slots, and nothing changes an array through it.
        Some(unsafe { &*shard.array_ptr() })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.items.core().slots().filter_map(|slot| self.array(slot))
    }

    /// Returns the number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arrays().map(|array| array.entries() as usize).sum()
    }

    /// Returns whether the list has no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the items, slot by slot. Within a slot they are in no particular order.
    pub fn iter(&self) -> IntrusiveIter<'_, T> {
        IntrusiveIter { snapshot: self, slot: 0, index: 0, left: self.len() }
    }

    /// Calls `f` with every item. Faster than [`iter`](Self::iter).
    pub fn for_each(&self, mut f: impl FnMut(Pin<&T>)) {
        for array in self.arrays() {
            array.for_each(|anchor| {
                // SAFETY: the anchor is in an array of this core, and `self` holds the lock of the
                // slot.
                f(unsafe { self.items.item(anchor) });
            });
        }
    }
}

impl<T: Linked + fmt::Debug> fmt::Debug for IntrusiveSnapshot<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'s, T: Linked> IntoIterator for &'s IntrusiveSnapshot<'_, T> {
    type Item = Pin<&'s T>;
    type IntoIter = IntrusiveIter<'s, T>;

    fn into_iter(self) -> IntrusiveIter<'s, T> {
        self.iter()
    }
}

/// An iterator over the items of an [`IntrusiveSnapshot`].
///
/// ```
/// use percpu_list::{IntrusiveList, Link, linked};
///
/// struct Session {
///     number: u32,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// let sessions = IntrusiveList::new();
/// let session = Box::pin(Session { number: 7, link: Link::new(sessions.domain()) });
/// sessions.insert(session.as_ref())?;
/// let snapshot = sessions.lock_all()?;
/// let numbers: Vec<u32> = snapshot.iter().map(|session| session.number).collect();
/// assert_eq!(numbers, [7]);
/// # drop(snapshot);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct IntrusiveIter<'s, T: Linked> {
    snapshot: &'s IntrusiveSnapshot<'s, T>,
    slot: u32,
    index: u32,
    left: usize,
}

impl<'s, T: Linked> Iterator for IntrusiveIter<'s, T> {
    type Item = Pin<&'s T>;

    fn next(&mut self) -> Option<Pin<&'s T>> {
        while self.left != 0 {
            let array = self.snapshot.array(CpuId::new(self.slot));
            match array.filter(|array| self.index < array.len()) {
                Some(array) => {
                    self.index += 1;
                    if let Some(anchor) = array.get(self.index - 1) {
                        self.left -= 1;
                        // SAFETY: the anchor is in an array of this core, and the snapshot holds
                        // the lock of the slot as long as `'s`.
                        return Some(unsafe { self.snapshot.items.item(anchor) });
                    }
                }
                None => (self.slot, self.index) = (self.slot + 1, 0),
            }
        }
        None
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T: Linked> ExactSizeIterator for IntrusiveIter<'_, T> {}
impl<T: Linked> FusedIterator for IntrusiveIter<'_, T> {}

impl<T: Linked> fmt::Debug for IntrusiveIter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntrusiveIter").field("left", &self.left).finish_non_exhaustive()
    }
}
