//! Exchange: removes the next message and stores another one in its slot.

use super::fifo::NIL;
use super::slab::Removed;
use super::{Core, Levels, Message, Preload};

impl<T, L: Levels> Core<T, L> {
    /// Returns whether a message of this priority is above all stored ones.
    #[inline(always)]
    pub(crate) fn is_next(&self, priority: L::Priority) -> bool {
        // SAFETY: `highest` has just returned the level.
        let is_above = |level| L::is_above(priority, unsafe { self.levels.priority(level) });
        self.levels.highest().is_none_or(is_above)
    }

    /// Returns whether all stored messages have this priority, which [`is_next`](Self::is_next) is false
    /// for, and none is lent.
    #[inline(always)]
    pub(crate) fn has_only(&mut self, priority: L::Priority) -> bool {
        let Some(level) = self.levels.highest() else { return false };
        // SAFETY: `highest` has just returned the level.
        let len = unsafe { self.levels.fifo(level) }.len as usize;
        // SAFETY: the level is still in the set: nothing was removed.
        let highest = unsafe { self.levels.priority(level) };
        len == self.occupied && !L::is_above(highest, priority)
    }

    /// Appends a message for whose level memory is stored, and removes the next one without ageing, which
    /// the message is not above. The message takes that one's slot.
    #[inline(always)]
    pub(crate) fn exchange(
        &mut self,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Message<T, L::Priority> {
        let Some(from) = self.levels.highest() else { unreachable!("the queue is not empty") };
        // SAFETY: `highest` has just returned the level.
        let priority = unsafe { self.levels.priority(from) };
        // SAFETY: `highest` has just returned the level.
        let head = unsafe { self.levels.fifo(from) }.head;
        // SAFETY: by invariant 1 the level's head is a live slot.
        let Removed { value, next } = unsafe { self.slab.replace(head, message.value) };
        if L::is_above(priority, message.priority) {
            let Some(to) = self.levels.get_or_insert_no_alloc(message.priority) else {
                unreachable!("a claim has its memory")
            };
            // SAFETY: the level is still in the set: nothing was removed.
            let fifo = unsafe { self.levels.fifo(from) };
            (fifo.head, fifo.len) = (next, fifo.len - 1);
            if next == NIL {
                fifo.tail = NIL;
            }
            // SAFETY: `to` is in the set. The slot holds the message, and has left its FIFO.
            unsafe { self.link_last(to, head) };
            if next == NIL {
                // SAFETY: the level is in the set, and its FIFO is empty.
                unsafe { self.remove_level(from, preload) };
            }
        } else if next != NIL {
            // SAFETY: the level is still in the set: nothing was removed.
            let fifo = unsafe { self.levels.fifo(from) };
            fifo.head = next;
            let tail = std::mem::replace(&mut fifo.tail, head);
            // SAFETY: by invariant 1 the FIFO names live slots.
            unsafe { self.slab.set_next(tail, head) };
        }
        if next != NIL {
            // SAFETY: by invariant 1 the FIFO names live slots.
            unsafe { self.slab.prefetch_after(head, next) };
        }
        Message { value, priority }
    }
}
