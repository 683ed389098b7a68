//! The handle of a request of another thread.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use super::mailbox::{Answer, SlotIndex};
use super::sent::SentRequest;
use super::shared::Shared;
use crate::outcome::{Outcome, Owned};
use crate::payload::RawResult;

/// A request that was sent to an engine of another thread. Await it on any executor, or block with
/// [`wait`](Self::wait).
///
/// A drop abandons the result, not the I/O: the request still runs, and the engine's thread frees
/// its buffer after the completion. It is safe to forget an operation, but the request then counts
/// against [`EngineBuilder::remote_capacity`](crate::EngineBuilder::remote_capacity) for ever.
///
/// ```
/// use aio_reap::{Engine, SharedFile};
/// use std::thread;
/// use std::time::Duration;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let remote = engine.remote();
/// let sender = thread::spawn(move || {
///     let file = SharedFile::new(std::fs::File::open("/dev/zero")?)?;
///     let mut read = remote.read(&file, vec![1; 512], 0).submit()?;
///     loop {
///         match read.wait_timeout(Duration::from_millis(100)) {
///             Ok((read, _buf)) => return Ok::<_, std::io::Error>(read?),
///             Err(operation) => read = operation, // not yet: do something else
///         }
///     }
/// });
/// engine.serve()?;
/// assert_eq!(sender.join().unwrap()?, 512);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping an operation abandons its result"]
pub struct RemoteOperation<B> {
    shared: Arc<Shared>,
    /// `None` after the result was returned.
    index: Option<SlotIndex>,
    buf: PhantomData<B>,
}

/// The buffer is in the mailbox, so the operation has no pinned field.
impl<B> Unpin for RemoteOperation<B> {}

impl<B: Send + 'static> RemoteOperation<B> {
    /// Makes the operation of the request at `index`, whose payload is an `Owned<B>`.
    pub(super) fn new(shared: &Arc<Shared>, index: SlotIndex) -> Self {
        Self { shared: Arc::clone(shared), index: Some(index), buf: PhantomData }
    }

    /// Returns whether the request has completed.
    pub fn is_done(&self) -> bool {
        self.index.is_none_or(|index| self.shared.mailbox.is_done(index))
    }

    /// Blocks until the request completes.
    ///
    /// # Panics
    ///
    /// Panics on the engine's own thread if the request has not completed, because that thread
    /// would wait for itself ([`wait_timeout`](Self::wait_timeout) returns the operation instead);
    /// if a poll has already returned the result; and if the engine was dropped while the kernel
    /// still used the buffer (other code closed a descriptor of the engine).
    pub fn wait(mut self) -> Outcome<B> {
        let answer = self.block(None);
        self.open(answer.expect("the engine's thread would wait for itself"))
    }

    /// Waits like [`wait`](Self::wait), for `timeout` at most.
    ///
    /// # Errors
    ///
    /// Returns the operation if the time is over first. On the engine's own thread it returns at
    /// once if the request has not completed, because it cannot complete while that thread blocks.
    /// Turn the engine, or await the operation.
    ///
    /// # Panics
    ///
    /// Panics if a poll has already returned the result, and if the engine was dropped while the
    /// kernel still used the buffer.
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Outcome<B>, Self> {
        let end = Instant::now().checked_add(timeout);
        match self.block(end) {
            Some(answer) => Ok(self.open(answer)),
            None => Err(self),
        }
    }

    /// Blocks for the answer until `end`. The engine's thread does not block, because it makes the
    /// answer itself.
    fn block(&self, end: Option<Instant>) -> Option<Answer<SentRequest, RawResult>> {
        let end = if self.shared.is_engine_thread() { Some(Instant::now()) } else { end };
        self.shared.mailbox.wait(self.index(), end)
    }

    /// Asks the engine to cancel the request, like
    /// [`Operation::cancel`](crate::Operation::cancel), in its next turn. Returns false if the
    /// request has completed. An attempt that the backend refuses is made again in later turns.
    ///
    /// Never blocks. A request that waits for a free slot of the engine is cancelled when it gets
    /// one.
    ///
    /// ```
    /// use aio_reap::Engine;
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let engine = Engine::new()?;
    /// let operation = engine.remote().nop().submit()?; // usually by another thread
    /// assert!(operation.cancel());
    /// engine.turn();
    /// let (result, ()) = operation.wait();
    /// assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    /// # Ok(())
    /// # }
    /// ```
    pub fn cancel(&self) -> bool {
        let asked = self.index.and_then(|index| self.shared.mailbox.cancel(index));
        if asked == Some(true) {
            self.shared.notify();
        }
        asked.is_some()
    }

    fn index(&self) -> SlotIndex {
        self.index.expect("an operation is not polled after it was ready")
    }

    /// Takes the buffer out of the answer.
    fn open(&mut self, (mut request, result): Answer<SentRequest, RawResult>) -> Outcome<B> {
        self.index = None;
        // SAFETY: `new` got the index of a request whose payload is an `Owned<B>`, and this is that
        // request.
        let owned = unsafe { request.payload.take::<Owned<B>>() };
        owned.expect("only this operation takes it").outcome(result)
    }
}

impl<B: Send + 'static> Future for RemoteOperation<B> {
    type Output = Outcome<B>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready, and if the engine was dropped while the kernel
    /// still used the buffer.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome<B>> {
        match self.shared.mailbox.poll(self.index(), context.waker()) {
            Some(answer) => Poll::Ready(self.open(answer)),
            None => Poll::Pending,
        }
    }
}

impl<B> Drop for RemoteOperation<B> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            drop(self.shared.mailbox.abandon(index)); // with the buffer, if the request has completed
        }
    }
}

impl<B> fmt::Debug for RemoteOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOperation").field("collected", &self.index.is_none()).finish()
    }
}
