//! The ways to lock a queue: with or without a drain of the ring, and up to a deadline.
//!
//! A thread that drains the ring may have to wait for a sender between its claim and its publication.
//! It waits without the lock.

use std::time::Duration;

use offlock_sync::{Futex, WordGuard, check, hint, step, thread};

use super::Queue;
use super::state::State;
use super::state::{Access, LockedState};
use crate::core::{Levels, Message, Preload};
use crate::parker::Wait;

/// The yields of a receive that finds the queue locked, before it waits for the lock. On a CPU that has
/// no other thread to run, they take about as long as the lock's own pauses.
///
/// Measured, four senders and four receivers on two CPUs: 86 to 90 ns for a message without a yield, 67
/// to 74 with 10, 62 to 70 with 40, 62 to 64 with 1,000.
const YIELDS: u32 = if cfg!(offlock_model) { 0 } else { 32 };

type Guard<'q, T, L> = WordGuard<'q, State<T, L>>;

impl<T, L: Levels> Queue<T, L> {
    /// Locks the state for a receive, without a drain. Yields the CPU before it waits for the lock.
    #[inline(always)]
    pub(super) fn lock_yielding(&self, wait: &Wait) -> Guard<'_, T, L> {
        // Without a ring the senders take the lock as well.
        if YIELDS == 0 || self.ring.is_none() {
            return self.state.lock();
        }
        self.state.try_lock().unwrap_or_else(|| self.lock_after_yields(wait))
    }

    /// Locks the state for a receive beside another one, whose CPU has the messages in its cache. A
    /// sender on this CPU, which takes no lock, does more for the queue than a receiver that spins.
    #[cold]
    #[inline(never)]
    fn lock_after_yields(&self, wait: &Wait) -> Guard<'_, T, L> {
        for _ in 0..YIELDS {
            // Beside a busy thread on this CPU, each yield lasts for its time slice, some milliseconds.
            // A call that does not wait for messages has no deadline that this could miss.
            if wait.is_over() {
                break;
            }
            thread::yield_now();
            if let Some(guard) = self.state.try_lock() {
                return guard;
            }
        }
        self.state.lock()
    }

    /// Locks the state, without a drain.
    #[inline(always)]
    pub(crate) fn lock_undrained(&self) -> LockedState<'_, T, L> {
        self.with_ring(self.state.lock())
    }

    /// Locks the state, and drains the ring: each message whose send has returned is in the store.
    ///
    /// It waits for a sender between its claim and its publication.
    #[inline]
    pub(crate) fn lock(&self) -> LockedState<'_, T, L> {
        self.lock_until(Access::Receive, Wait::Forever).unwrap_or_else(without_deadline)
    }

    /// Counts an operation that has timed out.
    #[cold]
    pub(crate) fn count_timeout(&self) {
        self.lock_undrained().counters.timeouts += 1;
    }

    /// Locks the state and drains the ring; shuts it first, except for [`Access::Receive`]. Returns `None`
    /// if a hole is left after the deadline and [`SPINS`] looks.
    pub(crate) fn lock_until(&self, access: Access, wait: Wait) -> Option<LockedState<'_, T, L>> {
        let (mut looks, mut upto) = (0, u64::MAX);
        loop {
            let mut state = self.lock_undrained();
            if access != Access::Receive {
                step!("lock: shut the ring", state.shut());
            }
            if state.drain(upto) || (access == Access::Send && state.closed) {
                return Some(state);
            }
            if looks >= SPINS && wait.is_over() {
                step!("lock: open the undrained ring", state.open_undrained());
                return None;
            }
            if looks == 0 && access == Access::Receive {
                // A receive that waited for holes reported later might never end.
                upto = state.reported();
            }
            drop(state);
            wait_for_sender(looks, wait.has_deadline());
            looks += 1;
        }
    }

    /// Waits a moment for the sender at a hole, and receives a message then. Returns the guard if no
    /// hole is left, or after [`SPINS`] looks.
    #[inline]
    pub(super) fn receive_at_hole<'q>(
        &'q self,
        mut guard: Guard<'q, T, L>,
        preload: &mut Preload<T, L>,
    ) -> Result<Message<T, L::Priority>, Guard<'q, T, L>> {
        let Some(ring) = self.ring.as_ref() else {
            return Err(guard);
        };
        let mut looks = 0;
        while check!("receive: a bounded wait at a hole", looks < SPINS)
            && guard.awaits_sender(ring)
        {
            drop(guard);
            wait_for_sender(looks, false);
            guard = self.state.lock();
            if let Some(message) = guard.fast_receive(Some(ring), &self.config, preload) {
                return Ok(message);
            }
            looks += 1;
        }
        Err(guard)
    }

    /// Allocates the memory that seems to be missing, and locks the state to send a message. The ring is
    /// shut, and drained unless the queue is closed. Returns `None` at the deadline.
    pub(crate) fn lock_to_send(
        &self,
        preload: &mut Preload<T, L>,
        wait: Wait,
    ) -> Option<LockedState<'_, T, L>> {
        let mut preloaded = self.ring.is_none() || self.hint.needs_slot();
        loop {
            self.hint.preload(preload);
            let state = self.lock_until(Access::Send, wait)?;
            if preloaded || !self.hint.needs_slot() {
                return Some(state);
            }
            preloaded = true; // the drained messages took the slots
        }
    }

    /// Returns the guard with the ring, which its drop leaves as the unlocked queue needs it.
    #[inline(always)]
    pub(super) fn with_ring<'q>(&'q self, guard: Guard<'q, T, L>) -> LockedState<'q, T, L> {
        LockedState { ring: self.ring.as_ref(), config: &self.config, guard }
    }
}

/// The looks at a hole without a yield or a sleep, also if the deadline is over: three microseconds.
const SPINS: u32 = if cfg!(offlock_model) { 1 } else { 64 };
/// The yields after them, before a thread without a deadline sleeps.
const YIELDS_TO_SENDER: u32 = 64;

/// Panics in place of the result of a timeout.
#[cold]
fn without_deadline<R>() -> R {
    unreachable!("a wait without a deadline timed out")
}

/// Waits a moment for a sender to publish its message. The sender takes some nanoseconds, unless its
/// thread was stopped.
#[cold]
fn wait_for_sender(looks: u32, has_deadline: bool) {
    if cfg!(offlock_model) {
        return thread::yield_now();
    }
    let Some(looks) = looks.checked_sub(SPINS) else { return hint::spin_loop() };
    // Beside a busy thread on this CPU, each yield lasts for its time slice, some milliseconds. It would
    // miss the deadline.
    let yields = if has_deadline { 0 } else { YIELDS_TO_SENDER };
    let Some(looks) = looks.checked_sub(yields) else { return thread::yield_now() };
    // The pauses grow from 50 us to 1 ms: a deadline is missed by a part of the wait.
    let pause = Duration::from_micros(50) * (looks + 1).min(20);
    Futex::new().wait_for(0, pause);
}
