//! Threads that wait.
//!
//! The node of a waiting thread is on its stack. The thread leaves this module only when the node
//! is off its list: either another thread has removed it and has stored that in the node's state,
//! or the thread has removed it at its deadline. The lock decides between the two, so a deadline
//! cannot lose a message that was handed over.

use std::pin::pin;
use std::ptr::NonNull;

use offlock_sync::step;

use super::{Access, LockedState, Queue, Received, State};
use crate::core::{Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::parker::Wait;
use crate::staging::Ring;
use crate::waiter::{CacheAligned, WaitEnd, Waiter};

impl<T, L: Levels> Queue<T, L> {
    /// Continues a send that found no room.
    #[cold]
    pub(super) fn wait_to_send(
        &self,
        message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        let (mut message, demand) = self.with_demand(message);
        let aligned = pin!(CacheAligned(Waiter::new()));
        let waiter = &aligned.as_ref().get_ref().0;
        let node = NonNull::from(waiter);
        loop {
            let mut section = self.section();
            let Some(mut state) = self.lock_to_send(&mut section.preload, wait) else {
                self.count_timeout();
                return Err(SendError { value: message.value, reason: SendRefused::Timeout });
            };
            match state.send(message, &mut section) {
                Err((refused, SendRefused::Full)) => message = refused,
                sent => {
                    drop(state);
                    return self.finish_send(sent, &mut section.deferred);
                }
            }
            waiter.reset();
            // SAFETY: the node is on no list, and the lock is held.
            let inner = unsafe { Waiter::inner_of(node) };
            inner.demand = Some(demand);
            state.core.keep_preload(&mut section.preload);
            inner.message = Some(message);
            state.counters.send_waits += 1;
            step!(
                "send: register in the lock section of the check",
                // SAFETY: the lock is held, and the node is on no list. It is pinned in this frame, which
                // it leaves only when it is off this list: `spin_then_sleep` has seen the end of the wait,
                // or `unlist` has run.
                unsafe { state.senders.add(node, None) }
            );
            drop(state);
            let ended = self.spin_then_sleep(waiter, wait, self.ring.is_some());
            // SAFETY: the node is alive, and no other list ever had it.
            let state = self.unlist(ended, |state| unsafe { state.senders.remove(node) });
            // SAFETY: the node is off its list: `spin_then_sleep` has seen the end of the wait, or
            // `unlist` has run. By invariant 1 of the waiters its message belongs to this thread now.
            let Some(unsent) = (unsafe { Waiter::inner_of(node) }).message.take() else {
                return Ok(());
            };
            let Some(state) = state else {
                message = unsent;
                continue;
            };
            return self.send_at_deadline(unsent, state);
        }
    }

    /// Continues a receive that found no message.
    ///
    /// `position` is where the next message of the open ring will be published; a shut ring has none.
    #[cold]
    pub(super) fn wait_to_receive(
        &self,
        wait: Wait,
        position: Option<u64>,
    ) -> Result<Received<T, L>, ReceiveError> {
        if let Some(message) = position.and_then(|position| self.spin_to_receive(wait, position)) {
            return Ok((message.value, message.priority));
        }
        // Without a position messages are sent under the lock, and the thread spins on its node.
        let has_spun = position.is_some();
        let aligned = pin!(CacheAligned(Waiter::new()));
        let waiter = &aligned.as_ref().get_ref().0;
        let node = NonNull::from(waiter);
        loop {
            let mut section = self.section();
            let Some(mut state) = self.lock_until(Access::Wait, wait) else {
                self.count_timeout();
                return Err(ReceiveError::Timeout);
            };
            if let Some(received) = state.receive(&mut section) {
                drop(state);
                self.run_deferred(&mut section.deferred);
                return received;
            }
            waiter.reset();
            state.counters.receive_waits += 1;
            step!(
                "receive: register in the lock section of the check",
                // SAFETY: the lock is held, and the node is on no list. It is pinned in this frame, which
                // it leaves only when it is off this list: `spin_then_sleep` has seen the end of the wait,
                // or `unlist` has run.
                unsafe { state.receivers.add(node, None) }
            );
            drop(state);
            // Wakes a sender whose message found no memory, before this thread sleeps.
            self.run_deferred(&mut section.deferred);
            let ended = self.spin_then_sleep(waiter, wait, has_spun);
            // SAFETY: the node is alive, and no other list ever had it.
            let state = self.unlist(ended, |state| unsafe { state.receivers.remove(node) });
            // SAFETY: the node is off its list: `spin_then_sleep` has seen the end of the wait, or
            // `unlist` has run. By invariant 1 of the waiters its message belongs to this thread now.
            let message = unsafe { Waiter::inner_of(node) }.message.take();
            step!(
                "receive: a message beats the deadline",
                if let Some(message) = message {
                    return Ok((message.value, message.priority));
                }
            );
            if let Some(state) = state {
                return self.receive_at_deadline(state);
            }
        }
    }

    /// Spins until a message comes through the ring. Returns `None` if the thread is to sleep.
    pub(super) fn spin_to_receive(
        &self,
        wait: Wait,
        mut position: u64,
    ) -> Option<Message<T, L::Priority>> {
        let ring = self.ring.as_ref()?;
        while !wait.is_over() && self.spin.until(wait, 2, |_| ring.was_published(position)) {
            let mut preload = Preload::new();
            let mut guard = self.state.lock();
            let message = guard.fast_receive(Some(ring), &self.config, &mut preload);
            if message.is_some() {
                guard.counters.receive_waits += 1;
                return message;
            }
            // At a later hole the message of `position` stays published, so `until` would return at once.
            if guard.cursor.is_shut() || guard.awaits_sender(ring) {
                return None;
            }
            position = guard.cursor.accepted();
        }
        None
    }

    /// Spins until a full queue has room. Returns false if the thread is to take the lock: to sleep, or
    /// because the ring is shut or memory is missing.
    pub(super) fn spin_for_room(&self, ring: &Ring<T, L::Priority>, wait: Wait) -> bool {
        let max_messages = self.config.max_messages;
        if wait.is_over() || ring.room(max_messages) != Some(0) {
            return false;
        }
        // A sender that went on at the first free slot would move the cache line of the room for each
        // message.
        let min_room = (max_messages as u64 / 4).clamp(1, 1024);
        self.room_spin.until(wait, 8, |spun| {
            ring.room(max_messages).is_none_or(|room| room >= min_room || (room > 0 && spun >= 256))
        })
    }

    /// Waits until another thread ends the wait, or until the deadline. Does not spin if the
    /// deadline is over, or if the operation spins on the ring instead (`has_spun`).
    fn spin_then_sleep(
        &self,
        waiter: &Waiter<T, L::Priority>,
        wait: Wait,
        has_spun: bool,
    ) -> WaitEnd {
        let spins = !has_spun && !wait.is_over();
        if spins && self.spin.until(wait, 1, |_| waiter.poll_end().is_some()) {
            if let Some(ended) = waiter.poll_end() {
                return ended;
            }
        }
        waiter.sleep(wait)
    }

    /// Locks, and takes the node off its list after a deadline. Returns `None` if another
    /// thread has ended the wait before.
    fn unlist(
        &self,
        ended: WaitEnd,
        remove: impl FnOnce(&mut State<T, L>) -> bool,
    ) -> Option<LockedState<'_, T, L>> {
        if matches!(ended, WaitEnd::Completed | WaitEnd::Retry) {
            return None;
        }
        let mut state = self.lock_undrained();
        remove(&mut state).then_some(state)
    }

    /// Completes a send at its deadline. The sender is on no list.
    ///
    /// It succeeds if there is room now: a task may have a permit for it, and not have polled yet. It
    /// tries in the lock section that took it off its list, and before the senders behind it are served.
    fn send_at_deadline(
        &self,
        message: Message<T, L::Priority>,
        mut state: LockedState<'_, T, L>,
    ) -> Result<(), SendError<T>> {
        let mut section = self.section();
        let sent = state.send(message, &mut section).map_err(|(message, reason)| match reason {
            SendRefused::Full => (message, SendRefused::Timeout),
            _ => (message, reason),
        });
        state.counters.timeouts += u64::from(matches!(sent, Err((_, SendRefused::Timeout))));
        state.serve_waiters(&mut section);
        drop(state);
        self.finish_send(sent, &mut section.deferred)
    }

    /// Completes a receive at its deadline. The receiver is on no list.
    ///
    /// It succeeds if there is a message now: a task may have a permit for it, and not have polled yet.
    fn receive_at_deadline(
        &self,
        mut state: LockedState<'_, T, L>,
    ) -> Result<Received<T, L>, ReceiveError> {
        let mut section = self.section();
        let received = state.receive(&mut section);
        state.counters.timeouts += u64::from(received.is_none());
        drop(state);
        self.run_deferred(&mut section.deferred);
        received.unwrap_or(Err(ReceiveError::Timeout))
    }
}
