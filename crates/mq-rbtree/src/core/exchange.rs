//! Exchange: removes the next message and stores another one in its slot.

use super::fifo::NIL;
use super::slab::Removed;
use super::{Core, Levels, Message, Preload};

impl<T, L: Levels> Core<T, L> {
    /// Appends a message for which memory is stored, and removes the next one: that very message, if
    /// it is above all others.
    #[inline(always)]
    pub(crate) fn pop_after(
        &mut self,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Message<T, L::Priority> {
        if self.ageing.is_none() {
            let Some(level) = self.levels.highest() else {
                self.passed += 1;
                return message;
            };
            // SAFETY: `highest` has just returned the level.
            let highest = unsafe { self.levels.priority(level) };
            if L::is_above(message.priority, highest) {
                self.passed += 1;
                return message;
            }
            // SAFETY: `highest` has just returned the level.
            return unsafe { self.exchange(level, message, preload) };
        }
        self.push_stored(message);
        self.pop_with(preload).unwrap_or_else(|| unreachable!("a message was just added"))
    }

    /// Appends a message for whose level memory is stored, and removes the oldest one of `from`. The
    /// message takes that one's slot. The caller has checked that its priority is not above that of
    /// `from`, by a comparison that cannot panic.
    ///
    /// # Safety
    ///
    /// `from` is in the set, and not empty.
    #[inline(always)]
    unsafe fn exchange(
        &mut self,
        from: L::Level,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Message<T, L::Priority> {
        // SAFETY: the caller guarantees a level of the set.
        let priority = unsafe { self.levels.priority(from) };
        // SAFETY: the caller guarantees that `from` is in the set, and its FIFO is not borrowed elsewhere.
        let head = unsafe { self.levels.fifo(from) }.head;
        // SAFETY: by invariant 1 the level's head is a live slot.
        let Removed { value, bytes, next } =
            unsafe { self.slab.replace(head, message.value, message.bytes) };
        self.bytes = self.bytes - u64::from(bytes) + u64::from(message.bytes);
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
        Message { value, priority, bytes }
    }
}
