//! A simulated device in virtual time. It shows how an engine and its limits behave on other
//! hardware, and is reproducible.
//!
//! A [`Sim`] is a clock and a device with a [`Model`]. One or several engines share it. The clock
//! moves in three cases: a submission, reap or wait takes the time of the model's [`Costs`]; a wait
//! jumps to the next completion; and the program reports the time of its [own work](Sim::spend). No
//! other time counts: the same model, seed and calls give the same order of completions, the same
//! times and the same [fingerprint](Sim::fingerprint) on every machine.
//!
//! ```
//! use aio_reap::Engine;
//! use aio_reap_test::{Build, sim::{Model, Service, Sim}};
//!
//! # fn main() -> std::io::Result<()> {
//! let model = Model { servers: 2, service: Service::Fixed(10_000), ..Model::default() };
//! let sim = Sim::new(model, 1);
//! let engine = Engine::builder().build_sim(&sim)?;
//! let plug = engine.plug();
//! let operations: Vec<_> = (0..4).map(|_| engine.nop().submit()).collect::<Result<_, _>>()?;
//! drop(plug);
//! for operation in operations {
//!     operation.wait().0?;
//! }
//! assert!(sim.now() >= 20_000); // two servers, two requests each
//! # Ok(())
//! # }
//! ```
//!
//! # Time
//!
//! Times are virtual nanoseconds (`u64`, from 0 on). So are the timeouts of waits, and the delay
//! before a retry. Deadlines count from [`Sim::instant`]. An engine's descriptor becomes readable only if the engine itself sleeps on it
//! (`block_on`). An event loop calls [`Sim::poll`] instead, until the earliest of its deadlines.
//!
//! Other threads have real time, even for the deadlines of their requests, so a simulation with
//! them is not reproducible.
//!
//! # The device
//!
//! A request waits for the first free one of the [`servers`](Model::servers), takes its [service
//! time](Service) there, and is visible to reaps after that time. A cancellation ends a request
//! that no server has begun. Unless the model [moves data](Model::moves_data), files and buffers
//! are not used.

use std::cell::RefCell;
use std::io;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use aio_reap::external::{External, RawCompletion, Request, Submitted};

pub use self::closed_loop::{ClosedLoop, Figures, Workload};
pub use self::model::{Costs, Faults, Model, Service};
use self::script::Directions;
pub use self::script::{Cancel, SubmitStep, Transfer};
use self::world::{Ring, World};

mod closed_loop;
mod model;
mod random;
mod script;
mod world;

/// A virtual clock and a simulated device. Clones share both.
#[derive(Clone, Debug)]
pub struct Sim(Rc<RefCell<World>>);

impl Sim {
    /// Makes a device without engines, at time 0.
    pub fn new(model: Model, seed: u64) -> Self {
        Self::of(World::new(model, seed))
    }

    fn of(world: World) -> Self {
        Self(Rc::new(RefCell::new(world)))
    }

    /// Returns the time in nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.0.borrow().clock
    }

    /// Returns the same time as an [`Instant`], for deadlines: the real time at which the
    /// simulation was made, plus the virtual time. If that cannot be represented, returns the
    /// start.
    pub fn instant(&self) -> Instant {
        let world = self.0.borrow();
        world.origin.checked_add(Duration::from_nanos(world.clock)).unwrap_or(world.origin)
    }

    /// Advances the clock by `nanos` nanoseconds of work of the calling thread. The device works
    /// meanwhile.
    pub fn spend(&self, nanos: u64) {
        self.0.borrow_mut().spend(nanos);
    }

    /// Sleeps until an engine has a completion to reap or the clock shows `until`, as an event loop
    /// does that polls the descriptors of all engines. If neither can happen, returns false at
    /// once; the engines may still have work ([`Engine::wait`](aio_reap::Engine::wait)).
    pub fn poll(&self, until: Option<u64>) -> bool {
        self.0.borrow_mut().poll(None, until)
    }

    /// Returns the number of requests in the device, including those that are complete and not
    /// reaped.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().rings.iter().flatten().map(Ring::len).sum()
    }

    /// Returns the number of completions that are not reaped.
    pub fn visible(&self) -> usize {
        self.0.borrow().visible()
    }

    /// Returns the mean time of the reaped requests from their submission to their reap, or 0 without
    /// one.
    pub fn mean_in_device(&self) -> u64 {
        let world = self.0.borrow();
        world.in_device.checked_div(world.reaped).unwrap_or(0)
    }

    /// Returns a hash of the history: every request that the device took, every completion that was
    /// reaped, their times and results.
    pub fn fingerprint(&self) -> u64 {
        self.0.borrow().fingerprint
    }
}

/// A device in script mode: the test determines how submissions end, when and in which order requests
/// complete, and how many bytes each transfers.
///
/// It is a [`Sim`] that accepts every request, and completes none until it is told to, and one engine
/// at a time can use it. It moves data. Its clock stands still, and deadlines have real time.
///
/// ```
/// use aio_reap::Engine;
/// use aio_reap_test::{Build, sim::{Script, SubmitStep}};
///
/// # fn main() -> std::io::Result<()> {
/// let script = Script::new();
/// let engine = Engine::builder().build_sim(&script)?;
/// script.on_submit(SubmitStep::Again); // the device has no room the first time
/// let nop = engine.nop().submit()?;
/// assert_eq!(script.in_flight(), 0);
/// engine.turn();
/// assert_eq!(script.in_flight(), 1);
/// script.complete(1);
/// assert_eq!(nop.wait().0?, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Script(Sim);

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

/// The backend of one engine on the device.
pub(crate) struct Simulated {
    sim: Sim,
    ring: usize,
}

impl Simulated {
    /// # Errors
    ///
    /// `EBUSY` while another engine uses a device in script mode, which does not name engines.
    pub(crate) fn new(sim: &Sim) -> io::Result<Self> {
        let new = Ring::new()?;
        let world = &mut *sim.0.borrow_mut();
        let rings = &mut world.rings;
        if world.script.is_some() && rings.iter().any(Option::is_some) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let free = rings.iter().position(Option::is_none);
        let ring = free.unwrap_or_else(|| {
            rings.push(None);
            rings.len() - 1
        });
        rings[ring] = Some(new);
        Ok(Self { sim: sim.clone(), ring })
    }
}

impl Drop for Simulated {
    /// Drops the engine's requests. The device may outlive the engine and must not use their
    /// memory.
    fn drop(&mut self) {
        self.sim.0.borrow_mut().rings[self.ring] = None;
    }
}

// SAFETY: 1 and 3: a request is in its ring until `reap` takes it, where it is performed; the drop
// removes the ring. 2: `carry_out` gives the result, or `pretend` that of a transfer left out.
unsafe impl External for Simulated {
    fn submit(&mut self, requests: &mut dyn ExactSizeIterator<Item = Request>) -> Submitted {
        self.sim.0.borrow_mut().submit(self.ring, requests)
    }

    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion)) {
        self.sim.0.borrow_mut().reap(self.ring, each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut world = self.sim.0.borrow_mut();
        let until = timeout.map(|timeout| world.clock.saturating_add(nanos(timeout)));
        world.poll(Some(self.ring), until);
        Ok(())
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        _ = self.wait(timeout);
        let mut world = self.sim.0.borrow_mut();
        if world.script.is_none() {
            world.ring(self.ring).signal();
        }
    }

    fn advance_time(&mut self, time: Duration) -> bool {
        let mut world = self.sim.0.borrow_mut();
        let is_virtual = world.script.is_none();
        if is_virtual {
            world.spend(nanos(time));
        }
        is_virtual
    }

    fn acknowledge(&mut self) {
        self.sim.0.borrow_mut().ring(self.ring).acknowledge();
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        self.sim.0.borrow_mut().cancel(self.ring, user_data)
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.sim.0.borrow_mut().ring(self.ring).fd()]
    }

    fn instant(&self) -> Instant {
        let scripted = self.sim.0.borrow().script.is_some();
        if scripted { Instant::now() } else { self.sim.instant() }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
