//! A device for tests of [`aio_reap::Engine`] and of programs on top of it: a [simulation](sim) in
//! virtual time with random faults, and a [`Script`](sim::Script), where the test says how each request
//! ends.
//!
//! [`Build`] starts an engine on one.

use aio_reap::external::External;
use aio_reap::{Engine, EngineBuilder, StartError};

use crate::sim::{Sim, Simulated};

pub mod sim;

/// The method of [`EngineBuilder`] that starts an engine on a device of this crate.
pub trait Build {
    /// Starts an engine on a [simulated](sim) device. Several engines may use one, but a
    /// [`Script`](sim::Script) refuses a second one with `EBUSY`.
    ///
    /// # Errors
    ///
    /// Those of [`EngineBuilder::build`].
    fn build_sim(self, sim: &Sim) -> Result<Engine, StartError>;
}

impl Build for EngineBuilder {
    fn build_sim(self, sim: &Sim) -> Result<Engine, StartError> {
        self.build_external(|| Ok(Box::new(Simulated::new(sim)?) as Box<dyn External>))
    }
}
