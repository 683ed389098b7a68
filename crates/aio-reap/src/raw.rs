//! Requests and completions in the form that the engine and a backend exchange.

use crate::op::Op;

/// A request for the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sub {
    pub(crate) user_data: u64,
    pub(crate) op: Op,
}

/// A completion. `result` is a number of bytes or a negated errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawCompletion {
    /// The number of the request.
    pub user_data: u64,
    /// A number of bytes or a negated errno.
    pub result: i32,
}

/// The reason why a submission ended before its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The kernel has no room now (EAGAIN, EBUSY). The engine tries again after a completion or a
    /// delay.
    Busy,
    /// The kernel refused the first request that it did not accept, with this errno.
    Failed(i32),
}

/// The result of a submission. `stop` is `None` if the whole batch was accepted.
#[derive(Clone, Copy, Debug)]
pub struct Submitted {
    /// The number of requests that the kernel took.
    pub accepted: usize,
    /// Why it took no more.
    pub stop: Option<Stop>,
}
