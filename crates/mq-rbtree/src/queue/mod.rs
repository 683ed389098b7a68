//! The queue: a [`Core`](crate::Core) under a lock, and the waiting threads and tasks.
//!
//! ```text
//!   outside the lock            under the lock                    outside the lock
//!
//!   check                   ┌─ message or room? ─ yes: done       free unused memory
//!   hint: memory needed? ──►│      no: wait                   ──► wake, drop
//!     yes: allocate         └─ store unused memory
//! ```
//!
//! Under the lock nothing is allocated or freed, no message is dropped, and no waker runs.
//! There is one exception: if another thread took the memory between the hint and the lock,
//! memory is allocated under the lock, which is counted.
//!
//! What a panic of user code must not drop under the lock, a message or memory, is declared before the
//! guard of the lock, so that an unwind drops it after the unlock.

mod batch;
mod builder;
mod inspect;
mod lock;
mod park;
#[cfg(all(test, not(offlock_model)))]
mod tests;
mod wait;

use std::mem;
use std::time::Instant;

use offlock_sync::{check, step};

pub use self::builder::Builder;
pub use self::lock::{Queue, Received};

pub(crate) use self::lock::Access;
use self::lock::{Alone, Guard, SPINS, State, wait_for_sender};
pub(crate) use self::park::Wait;
pub(crate) use self::wait::Look;
use crate::core::{Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::staging::Ring;

impl<T, L: Levels> Queue<T, L> {
    /// Sends a message. Waits while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.send_by(value, priority, &Wait::Forever)
    }

    /// Sends a message if there is room now.
    ///
    /// It may wait for another sender to finish: see [Progress](crate#progress).
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn try_send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.send_by(value, priority, &Wait::No)
    }

    /// Sends a message. Waits until `deadline` while there is no room.
    ///
    /// After the deadline it still sends a message that has room.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn send_deadline(
        &self,
        value: T,
        priority: L::Priority,
        deadline: Instant,
    ) -> Result<(), SendError<T>> {
        self.send_by(value, priority, &Wait::Until(deadline))
    }

    /// The common part of the sends. The wait is passed by reference, and copied only where a path needs it:
    /// a copy at each call cost `send` and `receive` half a nanosecond each.
    #[inline]
    fn send_by(&self, value: T, priority: L::Priority, wait: &Wait) -> Result<(), SendError<T>> {
        let message = self.config.admit(value, priority)?;
        match self.try_stage(message) {
            Ok(()) => Ok(()),
            Err(message) => self.send_unstaged(message, wait),
        }
    }

    /// Sends a message that was not staged. Out of line: its registers are saved here only.
    #[inline(never)]
    fn send_unstaged(
        &self,
        message: Message<T, L::Priority>,
        wait: &Wait,
    ) -> Result<(), SendError<T>> {
        match self.send_at_once(message) {
            Ok(()) => Ok(()),
            Err(message) => self.send_or_wait(message, *wait),
        }
    }

    /// Sends a message that was not staged, or returns it: the queue is closed or not idle, or room or
    /// memory is missing. Never waits for another sender.
    #[inline(always)]
    fn send_at_once(
        &self,
        message: Message<T, L::Priority>,
    ) -> Result<(), Message<T, L::Priority>> {
        if let Some(ring) = &self.ring {
            return self.stage_refreshed(ring, message);
        }
        if self.hint.needs_memory() {
            return Err(message);
        }
        let priority = message.priority;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let room = self.may_open(state) && state.core.occupied() < self.config.len_limit(priority);
        let level = if room { state.core.get_or_insert_level_no_alloc(priority) } else { None };
        let Some(level) = level else {
            drop(guard);
            return Err(message);
        };
        // SAFETY: `get_or_insert_level_no_alloc` has just returned the level.
        unsafe { state.core.push_to_level_no_alloc(level, message) };
        state.count_sent();
        Ok(())
    }

    /// Sends a message through the ring, or returns it: the queue has no ring, the ring is shut, or the
    /// claims have reached the limit that was published last.
    #[inline(always)]
    fn try_stage(&self, message: Message<T, L::Priority>) -> Result<(), Message<T, L::Priority>> {
        let Some(ring) = &self.ring else { return Err(message) };
        // No look at the memory: up to the limit of claims the queue has it (invariant 3 of `staging`).
        match ring.claim() {
            // SAFETY: the position has just been claimed.
            Some(position) => unsafe { ring.publish(position, message.value, message.priority) },
            None => return Err(message),
        }
        Ok(())
    }

    /// Stages a message in the room that was published last. The first send that finds no room copies it
    /// for the senders that follow.
    #[cold]
    #[inline(never)]
    fn stage_refreshed(
        &self,
        ring: &Ring<T, L::Priority>,
        mut message: Message<T, L::Priority>,
    ) -> Result<(), Message<T, L::Priority>> {
        // Other senders may claim the room before this one does, while receivers make more of it. A send
        // that took the lock then would shut the ring for all senders.
        while ring.refresh() {
            message = match self.try_stage(message) {
                Err(message) => message,
                done => return done,
            };
        }
        Err(message)
    }

    /// Sends a message that [`send_at_once`](Self::send_at_once) returned, with memory that is allocated
    /// before the lock, and waits if there is no room.
    #[cold]
    #[inline(never)]
    fn send_or_wait(
        &self,
        mut message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        if let Some(ring) = &self.ring {
            while wait != Wait::No && self.spin_for_room(ring, wait) {
                message = match self.stage_refreshed(ring, message) {
                    Ok(()) => return Ok(()),
                    Err(message) => message,
                };
            }
        }
        let mut message = Some(message);
        if let Look::Done(sent) = self.look_to_send(&mut message, wait) {
            return sent;
        }
        let Some(message) = message else { unreachable!("a refused message") };
        if wait == Wait::No {
            return Err(SendError { value: message.value, reason: SendRefused::Full });
        }
        self.wait_to_send(message, wait)
    }

    /// Receives the next message. Waits while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.receive_by(&Wait::Forever)
    }

    /// Receives the next message if there is one.
    ///
    /// It may wait for a sender to finish: see [Progress](crate#progress).
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Empty`], or [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn try_receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.receive_by(&Wait::No)
    }

    /// Receives the next message. Waits until `deadline` while there is none.
    ///
    /// After the deadline it still receives a message that is there.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`].
    #[inline]
    pub fn receive_deadline(&self, deadline: Instant) -> Result<Received<T, L>, ReceiveError> {
        self.receive_by(&Wait::Until(deadline))
    }

    /// The common part of the receives: see [`send_by`](Self::send_by).
    #[inline]
    fn receive_by(&self, wait: &Wait) -> Result<Received<T, L>, ReceiveError> {
        let mut guard = self.lock_yielding(wait);
        match self.take_alone(&mut guard) {
            Ok(message) => Ok((message.value, message.priority)),
            // Out of line, so that their registers are saved there only; one for each, because the message
            // in an `Option` would go through memory.
            Err(None) => self.receive_drained(guard, wait),
            Err(Some(alone)) => self.receive_exchanged(guard, alone, wait),
        }
    }

    #[inline(never)]
    fn receive_drained<'q>(
        &'q self,
        guard: Guard<'q, T, L>,
        wait: &Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        self.receive_stored(guard, None, wait)
    }

    #[inline(never)]
    fn receive_exchanged<'q>(
        &'q self,
        guard: Guard<'q, T, L>,
        alone: Message<T, L::Priority>,
        wait: &Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        self.receive_stored(guard, Some(alone), wait)
    }

    /// Receives a message through the store.
    #[inline(always)]
    fn receive_stored<'q>(
        &'q self,
        guard: Guard<'q, T, L>,
        alone: Option<Message<T, L::Priority>>,
        wait: &Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut preload = Preload::new();
        let mut guard = guard; // dropped before the preload
        match self.drain_and_receive(&mut guard, alone, &mut preload) {
            Some(message) => Ok((message.value, message.priority)),
            None => self.receive_locked(guard, *wait),
        }
    }

    /// Takes the message of the ring that is alone: see [`State::take_alone`].
    #[inline(always)]
    fn take_alone(&self, state: &mut State<T, L>) -> Alone<T, L::Priority> {
        self.ring.as_ref().map_or(Err(None), |ring| state.take_alone(ring, &self.config))
    }

    /// Receives the next message. Returns `None` if there is none, if the queue is not quiet, or if a sender
    /// must publish its message first.
    #[inline(always)]
    fn fast_receive(
        &self,
        state: &mut State<T, L>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        match self.take_alone(state) {
            Ok(message) => Some(message),
            Err(alone) => self.drain_and_receive(state, alone, preload),
        }
    }

    /// Receives the next message as [`fast_receive`](Self::fast_receive) does, after a message that was
    /// `alone` in the ring was taken, or none.
    #[inline(always)]
    fn drain_and_receive(
        &self,
        state: &mut State<T, L>,
        alone: Option<Message<T, L::Priority>>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        match &self.ring {
            // A wait, and the arming of a notifier, shuts the ring and looks at the queue then.
            Some(ring) if !state.cursor.is_shut() => {
                state.receive_staged(ring, &self.config, alone, preload)
            }
            None if self.is_quiet(state) => state.core.pop_with(preload),
            _ => None,
        }
    }

    /// Receives a message if the queue is not idle: a thread waits, a notifier is armed, or
    /// the queue is empty.
    #[inline(never)]
    fn receive_locked<'q>(
        &'q self,
        guard: Guard<'q, T, L>,
        wait: Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut preload = Preload::new();
        let guard = match self.receive_at_hole(guard, &mut preload) {
            Ok(message) => return Ok((message.value, message.priority)),
            Err(guard) => guard,
        };
        let mut state = self.with_queue(guard);
        if !check!("receive: wait for the sender at a hole", state.drain(u64::MAX)) {
            drop(state);
            let Some(locked) = self.lock_until(Access::Receive, wait) else {
                self.count_timeout();
                return Err(ReceiveError::Timeout);
            };
            state = locked;
        }
        let (received, position) = (state.receive(&mut preload), state.cursor.next_staged());
        drop(state); // a panic of a waker drops the message
        match received {
            Some(received) => received,
            None if wait == Wait::No => Err(ReceiveError::Empty),
            None => self.wait_to_receive(wait, position),
        }
    }

    /// Waits a moment for the sender at a hole, and receives a message then. Returns the guard if no
    /// hole is left, or after [`SPINS`] looks.
    #[inline]
    fn receive_at_hole<'q>(
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
            wait_for_sender(looks);
            guard = self.state.lock();
            if let Some(message) = self.fast_receive(&mut guard, preload) {
                return Ok(message);
            }
            looks += 1;
        }
        Err(guard)
    }

    /// Receives a message for a task, unless the queue is empty or not quiet. Never waits for a
    /// sender.
    #[inline(always)]
    pub(crate) fn poll_receive(&self) -> Option<Received<T, L>> {
        let mut preload = Preload::new();
        let mut guard = self.state.lock();
        let message = self.fast_receive(&mut guard, &mut preload)?;
        Some((message.value, message.priority))
    }

    /// Closes the queue: it refuses messages from now on. Returns whether it was open.
    ///
    /// Waiting senders get their messages back. The messages in the queue can still be received.
    /// Waiting receivers return [`ReceiveError::Closed`], unless a message in a
    /// [`MessageGuard`](crate::MessageGuard) may come back. To get every message, call
    /// [`receive`](Self::receive) until it returns `Closed`: [`drain`](Self::drain) does not wait for
    /// the guards.
    ///
    /// ```
    /// use mq_rbtree::{Queue, ReceiveError, SendRefused};
    ///
    /// let queue: Queue<&str> = Queue::new(8)?;
    /// queue.send("last", 1)?;
    /// assert!(queue.close());
    /// assert_eq!(queue.send("late", 1).unwrap_err().reason, SendRefused::Closed);
    /// assert_eq!(queue.receive(), Ok(("last", 1)));
    /// assert_eq!(queue.receive(), Err(ReceiveError::Closed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&self) -> bool {
        let mut state = self.lock_undrained();
        step!("close: shut the ring", state.shut());
        !mem::replace(&mut state.closed, true)
    }
}
