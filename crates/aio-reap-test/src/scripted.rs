//! A scripted device, to test the engine and code on top of it.
//!
//! The script determines how submissions end, when and in which order requests complete, and how
//! many bytes each transfers. The device moves data: a request performs its system call on its file
//! when it completes, so bytes can be compared. Everything happens on the engine's thread, in the
//! order of the script.
//!
//! ```
//! use aio_reap::Engine;
//! use aio_reap_test::{Build, scripted::{Script, SubmitStep}};
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
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Duration;

use aio_reap::external::{External, RawCompletion, Request, Stop, Submitted};

use crate::notifier::Notifier;

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
    pub(crate) unsafe fn carry_out(self, request: &Request) -> i32 {
        let most = match self {
            Self::Full => usize::MAX,
            Self::Short(bytes) => bytes.max(1),
            Self::Fail(errno) => {
                if request.closes() {
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

/// The script and the log of a device. Clones share both. One engine at a time can use it.
#[derive(Clone, Debug, Default)]
pub struct Script(Rc<RefCell<Device>>);

/// The state of a script and its device.
#[derive(Debug, Default)]
struct Device {
    steps: VecDeque<SubmitStep>,
    transfers: VecDeque<Transfer>,
    /// The accepted requests, in their order.
    accepted: VecDeque<Request>,
    /// The completions that are not reaped.
    done: VecDeque<RawCompletion>,
    /// The offsets of the accepted requests, in their order.
    log: Vec<u64>,
    /// The number of requests offered by each submission.
    batches: Vec<usize>,
    waits: u64,
    peeks: u64,
    cancel: Cancel,
    cancels: u64,
    /// The notifier of the engine that uses the device. It is signalled when `done` becomes
    /// non-empty.
    notifier: Option<Notifier>,
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

    /// Sets the effect of cancellations.
    pub fn cancels(&self, cancel: Cancel) {
        self.0.borrow_mut().cancel = cancel;
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
            notifier.signal();
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
        let Some(request) = self.accepted.remove(nth) else { return };
        let transfer = self.transfers.pop_front().unwrap_or(Transfer::Full);
        // SAFETY: `accepted` has the accepted requests of a living engine that have not completed.
        let result = unsafe { transfer.carry_out(&request) };
        self.done.push_back(RawCompletion { user_data: request.user_data(), result });
        if let (1, Some(notifier)) = (self.done.len(), &self.notifier) {
            notifier.signal();
        }
    }
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
        device.notifier = Some(Notifier::new()?);
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

// SAFETY: 1 and 3: a request is on `accepted` until it moves to `done`, from which `reap` takes it;
// the drop clears both. 2: `carry_out` gives the result.
unsafe impl External for Scripted {
    fn submit(&mut self, requests: &mut dyn ExactSizeIterator<Item = Request>) -> Submitted {
        let mut device = self.0.0.borrow_mut();
        let offered = requests.len();
        device.batches.push(offered);
        let step = device.steps.pop_front();
        let (most, stop) = match step.unwrap_or(SubmitStep::Accept(usize::MAX)) {
            SubmitStep::Accept(most) => (most, Stop::Busy),
            SubmitStep::Again => (0, Stop::Busy),
            SubmitStep::Refuse(most, errno) => (most, Stop::Failed(errno.max(1))),
            SubmitStep::Inline => (usize::MAX, Stop::Busy),
        };
        let accepted = most.min(offered);
        for request in requests.take(accepted) {
            device.accepted.push_back(request);
            device.log.push(request.offset());
        }
        if step == Some(SubmitStep::Inline) {
            let newest = device.accepted.len() - accepted;
            for _ in 0..accepted {
                device.complete(newest);
            }
        }
        Submitted { accepted, stop: (accepted < offered).then_some(stop) }
    }

    fn reap(&mut self, budget: usize, each: &mut dyn FnMut(RawCompletion)) {
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
        let nth = device.accepted.iter().position(|request| request.user_data() == user_data);
        if let (Cancel::Works, Some(nth)) = (device.cancel, nth) {
            device.transfers.push_front(Transfer::Fail(libc::ECANCELED));
            device.complete(nth);
        }
        device.cancel != Cancel::Refused
    }

    fn acknowledge(&mut self) {
        if let Some(notifier) = &self.0.0.borrow().notifier {
            notifier.drain();
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        self.0.0.borrow().notifier.iter().map(Notifier::fd).collect()
    }
}
