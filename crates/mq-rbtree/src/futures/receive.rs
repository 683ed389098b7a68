//! A receive that waits asynchronously.

use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

use percpu::sync::step;

use crate::core::{Bitmap, Levels, Preload};
use crate::deadline::Wait;
use crate::error::ReceiveError;
use crate::handles::{QueueRef, Receiver};
use crate::queue::{Deferred, Queue, Received};
use crate::waiter::Waiter;

/// A receive that waits asynchronously: [`Queue::receive_async`], or
/// [`Receiver::into_receive_async`].
#[must_use = "futures do nothing unless polled"]
pub struct ReceiveFuture<'q, T, L: Levels = Bitmap> {
    queue: QueueRef<'q, T, L, Receiver<T, L>>,
    waiter: Waiter<T, L::Priority>,
    /// It may be on a list, or have a permit.
    registered: bool,
    completed: bool,
    _pinned: PhantomPinned,
}

impl<T, L: Levels> Queue<T, L> {
    /// Receives the next message, asynchronously: the future waits while there is none.
    ///
    /// Dropping it loses nothing: a message is not taken before the future is ready.
    pub fn receive_async(&self) -> ReceiveFuture<'_, T, L> {
        ReceiveFuture::new(self)
    }
}

impl<T, L: Levels> Receiver<T, L> {
    /// Receives the next message, asynchronously: [`Queue::receive_async`](crate::Queue::receive_async).
    pub fn receive_async(&self) -> ReceiveFuture<'_, T, L> {
        self.queue().receive_async()
    }

    /// The same with the receiver in the future, which so depends on no reference, and counts as a handle
    /// until it is dropped.
    pub fn into_receive_async(self) -> ReceiveFuture<'static, T, L> {
        ReceiveFuture::owning(self)
    }
}

impl<'q, T, L: Levels> ReceiveFuture<'q, T, L> {
    pub(super) fn new(queue: &'q Queue<T, L>) -> Self {
        Self::with(QueueRef::Borrowed(queue))
    }

    pub(crate) fn owning(receiver: Receiver<T, L>) -> Self {
        Self::with(QueueRef::Owned(receiver))
    }

    fn with(queue: QueueRef<'q, T, L, Receiver<T, L>>) -> Self {
        let waiter = Waiter::new(0);
        Self { queue, waiter, registered: false, completed: false, _pinned: PhantomPinned }
    }

    /// Begins anew, behind who waits by then.
    ///
    /// # Panics
    ///
    /// Panics if it has not received.
    #[cfg(feature = "futures")]
    pub(super) fn restart(self: Pin<&mut Self>, urgency: u8) {
        // SAFETY: what is overwritten is the node, and that is on no list, as is made sure of below.
        let this = unsafe { self.get_unchecked_mut() };
        assert!(this.completed && !this.registered, "renewed before it had received");
        (this.waiter, this.completed) = (Waiter::new(urgency), false);
    }

    /// The same, with this urgency among those that wait: see [`Wait::urgency`](crate::Wait::urgency).
    /// Before it is first polled.
    pub fn urgency(mut self, urgency: u8) -> Self {
        self.waiter = Waiter::new(urgency);
        self
    }
}

impl<T, L: Levels> Future for ReceiveFuture<'_, T, L> {
    type Output = Result<Received<T, L>, ReceiveError>;

    /// # Panics
    ///
    /// Panics if it was ready before.
    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: nothing is moved out of it; the node stays where it is.
        let this = unsafe { self.get_unchecked_mut() };
        assert!(!this.completed, "polled after it was ready");
        if !this.registered {
            // The first look is that of a thread which does not wait: it needs neither node nor waker.
            match this.queue.get().receive_with(Wait::NO) {
                Err(ReceiveError::Empty) => this.registered = true,
                ready => {
                    this.completed = true;
                    return Poll::Ready(ready);
                }
            }
        }
        this.poll_registered(cx)
    }
}

impl<T, L: Levels> ReceiveFuture<'_, T, L> {
    /// Looks, and waits if there is nothing.
    #[cold]
    #[inline(never)]
    fn poll_registered(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Received<T, L>, ReceiveError>> {
        let this = self;
        let queue = this.queue.get();
        // Cloned and dropped outside the lock: it is user code.
        let waker = cx.waker().clone();
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let _old;
        {
            let mut state = queue.lock();
            let node = NonNull::from(&this.waiter);
            // SAFETY: we have the lock; no other reference is there.
            if std::mem::take(&mut unsafe { this.waiter.inner() }.permit) {
                state.release_receive_permit();
            }
            // Off the list before anything is taken: a sender that goes on then must not tell us.
            // SAFETY: it lives, and is on this list or none.
            let was_listed = unsafe { state.receivers.remove(node) };
            // SAFETY: we have the lock; no other reference is there.
            _old = unsafe { this.waiter.inner() }.take_waker();
            match state.receive(&queue.config, &mut preload, &mut deferred) {
                None if !state.closed => {
                    let waker = Some(waker);
                    if was_listed {
                        step!(
                            "poll: register the new waker",
                            // SAFETY: on no list; pinned, and taken off when it is dropped.
                            unsafe { state.receivers.add(node, waker) }
                        );
                    } else {
                        // SAFETY: as above.
                        unsafe { state.wait_to_receive(node, waker) };
                    }
                    Poll::Pending
                }
                taken => {
                    (this.registered, this.completed) = (false, true);
                    drop(state);
                    queue.run_deferred(&mut deferred);
                    let message = taken.ok_or(ReceiveError::Closed);
                    Poll::Ready(message.map(|message| (message.value, message.priority)))
                }
            }
        }
    }
}

impl<T, L: Levels> Drop for ReceiveFuture<'_, T, L> {
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
            unsafe { state.receivers.remove(NonNull::from(&self.waiter)) };
            // SAFETY: we have the lock; no other reference is there.
            let inner = unsafe { self.waiter.inner() };
            _old = inner.take_waker();
            if std::mem::take(&mut inner.permit) {
                state.release_receive_permit();
            }
            // What it was told of is for another; also what it was told of before a poll that panicked.
            step!(
                "receive dropped: pass the permit on",
                state.serve_waiters(&queue.config, &mut preload, &mut deferred)
            );
        }
        queue.run_deferred(&mut deferred);
    }
}

impl<T, L: Levels> fmt::Debug for ReceiveFuture<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveFuture").field("ready", &self.completed).finish_non_exhaustive()
    }
}

// SAFETY: what it shares with other threads is the node, under the queue's lock; the message moves
// with it.
unsafe impl<T: Send, L: Levels> Send for ReceiveFuture<'_, T, L> where L::Priority: Send + Sync {}
