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
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use aio_reap::external::{External, RawCompletion, Request, Submitted};

pub use self::closed_loop::{ClosedLoop, Figures, Workload};
pub use self::model::{Costs, Faults, Model, Service};
use self::world::{Ring, World};
use crate::notifier::Notifier;

mod closed_loop;
mod model;
mod random;
mod world;

/// A virtual clock and a simulated device. Clones share both.
#[derive(Clone, Debug)]
pub struct Sim(Rc<RefCell<World>>);

impl Sim {
    /// Makes a device without engines, at time 0.
    pub fn new(model: Model, seed: u64) -> Self {
        Self(Rc::new(RefCell::new(World::new(model, seed))))
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

/// The backend of one engine on the device.
pub(crate) struct Simulated {
    sim: Sim,
    ring: usize,
}

impl Simulated {
    pub(crate) fn new(sim: &Sim) -> io::Result<Self> {
        let notifier = Notifier::new()?;
        let mut world = sim.0.borrow_mut();
        let rings = &mut world.rings;
        let free = rings.iter().position(Option::is_none);
        let ring = free.unwrap_or_else(|| {
            rings.push(None);
            rings.len() - 1
        });
        rings[ring] = Some(Ring::new(notifier));
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

    fn reap(&mut self, budget: usize, each: &mut dyn FnMut(RawCompletion)) {
        self.sim.0.borrow_mut().reap(self.ring, budget, each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut world = self.sim.0.borrow_mut();
        let until = timeout.map(|timeout| world.clock.saturating_add(nanos(timeout)));
        world.poll(Some(self.ring), until);
        Ok(())
    }

    /// Advances the clock, which would stand still if a peek cost nothing.
    fn relax(&mut self) {
        self.sim.spend(1);
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        let mut world = self.sim.0.borrow_mut();
        let until = timeout.map(|timeout| world.clock.saturating_add(nanos(timeout)));
        world.poll(Some(self.ring), until);
        if let Some(ring) = &mut world.rings[self.ring] {
            ring.rung = true;
            ring.notifier.signal();
        }
    }

    fn advance_time(&mut self, time: Duration) -> bool {
        self.sim.spend(nanos(time));
        true
    }

    fn acknowledge(&mut self) {
        if let Some(ring) = &mut self.sim.0.borrow_mut().rings[self.ring] {
            if std::mem::take(&mut ring.rung) {
                ring.notifier.drain();
            }
        }
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        self.sim.0.borrow_mut().cancel(self.ring, user_data);
        true
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let world = self.sim.0.borrow();
        world.rings[self.ring].iter().map(|ring| ring.notifier.fd()).collect()
    }

    fn instant(&self) -> Instant {
        self.sim.instant()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
