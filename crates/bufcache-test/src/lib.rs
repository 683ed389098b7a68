//! Devices for tests of [`bufcache`] and of programs on top of it: [`FaultDevice`] fails the operations
//! that a test chooses, and returns the contents that a loss of power would leave. [`KeptDevice`] keeps the
//! operations that it begins until the test ends them.

mod fault;
mod kept;
mod power;

pub use self::fault::{Fault, FaultDevice, Hold};
pub use self::kept::{Begun, KeptDevice};
pub use self::power::{Operation, Outcome, Recorded};
