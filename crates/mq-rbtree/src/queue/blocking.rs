//! Threads that wait.
//!
//! The node of a waiting thread is on its stack. The thread leaves this module only when the node
//! is off its list: either another thread has removed it and has stored that in the node's state,
//! or the thread has removed it at its deadline. The lock decides between the two, so a deadline
//! cannot lose a message that was handed over.

use std::pin::pin;
use std::ptr::NonNull;

use percpu::sync::{WordGuard, step};

use super::{Deferred, Queue, Received, State, refuse_message, refuse_or_unwind};
use crate::core::{Levels, Message, Preload};
use crate::deadline::Wait;
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::waiter::{CacheAligned, Rank, WaitEnd, Waiter};

impl<T, L: Levels> Queue<T, L> {
    /// Continues a send that found no room.
    #[cold]
    pub(super) fn wait_to_send(
        &self,
        mut message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        let demand = self.config.demand(message.priority, message.bytes);
        let lines = pin!(CacheAligned(Waiter::new(wait.urgency_level())));
        let waiter = &lines.as_ref().get_ref().0;
        let node = NonNull::from(waiter);
        loop {
            let mut preload = Preload::new();
            let mut deferred = Deferred::new();
            self.hint.preload(message.priority, &mut preload);
            let mut state = self.lock();
            // SAFETY: the node is on no list, and the lock is held.
            let rank = unsafe { waiter.inner() }.rank();
            match state.send(&self.config, message, rank, &mut preload, &mut deferred) {
                Ok(()) => {
                    drop(state);
                    self.run_deferred(&mut deferred);
                    return Ok(());
                }
                Err((back, SendRefused::Full)) => message = back,
                Err(other) => {
                    drop(state);
                    return Err(refuse_or_unwind(other, &mut deferred));
                }
            }
            waiter.reset();
            // SAFETY: the node is on no list, and the lock is held.
            let inner = unsafe { waiter.inner() };
            inner.demand = Some(demand);
            state.core.keep_preload(message.priority, &mut preload);
            inner.message = Some(message);
            step!(
                "send: register in the lock section of the check",
                // SAFETY: the node is on no list. It is pinned in this frame, which it leaves only
                // when it is off this list: `sleep` has seen the end of the wait, or `unlist` has
                // run.
                unsafe { state.wait_to_send(node, None) }
            );
            drop(state);
            let ended = self.sleep(waiter, wait);
            let late = ended == WaitEnd::TimedOut;
            // SAFETY: the node is alive, and no other list ever had it.
            let state = late.then(|| self.unlist(|state| unsafe { state.senders.remove(node) }));
            // SAFETY: the node is off its list, because `poll_end` said so or `unlist` returned. By
            // invariant 1 of the waiters its message belongs to this thread now.
            let Some(back) = (unsafe { waiter.inner() }).message.take() else { return Ok(()) };
            let Some(Some(state)) = state else {
                message = back;
                continue;
            };
            // SAFETY: the node is off its list, so this thread alone uses it.
            let rank = unsafe { waiter.inner() }.rank();
            return self.send_at_deadline(back, rank, state);
        }
    }

    /// Continues a receive that found no message.
    #[cold]
    pub(super) fn wait_to_receive(&self, wait: Wait) -> Result<Received<T, L>, ReceiveError> {
        let lines = pin!(CacheAligned(Waiter::new(wait.urgency_level())));
        let waiter = &lines.as_ref().get_ref().0;
        let node = NonNull::from(waiter);
        loop {
            let mut preload = Preload::new();
            let mut deferred = Deferred::new();
            let mut state = self.lock();
            if let Some(message) = state.receive(&self.config, &mut preload, &mut deferred) {
                drop(state);
                self.run_deferred(&mut deferred);
                return Ok((message.value, message.priority));
            }
            if state.closed {
                return Err(ReceiveError::Closed);
            }
            waiter.reset();
            step!(
                "receive: register in the lock section of the check",
                // SAFETY: the node is on no list. It is pinned in this frame, which it leaves only
                // when it is off this list: `sleep` has seen the end of the wait, or `unlist` has
                // run.
                unsafe { state.wait_to_receive(node, None) }
            );
            drop(state);
            // Wakes a sender whose message found no memory, before this thread sleeps.
            self.run_deferred(&mut deferred);
            let ended = self.sleep(waiter, wait);
            let late = ended == WaitEnd::TimedOut;
            // SAFETY: the node is alive, and no other list ever had it.
            let state = late.then(|| self.unlist(|state| unsafe { state.receivers.remove(node) }));
            // SAFETY: the node is off its list, because `poll_end` said so or `unlist` returned. By
            // invariant 1 of the waiters its message belongs to this thread now.
            let message = unsafe { waiter.inner() }.message.take();
            step!(
                "receive: a message beats the deadline",
                if let Some(message) = message {
                    return Ok((message.value, message.priority));
                }
            );
            if let Some(Some(state)) = state {
                return self.receive_at_deadline(state);
            }
        }
    }

    /// Waits until the node is off its list, or until the deadline. Does not spin if the deadline
    /// is over.
    fn sleep(&self, waiter: &Waiter<T, L::Priority>, wait: Wait) -> WaitEnd {
        let late = wait.deadline().is_some_and(|deadline| deadline.is_over());
        let spins = if late { 0 } else { self.spin.spins() };
        let (ended, in_time) = waiter.wait(wait.deadline(), spins);
        if spins > 0 {
            self.spin.record(in_time);
        }
        ended
    }

    /// Locks, and takes a node off its list. Returns `None` if another thread has taken it off
    /// before.
    fn unlist(
        &self,
        remove: impl FnOnce(&mut State<T, L>) -> bool,
    ) -> Option<WordGuard<'_, State<T, L>>> {
        let mut guard = self.state.lock();
        remove(&mut guard).then_some(guard)
    }

    /// Completes a send at its deadline.
    ///
    /// It succeeds if there is room now: room of a task that has a permit and has not polled yet.
    fn send_at_deadline(
        &self,
        message: Message<T, L::Priority>,
        rank: Rank,
        mut state: WordGuard<'_, State<T, L>>,
    ) -> Result<(), SendError<T>> {
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let put = state.send(&self.config, message, rank, &mut preload, &mut deferred);
        if let Err((_, SendRefused::Full)) = &put {
            state.counters.timeouts += 1;
        }
        // The room that this sender needed may have blocked the senders behind it.
        step!(
            "send timed out: serve the other senders",
            state.serve_waiters(&self.config, &mut preload, &mut deferred)
        );
        drop(state);
        self.run_deferred(&mut deferred);
        put.map_err(|(message, reason)| match reason {
            SendRefused::Full => refuse_message((message, SendRefused::Timeout)),
            _ => refuse_or_unwind((message, reason), &mut deferred),
        })
    }

    /// Completes a receive at its deadline.
    ///
    /// It succeeds if there is a message now: that of a task that has a permit and has not polled
    /// yet.
    fn receive_at_deadline(
        &self,
        mut state: WordGuard<'_, State<T, L>>,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let taken = state.receive(&self.config, &mut preload, &mut deferred);
        state.counters.timeouts += u64::from(taken.is_none());
        drop(state);
        self.run_deferred(&mut deferred);
        let message = taken.ok_or(ReceiveError::Timeout)?;
        Ok((message.value, message.priority))
    }
}
