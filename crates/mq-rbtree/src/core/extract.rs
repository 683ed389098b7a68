//! The removal of messages out of order.

use super::fifo::NIL;
use super::slab::Removed;
use super::{Core, Levels, Message, Preload};

impl<T, L: Levels> Core<T, L> {
    /// Removes every message that `take` selects and passes it to `out`, highest priority first.
    ///
    /// If `take` or `out` panics, the messages not yet examined stay in the queue.
    ///
    /// ```
    /// let mut core: mq_rbtree::Core<u32> = mq_rbtree::Core::new(0);
    /// for (n, priority) in [(1, 5), (2, 7), (3, 5), (4, 7)] {
    ///     core.push(priority, n).unwrap();
    /// }
    /// let mut odd = Vec::new();
    /// core.drain_filter(|n, _| n % 2 == 1, |n, priority| odd.push((n, priority)));
    /// assert_eq!(odd, [(1, 5), (3, 5)]);
    /// assert_eq!(core.pop(), Some((2, 7)));
    /// ```
    pub fn drain_filter(
        &mut self,
        take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(T, L::Priority),
    ) {
        self.extract(&mut Preload::new(), take, |message| out(message.value, message.priority));
    }

    /// Removes the messages that `take` selects, highest priority first, and passes them to `out`.
    ///
    /// If `take` or `out` panics, the messages not yet examined stay.
    pub(crate) fn extract(
        &mut self,
        preload: &mut Preload<T, L>,
        mut take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(Message<T, L::Priority>),
    ) {
        let mut next_level = self.levels.highest();
        // Bounds the loop: with an inconsistent order of keys, `below` could lead around in a
        // circle.
        let mut levels = self.levels.stats().live;
        while let Some(level) = next_level.filter(|_| levels > 0) {
            levels -= 1;
            // SAFETY: `highest` or `below` has just returned the level.
            let priority = unsafe { self.levels.priority(level) };
            let mut previous = NIL;
            // SAFETY: the level is still in the set: nothing was removed since it was returned.
            let mut at = unsafe { self.levels.fifo(level) }.head;
            while at != NIL {
                // SAFETY: by invariant 1 `at`, an index from the FIFO, is a live slot.
                let next = unsafe { self.slab.next(at) };
                // SAFETY: `at` is a live slot, as for the line above.
                if take(unsafe { self.slab.get(at) }, priority) {
                    // SAFETY: the level is in the set as long as its FIFO has a message, and `at`
                    // is still in it.
                    let fifo = unsafe { self.levels.fifo(level) };
                    fifo.len -= 1;
                    if previous == NIL {
                        fifo.head = next;
                    } else {
                        // SAFETY: `previous` stayed in the FIFO, so by invariant 1 it is live.
                        unsafe { self.slab.set_next(previous, next) };
                    }
                    if next == NIL {
                        fifo.tail = previous;
                    }
                    let empty = fifo.is_empty();
                    // SAFETY: `at` was live, and it has just left its FIFO.
                    let Removed { value, .. } = unsafe { self.slab.remove(at) };
                    self.occupied -= 1;
                    if empty {
                        // SAFETY: the level is still in the set, and its FIFO has just become
                        // empty.
                        unsafe { self.levels.remove(level, &mut preload.levels) };
                    }
                    out(Message { value, priority });
                } else {
                    previous = at;
                }
                at = next;
            }
            next_level = self.levels.below(priority);
        }
    }
}
