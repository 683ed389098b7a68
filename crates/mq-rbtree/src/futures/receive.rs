//! The future of a receive.

use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

use percpu::sync::step;

use super::{detach, leave};
use crate::core::{Bitmap, Levels, Preload};
use crate::deadline::Wait;
use crate::error::ReceiveError;
use crate::handles::QueueRef;
use crate::queue::{Access, LockedState, Queue, Received, Section};
use crate::waiter::Waiter;

/// A receive that waits asynchronously.
///
/// It comes from [`Queue::receive_async`]. See [`SendFuture`](crate::SendFuture) for an example with both
/// sides.
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
#[must_use = "futures do nothing unless polled"]
pub struct ReceiveFuture<'q, T, L: Levels = Bitmap> {
    queue: QueueRef<'q, T, L>,
    pub(super) completed: bool,
    /// The node, once the queue was empty. It may be on a list, or have a permit.
    waiter: Option<Waiter<T, L::Priority>>,
    _pinned: PhantomPinned,
}

impl<T, L: Levels> Queue<T, L> {
    /// Receives the next message asynchronously: the future waits while there is none.
    ///
    /// Dropping the future loses no message: it takes one only when it is ready. Poll it until it is ready,
    /// or drop it: one that was woken and is kept without a poll leaves its message to receivers that need
    /// not wait, and no other waiter is woken for it.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn receive_async(&self) -> ReceiveFuture<'_, T, L> {
        ReceiveFuture::new(QueueRef::Borrowed(self))
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
        // A task waits for no sender. Without memory for more, one is what it has.
        let _no_memory = self.receive_more(out, most - 1, Wait::Past);
        Ok(out.len() - before)
    }
}

impl<'q, T, L: Levels> ReceiveFuture<'q, T, L> {
    #[inline]
    pub(super) fn new(queue: QueueRef<'q, T, L>) -> Self {
        Self { queue, completed: false, waiter: None, _pinned: PhantomPinned }
    }
}

impl<T, L: Levels> Future for ReceiveFuture<'_, T, L> {
    type Output = Result<Received<T, L>, ReceiveError>;

    /// # Panics
    ///
    /// Panics if the future has completed.
    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: nothing is moved out of the future, so the node stays in its place.
        let this = unsafe { self.as_mut().get_unchecked_mut() };
        assert!(!this.completed, "polled after it was ready");
        if this.waiter.is_none() {
            // A message that is there needs neither the node nor a waker.
            if let Some(message) = this.queue.get().poll_receive() {
                this.completed = true;
                return Poll::Ready(Ok(message));
            }
        }
        self.poll_with(cx, Preload::new(), |state, section| state.receive(section))
    }
}

impl<T, L: Levels> ReceiveFuture<'_, T, L> {
    /// Polls under the lock: completes the future with the result of `take`, or registers the waker if
    /// `take` returns `None`.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll_with<R>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        preload: Preload<T, L>,
        take: impl FnOnce(&mut LockedState<'_, T, L>, &mut Section<'_, T, L>) -> Option<R>,
    ) -> Poll<R> {
        // SAFETY: nothing is moved out of the future, so the node stays in its place.
        let this = unsafe { self.get_unchecked_mut() };
        let queue = this.queue.get();
        // The node is created in its place, which it does not leave. From the first poll on that waits,
        // only shared references are made to it (invariant 5 of the waiters).
        if this.waiter.is_none() {
            this.waiter = Some(Waiter::new());
        }
        let Some(waiter) = &this.waiter else { unreachable!("it was just created") };
        // Wakers are user code: they are cloned and dropped outside the lock.
        let waker = cx.waker().clone();
        let mut section = Section { preload, ..queue.section() };
        let detached;
        {
            let Some(mut state) = queue.lock_until(Access::Wait, Wait::Past) else {
                waker.wake(); // a sender is to publish its message first
                return Poll::Pending;
            };
            // The node leaves the list before a message is taken: a sender that is served then must
            // not give the permit for its message to this task.
            // SAFETY: the lock is held. The future is pinned, and only this queue's list had its node.
            detached = unsafe { detach(&mut state, waiter) };
            match take(&mut state, &mut section) {
                None => {
                    state.counters.receive_waits += u64::from(!detached.was_listed);
                    step!(
                        "poll: register the new waker",
                        // SAFETY: the lock is held, and the node is on no list. It is pinned, and the
                        // drop takes it off.
                        unsafe { state.receivers.add(NonNull::from(waiter), Some(waker)) }
                    );
                    Poll::Pending
                }
                Some(taken) => {
                    drop(state);
                    this.waiter = None;
                    queue.run_deferred(&mut section.deferred);
                    drop((detached, waker)); // if the drop of a waker panics, the message is not leaked
                    this.completed = true; // a stream that unwinds before has not ended
                    Poll::Ready(taken)
                }
            }
        }
    }
}

operation!(ReceiveFuture, |future| future.queue.get());

impl<T, L: Levels> fmt::Debug for ReceiveFuture<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveFuture").field("ready", &self.completed).finish_non_exhaustive()
    }
}
