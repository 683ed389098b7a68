//! The queue: a [`Core`](crate::Core) under a lock, and those who wait.
//!
//! ```text
//!   outside the lock              inside                              outside again
//!
//!   measure, check          ┌─ message or room? ─ yes: done           free what was made for nothing
//!   hint: short? ─► make ──►│      no: wait                     ──►   wake, notify, drop
//!                           └─ put back what nobody needed
//! ```
//!
//! No `malloc`, no `free`, no drop of a message, no waker and no callback runs under the lock, but for
//! memory that another thread took between the hint and the lock: that is counted.

mod batch;
mod blocking;
mod builder;
mod config;
mod deferred;
mod inspect;
mod spin;
mod state;

use std::fmt;
use std::panic::resume_unwind;
use std::time::Instant;

use percpu::sync::{WordGuard, WordLock, step};

pub use self::builder::Builder;

use self::config::Config;
pub(crate) use self::deferred::Deferred;
use self::spin::Spin;
use self::state::{Refused, State};
use crate::core::{Bitmap, Hint, Levels, Message, Preload};
use crate::deadline::Wait;
use crate::error::{NotifyError, NotifyRefused, ReceiveError, SendError, SendRefused};
use crate::quota::Charge;
use crate::waiter::{Rank, rank_of_new};

/// A bounded queue of messages with priorities, for any number of threads and tasks.
///
/// The highest priority comes first; messages of one priority come in the order in which they were
/// sent.
pub struct Queue<T, L: Levels = Bitmap> {
    state: WordLock<State<T, L>>,
    pub(crate) hint: Hint<L>,
    pub(crate) config: Config<T, L>,
    spin: Spin,
    charge: Option<Charge>,
}

/// What a receive gives: the message and its priority.
pub type Received<T, L> = (T, <L as Levels>::Priority);

impl<T, L: Levels> Queue<T, L> {
    /// Sends a message. Waits while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.send_with(value, priority, Wait::FOREVER)
    }

    /// Sends a message if there is room now.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn try_send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.send_with(value, priority, Wait::NO)
    }

    /// Sends a message. Waits as `wait` says while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn send_with(
        &self,
        value: T,
        priority: L::Priority,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        let bytes = match self.config.check(&value, priority) {
            Ok(bytes) => bytes,
            Err(reason) => return Err(SendError { value, reason }),
        };
        let message = Message { value, priority, bytes };
        if self.config.time_lock || self.hint.needs_memory(priority) {
            return self.send_preloaded(message, wait);
        }
        let mut guard = self.state.lock();
        // Comparisons may panic: then the guard goes first, and then the message.
        match guard.begin_fast_send(&self.config, priority, bytes) {
            Some(level) => {
                guard.finish_fast_send(level, message);
                Ok(())
            }
            None => self.send_locked(guard, message, wait),
        }
    }

    /// A send that may need memory: it is got before the lock.
    #[cold]
    #[inline(never)]
    fn send_preloaded(
        &self,
        message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        let mut preload = Preload::new();
        self.hint.preload(message.priority, &mut preload);
        self.send_with_preload(self.lock(), message, wait, preload)
    }

    /// A send beside somebody who waits or is to be told, or that is refused.
    #[inline(never)]
    fn send_locked(
        &self,
        guard: WordGuard<'_, State<T, L>>,
        message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        self.send_with_preload(self.with_hold_timer(guard), message, wait, Preload::new())
    }

    /// The rest of a send.
    #[inline(always)]
    fn send_with_preload(
        &self,
        state: LockedState<'_, T, L>,
        message: Message<T, L::Priority>,
        wait: Wait,
        mut preload: Preload<T, L>,
    ) -> Result<(), SendError<T>> {
        let mut deferred = Deferred::new();
        let put = {
            let mut state = state; // it goes before what was made and collected
            let rank = rank_of_new(wait.urgency_level());
            state.send(&self.config, message, rank, &mut preload, &mut deferred)
        };
        match put {
            Ok(()) => {
                self.run_deferred(&mut deferred);
                Ok(())
            }
            Err((message, SendRefused::Full)) if !wait.is_no() => self.wait_to_send(message, wait),
            Err(not_put) => Err(refuse_or_unwind(not_put, &mut deferred)),
        }
    }

    /// Receives the next message. Waits while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.receive_with(Wait::FOREVER)
    }

    /// Receives the next message if there is one.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Empty`]; [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn try_receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.receive_with(Wait::NO)
    }

    /// Receives the next message. Waits as `wait` says while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`].
    #[inline]
    pub fn receive_with(&self, wait: Wait) -> Result<Received<T, L>, ReceiveError> {
        let mut preload = Preload::new();
        let mut guard = self.state.lock();
        if !self.config.time_lock {
            if let Some(message) = guard.fast_receive(&mut preload) {
                return Ok((message.value, message.priority));
            }
        }
        self.receive_locked(guard, wait)
    }

    /// A receive beside somebody who waits or is to be told, or from an empty queue.
    #[inline(never)]
    fn receive_locked(
        &self,
        guard: WordGuard<'_, State<T, L>>,
        wait: Wait,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let taken = {
            let mut state = self.with_hold_timer(guard);
            match state.receive(&self.config, &mut preload, &mut deferred) {
                None if state.closed => return Err(ReceiveError::Closed),
                taken => taken,
            }
        };
        match taken {
            Some(message) => {
                self.run_deferred(&mut deferred);
                Ok((message.value, message.priority))
            }
            None if wait.is_no() => Err(ReceiveError::Empty),
            None => {
                // A sender for whose message there was no memory is told before we wait for another.
                self.run_deferred(&mut deferred);
                self.wait_to_receive(wait)
            }
        }
    }

    /// Puts a message in, or says why not; if there is no room, it comes back.
    #[inline(always)]
    pub(crate) fn poll_send(
        &self,
        message: Message<T, L::Priority>,
        rank: Rank,
    ) -> Result<Result<(), SendError<T>>, Message<T, L::Priority>> {
        let Message { priority, bytes, .. } = message;
        if self.config.time_lock || self.hint.needs_memory(priority) {
            let mut preload = Preload::new();
            self.hint.preload(priority, &mut preload);
            return self.poll_send_locked(self.lock(), message, rank, preload);
        }
        let mut guard = self.state.lock();
        // Comparisons may panic: then the guard goes first, and then the message.
        match guard.begin_fast_send(&self.config, priority, bytes) {
            Some(level) => {
                guard.finish_fast_send(level, message);
                Ok(Ok(()))
            }
            None => {
                self.poll_send_locked(self.with_hold_timer(guard), message, rank, Preload::new())
            }
        }
    }

    #[inline(never)]
    fn poll_send_locked(
        &self,
        state: LockedState<'_, T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        mut preload: Preload<T, L>,
    ) -> Result<Result<(), SendError<T>>, Message<T, L::Priority>> {
        let mut deferred = Deferred::new();
        let put = {
            let mut state = state; // unlocks before `preload` and `deferred` are dropped
            state.send(&self.config, message, rank, &mut preload, &mut deferred)
        };
        match put {
            Ok(()) => {
                self.run_deferred(&mut deferred);
                Ok(Ok(()))
            }
            Err((message, SendRefused::Full)) => Err(message),
            Err(not_put) => Ok(Err(refuse_or_unwind(not_put, &mut deferred))),
        }
    }

    /// Refuses messages from now on. Who waits to send gets its message back; what is in the queue can
    /// be received. Returns whether it was open.
    pub fn close(&self) -> bool {
        let mut was_open = false;
        let mut never = None; // a notification that nobody calls any more: dropped after the unlock
        let mut deferred = Deferred::new();
        loop {
            {
                let mut state = self.lock();
                was_open |= !std::mem::replace(&mut state.closed, true);
                never = never.or(state.notification.take());
                step!(
                    "close: dismiss every waiter",
                    while deferred.has_room() && state.dismiss_one(&mut deferred) {}
                );
                if !deferred.has_room() {
                    deferred.request_section();
                }
                state.signal_notifiers(&self.config, &mut deferred);
            }
            if !deferred.run() {
                return was_open;
            }
        }
    }

    /// Has `notification` called once, by the next send that brings a message to the empty queue while
    /// nobody waits to receive: on the sender's thread, after the message is there.
    ///
    /// # Errors
    ///
    /// [`NotifyError`] with the notification: one is registered, or the queue is closed, so that it
    /// would never be called.
    pub fn notify<F: FnOnce() + Send + 'static>(
        &self,
        notification: F,
    ) -> Result<(), NotifyError<F>> {
        let boxed = Box::new(notification);
        let reason = {
            let mut state = self.lock();
            if state.closed {
                NotifyRefused::Closed
            } else if state.notification.is_some() {
                NotifyRefused::Busy
            } else {
                state.notification = Some(boxed);
                return Ok(());
            }
        };
        Err(NotifyError { callback: *boxed, reason })
    }

    /// Takes back what was registered; false if nothing is, any more.
    pub fn cancel_notify(&self) -> bool {
        let taken = self.lock().notification.take();
        taken.is_some() // dropped after the unlock
    }

    /// Locks, and notes the time if the queue measures how long its lock is held.
    #[inline(always)]
    pub(crate) fn lock(&self) -> LockedState<'_, T, L> {
        self.with_hold_timer(self.state.lock())
    }

    /// Notes the time of a lock that was just taken, if the queue measures how long it is held.
    #[inline(always)]
    fn with_hold_timer<'q>(&self, guard: WordGuard<'q, State<T, L>>) -> LockedState<'q, T, L> {
        let since = if self.config.time_lock { Some(Instant::now()) } else { None };
        LockedState { guard, since }
    }

    /// Does what was collected under the lock, which is not held any more, and goes on there if it must.
    ///
    /// What panics of it goes on from here. A panic out of `deferred`'s destructor would come when the caller's
    /// result is in its place already, and leak that: a message, if it was a receive.
    #[inline(always)]
    pub(crate) fn run_deferred(&self, deferred: &mut Deferred) {
        if deferred.run() {
            self.serve_waiters();
        }
        deferred.resume_panic();
    }

    /// Goes on where a section of the lock had to stop.
    #[cold]
    fn serve_waiters(&self) {
        let mut deferred = Deferred::new();
        loop {
            let mut preload = Preload::new();
            {
                let mut state = self.lock();
                state.serve_waiters(&self.config, &mut preload, &mut deferred);
            }
            if !deferred.run() {
                return;
            }
        }
    }
}

pub(crate) fn refuse<T>((value, reason): (T, SendRefused)) -> SendError<T> {
    SendError { value, reason }
}

fn refuse_message<T, P>((message, reason): Refused<T, P>) -> SendError<T> {
    SendError { value: message.value, reason }
}

/// Gives back a message that was not put in; or drops it, if what kept it out was a panic of its order,
/// and lets that go on. The lock is not held.
pub(crate) fn refuse_or_unwind<T, P>(
    not_put: Refused<T, P>,
    deferred: &mut Deferred,
) -> SendError<T> {
    if let Some(panic) = deferred.take_panic() {
        drop(not_put);
        resume_unwind(panic);
    }
    refuse_message(not_put)
}

/// The queue's state, locked.
pub(crate) struct LockedState<'q, T, L: Levels> {
    guard: WordGuard<'q, State<T, L>>,
    /// If the queue looks how long it is held.
    since: Option<Instant>,
}

impl<T, L: Levels> std::ops::Deref for LockedState<'_, T, L> {
    type Target = State<T, L>;

    #[inline(always)]
    fn deref(&self) -> &State<T, L> {
        &self.guard
    }
}

impl<T, L: Levels> std::ops::DerefMut for LockedState<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State<T, L> {
        &mut self.guard
    }
}

impl<T, L: Levels> Drop for LockedState<'_, T, L> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(since) = self.since {
            self.guard.counters.record_hold(since);
        }
    }
}

// What panics under the lock or while somebody waits leaves nothing half done.
impl<T, L: Levels> std::panic::UnwindSafe for Queue<T, L> {}
impl<T, L: Levels> std::panic::RefUnwindSafe for Queue<T, L> {}

impl<T, L: Levels> fmt::Debug for Queue<T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Queue");
        // Written after the unlock: the writer is the user's.
        let seen = self.state.try_lock().map(|state| (state.core.len(), state.closed));
        if let Some((len, closed)) = seen {
            debug.field("len", &len).field("closed", &closed);
        }
        debug.field("max_messages", &self.config.max_messages).finish_non_exhaustive()
    }
}
