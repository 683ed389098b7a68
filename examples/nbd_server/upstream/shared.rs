//! What the device, its thread and the lanes of the workers share.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nbd_protocol::{Connected, MAX_PAYLOAD, TransmissionFlags as Flags};
use percpu::sync::Mutex;

use super::address::Address;
use super::error::UpstreamError;
use super::link::Link;
use super::operation::Operation;

/// Connections to a server that offers several. Of 4, 8 and 16, a server that takes 1 ms per command is fastest through 8
/// (U3 in the benchmarks): four carry too few commands at once, sixteen too few in each batch.
const CONNECTIONS: usize = 8;

/// Most requests in flight on a connection of several, and on one alone. A guess: qemu-nbd works on 16 of a connection, and
/// nbdkit has 16 threads for it.
pub(super) const DEPTH: (usize, usize) = (16, 64);

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
pub(super) struct Export {
    pub(super) size: u64,
    pub(super) flags: Flags,
    pub(super) min_block: u32,
    pub(super) max_block: u32,
}

impl Export {
    pub(super) fn new(connected: &Connected) -> Self {
        let Connected { size, flags, block_sizes, .. } = *connected;
        let (min_block, _, max_block) = block_sizes.unwrap_or((1, 4096, MAX_PAYLOAD));
        Self { size, flags, min_block, max_block: max_block.min(MAX_PAYLOAD) }
    }

    pub(super) fn has(&self, flag: Flags) -> bool {
        self.flags.contains(flag)
    }

    /// Another connection is to the same export, as far as can be told.
    pub(super) fn check(&self, connected: &Connected) -> Result<(), UpstreamError> {
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
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) lane_requests: AtomicU64,
    pub(super) connects: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) lies: AtomicU64,
    pub(super) resent: AtomicU64,
    pub(super) replayed: AtomicU64,
    pub(super) poisoned: AtomicBool,
}

/// See [`NbdDevice::stats`](super::NbdDevice::stats).
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

/// What other threads say, with the slot.
pub(super) enum Event {
    Drained,
    Connected(usize, Result<(Link, Connected), UpstreamError>),
    /// A worker's lane was lost in that period.
    LaneLost(u64, UpstreamError),
}

/// What the threads share.
pub(super) struct Shared {
    pub(super) address: Address,
    pub(super) options: UpstreamOptions,
    /// See [`lane`](super::lane); 0 between two periods.
    pub(super) period: AtomicU64,
    pub(super) inbox: Mutex<Inbox>,
    /// An eventfd, written when the inbox is no longer empty.
    pub(super) wake: OwnedFd,
    pub(super) stats: Counters,
}

#[derive(Default)]
pub(super) struct Inbox {
    pub(super) operations: Vec<Operation>,
    pub(super) events: Vec<Event>,
    /// The device was dropped.
    pub(super) closing: bool,
    /// The thread has ended.
    pub(super) closed: bool,
}

impl Shared {
    pub(super) fn period(&self) -> u64 {
        // Ordering: Acquire, pairs with the Release in `set_period`; it carries what came before the period began.
        self.period.load(Ordering::Acquire)
    }

    pub(super) fn set_period(&self, period: u64) {
        // Ordering: Release, pairs with the Acquire in `period`: a lane that finds a period finds it after its
        // journal was answered, and a lane whose worker was told of a loss does not find the period before it.
        self.period.store(period, Ordering::Release);
    }

    /// Hands an operation to the thread. It fails at once if there is none.
    pub(super) fn submit(&self, operation: Operation) {
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

    pub(super) fn tell(&self, event: Event) {
        self.put(|inbox| inbox.events.push(event));
    }

    pub(super) fn put<T>(&self, put: impl FnOnce(&mut Inbox) -> T) -> T {
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

    pub(super) fn take(&self) -> (Vec<Operation>, Vec<Event>, bool) {
        let mut inbox = self.inbox.lock();
        (std::mem::take(&mut inbox.operations), std::mem::take(&mut inbox.events), inbox.closing)
    }
}

/// Has operations fail from then on, however the thread ends.
pub(super) struct Closing(pub(super) Arc<Shared>);

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
