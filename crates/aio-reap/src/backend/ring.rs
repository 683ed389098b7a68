//! Linux AIO's completion ring, read where it lies: in memory shared with the kernel.
//!
//! ```text
//!  | id nr head tail magic compat incompat header_length | event 0 | event 1 | ... | event nr-1 |
//!              ▲    ▲
//!    ours alone┘    └ the kernel's: stores events, then the tail (Release)
//!  consumer: load tail (Acquire), copy events head..tail, store head (Release)
//! ```
//!
//! # Invariants
//!
//! 1. One consumer: the engine, which is `!Sync`. `head` is written by nobody else.
//! 2. `head`, as used here, is below `nr`, whatever the memory says.
//! 3. An event is copied after the tail that covers it was loaded, before the head passes it.

use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::order;

/// `struct io_event` of the kernel's ABI.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// What the request carried in `aio_data`.
    pub data: u64,
    /// Address of the request's `struct iocb`.
    pub obj: u64,
    /// Bytes, or a negated errno.
    pub res: i64,
    /// A second result; unused by block I/O.
    pub res2: i64,
}

/// One side of the ring: the consumer's.
pub struct Ring<'a> {
    head: &'a AtomicU32,
    tail: &'a AtomicU32,
    events: &'a [UnsafeCell<Event>],
}

impl<'a> Ring<'a> {
    /// Borrows a ring.
    ///
    /// # Safety
    ///
    /// 1. `events[i]` for i from head to tail (modulo the length) is written by nobody until the
    ///    head passes it; the producer publishes it with a Release store of `tail`.
    /// 2. No other `Ring` over the same memory is in use.
    pub unsafe fn new(
        head: &'a AtomicU32,
        tail: &'a AtomicU32,
        events: &'a [UnsafeCell<Event>],
    ) -> Self {
        Self { head, tail, events }
    }

    /// Copies at most `budget` events out, oldest first. Wait-free.
    pub fn consume(&mut self, budget: usize, mut each: impl FnMut(Event)) {
        let nr = self.events.len() as u32;
        if nr == 0 {
            return;
        }
        // Ordering: Relaxed; only this thread stores it (invariant 1).
        let mut head = self.head.load(Ordering::Relaxed) % nr;
        // Ordering: Acquire pairs with the producer's Release store of the tail (the kernel's
        // `smp_wmb` before it); it carries the events below the tail.
        let tail = self.tail.load(order!(Acquire, "consume: the events are written")) % nr;
        let mut taken = 0;
        while head != tail && taken < budget {
            // SAFETY: the producer wrote this event before the tail we loaded and leaves it alone
            // until the head passes it (condition 1 of `new`).
            let event = self.events[head as usize].with(|event| unsafe { *event });
            head = (head + 1) % nr;
            taken += 1;
            each(event);
        }
        if taken > 0 {
            // Ordering: Release pairs with the producer's Acquire load of the head; it keeps our
            // reads of the events before the moment the producer may overwrite them.
            self.head.store(head, order!(Release, "consume: the events are read"));
        }
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    fn consume(head: u32, tail: u32, nr: u64, budget: usize) -> (Vec<u64>, u32) {
        let (head, tail) = (AtomicU32::new(head), AtomicU32::new(tail));
        let events: Vec<_> =
            (0..nr).map(|data| UnsafeCell::new(Event { data, ..Event::default() })).collect();
        let mut seen = Vec::new();
        // SAFETY: one thread, one `Ring`, nobody writes.
        let mut ring = unsafe { Ring::new(&head, &tail, &events) };
        ring.consume(budget, |event| seen.push(event.data));
        (seen, head.load(Ordering::Relaxed))
    }

    #[test]
    fn inv08_ring_wraps_stops_at_the_budget_and_clamps_a_hostile_head() {
        assert_eq!(consume(2, 1, 4, 10), (vec![2, 3, 0], 1));
        assert_eq!(consume(2, 1, 4, 2), (vec![2, 3], 0));
        assert_eq!(consume(3, 3, 4, 10), (vec![], 3));
        assert_eq!(consume(u32::MAX, 1, 4, 10), (vec![3, 0], 1));
        assert_eq!(consume(1, 400, 4, 10), (vec![1, 2, 3], 0));
        assert_eq!(consume(0, 0, 0, 10), (vec![], 0));
    }
}
