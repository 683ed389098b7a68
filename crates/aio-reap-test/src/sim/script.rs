//! The decisions of a test in script mode: how submissions end, and how requests end.

use std::collections::VecDeque;

use aio_reap::external::{Request, Stop};

/// The end of one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitStep {
    /// The device takes at most this many requests. The rest finds no room.
    Accept(usize),
    /// The device takes no request (EAGAIN).
    Again,
    /// The device takes this many requests, and refuses the next one with this errno.
    Refuse(usize, i32),
    /// The device takes all requests, and all complete before the submission returns.
    Inline,
}

/// The end of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transfer {
    /// The request ends like its system call.
    Full,
    /// The request transfers at most this many bytes (at least one).
    Short(usize),
    /// The request transfers nothing and fails with this errno (at least 1). A close does close its
    /// descriptor, as in the kernel.
    Fail(i32),
}

impl Transfer {
    /// Performs the system call of a request. Returns its result.
    ///
    /// # Safety
    ///
    /// Those of [`Request::perform`].
    pub(super) unsafe fn carry_out(self, request: &Request) -> i32 {
        let most = match self {
            Self::Full => usize::MAX,
            Self::Short(bytes) => bytes.max(1),
            Self::Fail(errno) => {
                if request.closes {
                    // SAFETY: the contract of this function is that of `perform`.
                    unsafe { request.perform(0) };
                }
                return -errno.max(1);
            }
        };
        // SAFETY: the contract of this function is that of `perform`.
        unsafe { request.perform(most) }
    }
}

/// The effect of cancellations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cancel {
    /// The request completes at once, with `ECANCELED`.
    #[default]
    Works,
    /// None: the device has begun the request.
    TooLate,
    /// None, and the device says that there was no attempt, as io_uring without room in its ring.
    Refused,
}

/// The decisions of a script, and its log.
#[derive(Debug, Default)]
pub(super) struct Directions {
    pub(super) steps: VecDeque<SubmitStep>,
    pub(super) transfers: VecDeque<Transfer>,
    /// The offsets of the accepted requests, in their order.
    pub(super) log: Vec<u64>,
    /// The number of requests offered by each submission.
    pub(super) batches: Vec<usize>,
    pub(super) waits: u64,
    pub(super) cancel: Cancel,
    pub(super) cancels: u64,
}

impl Directions {
    /// Returns how many requests of a batch the device takes, why it takes no more, and whether they
    /// complete at once.
    pub(super) fn submission(&mut self, offered: usize) -> (usize, Stop, bool) {
        self.batches.push(offered);
        let step = self.steps.pop_front().unwrap_or(SubmitStep::Accept(usize::MAX));
        let (most, stop) = match step {
            SubmitStep::Accept(most) => (most, Stop::Busy),
            SubmitStep::Again => (0, Stop::Busy),
            SubmitStep::Refuse(most, errno) => (most, Stop::Failed(errno.max(1))),
            SubmitStep::Inline => (usize::MAX, Stop::Busy),
        };
        (most.min(offered), stop, step == SubmitStep::Inline)
    }
}
