//! Calls of other threads.
//!
//! ```text
//!  sender:  call ─► queue (wake the engine if it was empty)                     response ◄─┐
//!  engine:          clear the wake fd ─► take all, oldest first ─► run each call ─► send ─┘
//! ```
//!
//! # Invariants
//!
//! 1. If the queue is not empty, the engine was woken after its last `take`, or will be: the sender
//!    that makes the queue non-empty wakes the engine after its push. The engine clears the wake fd
//!    before it takes.
//! 2. A closed queue is empty and refuses calls. `close` returns the calls that were sent before.
//! 3. The last sender wakes the engine after its calls are in the queue. One look under the lock finds
//!    the sender or its calls, so an engine that finds neither, and has none taken, gets no more calls.
//! 4. The response, or the drop of its responder, is stored before its task is woken. A poll looks for
//!    it and stores its waker under one hold of the lock.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use offlock_sync::{Arc, Mutex, check, step};
use thiserror::Error;

use crate::error::SubmitError;

/// The calls `C` that senders have queued for an engine.
pub(crate) struct CallQueue<C> {
    state: Mutex<Queue<C>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// The state of a [`CallQueue`].
struct Queue<C> {
    calls: VecDeque<C>,
    capacity: usize,
    /// The number of handles that may send.
    senders: usize,
    closed: bool,
}

impl<C> CallQueue<C> {
    /// Makes a queue of at most `capacity` calls, without a sender. `wake` wakes the engine.
    pub(crate) fn new(capacity: usize, wake: impl Fn() + Send + Sync + 'static) -> Self {
        let calls = VecDeque::new();
        let state = Mutex::new(Queue { calls, capacity, senders: 0, closed: false });
        Self { state, wake: Box::new(wake) }
    }

    /// Queues the call that `make` makes of `parts`, and wakes the engine if the queue was empty.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the parts if the queue is full or closed.
    pub(crate) fn send<T>(
        &self,
        parts: T,
        make: impl FnOnce(T) -> C,
    ) -> Result<(), SubmitError<T>> {
        let mut queue = self.state.lock();
        if queue.closed {
            return Err(SubmitError::Closed(parts));
        }
        if queue.calls.len() == queue.capacity {
            return Err(SubmitError::Full(parts));
        }
        let notified = check!("send: an older call has woken the engine", !queue.calls.is_empty());
        queue.calls.push_back(make(parts));
        drop(queue);
        if !notified {
            (self.wake)();
        }
        Ok(())
    }

    /// Returns the number of queued calls, and the most that there may be.
    pub(crate) fn len_and_capacity(&self) -> (usize, usize) {
        let queue = self.state.lock();
        (queue.calls.len(), queue.capacity)
    }

    /// Engine: returns whether the queue has calls.
    pub(crate) fn has_calls(&self) -> bool {
        !self.state.lock().calls.is_empty()
    }

    /// Engine: moves the queued calls to the end of `calls`.
    pub(crate) fn take(&self, calls: &mut VecDeque<C>) {
        calls.append(&mut self.state.lock().calls);
    }

    /// Engine: refuses later calls, and moves the queued ones to the end of `calls`.
    pub(crate) fn close(&self, calls: &mut VecDeque<C>) {
        let mut queue = self.state.lock();
        queue.closed = true;
        step!("close: take what was sent", calls.append(&mut queue.calls));
    }

    /// Adds a handle that may send. The first one allocates the queue.
    pub(crate) fn add_sender(&self) {
        let queue = &mut *self.state.lock();
        queue.calls.reserve_exact(queue.capacity - queue.calls.len());
        queue.senders += 1;
    }

    /// Removes a handle. The last one wakes the engine.
    pub(crate) fn drop_sender(&self) {
        let mut queue = self.state.lock();
        queue.senders -= 1;
        let last = queue.senders == 0;
        drop(queue);
        if last {
            step!("drop_sender: wake the engine", (self.wake)());
        }
    }

    /// Engine: returns whether the queue has calls, or a handle that may send one.
    pub(crate) fn may_have_calls(&self) -> bool {
        let queue = self.state.lock();
        queue.senders != 0 || !check!("may_have_calls: none is queued", queue.calls.is_empty())
    }
}

/// The way of a response.
enum Slot<T> {
    /// There is no response yet. The waker is that of the task that polls for it.
    Waiting(Option<Waker>),
    Sent(T),
    /// The responder or the response was dropped, or the value was taken.
    Ended,
}

/// Makes a connected pair.
pub(crate) fn response<T>() -> (Responder<T>, Response<T>) {
    let slot = Arc::new(Mutex::new(Slot::Waiting(None)));
    (Responder(Arc::clone(&slot)), Response(slot))
}

/// Sends the response of a call, from [`Remote::ask`](crate::Remote::ask). A responder that is dropped ends the
/// [`Response`] with [`NoResponse`].
///
/// ```
/// use aio_reap::{Engine, SharedFile};
/// # fn block_on<F: std::future::Future>(future: F) -> F::Output {
/// #     Engine::new().unwrap().block_on(future).unwrap() // any executor
/// # }
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let remote = engine.remote();
/// let thread = std::thread::spawn(move || {
///     let file = SharedFile::new(tempfile::tempfile()?)?;
///     let write = remote.ask(move |engine, responder| {
///         let write = engine.write(&engine.attach_shared(&file), "hello", 0);
///         _ = write.callback(|result, _| _ = responder.send(result));
///     })?;
///     Ok::<_, std::io::Error>(block_on(write)??)
/// });
/// engine.serve()?;
/// assert_eq!(thread.join().unwrap()?, 5);
/// # Ok(())
/// # }
/// ```
pub struct Responder<T>(Arc<Mutex<Slot<T>>>);

impl<T> Responder<T> {
    /// Sends the response, and wakes its task.
    ///
    /// # Errors
    ///
    /// Returns the value if the [`Response`] was dropped.
    pub fn send(self, value: T) -> Result<(), T> {
        self.end(Slot::Sent(value))
    }

    /// Stores `end` if the response is awaited, and wakes its task. Otherwise returns the value in
    /// `end`.
    fn end(&self, end: Slot<T>) -> Result<(), T> {
        let mut slot = self.0.lock();
        let Slot::Waiting(waker) = &mut *slot else {
            drop(slot);
            return if let Slot::Sent(value) = end { Err(value) } else { Ok(()) };
        };
        let waker = waker.take();
        *slot = end;
        drop(slot);
        step!("end: wake the task", waker.into_iter().for_each(Waker::wake)); // user code
        Ok(())
    }
}

impl<T> Drop for Responder<T> {
    fn drop(&mut self) {
        _ = self.end(Slot::Ended);
    }
}

impl<T> fmt::Debug for Responder<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder").finish_non_exhaustive()
    }
}

/// The response of a call, from [`Remote::ask`](crate::Remote::ask): a future for any executor. Its drop does not end the
/// call.
///
/// ```
/// use aio_reap::{Engine, Response};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let backend: Response<String> = engine.remote().ask(|engine, responder| {
///     _ = responder.send(engine.backend().to_string());
/// })?;
/// println!("on {}", engine.block_on(backend)??);
/// # Ok(())
/// # }
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct Response<T>(Arc<Mutex<Slot<T>>>);

impl<T> Future for Response<T> {
    type Output = Result<T, NoResponse>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker().clone(); // user code: not under the lock
        let mut slot = self.0.lock();
        match mem::replace(&mut *slot, Slot::Ended) {
            Slot::Sent(value) => Poll::Ready(Ok(value)),
            Slot::Ended => Poll::Ready(Err(NoResponse)),
            Slot::Waiting(old) => {
                *slot = Slot::Waiting(Some(waker));
                drop(slot);
                drop(old);
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for Response<T> {
    fn drop(&mut self) {
        let old = mem::replace(&mut *self.0.lock(), Slot::Ended);
        drop(old); // user code: not under the lock
    }
}

impl<T> fmt::Debug for Response<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response").finish_non_exhaustive()
    }
}

/// The error of a [`Response`] whose responder was dropped: the request was refused, or the engine has
/// ended. Also that of a poll after the response was returned. As an [`io::Error`] it is `ECANCELED`.
///
/// ```
/// use aio_reap::{Engine, NoResponse};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let response = engine.remote().ask::<(), _>(|_, responder| drop(responder))?;
/// assert_eq!(engine.block_on(response)?, Err(NoResponse));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the call has ended without a response")]
pub struct NoResponse;

impl From<NoResponse> for io::Error {
    fn from(_: NoResponse) -> Self {
        Self::from_raw_os_error(libc::ECANCELED)
    }
}
