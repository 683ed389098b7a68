//! An export of another NBD server as a device: [`NbdDevice`].
//!
//! ```text
//!  Cache ─► NbdDevice ─► inbox ─► driver (one thread) ═══ connection 0..N ═══ upstream: qemu-nbd, nbdkit, ...
//!               │                    └─ journal: the changes since the last flush    ║
//!               └─► reads of a worker ─► its lane ═══════════════════════════════════╝
//! ```
//!
//! | file | |
//! |---|---|
//! | `address` | the URI |
//! | `link`, `secure` | a connection: connect, handshake, TLS |
//! | `connection` | requests and replies |
//! | `device` | what the cache calls |
//! | `operation` | what it asks for |
//! | `journal` | what a lost connection makes uncertain |
//! | `shared` | what the threads share |
//! | `driver` | the thread, and all decisions |
//! | `lane` | a worker's own connection, for reads |
//!
//! # Invariants
//!
//! Tests in `examples/tests/nbd_upstream` have the numbers in their names.
//!
//! 1. An operation ends well only if a reply said so that fits its request: cookie, kind, offset, length.
//!    Anything else ends the connection, and none of its bytes count.
//! 2. Each operation ends once, whatever the upstream does; without an upstream after `reconnect` at the latest.
//! 3. What a flush has covered that succeeded, or a durable write, was durable at the upstream before.
//! 4. A change that was answered is in every later read, also where the upstream lost it with its process.
//! 5. After a lost connection of the device's thread nothing is sent before the journal was, but reads of a lane, whose
//!    replies do not count then; and no change of the journal is sent while another change is in flight. The loss of a
//!    lane alone sends no journal and poisons nothing.
//! 6. If a flush fails, the journal is refused, or it has forgotten bytes when a connection is lost, the device is
//!    poisoned: each later change and flush fails, and reads of what was not flushed do.
//! 7. The limits of the server hold for each request: block sizes, and the commands and flags that it offers.
//! 8. The journal keeps at most `keep` bytes, twice that where entries share buffers.
//!
//! # What it cannot know
//!
//! NBD has no way to say that requests of a lost connection shall not be carried out any more. The device waits a
//! second for the server to close it, which servers do when they have done what they had received. A server that hangs for longer,
//! and then goes on, may carry out an old write over a newer one.
//!
//! Nor does it tell which server answers. All connections must reach one process at a time, or processes that share all
//! they have: behind an address that spreads connections over others, a lane could read what a change never reached.

mod address;
mod connection;
mod device;
mod driver;
mod error;
mod journal;
mod lane;
mod link;
mod operation;
mod secure;
mod shared;

pub(crate) use self::address::Address;
pub(crate) use self::device::NbdDevice;
pub(crate) use self::error::UpstreamError;
pub(crate) use self::lane::Lanes;
pub(crate) use self::shared::{UpstreamOptions, UpstreamStats};
