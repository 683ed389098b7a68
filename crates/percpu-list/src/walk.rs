//! Walks that hold no lock between entries, and the drain, which is a walk that removes.

use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ptr;

use offlock_percpu::cells::Block;
use offlock_sync::panics::exhaust;

use crate::cells::{BATCH, Cells, Key, next, occupied, pop};
use crate::entry::Ref;
use crate::error::Deadlock;

/// A walk of a [`PerCpuList`](crate::PerCpuList) that holds no lock while the caller's code runs, for
/// [`PerCpuList::iter`](crate::PerCpuList::iter).
///
/// Other threads may add and remove during the walk. It sees an entry that is on the list during
/// the whole walk exactly once, and an entry that is added or removed during the walk once or not
/// at all. A [`Ref`] keeps its value alive, but the value may have been removed from the list.
///
/// The walk pins the entries of up to 16 blocks at a time, at most 1,024, and ends the pins of those
/// that it does not return. It restarts the sections of all threads by one system call if no walk
/// has seen some of these entries before. Such a step waits for that of another walk. A value that is
/// removed while it is pinned is dropped at the end of the pin. A walk may stop and continue at any
/// time, also while its thread has a snapshot.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// for session in &sessions {
///     // `session` is a `Ref`, and no lock is held here
///     assert_eq!((*session, session.slot()), ("alice", alice.slot()));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until it is iterated over"]
pub struct Iter<'a, T> {
    cells: &'a Cells<T>,
    /// The shard where the walk is.
    shard: usize,
    /// The last block of this shard that the walk has seen, or null, and its serial number. The
    /// block may be gone if there was a trim meanwhile.
    at: *const Block,
    serial: u64,
    trims: u64,
    /// Newer blocks have no entries that were there when the walk began. So the walk ends, even if
    /// other threads add all the time.
    newest: u64,
    /// Blocks and their pinned cells, the next block last.
    batch: [(*const Block, u64); BATCH],
    len: usize,
    _value: PhantomData<T>,
}

// SAFETY: the walk has pins, which any thread may end, and pointers to blocks of the list. The list is
// `Sync`.
unsafe impl<T: Send + Sync> Send for Iter<'_, T> {}
// SAFETY: a shared walk does nothing.
unsafe impl<T: Send + Sync> Sync for Iter<'_, T> {}

impl<'a, T> Iter<'a, T> {
    pub(crate) fn new(cells: &'a Cells<T>) -> Self {
        let (batch, newest) = ([(ptr::null(), 0); BATCH], cells.newest());
        let (at, _value) = (ptr::null(), PhantomData);
        Self { cells, shard: 0, at, serial: 0, trims: 0, newest, batch, len: 0, _value }
    }

    /// Returns the next block. The caller has locked `walk`, under which blocks live.
    fn next_block(&mut self) -> Option<*const Block> {
        loop {
            // SAFETY: the block was found under this lock, or there was no trim since.
            let after = match unsafe { self.at.as_ref() } {
                Some(block) => next(block),
                None if self.shard == self.cells.shard_count() => return None,
                None => self.cells.first(self.shard),
            };
            // SAFETY: the block is the next of one that lives, or the first of a shard, found under the lock.
            match unsafe { after.as_ref() }.filter(|block| block.serial <= self.newest) {
                Some(block) => {
                    (self.at, self.serial) = (after, block.serial);
                    return Some(after);
                }
                None => {
                    (self.at, self.serial) = (ptr::null(), 0);
                    self.shard += 1;
                }
            }
        }
    }

    /// Finds the place of the walk again after a trim, which may have freed the last block.
    fn resume(&mut self) {
        let mut at = ptr::null();
        if self.serial != 0 {
            let mut after = self.cells.first(self.shard);
            // SAFETY: the caller has locked `walk`, under which blocks live.
            while let Some(block) = unsafe { after.as_ref() }
                && block.serial <= self.serial
            {
                (at, after) = (after, next(block));
            }
        }
        self.at = at;
    }

    /// Pins the entries of the next blocks.
    #[inline(never)]
    fn fill(&mut self) {
        let cells = self.cells;
        let (walking, trims) = cells.walking();
        if self.trims != trims {
            self.trims = trims;
            self.resume();
        }
        while self.len < BATCH
            && let Some(at) = self.next_block()
        {
            // SAFETY: blocks live while `walk` is locked.
            let entries = occupied(unsafe { &*at });
            if entries != 0 {
                self.batch[self.len] = (at, entries);
                self.len += 1;
            }
        }
        let mut stale = cells.pin_batch(&mut self.batch[..self.len]);
        drop(walking);
        self.batch[..self.len].reverse();
        stale[..self.len].reverse();
        if stale != [0; BATCH] {
            let (batch, len) = (&self.batch, self.len); // a block with a pin lives
            let mut pins = (0..len).map(|n| (batch[n].0, stale[n]));
            unpin::<T>(&mut || pins.next());
        }
    }
}

/// Ends pins, also after a panic of a value's drop.
fn unpin<T>(blocks: &mut dyn FnMut() -> Option<(*const Block, u64)>) {
    let (mut at, mut cells) = (ptr::null(), 0);
    exhaust(|| {
        while cells == 0 {
            let Some(more) = blocks() else { return false };
            (at, cells) = more;
        }
        if let Some(index) = pop(&mut cells) {
            // SAFETY: the caller has the pin, and passes it on.
            drop(unsafe { Ref::<T>::from_pin(Key::new(at, index)) });
        }
        true
    });
}

impl<T> Iterator for Iter<'_, T> {
    type Item = Ref<T>;

    #[inline]
    fn next(&mut self) -> Option<Ref<T>> {
        loop {
            while let Some((at, pinned)) = self.batch.get_mut(self.len.wrapping_sub(1)) {
                if let Some(index) = pop(pinned) {
                    // SAFETY: the walk has this pin, and passes it on.
                    return Some(unsafe { Ref::from_pin(Key::new(*at, index)) });
                }
                self.len -= 1;
            }
            self.fill();
            if self.len == 0 {
                return None;
            }
        }
    }
}

impl<T> FusedIterator for Iter<'_, T> {}

impl<T> Drop for Iter<'_, T> {
    fn drop(&mut self) {
        let mut left = self.batch[..self.len].iter().copied();
        unpin::<T>(&mut || left.next());
    }
}

impl<T> fmt::Debug for Iter<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iter").field("slot", &self.shard).finish_non_exhaustive()
    }
}

/// An iterator that removes the entries of a [`PerCpuList`](crate::PerCpuList) and returns them, for
/// [`PerCpuList::drain`](crate::PerCpuList::drain).
///
/// It removes every entry that is on the list during the whole drain, unless another call removes
/// it first. An entry that is added during the drain may stay; to leave the list empty,
/// [`close`](crate::PerCpuList::close) it before. The owner of a removed entry keeps the
/// [`Entry`](crate::Entry), which is no longer linked. The value is dropped with the last of the
/// `Entry` and the [`Ref`]s.
///
/// A drain is a walk, and removes each entry when it returns it. So if it is dropped early, the
/// remaining entries stay on the list. If its thread has a snapshot of the list, it returns
/// [`Deadlock`] and then ends. It waits for a snapshot of another thread.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// sessions.close()?; // no entry is added during the drain
/// for session in sessions.drain() {
///     assert_eq!(*session?, "alice");
/// }
/// assert!(sessions.is_empty() && !alice.is_linked());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until it is iterated over"]
pub struct Drain<'a, T> {
    cells: &'a Cells<T>,
    /// `None` after an error.
    walk: Option<Iter<'a, T>>,
}

impl<'a, T> Drain<'a, T> {
    pub(crate) fn new(cells: &'a Cells<T>) -> Self {
        Self { cells, walk: Some(Iter::new(cells)) }
    }
}

impl<T> Iterator for Drain<'_, T> {
    type Item = Result<Ref<T>, Deadlock>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let found = self.walk.as_mut()?.next()?;
            // SAFETY: the walk has pinned the cell, and is one of this list.
            match unsafe { self.cells.unlink(found.key()) } {
                Ok(true) => return Some(Ok(found)),
                Ok(false) => {}
                Err(error) => {
                    self.walk = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl<T> FusedIterator for Drain<'_, T> {}

impl<T> fmt::Debug for Drain<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").field("walk", &self.walk).finish_non_exhaustive()
    }
}
