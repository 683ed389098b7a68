//! Threads that wait.
//!
//! A waiting thread's node is on its stack. It leaves this module only when the node is off its list:
//! because somebody took it off and said so, or because it took itself off at its deadline. Which of
//! the two it was the lock decides, so a message that was handed over is never lost to a deadline.

use std::pin::pin;
use std::ptr::NonNull;

use percpu::sync::Arc;

use super::{After, Queue, Received, refuse_message};
use crate::core::{Levels, Message, Preload};
use crate::deadline::Wait;
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::parker::Parker;
use crate::waiter::{Ended, Waiter, Wake, Wanted};

impl<T, L: Levels> Queue<T, L> {
    /// Goes on with a send that found no room.
    #[cold]
    pub(super) fn wait_to_send(
        &self,
        mut message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        if self.born.is_inherited() {
            return Err(refuse_message((message, SendRefused::Forked)));
        }
        let parker = Parker::mine();
        let waiter = pin!(Waiter::new(wait.urgency_level(), None));
        let node = NonNull::from(waiter.as_ref().get_ref());
        loop {
            let mut preload = Preload::new();
            let mut after = After::new();
            self.hint.fill(message.priority, &mut preload);
            let mut state = match self.lock() {
                Ok(state) => state,
                Err(error) => return Err(refuse_message((message, error.into()))),
            };
            match state.put(&self.config, message, &mut preload, &mut after) {
                Ok(()) => {
                    drop(state);
                    if after.run() {
                        self.settle();
                    }
                    return Ok(());
                }
                Err((back, SendRefused::Full)) => message = back,
                Err(other) => {
                    drop(state);
                    return Err(refuse_message(other));
                }
            }
            waiter.rewind();
            // SAFETY: the node is on no list, and we have the lock.
            let inner = unsafe { waiter.inner() };
            inner.wanted = Some(Wanted { priority: message.priority, bytes: message.bytes });
            inner.cargo = Some(message);
            state.counters.send_waits += 1;
            // SAFETY: on no list, and pinned here until it is off this one: see below.
            unsafe { state.senders.add(node, Wake::Thread(Arc::clone(&parker))) };
            drop(state);
            let mut ended = self.sleep(&waiter, &parker, wait);
            if ended == Ended::Timeout {
                ended = self.give_up(&waiter, |state| {
                    // SAFETY: it lives, and was put on this list only.
                    let late = unsafe { state.senders.remove(node) };
                    state.counters.timeouts += u64::from(late);
                    late
                });
            }
            // SAFETY: off the list, and the state says so, or we took it off: it is ours alone.
            let back = unsafe { waiter.inner() }.cargo.take();
            match (ended, back) {
                (Ended::Timeout, Some(back)) => {
                    self.settle(); // what it wanted room for may have kept others from going on
                    return Err(refuse_message((back, SendRefused::Timeout)));
                }
                (Ended::Again, Some(back)) => message = back,
                _ => return Ok(()),
            }
        }
    }

    /// Goes on with a receive that found nothing.
    #[cold]
    pub(super) fn wait_to_receive(&self, wait: Wait) -> Result<Received<T, L>, ReceiveError> {
        if self.born.is_inherited() {
            return Err(ReceiveError::Forked);
        }
        let parker = Parker::mine();
        let waiter = pin!(Waiter::new(wait.urgency_level(), None));
        let node = NonNull::from(waiter.as_ref().get_ref());
        loop {
            let mut preload = Preload::new();
            let mut after = After::new();
            let mut state = self.lock()?;
            if let Some(message) = state.take(&self.config, &mut preload, &mut after) {
                drop(state);
                if after.run() {
                    self.settle();
                }
                return Ok((message.value, message.priority));
            }
            if state.closed {
                return Err(ReceiveError::Closed);
            }
            waiter.rewind();
            state.counters.receive_waits += 1;
            // SAFETY: on no list, and pinned here until it is off this one: see below.
            unsafe { state.receivers.add(node, Wake::Thread(Arc::clone(&parker))) };
            drop(state);
            let mut ended = self.sleep(&waiter, &parker, wait);
            if ended == Ended::Timeout {
                ended = self.give_up(&waiter, |state| {
                    // SAFETY: it lives, and was put on this list only.
                    let late = unsafe { state.receivers.remove(node) };
                    state.counters.timeouts += u64::from(late);
                    late
                });
            }
            // SAFETY: off the list, and the state says so, or we took it off: it is ours alone.
            let message = unsafe { waiter.inner() }.cargo.take();
            match (message, ended) {
                (Some(message), _) => return Ok((message.value, message.priority)),
                (None, Ended::Timeout) => return Err(ReceiveError::Timeout),
                (None, _) => {}
            }
        }
    }

    /// Waits until the node is off its list, or the deadline. One in the past waits for nothing.
    fn sleep(&self, waiter: &Waiter<T, L::Priority>, parker: &Parker, wait: Wait) -> Ended {
        let late = wait.deadline().is_some_and(|deadline| deadline.is_over());
        let looks = if late { 0 } else { self.spin.looks() };
        let (ended, in_time) = waiter.wait(parker, wait.deadline(), looks);
        if looks > 0 {
            self.spin.learn(in_time);
        }
        ended
    }

    /// Takes a node off its list at its deadline, unless somebody else did in the meantime.
    fn give_up(
        &self,
        waiter: &Waiter<T, L::Priority>,
        remove: impl FnOnce(&mut super::State<T, L>) -> bool,
    ) -> Ended {
        // The lock may be left behind by a fork, but then not in this process: who waits does not fork.
        let mut guard = loop {
            match self.state.lock() {
                Ok(guard) => break guard,
                Err(_) => percpu::sync::thread::yield_now(),
            }
        };
        if remove(&mut guard) {
            return Ended::Timeout;
        }
        drop(guard);
        // Said before the unlock that we waited for just now.
        waiter.ended().unwrap_or(Ended::Again)
    }
}
