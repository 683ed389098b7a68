//! A scripted device, to test the engine and code on top of it.
//!
//! The script determines how submissions end, when and in which order requests complete, and how
//! many bytes each transfers. The device moves data: a request performs its system call on its file
//! when it completes, so bytes can be compared. Everything happens on the engine's thread, in the
//! order of the script.
//!
//! ```
//! use aio_reap::{Engine, scripted::{Script, SubmitStep}};
//!
//! # fn main() -> std::io::Result<()> {
//! let script = Script::new();
//! let engine = Engine::builder().build_scripted(&script)?;
//! script.on_submit(SubmitStep::Again); // the device has no room the first time
//! let nop = engine.nop().submit()?;
//! assert_eq!(script.in_flight(), 0);
//! engine.turn();
//! assert_eq!(script.in_flight(), 1);
//! script.complete(1);
//! assert_eq!(nop.wait().0?, 0);
//! # Ok(())
//! # }
//! ```

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::slice;
use std::time::Duration;

use super::Backend;
use crate::op::{Kind, MemoryKind, Op};
use crate::raw::{RawCompletion, Stop, Sub, Submitted};
use crate::slab::Batch;
use crate::{perform, sys};

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
    /// The request transfers nothing and fails with this errno (at least 1).
    Fail(i32),
}

impl Transfer {
    /// Performs the system call of an accepted request that has not completed. Returns its result.
    pub(super) fn carry_out(self, op: &Op) -> i32 {
        match self {
            Self::Full => perform(op),
            Self::Short(bytes) if op.transfers() => short(op, bytes.max(1)),
            Self::Short(_) => perform(op),
            Self::Fail(errno) => -errno.max(1),
        }
    }
}

/// The script and the log of a device. Clones share both. One engine at a time can use it.
#[derive(Clone, Debug, Default)]
pub struct Script(Rc<RefCell<Device>>);

/// The state of a script and its device.
#[derive(Debug, Default)]
struct Device {
    steps: VecDeque<SubmitStep>,
    transfers: VecDeque<Transfer>,
    /// The accepted requests, in their order.
    accepted: VecDeque<Sub>,
    /// The completions that are not reaped.
    done: VecDeque<RawCompletion>,
    /// The offsets of the accepted requests, in their order.
    log: Vec<u64>,
    /// The number of requests offered by each submission.
    batches: Vec<usize>,
    waits: u64,
    peeks: u64,
    /// Cancellations have no effect.
    stubborn: bool,
    cancels: u64,
    /// The notifier of the engine that uses the device. It is signalled when `done` becomes
    /// non-empty.
    notifier: Option<OwnedFd>,
}

impl Script {
    /// Makes a device that accepts every request, and completes none until it is told to.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the end of the next submission that has none yet.
    pub fn on_submit(&self, step: SubmitStep) {
        self.0.borrow_mut().steps.push_back(step);
    }

    /// Adds the end of the next completing request that has none yet. Requests without one end as
    /// [`Transfer::Full`].
    pub fn on_transfer(&self, transfer: Transfer) {
        self.0.borrow_mut().transfers.push_back(transfer);
    }

    /// Completes up to `count` requests, oldest first. The engine sees them when it reaps. Returns
    /// their number.
    pub fn complete(&self, count: usize) -> usize {
        let mut device = self.0.borrow_mut();
        let count = count.min(device.accepted.len());
        for _ in 0..count {
            device.complete(0);
        }
        count
    }

    /// Completes the `nth` oldest request in flight, out of order. Returns false if there is none.
    pub fn complete_nth(&self, nth: usize) -> bool {
        let mut device = self.0.borrow_mut();
        let there = nth < device.accepted.len();
        if there {
            device.complete(nth);
        }
        there
    }

    /// Sets whether cancellations have an effect. They do by default.
    pub fn cancels(&self, cancels: bool) {
        self.0.borrow_mut().stubborn = !cancels;
    }

    /// Returns the number of attempted cancellations.
    pub fn cancellations(&self) -> u64 {
        self.0.borrow().cancels
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().accepted.len()
    }

    /// Returns the number of completions that the engine has not reaped.
    pub fn visible(&self) -> usize {
        self.0.borrow().done.len()
    }

    /// Returns the offsets of the accepted requests, in their order.
    pub fn log(&self) -> Vec<u64> {
        self.0.borrow().log.clone()
    }

    /// Returns the sizes of all submissions, including refused ones.
    pub fn batches(&self) -> Vec<usize> {
        self.0.borrow().batches.clone()
    }

    /// Makes the engine's descriptor readable without a completion.
    pub fn ring(&self) {
        if let Some(notifier) = &self.0.borrow().notifier {
            sys::signal(notifier);
        }
    }

    /// Returns how often the engine peeked again after a peek that found nothing. Each sixteenth
    /// such peek completes the oldest request, as a sleep does.
    pub fn peeks(&self) -> u64 {
        self.0.borrow().peeks
    }

    /// Returns how often the engine went to sleep.
    pub fn waits(&self) -> u64 {
        self.0.borrow().waits
    }
}

impl Device {
    fn complete(&mut self, nth: usize) {
        let Some(Sub { user_data, op }) = self.accepted.remove(nth) else { return };
        let result = self.transfers.pop_front().unwrap_or(Transfer::Full).carry_out(&op);
        self.done.push_back(RawCompletion { user_data, result });
        if let (1, Some(notifier)) = (self.done.len(), &self.notifier) {
            sys::signal(notifier);
        }
    }
}

/// Transfers at most `most` bytes of `op`.
fn short(op: &Op, most: usize) -> i32 {
    let MemoryKind::Vectors(count) = op.memory.kind() else {
        return perform(&Op { len: op.len.min(most as u64), ..*op });
    };
    // SAFETY: by contract 2 of `backend` the vectors are valid until the completion.
    let vectors = unsafe { slice::from_raw_parts(op.ptr.cast::<libc::iovec>(), count.into()) };
    let mut left = most;
    let mut fewer = vectors.to_vec();
    for vector in &mut fewer {
        vector.iov_len = vector.iov_len.min(left);
        left -= vector.iov_len;
    }
    perform(&Op { ptr: fewer.as_mut_ptr().cast(), ..*op })
}

fn perform(op: &Op) -> i32 {
    debug_assert!(op.kind == Kind::Nop || op.kind.manages_files() || op.fd >= 0);
    // SAFETY: by contract 2 of `backend` the memory is valid, since the request was accepted and
    // has not completed.
    unsafe { perform::perform(op) }
}

/// The backend of the engine that uses a script.
pub(crate) struct Scripted(Script);

impl Scripted {
    /// # Errors
    ///
    /// `EBUSY` while another engine uses the device, because each engine would get completions of
    /// the other.
    pub(crate) fn new(script: &Script) -> io::Result<Self> {
        let mut device = script.0.borrow_mut();
        if device.notifier.is_some() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        device.notifier = Some(sys::eventfd()?);
        drop(device);
        Ok(Self(script.clone()))
    }
}

impl Drop for Scripted {
    /// Drops the engine's requests. The script may outlive the engine and must not use their
    /// memory.
    fn drop(&mut self) {
        let mut device = self.0.0.borrow_mut();
        device.accepted.clear();
        device.done.clear();
        device.notifier = None;
    }
}

impl Backend for Scripted {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        let mut device = self.0.0.borrow_mut();
        let offered = batch.len();
        device.batches.push(offered);
        let step = device.steps.pop_front();
        let (most, stop) = match step.unwrap_or(SubmitStep::Accept(usize::MAX)) {
            SubmitStep::Accept(most) => (most, Stop::Busy),
            SubmitStep::Again => (0, Stop::Busy),
            SubmitStep::Refuse(most, errno) => (most, Stop::Failed(errno.max(1))),
            SubmitStep::Inline => (usize::MAX, Stop::Busy),
        };
        let accepted = most.min(offered);
        for sub in batch.take(accepted) {
            device.accepted.push_back(sub);
            device.log.push(sub.op.offset);
        }
        if step == Some(SubmitStep::Inline) {
            let newest = device.accepted.len() - accepted;
            for _ in 0..accepted {
                device.complete(newest);
            }
        }
        Submitted { accepted, stop: (accepted < offered).then_some(stop) }
    }

    fn reap(&mut self, budget: usize, each: impl FnMut(RawCompletion)) {
        let mut device = self.0.0.borrow_mut();
        let count = budget.min(device.done.len());
        device.done.drain(..count).for_each(each);
    }

    /// Completes the oldest request instead of sleeping.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.before_sleep(timeout);
        Ok(())
    }

    fn relax(&mut self) {
        let mut device = self.0.0.borrow_mut();
        device.peeks += 1;
        if device.peeks.is_multiple_of(16) && device.done.is_empty() {
            device.complete(0);
        }
    }

    fn before_sleep(&mut self, _timeout: Option<Duration>) {
        let mut device = self.0.0.borrow_mut();
        device.waits += 1;
        if device.done.is_empty() {
            device.complete(0);
        }
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        let mut device = self.0.0.borrow_mut();
        device.cancels += 1;
        let nth = device.accepted.iter().position(|sub| sub.user_data == user_data);
        if let (false, Some(nth)) = (device.stubborn, nth) {
            device.transfers.push_front(Transfer::Fail(libc::ECANCELED));
            device.complete(nth);
        }
        true
    }

    fn acknowledge(&mut self) {
        if let Some(notifier) = &self.0.0.borrow().notifier {
            sys::drain(notifier);
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        self.0.0.borrow().notifier.iter().map(AsRawFd::as_raw_fd).collect()
    }
}
