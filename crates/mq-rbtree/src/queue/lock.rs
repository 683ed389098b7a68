//! The ways to lock a queue: with or without a drain of the ring, and up to a deadline.
//!
//! A thread that drains the ring may have to wait for a sender between its claim and its publication.
//! It waits without the lock.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use offlock_sync::{Futex, WaitSet, WordGuard, check, hint, step, thread};

use super::Queue;
use super::park::Wait;
use super::state::State;
use crate::core::{Levels, Message, Preload};

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
        self.with_queue(self.state.lock())
    }

    /// Locks the state, and drains the ring: each message whose send has returned is in the store.
    ///
    /// It waits for a sender between its claim and its publication.
    #[inline]
    pub(crate) fn lock(&self) -> LockedState<'_, T, L> {
        self.lock_until(Access::Receive, Wait::Forever).unwrap_or_else(without_deadline)
    }

    /// Locks the state for a wait that is given up. The unlock wakes the waiters for which the state has
    /// something.
    #[cold]
    pub(crate) fn give_up(&self) -> LockedState<'_, T, L> {
        let mut state = self.lock_undrained();
        // At a hole `lock_until` has left it shut.
        step!("give up: open the undrained ring", state.open_undrained());
        state
    }

    /// Counts an operation that has timed out.
    #[cold]
    pub(crate) fn count_timeout(&self) {
        self.give_up().counters.timeouts += 1;
    }

    /// Locks the state and drains the ring; shuts it first, except for [`Access::Receive`]. Returns `None`
    /// if a hole is left after the deadline and [`SPINS`] looks: the caller [gives up](Self::give_up) then.
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
            if let Some(message) = self.fast_receive(&mut guard, preload) {
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

    /// Returns the guard with the queue, which its drop leaves as the unlocked queue needs it.
    #[inline(always)]
    pub(super) fn with_queue<'q>(&'q self, guard: Guard<'q, T, L>) -> LockedState<'q, T, L> {
        let [receivers, senders] =
            [&self.receivers, &self.senders].map(|set| Wake { set, units: 0 });
        LockedState { queue: self, guard, receivers, senders }
    }

    /// Returns whether no thread or task waits and no notifier is armed.
    #[inline(always)]
    pub(super) fn is_quiet(&self, state: &State<T, L>) -> bool {
        self.receivers.waiting() == 0 && self.senders.waiting() == 0 && state.armed == 0
    }

    /// Returns whether senders may use the ring, or append to the store at once: the queue is quiet and open.
    #[inline(always)]
    pub(super) fn may_open(&self, state: &State<T, L>) -> bool {
        self.is_quiet(state) && !state.closed
    }
}

/// What the queue is locked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To see the messages whose sends have returned.
    Receive,
    /// To wait, or to arm a notifier.
    Wait,
    /// To send; a closed queue refuses that without a look at the ring.
    Send,
}

/// The locked state of a queue. Its drop opens a quiet ring, unlocks, and then wakes the waiters for which the
/// state has something.
pub(crate) struct LockedState<'q, T, L: Levels> {
    queue: &'q Queue<T, L>,
    guard: Guard<'q, T, L>,
    // Dropped in this order, after the guard: a panic of a waker does not keep the others waiting.
    receivers: Wake<'q>,
    senders: Wake<'q>,
}

/// The waiters to wake after the unlock.
struct Wake<'q> {
    set: &'q WaitSet,
    units: usize,
}

impl Drop for Wake<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.units > 0 {
            self.set.wake_for(self.units);
        }
    }
}

impl<T, L: Levels> LockedState<'_, T, L> {
    /// Makes later sends take the lock.
    pub(crate) fn shut(&mut self) {
        if let Some(ring) = &self.queue.ring {
            ring.shut(&mut self.guard.cursor);
        }
    }

    /// Opens a ring that could not be drained, if no thread or task waits and no notifier is armed.
    pub(super) fn open_undrained(&mut self) {
        if let Some(ring) = &self.queue.ring {
            if self.queue.may_open(&self.guard) {
                ring.open_undrained(&mut self.guard.cursor);
            }
        }
    }

    /// Drains the ring: see [`State::drain`].
    #[inline]
    pub(crate) fn drain(&mut self, upto: u64) -> bool {
        match &self.queue.ring {
            Some(ring) => self.guard.drain(ring, upto),
            None => true,
        }
    }

    /// Returns the position below which senders have reported holes.
    fn reported(&self) -> u64 {
        self.queue.ring.as_ref().map_or(0, |ring| ring.reported())
    }

    /// Decides whom to wake after the unlock: as many as there are messages or places, or all that a closed
    /// queue has nothing for.
    #[cold]
    #[inline(never)]
    fn serve(&mut self) {
        let (queue, state) = (self.queue, &mut *self.guard);
        if state.armed != 0 {
            step!("unlock: signal the armed notifiers", state.signal_notifiers(&queue.config));
        }
        if queue.receivers.waiting() != 0 {
            let messages = if state.has_ended() { usize::MAX } else { state.core.len() };
            step!("unlock: wake receivers for the messages", self.receivers.units = messages);
        }
        if queue.senders.waiting() != 0 {
            let places = queue.config.max_messages - state.core.occupied();
            let places = if state.closed { usize::MAX } else { places };
            step!("unlock: wake senders for the places", self.senders.units = places);
        }
    }
}

impl<T, L: Levels> Deref for LockedState<'_, T, L> {
    type Target = State<T, L>;

    #[inline(always)]
    fn deref(&self) -> &State<T, L> {
        &self.guard
    }
}

impl<T, L: Levels> DerefMut for LockedState<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State<T, L> {
        &mut self.guard
    }
}

impl<T, L: Levels> Drop for LockedState<'_, T, L> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.queue.is_quiet(&self.guard) {
            self.serve();
        }
        if let Some(ring) = &self.queue.ring {
            let state = &mut *self.guard;
            state.set_room(ring, &self.queue.config);
            let quiet = check!("leave: open the quiet ring only", self.queue.may_open(state));
            if quiet && state.cursor.is_drained() {
                ring.reopen(&mut state.cursor);
            }
        }
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
