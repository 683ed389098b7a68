//! A send that waits asynchronously.

use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

use percpu::sync::step;

use crate::core::{Bitmap, Levels, Message, Preload};
use crate::error::{SendError, SendRefused};
use crate::handles::{QueueRef, Sender};
use crate::queue::{Deferred, Queue, refuse, refuse_or_unwind};
use crate::waiter::Waiter;

/// A message on its way in, or why it can never be sent.
type Admitted<T, L> = Result<Message<T, <L as Levels>::Priority>, (T, SendRefused)>;

/// A send that waits asynchronously: [`Queue::send_async`], or [`Sender::into_send_async`].
#[must_use = "futures do nothing unless polled"]
pub struct SendFuture<'q, T, L: Levels = Bitmap> {
    queue: QueueRef<'q, T, L, Sender<T, L>>,
    waiter: Waiter<T, L::Priority>,
    /// `None` once it is ready.
    message: Option<Admitted<T, L>>,
    registered: bool,
    _pinned: PhantomPinned,
}

impl<T, L: Levels> Queue<T, L> {
    /// Sends a message, asynchronously: the future waits while there is no room.
    ///
    /// Dropping it is harmless: the message was sent, or is dropped with it.
    pub fn send_async(&self, value: T, priority: L::Priority) -> SendFuture<'_, T, L> {
        SendFuture::new(self, value, priority)
    }
}

impl<T, L: Levels> Sender<T, L> {
    /// Sends a message, asynchronously: [`Queue::send_async`](crate::Queue::send_async).
    pub fn send_async(&self, value: T, priority: L::Priority) -> SendFuture<'_, T, L> {
        self.queue().send_async(value, priority)
    }

    /// The same with the sender in the future, which so depends on no reference, and counts as a handle
    /// until it is dropped.
    ///
    /// ```
    /// # use std::{future::Future, pin::Pin};
    /// # let mut spawned = Vec::new();
    /// # let mut spawn = |task: Pin<Box<dyn Future<Output = _> + Send + 'static>>| spawned.push(task);
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// spawn(Box::pin(sender.clone().into_send_async("a message", 7)));
    /// # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    /// # assert!(spawned[0].as_mut().poll(&mut cx).is_ready());
    /// # assert_eq!(receiver.try_receive(), Ok(("a message", 7)));
    /// # Ok::<(), mq_rbtree::BuildError>(())
    /// ```
    ///
    /// One that borrows its sender is not `'static`:
    ///
    /// ```compile_fail,E0597
    /// fn spawn(task: impl Future<Output = Result<(), mq_rbtree::SendError<u8>>> + Send + 'static) {}
    /// # use std::future::Future;
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// spawn(sender.send_async(1u8, 7));
    /// # Ok::<(), mq_rbtree::BuildError>(())
    /// ```
    pub fn into_send_async(self, value: T, priority: L::Priority) -> SendFuture<'static, T, L> {
        SendFuture::owning(self, value, priority)
    }
}

impl<'q, T, L: Levels> SendFuture<'q, T, L> {
    pub(super) fn new(queue: &'q Queue<T, L>, value: T, priority: L::Priority) -> Self {
        Self::with(QueueRef::Borrowed(queue), value, priority)
    }

    pub(crate) fn owning(sender: Sender<T, L>, value: T, priority: L::Priority) -> Self {
        Self::with(QueueRef::Owned(sender), value, priority)
    }

    fn with(queue: QueueRef<'q, T, L, Sender<T, L>>, value: T, priority: L::Priority) -> Self {
        let waiter = Waiter::new(0);
        let message = Some(queue.get().config.admit(value, priority));
        Self { queue, waiter, message, registered: false, _pinned: PhantomPinned }
    }

    /// One that was ready, as it were.
    #[cfg(feature = "futures")]
    pub(super) fn without_message(queue: QueueRef<'q, T, L, Sender<T, L>>) -> Self {
        let waiter = Waiter::new(0);
        Self { queue, waiter, message: None, registered: false, _pinned: PhantomPinned }
    }

    /// Whether it has a message to send.
    #[cfg(feature = "futures")]
    pub(super) fn has_message(&self) -> bool {
        self.message.is_some()
    }

    /// Begins anew with another message, behind who waits by then.
    ///
    /// # Panics
    ///
    /// Panics if it has a message still.
    #[cfg(feature = "futures")]
    pub(super) fn restart(
        self: Pin<&mut Self>,
        value: T,
        priority: L::Priority,
        urgency: u8,
    ) -> Result<(), SendError<T>> {
        // SAFETY: what is overwritten is the node, and that is on no list, as is made sure of below.
        let this = unsafe { self.get_unchecked_mut() };
        assert!(this.message.is_none() && !this.registered, "a message before there was room");
        let message = this.queue.get().config.admit(value, priority).map_err(refuse)?;
        (this.waiter, this.message) = (Waiter::new(urgency), Some(Ok(message)));
        Ok(())
    }

    /// The same, with this urgency among those that wait: see [`Wait::urgency`](crate::Wait::urgency).
    /// Before it is first polled.
    pub fn urgency(mut self, urgency: u8) -> Self {
        self.waiter = Waiter::new(urgency);
        self
    }
}

impl<T, L: Levels> Future for SendFuture<'_, T, L> {
    type Output = Result<(), SendError<T>>;

    /// # Panics
    ///
    /// Panics if it was ready before.
    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: nothing that is pinned is moved out of it; the node stays where it is.
        let this = unsafe { self.get_unchecked_mut() };
        if !this.registered {
            let message = match this.message.take().expect("polled after it was ready") {
                Ok(message) => message,
                Err(refused) => return Poll::Ready(Err(refuse(refused))),
            };
            // The first look is that of a thread which does not wait: it needs neither node nor waker.
            // SAFETY: it was on no list yet, so nobody else knows the node.
            let rank = unsafe { this.waiter.inner() }.rank();
            match this.queue.get().poll_send(message, rank) {
                Ok(sent) => return Poll::Ready(sent),
                Err(message) => (this.message, this.registered) = (Some(Ok(message)), true),
            }
        }
        this.poll_registered(cx)
    }
}

impl<T, L: Levels> SendFuture<'_, T, L> {
    /// Looks, and waits if there is no room.
    #[cold]
    #[inline(never)]
    fn poll_registered(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError<T>>> {
        let this = self;
        let queue = this.queue.get();
        // Cloned and dropped outside the lock: it is user code, as comparisons are. If it panics the
        // message is still there.
        let waker = cx.waker().clone();
        let message = match this.message.take().expect("one that waits has its message") {
            Ok(message) => message,
            Err(refused) => return Poll::Ready(Err(refuse(refused))),
        };
        let demand = queue.config.demand(message.priority, message.bytes);
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        queue.hint.preload(message.priority, &mut preload);
        let _old;
        {
            let mut state = queue.lock();
            let node = NonNull::from(&this.waiter);
            // SAFETY: we have the lock; no other reference is there.
            let had_permit = std::mem::take(&mut unsafe { this.waiter.inner() }.permit);
            if had_permit {
                state.release_send_permit(message.bytes);
            }
            // Off the list before it is put in: a receiver that takes it must not tell us of room.
            // SAFETY: it lives, and is on this list or none.
            let was_listed = unsafe { state.senders.remove(node) };
            // SAFETY: we have the lock; no other reference is there.
            _old = unsafe { this.waiter.inner() }.take_waker();
            // SAFETY: as above.
            let rank = unsafe { this.waiter.inner() }.rank();
            match state.send(&queue.config, message, rank, &mut preload, &mut deferred) {
                Err((back, SendRefused::Full)) => {
                    this.message = Some(Ok(back));
                    // SAFETY: as above.
                    unsafe { this.waiter.inner() }.demand = Some(demand);
                    let waker = Some(waker);
                    if was_listed {
                        // SAFETY: on no list; pinned, and taken off when it is dropped.
                        unsafe { state.senders.add(node, waker) };
                    } else {
                        // SAFETY: as above.
                        unsafe { state.wait_to_send(node, waker) };
                    }
                    if had_permit {
                        // What is left of the room that it was promised may do for another.
                        step!(
                            "send refused: pass the permit on",
                            state.serve_waiters(&queue.config, &mut preload, &mut deferred)
                        );
                    }
                    drop(state);
                    queue.run_deferred(&mut deferred);
                    Poll::Pending
                }
                put => {
                    this.registered = false;
                    if had_permit || was_listed {
                        // What it was promised, or wanted, may do for another: also if a receiver took
                        // the message at once.
                        state.serve_waiters(&queue.config, &mut preload, &mut deferred);
                    }
                    drop(state);
                    queue.run_deferred(&mut deferred);
                    Poll::Ready(put.map_err(|not_put| refuse_or_unwind(not_put, &mut deferred)))
                }
            }
        }
    }
}

impl<T, L: Levels> Drop for SendFuture<'_, T, L> {
    fn drop(&mut self) {
        if !self.registered {
            return;
        }
        let queue = self.queue.get();
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let _old;
        {
            let mut state = queue.lock();
            // SAFETY: it lives, and is on this list or none.
            let listed = unsafe { state.senders.remove(NonNull::from(&self.waiter)) };
            // SAFETY: we have the lock; no other reference is there.
            let inner = unsafe { self.waiter.inner() };
            _old = inner.take_waker();
            let permit = std::mem::take(&mut inner.permit);
            if permit {
                state.release_send_permit(inner.demand.map_or(0, |demand| demand.bytes));
            }
            if permit || listed {
                // What it wanted room for may have kept others from going on.
                step!(
                    "send dropped: serve the other senders",
                    state.serve_waiters(&queue.config, &mut preload, &mut deferred)
                );
            }
        }
        queue.run_deferred(&mut deferred);
    }
}

impl<T, L: Levels> fmt::Debug for SendFuture<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ready = self.message.is_none();
        f.debug_struct("SendFuture").field("ready", &ready).finish_non_exhaustive()
    }
}

// SAFETY: what it shares with other threads is the node, under the queue's lock; the message moves
// with it.
unsafe impl<T: Send, L: Levels> Send for SendFuture<'_, T, L> where L::Priority: Send + Sync {}
