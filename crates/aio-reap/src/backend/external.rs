//! The hook for a device outside this crate, for tests: `aio-reap-test` has one.
//!
//! It is outside semantic versioning.

use std::io;
use std::os::fd::RawFd;
use std::slice;
use std::time::{Duration, Instant};

use super::Backend;
use crate::op::Sub;
use crate::op::{Kind, MAX_TRANSFER, Op};
pub use crate::op::{RawCompletion, Stop, Submitted};
use crate::slab::Batch;

/// A device outside this crate. The methods are those of the engine's own backends.
///
/// # Safety
///
/// 1. `submit` takes a prefix of the requests, in order. Each one that it took completes at most
///    once through `reap`, with its user data.
/// 2. The result is that of [`Request::perform`], a smaller number of bytes, or a negated errno; or
///    the number of bytes of a transfer that was left out. A request that [closes](Request::closes)
///    is performed whatever its result is.
/// 3. After its completion, and after the device was dropped, a request is not performed.
pub unsafe trait External {
    /// Starts requests, first to last.
    fn submit(&mut self, requests: &mut dyn ExactSizeIterator<Item = Request>) -> Submitted;

    /// Passes the completions that are visible now to `each`, which does not panic.
    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion));

    /// Sleeps until a completion is probably visible, or `timeout` is over. It may return early.
    ///
    /// # Errors
    ///
    /// The engine returns the error from its own wait.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Called before the engine sleeps on the [descriptors](Self::wake_fds) instead of in `wait`.
    fn before_sleep(&mut self, timeout: Option<Duration>);

    /// Advances the time of the device while the engine would sleep with nothing in flight. Returns
    /// false if the device has real time.
    fn advance_time(&mut self, _time: Duration) -> bool {
        false
    }

    /// Clears the descriptors, before a reap that takes the completions.
    fn acknowledge(&mut self);

    /// Returns the descriptors that are readable when completions may be visible; at most two.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Tries to cancel an accepted request, which completes like every other in any case. Returns
    /// false if there was no attempt.
    fn cancel(&mut self, user_data: u64) -> bool;

    /// Returns the time for deadlines and timeouts.
    fn instant(&self) -> Instant {
        Instant::now()
    }
}

/// A request as an outside device sees it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The number that its completion must have.
    pub user_data: u64,
    /// The offset in the file.
    pub offset: u64,
    /// The number of bytes of a transfer in one system call, or `None` for other requests.
    pub transfer_len: Option<u64>,
    /// The request opens, closes or names files: it is performed also where data does not move.
    pub manages_files: bool,
    /// The request closes a descriptor, which the engine then takes as closed, also after an error.
    pub closes: bool,
    op: Op,
}

impl Request {
    fn new(Sub { user_data, op }: Sub) -> Self {
        Self {
            user_data,
            offset: op.offset,
            transfer_len: op.transfers().then_some(op.len.min(MAX_TRANSFER as u64)),
            manages_files: op.kind.manages_files(),
            closes: op.kind == Kind::Close,
            op,
        }
    }

    /// Returns how many of the `bytes` of a short transfer count as moved: on a direct file, those
    /// of whole blocks.
    pub fn whole(&self, bytes: u64) -> u64 {
        self.op.block.whole(bytes)
    }

    /// Performs the blocking system call, for a transfer of at most `most` bytes. Returns a count or
    /// a negated errno.
    ///
    /// # Safety
    ///
    /// The device has accepted the request, has not completed it, and was not dropped.
    pub unsafe fn perform(&self, most: usize) -> i32 {
        let op = &self.op;
        let mut vectors = Vec::new();
        let less = match op.memory.vector_count() {
            _ if !op.transfers() => *op,
            Some(count) => {
                let all = op.ptr.cast::<libc::iovec>();
                // SAFETY: by the contract of this function the request is in flight, so its slot
                // keeps the vectors.
                vectors.extend_from_slice(unsafe { slice::from_raw_parts(all, count.into()) });
                let mut left = most;
                for vector in &mut vectors {
                    vector.iov_len = vector.iov_len.min(left);
                    left -= vector.iov_len;
                }
                Op { ptr: vectors.as_mut_ptr().cast(), ..*op }
            }
            None => Op { len: op.len.min(most as u64), ..*op },
        };
        // SAFETY: by the contract of this function the request is in flight, so its slot keeps the
        // buffers and the file; `vectors` lives until the end of the function.
        unsafe { crate::op::perform(&less) }
    }
}

/// An outside device, with the requests that are staged for its next submission.
pub(crate) struct Staging {
    device: Box<dyn External>,
    staged: Vec<Request>,
}

impl Staging {
    pub(crate) fn new(device: Box<dyn External>) -> Self {
        Self { device, staged: Vec::new() }
    }
}

impl Backend for Staging {
    fn stage(&mut self, request: Sub) -> bool {
        self.staged.push(Request::new(request));
        true
    }

    fn unstage(&mut self) {
        self.staged.clear();
    }

    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        self.staged.extend(batch.map(Request::new));
        self.device.submit(&mut self.staged.drain(..))
    }

    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion)) {
        self.device.reap(each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.device.wait(timeout)
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        self.device.before_sleep(timeout);
    }

    fn advance_time(&mut self, time: Duration) -> bool {
        self.device.advance_time(time)
    }

    fn acknowledge(&mut self) {
        self.device.acknowledge();
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        self.device.wake_fds()
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        self.device.cancel(user_data)
    }

    fn instant(&self) -> Instant {
        self.device.instant()
    }
}
