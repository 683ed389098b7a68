//! Tasks that wait.
//!
//! A future's node is in the future, and on a list only while it waits. Who makes room or brings a
//! message gives the first task a permit: takes its node off the list and wakes it to look. Others may
//! be faster; then it waits again, where it stood before. A future that is dropped with a permit passes
//! it on.

mod receive;
mod send;
#[cfg(feature = "futures")]
mod stream;

pub use self::receive::ReceiveFuture;
pub use self::send::SendFuture;
#[cfg(feature = "futures")]
pub use self::stream::{ReceiveStream, SendSink};
