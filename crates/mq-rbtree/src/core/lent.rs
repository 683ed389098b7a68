//! Lent messages: out of the levels, in their slots.

use std::ptr::NonNull;

use percpu::AllocError;

use super::fifo::NIL;
use super::slab::{Removed, Slab};
use super::{Core, Levels, Preload};

/// A message in a guard: it is in no FIFO, and keeps its slot and its place.
pub(crate) struct Lent<T, P> {
    index: u32,
    /// The message in its slot, which does not move.
    pub(crate) value: NonNull<T>,
    pub(crate) priority: P,
}

impl<T, L: Levels> Core<T, L> {
    /// Lends the next message: it keeps its slot and its place until [`put_back`](Self::put_back)
    /// or [`take_lent`](Self::take_lent). Moves the memory for its level into `preload`.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if that memory is missing; no message was lent.
    pub(crate) fn lend(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Result<Option<Lent<T, L::Priority>>, AllocError> {
        if self.is_empty() {
            return Ok(None);
        }
        self.levels.take_lent_memory(&mut preload.levels)?;
        let lend = |slab: &mut Slab<T>, head| {
            // SAFETY: `unlink_next` passes the head of a FIFO, which by invariant 1 is a live slot.
            let next = unsafe { slab.next(head) };
            // SAFETY: the slot is live, as for the line above.
            ((head, unsafe { slab.value(head) }), next)
        };
        let lent = self.unlink_next(preload, lend);
        self.lent += usize::from(lent.is_some());
        Ok(lent.map(|((index, value), priority)| Lent { index, value, priority }))
    }

    /// Puts a lent message back, in front of the messages of its priority. If a comparison of keys
    /// panics, nothing has changed.
    ///
    /// # Safety
    ///
    /// The message is lent by this queue, and the caller gives it up; `lend` has returned `preload`
    /// with it.
    pub(crate) unsafe fn put_back(
        &mut self,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) {
        let Ok(level) = self.get_or_insert_level(lent.priority, preload) else {
            unreachable!("a lent message has the memory for its level")
        };
        // SAFETY: the level has just been returned.
        let fifo = unsafe { self.levels.fifo(level) };
        fifo.len += 1;
        let next = std::mem::replace(&mut fifo.head, lent.index);
        if next == NIL {
            fifo.tail = lent.index;
        }
        // SAFETY: the caller guarantees a lent message, whose slot is live.
        unsafe { self.slab.set_next(lent.index, next) };
        self.lent -= 1;
    }

    /// Removes a lent message. `preload` gets back to the kept memory, as far as there is room.
    ///
    /// # Safety
    ///
    /// The message is lent by this queue, and the caller gives it up.
    pub(crate) unsafe fn take_lent(
        &mut self,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> T {
        // SAFETY: the caller guarantees a lent message, whose slot is live and in no FIFO.
        let Removed { value, .. } = unsafe { self.slab.remove(lent.index) };
        self.lent -= 1;
        self.occupied -= 1;
        self.levels.keep_preload(&mut preload.levels);
        value
    }
}
