//! Requests and completions in the form in which the engine and a backend exchange them.

use crate::op::Op;

/// One request on its way to the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sub {
    pub(crate) user_data: u64,
    pub(crate) op: Op,
}

/// One completion: bytes, or a negated errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawCompletion {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
}

/// Why a submission ended before its batch did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// No room now: EAGAIN, EBUSY. Try again after a completion or a while.
    Busy,
    /// The first request not accepted is refused with this errno.
    Failed(i32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Submitted {
    pub(crate) accepted: usize,
    pub(crate) stop: Option<Stop>,
}
