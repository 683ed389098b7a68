//! Waits, of threads and of tasks, for a message or for room.
//!
//! ```text
//!   look: lock, shut the ring, drain ─ message or room? ─ yes: done
//!     ▲                                       │ no
//!     │                               list, look again ─ yes: done
//!     │                                       │ no
//!   woken ◄── LockedState::drop ◄──────── pending: a thread spins and parks
//! ```
//!
//! A thread's receive goes through these functions until it sleeps. In `mod.rs`, `receive_by` locks the queue and
//! finds no message in `receive_stored`; `receive_locked` waits a moment at a hole, drains, and looks again. Here,
//! `wait_to_receive` spins for a message of the ring, in `spin_to_receive`. Then `wait_by` runs `block_on`, which
//! polls the wait and sleeps: `poll_wait` looks by `look_to_receive`, lists the waiter, and looks again. A sender
//! finds the ring shut, so its `look_to_send` changes the queue under the lock, whose `LockedState::serve` counts
//! the waiters to wake. Its drop wakes them, and `poll_wait` looks once more.
//!
//! A wait is a future: a task polls it, and a thread polls its own with its parker for a waker. A
//! wake-up carries nothing: the message or the room stays in the queue, and the waiter looks at the queue
//! under the lock, as every other operation does. A waiter that is woken in vain keeps its place.
//!
//! While a waiter is listed the ring is shut, so each change is made under the lock, and the drop of the
//! lock's guard wakes as many waiters as there are messages or places for them. The order of a change, a
//! look and the list is that of the lock: see [`WaitSet::waiting`](offlock_sync::WaitSet::waiting).

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use offlock_sync::Waiter;

use super::park::{Wait, block_on};
use super::{Access, Queue, Received};
use crate::core::{Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::staging::Ring;

/// What a waiter finds under the lock.
pub(crate) enum Look<R> {
    Done(R),
    /// No message, or no room.
    Nothing,
    /// A sender is stopped between its claim and its publication, and the deadline is over.
    Hole,
}

impl<T, L: Levels> Queue<T, L> {
    /// Receives the next message asynchronously: the future waits while there is none.
    ///
    /// Dropping the future loses no message: it takes one only when it is ready. Poll it until it is ready,
    /// or drop it: see [Futures](Self#futures).
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// # let mut cx = Context::from_waker(Waker::noop());
    /// let queue: mq_rbtree::Queue<&str> = mq_rbtree::Queue::new(8)?;
    /// let mut receive = pin!(queue.receive_async());
    /// assert!(receive.as_mut().poll(&mut cx).is_pending());
    /// queue.send("a message", 7)?; // wakes the task
    /// assert_eq!(receive.poll(&mut cx), Poll::Ready(Ok(("a message", 7))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty.
    pub async fn receive_async(&self) -> Result<Received<T, L>, ReceiveError> {
        if let Some(message) = self.poll_receive() {
            return Ok(message);
        }
        let mut waiter = pin!(self.receivers.waiter());
        poll_fn(|cx| self.poll_to_receive(waiter.as_mut(), cx)).await
    }

    /// Polls a task's wait for a message.
    pub(crate) fn poll_to_receive(
        &self,
        waiter: Pin<&mut Waiter<'_>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Received<T, L>, ReceiveError>> {
        self.poll_wait(waiter, cx, || self.look_to_receive(Wait::Past))
    }

    /// Sends a message asynchronously: the future waits while there is no room.
    ///
    /// Dropping the future before it is ready drops the message, which is not sent. Poll it until it is
    /// ready, or drop it: see [Futures](Self#futures). A task that must not borrow owns a
    /// [`Sender`](crate::Sender): `async move { sender.send_async(message, priority).await }`.
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// use mq_rbtree::Queue;
    ///
    /// async fn produce_and_consume(queue: &Queue<String>) -> Result<(), Box<dyn std::error::Error>> {
    ///     queue.send_async("a message".to_string(), 7).await?; // waits while there is no room
    ///     let (message, priority) = queue.receive_async().await?; // waits while there is none
    ///     assert_eq!((message.as_str(), priority), ("a message", 7));
    ///     Ok(())
    /// }
    /// # let queue = Queue::new(8).unwrap();
    /// # let mut cx = Context::from_waker(Waker::noop());
    /// # assert!(pin!(produce_and_consume(&queue)).poll(&mut cx).is_ready());
    /// ```
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    pub async fn send_async(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        let staged = self.try_stage(self.config.admit(value, priority)?);
        let Err(message) = staged.or_else(|message| self.send_at_once(message)) else {
            return Ok(());
        };
        let mut message = Some(message);
        let mut waiter = pin!(self.send_waiter(priority));
        poll_fn(|cx| {
            self.poll_wait(waiter.as_mut(), cx, || self.look_to_send(&mut message, Wait::Past))
        })
        .await
    }

    /// Receives up to `most` messages into `out` asynchronously, and at most
    /// [`max_messages`](Self::max_messages). Returns how many were received: at least one, unless `most`
    /// is 0.
    ///
    /// It waits for the first message, and then takes what is in the queue. If it is dropped while it
    /// waits, it has received nothing.
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// # let mut cx = Context::from_waker(Waker::noop());
    /// let queue: mq_rbtree::Queue<u32> = mq_rbtree::Queue::new(8)?;
    /// let mut out = Vec::new();
    /// {
    ///     let mut batch = pin!(queue.receive_batch_async(&mut out, 2));
    ///     assert!(batch.as_mut().poll(&mut cx).is_pending());
    ///     (0..3).for_each(|n| queue.send(n, n).unwrap());
    ///     assert_eq!(batch.poll(&mut cx), Poll::Ready(Ok(2)));
    /// }
    /// assert_eq!(out, [(2, 2), (1, 1)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty; [`ReceiveError::NoMemory`] if `out` is
    /// full and cannot grow.
    pub async fn receive_batch_async(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
    ) -> Result<usize, ReceiveError> {
        let most = most.min(self.config.max_messages);
        if most == 0 {
            return Ok(0);
        }
        let before = out.len();
        out.try_reserve(1).map_err(|_| ReceiveError::NoMemory)?; // before a message is taken
        out.push(self.receive_async().await?);
        // A task does not wait for a sender. If memory is exhausted, the batch is the one message received.
        let _no_memory = self.receive_more(out, before + most, Wait::Past);
        Ok(out.len() - before)
    }

    /// Returns the waiter for the free places that a message of this priority needs.
    fn send_waiter(&self, priority: L::Priority) -> Waiter<'_> {
        let reserved = self.config.max_messages - self.config.len_limit(priority);
        self.senders.waiter_needing(reserved + 1)
    }

    /// Continues a thread's send that found no room.
    #[cold]
    pub(super) fn wait_to_send(
        &self,
        message: Message<T, L::Priority>,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        let waiter = self.send_waiter(message.priority);
        let mut message = Some(message);
        let look = || self.look_to_send(&mut message, wait);
        // In a queue with a ring it has spun for the room already.
        let sent = self.wait_by(waiter, wait, self.ring.is_some(), look);
        sent.unwrap_or_else(|| {
            let Some(Message { value, .. }) = message else { unreachable!("a refused message") };
            Err(SendError { value, reason: SendRefused::Timeout })
        })
    }

    /// Continues a thread's receive that found no message.
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
        // Without a position messages are sent under the lock, and the thread spins on its parker.
        let look = || self.look_to_receive(wait);
        let received = self.wait_by(self.receivers.waiter(), wait, position.is_some(), look);
        received.unwrap_or(Err(ReceiveError::Timeout))
    }

    /// Waits on the calling thread until `look` is done. Returns `None` at the deadline.
    pub(crate) fn wait_by<V, E>(
        &self,
        waiter: Waiter<'_>,
        wait: Wait,
        has_spun: bool,
        mut look: impl FnMut() -> Look<Result<V, E>>,
    ) -> Option<Result<V, E>> {
        // A wait whose deadline is over needs no parker, whose first use allocates. In a model each deadline
        // is over, so this would leave nothing to check.
        if !wait.is_over() || cfg!(offlock_model) {
            let mut waiter = pin!(waiter);
            let spin = (!has_spun).then_some(&self.spin);
            let done = block_on(wait, spin, |cx| self.poll_wait(waiter.as_mut(), cx, &mut look));
            if done.is_some() {
                return done;
            }
        }
        // After the deadline too: what the wait was for may have come before it, and the thread ran later.
        match look() {
            Look::Done(done) => Some(done),
            Look::Nothing | Look::Hole => {
                self.count_timeout();
                None
            }
        }
    }

    /// Polls a wait: looks at the queue, lists the waiter, and looks again.
    pub(crate) fn poll_wait<V, E>(
        &self,
        waiter: Pin<&mut Waiter<'_>>,
        cx: &mut Context<'_>,
        mut look: impl FnMut() -> Look<Result<V, E>>,
    ) -> Poll<Result<V, E>> {
        let found = waiter.poll(cx, || match look() {
            Look::Done(done) => Some(Some(done)),
            Look::Hole => Some(None),
            Look::Nothing => None,
        });
        let Poll::Ready(done) = found else { return Poll::Pending };
        if !matches!(done, Some(Ok(_))) {
            // It may have been woken for a message or for room that it has not taken.
            drop(self.give_up());
        }
        match done {
            Some(done) => Poll::Ready(done),
            None => {
                cx.waker().wake_by_ref(); // the sender is to publish its message first
                Poll::Pending
            }
        }
    }

    pub(crate) fn look_to_receive(&self, wait: Wait) -> Look<Result<Received<T, L>, ReceiveError>> {
        let mut preload = Preload::new();
        let Some(mut state) = self.lock_until(Access::Wait, wait) else { return Look::Hole };
        let received = state.receive(&mut preload);
        drop(state);
        received.map_or(Look::Nothing, Look::Done)
    }

    /// Sends the message and takes it out, unless there is no room.
    pub(super) fn look_to_send(
        &self,
        message: &mut Option<Message<T, L::Priority>>,
        wait: Wait,
    ) -> Look<Result<(), SendError<T>>> {
        let mut preload = Preload::new();
        let Some(mut state) = self.lock_to_send(&mut preload, wait) else { return Look::Hole };
        let sent = state.send(message, &self.config, &mut preload);
        drop(state);
        match sent {
            Ok(()) => Look::Done(Ok(())),
            Err(SendRefused::Full) => Look::Nothing,
            Err(reason) => {
                let Some(Message { value, .. }) = message.take() else {
                    unreachable!("a refused message")
                };
                Look::Done(Err(SendError { value, reason }))
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
            let message = self.fast_receive(&mut guard, &mut preload);
            if message.is_some() {
                guard.spun_receives += 1;
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
}
