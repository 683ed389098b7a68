//! A device in virtual time: what an engine and its limits do on hardware that is not there, the
//! same every time.
//!
//! A [`Sim`] is a clock, a device after a [`Model`], and what calls on it cost. One or several
//! engines share it. The clock moves when the engines submit, reap and wait, by the model's
//! [`Costs`], when a wait jumps to the next completion, and when the program says what its
//! [own work takes](Sim::spend). Nothing else counts: the same model, seed and calls give the same
//! order of completions, the same times and the same [fingerprint](Sim::fingerprint), on every
//! machine.
//!
//! ```
//! use aio_reap::{Engine, sim::{Model, Service, Sim}};
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
//! Everything is in nanoseconds (`u64`, from 0 on), also latencies of
//! [timed](crate::EngineBuilder::timed) engines, timeouts of waits, the delay before a retry and how
//! long [`ReapMode::Hybrid`](crate::ReapMode::Hybrid) peeks. Deadlines are counted from
//! [`Sim::instant`]. An engine's descriptor becomes readable when the engine sleeps on it itself
//! (`block_on`); a loop that polls calls [`Sim::poll`] instead, until the earliest of its deadlines.
//!
//! Other threads keep real time, also for the deadlines of what they submit: with them a simulation is
//! not the same every time.
//!
//! # The device
//!
//! A request waits for the first of the [`servers`](Model::servers) that is free, takes its
//! [service time](Service) there, and is visible to the next reap when the clock shows that. A
//! cancellation ends what no server has taken up yet. Unless the model
//! [moves data](Model::moves_data) no file and no buffer is touched.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

pub use self::model::{Costs, Faults, Model, Service};
use self::world::{Ring, World};
use super::Backend;
pub use crate::closed_loop::{ClosedLoop, Figures, Workload};
use crate::raw::{RawCompletion, Submitted};
use crate::slab::Batch;
use crate::sys;

mod model;
pub(crate) mod random;
mod world;

/// A virtual clock and the device that runs by it; clones share both.
#[derive(Clone, Debug)]
pub struct Sim(Rc<RefCell<World>>);

impl Sim {
    /// A device that nobody uses yet, at time 0.
    pub fn new(model: Model, seed: u64) -> Self {
        Self(Rc::new(RefCell::new(World::new(model, seed))))
    }

    /// The time: nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.0.borrow().clock
    }

    /// The same time, as deadlines are told: on from when the simulation was made. It stays there
    /// after half an eternity (2^63 seconds).
    pub fn instant(&self) -> Instant {
        let world = self.0.borrow();
        world.origin.checked_add(Duration::from_nanos(world.clock)).unwrap_or(world.origin)
    }

    /// Lets so many nanoseconds pass in which the calling thread works and the device goes on.
    pub fn spend(&self, nanos: u64) {
        self.0.borrow_mut().spend(nanos);
    }

    /// As an event loop that polls the descriptors of all engines: sleeps until one has a completion
    /// to reap or the clock shows `until`. Returns at once, and false, if neither can come; the
    /// engines may then have work of their own ([`Engine::wait`](crate::Engine::wait)).
    pub fn poll(&self, until: Option<u64>) -> bool {
        self.0.borrow_mut().poll(None, until)
    }

    /// Requests the device holds, also those that are complete and not reaped yet.
    pub fn in_flight(&self) -> usize {
        self.0.borrow().rings.iter().flatten().map(Ring::len).sum()
    }

    /// Completions that no engine has reaped yet.
    pub fn visible(&self) -> usize {
        self.0.borrow().visible()
    }

    /// A number that stands for all that has happened: every request the device took, every
    /// completion that was reaped, their times and results.
    pub fn fingerprint(&self) -> u64 {
        self.0.borrow().fingerprint
    }
}

/// One engine's part of the device.
pub(crate) struct Simulated {
    sim: Sim,
    ring: usize,
}

impl Simulated {
    pub(crate) fn new(sim: &Sim) -> io::Result<Self> {
        let notifier = sys::eventfd()?;
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
    /// The device may outlive the engine, whose requests it must not touch any more.
    fn drop(&mut self) {
        self.sim.0.borrow_mut().rings[self.ring] = None;
    }
}

impl Backend for Simulated {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        self.sim.0.borrow_mut().submit(self.ring, batch)
    }

    fn reap(&mut self, budget: usize, each: impl FnMut(RawCompletion)) {
        self.sim.0.borrow_mut().reap(self.ring, budget, each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut world = self.sim.0.borrow_mut();
        let until = timeout.map(|timeout| world.clock.saturating_add(nanos(timeout)));
        world.poll(Some(self.ring), until);
        Ok(())
    }

    /// Where a peek costs nothing, time would stand still.
    fn relax(&mut self) {
        self.sim.spend(1);
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        let mut world = self.sim.0.borrow_mut();
        let until = timeout.map(|timeout| world.clock.saturating_add(nanos(timeout)));
        world.poll(Some(self.ring), until);
        if let Some(ring) = &mut world.rings[self.ring] {
            ring.rung = true;
            sys::signal(&ring.notifier);
        }
    }

    fn pass(&mut self, time: Duration) -> bool {
        self.sim.spend(nanos(time));
        true
    }

    fn acknowledge(&mut self) {
        if let Some(ring) = &mut self.sim.0.borrow_mut().rings[self.ring] {
            if std::mem::take(&mut ring.rung) {
                sys::drain(&ring.notifier);
            }
        }
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        self.sim.0.borrow_mut().cancel(self.ring, user_data);
        true
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        let world = self.sim.0.borrow();
        world.rings[self.ring].iter().map(|ring| ring.notifier.as_raw_fd()).collect()
    }

    fn instant(&self) -> Instant {
        self.sim.instant()
    }

    fn now(&self) -> u64 {
        self.sim.now()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
