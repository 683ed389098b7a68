//! Threads that wait.
//!
//! A waiting thread's node is on its stack. It leaves this module only when the node is off its list:
//! because somebody took it off and said so, or because it took itself off at its deadline. Which of
//! the two it was the lock decides, so a message that was handed over is never lost to a deadline.

use std::pin::pin;
use std::ptr::NonNull;

use percpu::sync::{WordGuard, step};

use super::{Deferred, Queue, Received, State, refuse_message, refuse_or_unwind};
use crate::core::{Levels, Message, Preload};
use crate::deadline::Wait;
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::waiter::{CacheAligned, Rank, WaitEnd, Waiter};

impl<T, L: Levels> Queue<T, L> {
    /// Goes on with a send that found no room.
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
            // SAFETY: the node is on no list, and we have the lock.
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
            // SAFETY: the node is on no list, and we have the lock.
            let inner = unsafe { waiter.inner() };
            inner.demand = Some(demand);
            state.core.keep_preload(message.priority, &mut preload);
            inner.message = Some(message);
            step!(
                "send: register in the lock section of the check",
                // SAFETY: on no list, and pinned here until it is off this one: see below.
                unsafe { state.wait_to_send(node, None) }
            );
            drop(state);
            let ended = self.sleep(waiter, wait);
            let late = ended == WaitEnd::TimedOut;
            // SAFETY: it lives, and was put on this list only.
            let state = late.then(|| self.unlist(|state| unsafe { state.senders.remove(node) }));
            // SAFETY: off the list, and the state says so, or we took it off: it is ours alone.
            let Some(back) = (unsafe { waiter.inner() }).message.take() else { return Ok(()) };
            let Some(Some(state)) = state else {
                message = back;
                continue;
            };
            // SAFETY: as above.
            let rank = unsafe { waiter.inner() }.rank();
            return self.send_at_deadline(back, rank, state);
        }
    }

    /// Goes on with a receive that found nothing.
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
                // SAFETY: on no list, and pinned here until it is off this one: see below.
                unsafe { state.wait_to_receive(node, None) }
            );
            drop(state);
            // A sender for whose message there was no memory is told before we sleep.
            self.run_deferred(&mut deferred);
            let ended = self.sleep(waiter, wait);
            let late = ended == WaitEnd::TimedOut;
            // SAFETY: it lives, and was put on this list only.
            let state = late.then(|| self.unlist(|state| unsafe { state.receivers.remove(node) }));
            // SAFETY: off the list, and the state says so, or we took it off: it is ours alone.
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

    /// Waits until the node is off its list, or the deadline. One in the past waits for nothing.
    fn sleep(&self, waiter: &Waiter<T, L::Priority>, wait: Wait) -> WaitEnd {
        let late = wait.deadline().is_some_and(|deadline| deadline.is_over());
        let spins = if late { 0 } else { self.spin.spins() };
        let (ended, in_time) = waiter.wait(wait.deadline(), spins);
        if spins > 0 {
            self.spin.record(in_time);
        }
        ended
    }

    /// Locks, and takes a node off its list, unless somebody else did in the meantime: `None`.
    fn unlist(
        &self,
        remove: impl FnOnce(&mut State<T, L>) -> bool,
    ) -> Option<WordGuard<'_, State<T, L>>> {
        let mut guard = self.state.lock();
        remove(&mut guard).then_some(guard)
    }

    /// The end of a send at its deadline: with success if there is room now, which was promised to a
    /// task that has not looked yet.
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
        // What it wanted room for may have kept others from going on.
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

    /// The end of a receive at its deadline: with success if a message is there, which was promised to a
    /// task that has not looked yet.
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
