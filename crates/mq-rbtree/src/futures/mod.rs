//! Waiting tasks.
//!
//! A future contains its node, which is on a list only while the future waits. A sender, or a
//! receiver that makes room, gives the first waiting task a permit: it takes the node off the list
//! and wakes the task, which polls again. Another thread or task may take the message or the room
//! before. Then the task waits again, at its former position. A future that is dropped with a
//! permit passes it on.

mod receive;
mod send;
#[cfg(feature = "stream")]
mod stream;
mod timed;

pub use self::receive::ReceiveFuture;
pub use self::send::SendFuture;
#[cfg(feature = "stream")]
pub use self::stream::{ReceiveStream, SendSink};
pub use self::timed::Timed;
