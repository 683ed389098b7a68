//! Linux AIO's completion ring, read in the memory that the kernel shares.
//!
//! ```text
//!  | id nr head tail magic compat incompat header_length | event 0 | event 1 | ... | event nr-1 |
//!              ▲    ▲
//!  the engine's┘    └ the kernel's: stores events, then the tail (Release)
//!  consumer: load tail (Acquire), copy events head..tail, store head (Release)
//! ```
//!
//! # Invariants
//!
//! 1. The engine, which is `!Sync`, is the only consumer. Only it writes `head`.
//! 2. `head`, as used here, is below `nr`, for every value in the memory.
//! 3. An event is copied after the load of a tail that covers it, and before the head passes it.

use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::order;

/// `struct io_event` of the kernel's ABI.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The request's `aio_data`.
    pub data: u64,
    /// The address of the request's `struct iocb`.
    pub obj: u64,
    /// A number of bytes or a negated errno.
    pub res: i64,
    /// A second result, which block I/O does not use.
    pub res2: i64,
}

/// The consumer's side of the ring.
#[expect(missing_debug_implementations, reason = "for model checkers only")]
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
    /// 1. `events[i]` for i from head to tail (modulo the length) is not written until the head
    ///    passes it. The producer publishes it by a Release store of `tail`.
    /// 2. No other `Ring` over the same memory is in use.
    pub unsafe fn new(
        head: &'a AtomicU32,
        tail: &'a AtomicU32,
        events: &'a [UnsafeCell<Event>],
    ) -> Self {
        Self { head, tail, events }
    }

    /// Passes copies of at most `budget` events to `each`, oldest first. Wait-free.
    pub fn consume(&mut self, budget: usize, mut each: impl FnMut(Event)) {
        let nr = self.events.len() as u32;
        if nr == 0 {
            return;
        }
        // Ordering: Relaxed; only this thread stores the head (invariant 1).
        let mut head = self.head.load(Ordering::Relaxed) % nr;
        // Ordering: Acquire pairs with the producer's Release store of the tail (the kernel's
        // `smp_wmb` before it); it carries the events below the tail.
        let tail = self.tail.load(order!(Acquire, "consume: the events are written")) % nr;
        let mut taken = 0;
        while head != tail && taken < budget {
            // SAFETY: by condition 1 of `new` the producer wrote this event before it stored the
            // tail that was loaded here, and does not write it until the head passes it.
            let event = self.events[head as usize].with(|event| unsafe { *event });
            head = (head + 1) % nr;
            taken += 1;
            each(event);
        }
        if taken > 0 {
            // Ordering: Release pairs with the producer's Acquire load of the head; the reads of
            // the events happen before the producer overwrites them.
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
        // SAFETY: this is the only `Ring`, and no code writes the events.
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
