//! The future of a send.

use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

use percpu::sync::step;

use super::{detach, leave};
use crate::core::{Bitmap, Levels, Message};
use crate::deadline::Wait;
use crate::error::{SendError, SendRefused};
use crate::queue::Queue;
use crate::waiter::Waiter;

/// A checked message, or the reason why it can never be sent.
type Admitted<T, L> = Result<Message<T, <L as Levels>::Priority>, SendError<T>>;

/// A send that waits asynchronously.
///
/// It comes from [`Queue::send_async`]. A task that must not borrow owns a [`Sender`](crate::Sender):
/// `async move { sender.send_async(message, priority).await }`.
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
#[must_use = "futures do nothing unless polled"]
pub struct SendFuture<'q, T, L: Levels = Bitmap> {
    queue: &'q Queue<T, L>,
    /// `None` once the future is completed.
    message: Option<Admitted<T, L>>,
    /// The node, once there was no room. It may be on a list, or have a permit.
    waiter: Option<Waiter<T, L::Priority>>,
    _pinned: PhantomPinned,
}

impl<T, L: Levels> Queue<T, L> {
    /// Sends a message asynchronously: the future waits while there is no room.
    ///
    /// Dropping the future before it is ready drops the message, which is not sent. Poll it until it is
    /// ready, or drop it: one that was woken and is kept without a poll leaves its room to senders that need
    /// not wait, and no other waiter is woken for it.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn send_async(&self, value: T, priority: L::Priority) -> SendFuture<'_, T, L> {
        SendFuture::new(self, value, priority)
    }
}

impl<'q, T, L: Levels> SendFuture<'q, T, L> {
    #[inline]
    fn new(queue: &'q Queue<T, L>, value: T, priority: L::Priority) -> Self {
        let message = Some(queue.config.admit(value, priority));
        Self { queue, message, waiter: None, _pinned: PhantomPinned }
    }
}

impl<T, L: Levels> Future for SendFuture<'_, T, L> {
    type Output = Result<(), SendError<T>>;

    /// # Panics
    ///
    /// Panics if the future has completed.
    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: the message, which is not pinned, is all that is moved out of the future; the
        // node stays in its place.
        let this = unsafe { self.get_unchecked_mut() };
        if this.waiter.is_none() {
            let message = match this.message.take().expect("polled after it was ready") {
                Ok(message) => message,
                Err(refused) => return Poll::Ready(Err(refused)),
            };
            match this.queue.send_at_once(message) {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(message) => this.message = Some(Ok(message)),
            }
        }
        this.poll_registered(cx)
    }
}

impl<T, L: Levels> SendFuture<'_, T, L> {
    /// Polls a future that has found no room before, and waits if there still is none.
    #[cold]
    #[inline(never)]
    fn poll_registered(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError<T>>> {
        let this = self;
        let queue = this.queue;
        // The node is created in its place, which it does not leave. From the first poll on that waits,
        // only shared references are made to it (invariant 5 of the waiters).
        if this.waiter.is_none() {
            this.waiter = Some(Waiter::new());
        }
        let Some(waiter) = &this.waiter else { unreachable!("it was just created") };
        let node = NonNull::from(waiter);
        // Wakers are user code: they are cloned and dropped outside the lock. If the clone panics,
        // the future still has its message. Comparisons run outside the lock as well.
        let waker = cx.waker().clone();
        let Some(Ok(message)) = this.message.take() else { panic!("polled after it was ready") };
        let (message, demand) = queue.with_demand(message);
        let mut section = queue.section();
        let detached;
        {
            let Some(mut state) = queue.lock_to_send(&mut section.preload, Wait::Past) else {
                this.message = Some(Ok(message));
                waker.wake(); // a sender is to publish its message first
                return Poll::Pending;
            };
            // The node leaves the list before the message is sent: a receiver that takes the
            // message must not give the permit for its room to this task.
            // SAFETY: the lock is held. The future is pinned, and only this queue's list had its node.
            detached = unsafe { detach(&mut state, waiter) };
            match state.send(message, &mut section) {
                Err((back, SendRefused::Full)) => {
                    this.message = Some(Ok(back));
                    // SAFETY: the lock is held, and the reference ends in this line.
                    unsafe { Waiter::inner_of(node) }.demand = Some(demand);
                    state.counters.send_waits += u64::from(!detached.was_listed);
                    // SAFETY: the lock is held, and the node is on no list. It is pinned, and the drop
                    // takes it off.
                    unsafe { state.senders.add(node, Some(waker)) };
                    if detached.had_permit {
                        // The rest of the permit's room may be enough for another sender.
                        step!(
                            "send refused: pass the permit on",
                            state.serve_waiters(&mut section)
                        );
                    }
                    drop(state);
                    queue.run_deferred(&mut section.deferred);
                    Poll::Pending
                }
                put => {
                    if detached.had_permit || detached.was_listed {
                        // The room of the permit, or the room that this message needed, may be
                        // enough for another sender; also if a receiver took the message at once.
                        state.serve_waiters(&mut section);
                    }
                    drop(state);
                    this.waiter = None;
                    let sent = queue.finish_send(put, &mut section.deferred);
                    drop((detached, waker)); // if the drop of a waker panics, the message is not leaked
                    Poll::Ready(sent)
                }
            }
        }
    }
}

operation!(SendFuture, |future| future.queue);

impl<T, L: Levels> fmt::Debug for SendFuture<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ready = self.message.is_none();
        f.debug_struct("SendFuture").field("ready", &ready).finish_non_exhaustive()
    }
}
