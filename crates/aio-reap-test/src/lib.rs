//! Devices for tests of [`aio_reap::Engine`] and of programs on top of it: [`scripted`], where the
//! test says how each request ends, and [`sim`], a simulation in virtual time with random faults.
//!
//! [`Build`] starts an engine on one.

use std::io;

use aio_reap::external::External;
use aio_reap::{Engine, EngineBuilder, StartError};

use crate::scripted::{Script, Scripted};
use crate::sim::{Sim, Simulated};

mod notifier;
pub mod scripted;
pub mod sim;

/// Methods of [`EngineBuilder`] that start an engine on a device of this crate.
pub trait Build {
    /// Starts an engine on a [scripted] device.
    ///
    /// # Errors
    ///
    /// Those of [`EngineBuilder::build`]. It is refused (`EBUSY`) while another engine uses the
    /// script.
    fn build_scripted(self, script: &Script) -> Result<Engine, StartError>;

    /// Starts an engine on a [simulated](sim) device. Several engines may use one device.
    ///
    /// # Errors
    ///
    /// Those of [`EngineBuilder::build`].
    fn build_sim(self, sim: &Sim) -> Result<Engine, StartError>;
}

impl Build for EngineBuilder {
    fn build_scripted(self, script: &Script) -> Result<Engine, StartError> {
        self.build_external(|| boxed(Scripted::new(script)))
    }

    fn build_sim(self, sim: &Sim) -> Result<Engine, StartError> {
        self.build_external(|| boxed(Simulated::new(sim)))
    }
}

fn boxed(device: io::Result<impl External + 'static>) -> io::Result<Box<dyn External>> {
    Ok(Box::new(device?))
}
