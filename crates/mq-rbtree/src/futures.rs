//! Waiting tasks.
//!
//! A future contains its node, which is on a list only while the future waits. A sender, or a
//! receiver that makes room, gives the first waiting task a permit: it takes the node off the list
//! and wakes the task, which polls again. Another thread or task may take the message or the room
//! before. Then the task waits again, at its former position. A future that is dropped with a
//! permit passes it on.

use std::fmt;
use std::future::Future;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use offlock_sync::step;

use crate::core::{Bitmap, Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::handles::QueueRef;
use crate::parker::Wait;
use crate::queue::{Access, Deferred, LockedState, Queue, Received, Section, State};
use crate::waiter::Waiter;

/// Writes what both futures have: the end of one that is dropped.
macro_rules! operation {
    ($name:ident, |$this:ident| $queue:expr) => {
        impl<T, L: Levels> Drop for $name<'_, T, L> {
            #[inline]
            fn drop(&mut self) {
                let $this = &*self;
                if let Some(waiter) = &$this.waiter {
                    drop(leave($queue, waiter));
                }
            }
        }

        // SAFETY: the future shares its node with other threads, under the queue's lock. A message
        // moves with the future. `Sync` is for the borrowed queue, whose configuration threads read
        // without the lock.
        unsafe impl<T: Send, L: Levels> Send for $name<'_, T, L> where L::Priority: Send + Sync {}
    };
}

#[cfg(feature = "stream")]
mod stream;

#[cfg(feature = "stream")]
pub use self::stream::ReceiveStream;

/// A task's node that was taken off its list.
struct Detached {
    was_listed: bool,
    had_permit: bool,
    /// The old waker, which is dropped after the unlock.
    _waker: Option<Waker>,
}

/// Takes a task's node off its list, and ends its permit.
///
/// # Safety
///
/// The caller holds the lock of the state, and no reference to the part of the node that it protects. The
/// node is on a list of this state or on none, and does not move until it is off.
unsafe fn detach<T, L: Levels>(
    state: &mut State<T, L>,
    waiter: &Waiter<T, L::Priority>,
) -> Detached {
    let node = NonNull::from(waiter);
    // SAFETY: the caller holds the lock, and the reference ends in this line.
    let demand = unsafe { Waiter::inner_of(node) }.demand; // a listed sender has one, a receiver none
    let list = if demand.is_some() { &mut state.senders } else { &mut state.receivers };
    // SAFETY: the caller holds the lock, and the node is alive, and on this list or on none.
    let was_listed = unsafe { list.remove(node) };
    // SAFETY: the caller holds the lock, and this is the only reference.
    let inner = unsafe { Waiter::inner_of(node) };
    let had_permit = std::mem::take(&mut inner.permit);
    if had_permit {
        match demand {
            Some(_) => state.release_send_permit(),
            None => state.release_receive_permit(),
        }
    }
    Detached { was_listed, had_permit, _waker: inner.take_waker() }
}

/// Ends the wait of a task, and passes its permit on. Then the node is on no list, and no other thread
/// knows it. The drop of the result resumes the panic of a waker.
#[cold]
#[inline(never)]
fn leave<T, L: Levels>(queue: &Queue<T, L>, waiter: &Waiter<T, L::Priority>) -> Deferred {
    let mut section = queue.section();
    let detached;
    {
        // While others wait, the ring is shut and drained.
        let mut state = queue.lock_undrained();
        // SAFETY: the lock is held. The future is pinned, and only this queue's list had its node.
        detached = unsafe { detach(&mut state, waiter) };
        // The message or room of the permit is for another waiter now; also that of a permit from
        // before a poll that panicked. The room that a message needed may have blocked the senders
        // behind it.
        step!("future dropped: serve the other waiters", state.serve_waiters(&mut section));
    }
    queue.run_and_keep_panic(&mut section.deferred);
    drop(detached);
    section.deferred
}

// The future of a receive.

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

// The future of a send.

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
