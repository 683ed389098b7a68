//! The script mode: the test determines how submissions end, when and in which order requests
//! complete, and how many bytes each transfers. The clock stands still.
//!
//! ```
//! use aio_reap::Engine;
//! use aio_reap_test::{Build, sim::{Script, SubmitStep}};
//!
//! # fn main() -> std::io::Result<()> {
//! let script = Script::new();
//! let engine = Engine::builder().build_sim(&script)?;
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

use std::collections::VecDeque;
use std::ops::Deref;

use aio_reap::external::{Request, Stop};

use super::Sim;
use super::world::World;

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

/// A device in script mode. It is a [`Sim`] that accepts every request, and completes none until it is
/// told to, and one engine at a time can use it. It moves data, and deadlines have real time.
#[derive(Clone, Debug)]
pub struct Script(Sim);

/// What a script determines, and its log.
#[derive(Debug, Default)]
pub(super) struct Directions {
    steps: VecDeque<SubmitStep>,
    pub(super) transfers: VecDeque<Transfer>,
    /// The offsets of the accepted requests, in their order.
    pub(super) log: Vec<u64>,
    /// The number of requests offered by each submission.
    batches: Vec<usize>,
    pub(super) waits: u64,
    pub(super) peeks: u64,
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

impl Script {
    /// Makes a device without an engine.
    #[expect(clippy::new_without_default, reason = "a device is an identity, not a value")]
    pub fn new() -> Self {
        Self(Sim::of(World::scripted()))
    }

    fn with<T>(&self, f: impl FnOnce(&mut Directions) -> T) -> T {
        f(self.0.0.borrow_mut().script.as_mut().expect("the world of a script has one"))
    }

    /// Adds the end of the next submission that has none yet.
    pub fn on_submit(&self, step: SubmitStep) {
        self.with(|script| script.steps.push_back(step));
    }

    /// Adds the end of the next completing request that has none yet. Requests without one end as
    /// [`Transfer::Full`].
    pub fn on_transfer(&self, transfer: Transfer) {
        self.with(|script| script.transfers.push_back(transfer));
    }

    /// Completes up to `count` requests, oldest first. The engine sees them when it reaps. Returns
    /// their number.
    pub fn complete(&self, count: usize) -> usize {
        (0..count).take_while(|_| self.complete_nth(0)).count()
    }

    /// Completes the `nth` oldest request in flight, out of order. Returns false if there is none.
    pub fn complete_nth(&self, nth: usize) -> bool {
        self.0.0.borrow_mut().complete(nth)
    }

    /// Sets the effect of cancellations.
    pub fn cancels(&self, cancel: Cancel) {
        self.with(|script| script.cancel = cancel);
    }

    /// Returns the number of attempted cancellations.
    pub fn cancellations(&self) -> u64 {
        self.with(|script| script.cancels)
    }

    /// Returns the number of requests in flight, without those that are complete.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight() - self.visible()
    }

    /// Returns the offsets of the accepted requests, in their order.
    pub fn log(&self) -> Vec<u64> {
        self.with(|script| script.log.clone())
    }

    /// Returns the sizes of all submissions, including refused ones.
    pub fn batches(&self) -> Vec<usize> {
        self.with(|script| script.batches.clone())
    }

    /// Makes the engine's descriptor readable without a completion.
    pub fn ring(&self) {
        self.0.0.borrow_mut().rings.iter_mut().flatten().for_each(|ring| ring.signal());
    }

    /// Returns how often the engine peeked again after a peek that found nothing. Each sixteenth
    /// such peek completes the oldest request, as a sleep does.
    pub fn peeks(&self) -> u64 {
        self.with(|script| script.peeks)
    }

    /// Returns how often the engine went to sleep. The oldest request completes then, unless a
    /// completion is visible.
    pub fn waits(&self) -> u64 {
        self.with(|script| script.waits)
    }
}

impl Deref for Script {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        &self.0
    }
}
