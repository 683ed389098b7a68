//! An export of another NBD server as a device: [`NbdDevice`].
//!
//! ```text
//!  Cache ─► NbdDevice ─► inbox ─► driver (one thread) ═══ connection 0..N ═══ upstream server
//!               │                    └─ journal: the changes since the last flush  ║
//!               └─► reads of a worker ─► its lane ═════════════════════════════════╝
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `address` | the URI of an upstream export |
//! | `link`, `secure` | a connection's socket: connect, handshake, TLS |
//! | `connection` | the requests and replies of one connection |
//! | `device` | [`NbdDevice`], which the cache and the workers call |
//! | `operation` | an operation of the device, until it ends |
//! | `journal` | the changes that the upstream may lose until the next flush |
//! | `shared` | options, counters, and the inbox of the device's thread |
//! | `driver` | the device's thread, which sends, receives and recovers |
//! | `lane` | a worker's own connection, for reads |
//!
//! # Invariants
//!
//! Tests in `examples/tests/nbd_upstream` have the numbers in their names.
//!
//! 1. An operation succeeds only by a reply that matches its request: cookie, kind, offset and
//!    length. Any other reply ends the connection, and none of its bytes are used.
//! 2. Each operation ends once, whatever the upstream does. Without an upstream it ends after
//!    `reconnect` at the latest.
//! 3. When a flush or a durable write succeeds, the changes that it covers are durable at the
//!    upstream.
//! 4. Every later read returns an answered change, even if the upstream's process lost it.
//! 5. After the device's thread loses a connection, it sends the journal first. Only lanes send
//!    reads before that, and their replies are discarded. A change of the journal is not sent while
//!    another change is in flight. The loss of a lane alone sends no journal and does not poison
//!    the device.
//! 6. The device is poisoned if a flush fails, the upstream refuses a change of the journal, or a
//!    connection is lost after the journal has dropped bytes. Later changes and flushes fail then,
//!    and so do reads of unflushed bytes.
//! 7. Each request keeps to the server's limits: its block sizes, and the commands and flags that
//!    it offers.
//! 8. The journal holds at most `keep` bytes, or twice that if entries share buffers.
//!
//! # Limits of the protocol
//!
//! NBD cannot cancel the requests of a lost connection. The device shuts down its side of the
//! connection and waits up to a second for the server to close the other side, which servers do
//! when they have carried out what they received. A server that hangs for longer and then continues
//! may carry out an old write over a newer one.
//!
//! NBD does not identify the server that answers. All connections must reach one process at a time,
//! or processes that share all their state. Behind an address that spreads connections over several
//! servers, a lane could read from a server that a change never reached.

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
