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

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nbd_protocol::{Connected, MAX_PAYLOAD, TransmissionFlags as Flags};
use percpu::sync::Mutex;

pub(crate) use self::address::Address;
pub(crate) use self::device::NbdDevice;
use self::driver::Event;
pub(crate) use self::error::UpstreamError;
pub(crate) use self::lane::Lanes;
use self::operation::Operation;

/// Connections to a server that offers several. Of 4, 8 and 16, a server that takes 1 ms per command is fastest through 8
/// (U3 in the benchmarks): four carry too few commands at once, sixteen too few in each batch.
const CONNECTIONS: usize = 8;

/// How patient the device is, and what it keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpstreamOptions {
    /// Most connections of the device's thread, to a server that offers several. Each worker has one more.
    pub(crate) connections: usize,
    /// How long operations wait for a connection before they fail.
    pub(crate) reconnect: Duration,
    /// How long a reply may take before its connection counts as lost.
    pub(crate) reply: Duration,
    /// Bytes of changes that are kept until a flush. At half of it the device flushes by itself.
    pub(crate) keep: usize,
}

impl Default for UpstreamOptions {
    fn default() -> Self {
        Self {
            connections: CONNECTIONS,
            reconnect: Duration::from_secs(30),
            reply: Duration::from_secs(30),
            keep: 64 << 20,
        }
    }
}

/// What the server said of the export.
#[derive(Clone, Copy, Debug)]
struct Export {
    size: u64,
    flags: Flags,
    min_block: u32,
    max_block: u32,
}

impl Export {
    fn new(connected: &Connected) -> Self {
        let Connected { size, flags, block_sizes, .. } = *connected;
        let (min_block, _, max_block) = block_sizes.unwrap_or((1, 4096, MAX_PAYLOAD));
        Self { size, flags, min_block, max_block: max_block.min(MAX_PAYLOAD) }
    }

    fn has(&self, flag: Flags) -> bool {
        self.flags.contains(flag)
    }

    /// Another connection is to the same export, as far as can be told.
    fn check(&self, connected: &Connected) -> Result<(), UpstreamError> {
        let other = Self::new(connected);
        let used = Flags::READ_ONLY
            | Flags::SEND_FLUSH
            | Flags::SEND_FUA
            | Flags::SEND_WRITE_ZEROES
            | Flags::CAN_MULTI_CONN;
        let changed = |what, was, is| Err(UpstreamError::Changed { what, was, is });
        match (self.flags & used, other.flags & used) {
            _ if self.size != other.size => changed("size", self.size, other.size),
            (was, is) if was != is => changed("flags", was.0.into(), is.0.into()),
            _ if other.min_block > self.min_block => {
                changed("minimum block", self.min_block.into(), other.min_block.into())
            }
            _ if other.max_block < self.max_block => {
                changed("maximum block", self.max_block.into(), other.max_block.into())
            }
            _ => Ok(()),
        }
    }
}

/// What happened so far.
#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    lane_requests: AtomicU64,
    connects: AtomicU64,
    losses: AtomicU64,
    lies: AtomicU64,
    resent: AtomicU64,
    replayed: AtomicU64,
    poisoned: AtomicBool,
}

/// See [`NbdDevice::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpstreamStats {
    /// Requests that were sent.
    pub(crate) requests: u64,
    /// Of these, READs over a worker's own connection.
    pub(crate) lane_requests: u64,
    /// Connections that were made, without the first.
    pub(crate) connects: u64,
    /// Connections that were lost.
    pub(crate) losses: u64,
    /// Of these, those dropped because the server broke the protocol.
    pub(crate) lies: u64,
    /// Operations that were sent again because no reply had come.
    pub(crate) resent: u64,
    /// Changes that were sent again although they had been answered.
    pub(crate) replayed: u64,
    /// Changes may be lost.
    pub(crate) poisoned: bool,
}

impl fmt::Display for UpstreamStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, lane_requests, connects, losses, lies, resent, replayed, poisoned } =
            self;
        write!(
            f,
            "{requests} requests, {lane_requests} of them by workers; {losses} connections lost, {lies} of them for lies, {connects} made; "
        )?;
        write!(f, "{resent} operations and {replayed} answered changes sent again")?;
        if *poisoned { f.write_str("; changes may be lost") } else { Ok(()) }
    }
}

/// What the threads share.
struct Shared {
    address: Address,
    options: UpstreamOptions,
    /// See [`lane`]; 0 between two periods.
    period: AtomicU64,
    inbox: Mutex<Inbox>,
    /// An eventfd, written when the inbox is no longer empty.
    wake: OwnedFd,
    stats: Counters,
}

#[derive(Default)]
struct Inbox {
    operations: Vec<Operation>,
    events: Vec<Event>,
    /// The device was dropped.
    closing: bool,
    /// The thread has ended.
    closed: bool,
}

impl Shared {
    fn period(&self) -> u64 {
        // Ordering: Acquire, pairs with the Release in `set_period`; it carries nothing but the order.
        self.period.load(Ordering::Acquire)
    }

    fn set_period(&self, period: u64) {
        // Ordering: Release, pairs with the Acquire in `period`: a lane that finds a period finds it after its
        // journal was answered, and a lane whose worker was told of a loss does not find the period before it.
        self.period.store(period, Ordering::Release);
    }

    /// Hands an operation to the thread. It fails at once if there is none.
    fn submit(&self, operation: Operation) {
        let refused = self.put(|inbox| match inbox.closed {
            true => Some(operation),
            false => {
                inbox.operations.push(operation);
                None
            }
        });
        if let Some(refused) = refused {
            refused.finish(Err(libc::ENOTCONN)); // which may do anything: not under the lock
        }
    }

    fn tell(&self, event: Event) {
        self.put(|inbox| inbox.events.push(event));
    }

    fn put<T>(&self, put: impl FnOnce(&mut Inbox) -> T) -> T {
        let mut inbox = self.inbox.lock();
        let was_empty = inbox.operations.is_empty() && inbox.events.is_empty();
        let result = put(&mut inbox);
        let wakes = was_empty || inbox.closing;
        drop(inbox);
        if wakes {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()); // full: it is readable
        }
        result
    }

    fn take(&self) -> (Vec<Operation>, Vec<Event>, bool) {
        let mut inbox = self.inbox.lock();
        (std::mem::take(&mut inbox.operations), std::mem::take(&mut inbox.events), inbox.closing)
    }
}

/// Has operations fail from then on, however the thread ends.
struct Closing(Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.set_period(0);
        let mut inbox = self.0.inbox.lock();
        inbox.closed = true;
        let left = std::mem::take(&mut inbox.operations);
        drop(inbox);
        drop(left); // which fails them
    }
}
