//! Devices for tests of [`bufcache`] and of programs on top of it: [`FaultDevice`] fails the operations
//! that a test chooses, and returns the contents that a loss of power would leave.

mod fault;
mod power;

pub use self::fault::{Fault, FaultDevice, Hold};
pub use self::power::{Operation, Outcome, Recorded};
