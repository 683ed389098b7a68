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

mod batch;
mod blocking;
mod builder;
mod config;
mod deferred;
mod inspect;
mod lock;
mod state;
#[cfg(all(test, not(offlock_model)))]
mod tests;

use std::fmt;
use std::mem;
use std::time::Instant;

use offlock_sync::{WordGuard, WordLock, check, step};

pub use self::builder::Builder;

use self::config::Config;
pub(crate) use self::config::Section;
pub(crate) use self::deferred::Deferred;
use self::deferred::{catch_comparison, drop_and_unwind};
use self::state::Refused;
pub(crate) use self::state::State;
pub(crate) use self::state::{Access, LockedState};
use crate::core::{Bitmap, Hint, Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::parker::Spin;
use crate::parker::Wait;
use crate::staging::Ring;
use crate::waiter::Demand;

/// A bounded priority queue for any number of threads and tasks.
///
/// Messages are received by priority, the highest first. Messages of equal priority are received in
/// the order in which they were sent.
///
/// Threads share a queue by reference or in an `Arc`. A queue that closes when its last sender or
/// receiver is dropped comes from [`Builder::channel`].
///
/// ```
/// use std::thread;
/// use mq_rbtree::Queue;
///
/// let queue: Queue<&str> = Queue::new(100)?; // at most 100 messages
/// thread::scope(|s| {
///     s.spawn(|| {
///         queue.send("later", 1).unwrap(); // waits if the queue is full
///         queue.send("now", 9).unwrap();
///         queue.close(); // refuses further messages
///     });
///     while let Ok((message, priority)) = queue.receive() {
///         println!("{message} ({priority})"); // until the queue is closed and empty
///     }
/// });
/// assert!(queue.is_empty());
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub struct Queue<T, L: Levels = Bitmap> {
    /// Takes the sends that need no lock, unless priorities are compared or limits need the lock.
    ring: Option<Ring<T, L::Priority>>,
    state: WordLock<State<T, L>>,
    pub(crate) hint: Hint<L>,
    pub(crate) config: Config<L>,
    spin: Spin,
    /// For senders of the ring.
    room_spin: Spin,
}

/// A received message and its priority.
///
/// ```
/// use mq_rbtree::{Bitmap, Queue, Received};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// queue.send("a message", 7)?;
/// let (message, priority): Received<&str, Bitmap> = queue.receive()?;
/// assert_eq!((message, priority), ("a message", 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Received<T, L> = (T, <L as Levels>::Priority);

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
        match self.send_at_once(self.config.admit(value, priority)?) {
            Ok(()) => Ok(()),
            Err(message) => self.send_or_wait(message, *wait),
        }
    }

    /// Sends a message, or returns it: the queue is closed or not idle, or room or memory is
    /// missing. Never waits for another sender.
    #[inline(always)]
    pub(crate) fn send_at_once(
        &self,
        message: Message<T, L::Priority>,
    ) -> Result<(), Message<T, L::Priority>> {
        let priority = message.priority;
        if let Some(ring) = &self.ring {
            return match self.try_stage(ring, message) {
                Ok(()) => Ok(()),
                Err(message) => self.stage_refreshed(ring, message),
            };
        }
        if self.hint.needs_memory() {
            return Err(message);
        }
        let mut guard = self.state.lock();
        let look = || guard.level_at_once(&self.config, priority);
        let found = catch_comparison::<L, _>(look);
        let Ok(Some(level)) = found else {
            drop(guard);
            return match found {
                Err(panic) => drop_and_unwind(message, panic),
                Ok(_) => Err(message),
            };
        };
        // SAFETY: `level_at_once` has the level from `get_or_insert_level_no_alloc`, and nothing was
        // called since.
        unsafe { guard.core.push_to_level_no_alloc(level, message) };
        guard.count_sent();
        Ok(())
    }

    /// Sends a message through the ring, or returns it: the ring is shut, or room or memory is
    /// missing as far as can be seen without the lock.
    #[inline(always)]
    fn try_stage(
        &self,
        ring: &Ring<T, L::Priority>,
        message: Message<T, L::Priority>,
    ) -> Result<(), Message<T, L::Priority>> {
        if self.hint.needs_memory() {
            return Err(message);
        }
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
            message = match self.try_stage(ring, message) {
                Err(message) if !self.hint.needs_memory() => message,
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
        let mut section = self.section();
        let put = match self.lock_to_send(&mut section.preload, wait) {
            Some(mut state) => state.send(message, &mut section),
            None => {
                self.count_timeout();
                return Err(SendError { value: message.value, reason: SendRefused::Timeout });
            }
        };
        match put {
            Err((message, SendRefused::Full)) if wait != Wait::No => {
                self.wait_to_send(message, wait)
            }
            put => self.finish_send(put, &mut section.deferred),
        }
    }

    /// Runs the deferred actions after the unlock, and returns the result of a send.
    ///
    /// A refused message goes back to its sender, also if the waker of another task panics: that
    /// panic is dropped. If the message's own comparison has panicked, that panic resumes.
    pub(crate) fn finish_send(
        &self,
        put: Result<(), Refused<T, L::Priority>>,
        deferred: &mut Deferred,
    ) -> Result<(), SendError<T>> {
        let Err((message, reason)) = put else {
            self.run_deferred(deferred);
            return Ok(());
        };
        // The only panic before the actions is that of the comparison.
        let comparison = deferred.take_panic();
        self.run_and_keep_panic(deferred);
        deferred.drop_panic();
        match comparison {
            None => Err(SendError { value: message.value, reason }),
            Some(panic) => drop_and_unwind(message, panic),
        }
    }

    /// Returns a message, with the room that it needs. The lock is not held.
    pub(crate) fn with_demand(
        &self,
        message: Message<T, L::Priority>,
    ) -> (Message<T, L::Priority>, Demand<L::Priority>) {
        let demand = || self.config.demand(message.priority);
        match catch_comparison::<L, _>(demand) {
            Ok(demand) => (message, demand),
            Err(panic) => drop_and_unwind(message, panic),
        }
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
        let mut preload = Preload::new();
        let mut guard = self.lock_yielding(wait);
        let (ring, config) = (self.ring.as_ref(), &self.config);
        if let Some(message) = guard.fast_receive(ring, config, &mut preload) {
            return Ok((message.value, message.priority));
        }
        self.receive_locked(guard, *wait)
    }

    /// Receives a message if the queue is not idle: a thread waits, a notifier is armed, or
    /// the queue is empty.
    #[inline(never)]
    fn receive_locked<'q>(
        &'q self,
        guard: WordGuard<'q, State<T, L>>,
        wait: Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut section = self.section();
        let guard = match self.receive_at_hole(guard, &mut section.preload) {
            Ok(message) => return Ok((message.value, message.priority)),
            Err(guard) => guard,
        };
        let (received, position) = {
            let mut state = self.with_ring(guard);
            if !check!("receive: wait for the sender at a hole", state.drain(u64::MAX)) {
                drop(state);
                let Some(locked) = self.lock_until(Access::Receive, wait) else {
                    self.count_timeout();
                    return Err(ReceiveError::Timeout);
                };
                state = locked;
            }
            (state.receive(&mut section), state.cursor.next_staged())
        };
        // Wakes a sender whose message found no memory, before this thread waits.
        self.run_deferred(&mut section.deferred);
        match received {
            Some(received) => received,
            None if wait == Wait::No => Err(ReceiveError::Empty),
            None => self.wait_to_receive(wait, position),
        }
    }

    /// Receives a message for a task, unless the queue is empty or not idle. Never waits for a
    /// sender.
    #[inline(always)]
    pub(crate) fn poll_receive(&self) -> Option<Received<T, L>> {
        let mut preload = Preload::new();
        let mut guard = self.state.lock();
        let message = guard.fast_receive(self.ring.as_ref(), &self.config, &mut preload)?;
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
        let mut was_open = false;
        let mut section = self.section();
        loop {
            {
                let mut state = self.lock_undrained();
                step!("close: shut the ring", state.shut());
                was_open |= !mem::replace(&mut state.closed, true);
                step!(
                    "close: dismiss every waiter",
                    while section.deferred.has_room() && state.dismiss_one(&mut section.deferred) {
                    }
                );
                if !section.deferred.has_room() {
                    section.deferred.request_section();
                }
                state.signal_notifiers(&mut section);
            }
            if !section.deferred.run() {
                return was_open;
            }
        }
    }

    /// Returns what a lock section has beside the state.
    #[inline(always)]
    pub(crate) fn section(&self) -> Section<'_, T, L> {
        Section { config: &self.config, deferred: Deferred::new(), preload: Preload::new() }
    }

    /// Runs the deferred actions after the unlock, and serves more waiters if there was no room for
    /// all.
    ///
    /// A panic of an action resumes from here. If the destructor of `deferred` resumed it, the
    /// result of the caller would be in its place already and would leak: a message, if the caller
    /// was a receive.
    #[inline(always)]
    pub(crate) fn run_deferred(&self, deferred: &mut Deferred) {
        self.run_and_keep_panic(deferred);
        deferred.resume_panic();
    }

    /// Does the same, but keeps the first panic of an action in `deferred`.
    #[inline(always)]
    pub(crate) fn run_and_keep_panic(&self, deferred: &mut Deferred) {
        if deferred.run() {
            self.serve_waiters(deferred);
        }
    }

    /// Serves the waiters that an earlier lock section had no room for.
    #[cold]
    fn serve_waiters(&self, deferred: &mut Deferred) {
        let mut section = self.section();
        mem::swap(&mut section.deferred, deferred);
        loop {
            // While others wait, the ring is shut and drained.
            self.lock_undrained().serve_waiters(&mut section);
            if !section.deferred.run() {
                break;
            }
        }
        mem::swap(&mut section.deferred, deferred);
    }
}

impl<T, L: Levels> Drop for Queue<T, L> {
    fn drop(&mut self) {
        // The store drops all messages.
        if let Some(ring) = &self.ring {
            self.state.get_mut().drain(ring, u64::MAX);
        }
    }
}

// A panic under the lock or in a wait leaves the state consistent.
impl<T, L: Levels> std::panic::UnwindSafe for Queue<T, L> {}
impl<T, L: Levels> std::panic::RefUnwindSafe for Queue<T, L> {}

impl<T, L: Levels> fmt::Debug for Queue<T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Queue");
        // The fields are written after the unlock, because the writer is the user's.
        let seen = self.state.try_lock().map(|mut state| {
            if let Some(ring) = &self.ring {
                state.drain(ring, u64::MAX);
            }
            (state.core.len(), state.closed)
        });
        if let Some((len, closed)) = seen {
            debug.field("len", &len).field("closed", &closed);
        }
        debug.field("max_messages", &self.config.max_messages).finish_non_exhaustive()
    }
}
