//! State shared by the device, its thread and the workers' lanes.

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

/// Connections to a server that allows several. With a server that takes 1 ms per command, 8
/// connections are faster than 4 or 16 (U3 in the benchmarks): 4 carry too few commands at once,
/// and 16 have too few in each batch.
const CONNECTIONS: usize = 8;

/// Most requests in flight on each of several connections, and on a single one. A guess: qemu-nbd
/// works on 16 requests of a connection, and nbdkit has 16 threads for it.
pub(super) const DEPTH: (usize, usize) = (16, 64);

/// Timeouts and limits of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpstreamOptions {
    /// Most connections of the device's thread to a server that allows several. Each worker may
    /// have one more.
    pub(crate) connections: usize,
    /// How long operations wait for a connection before they fail.
    pub(crate) reconnect: Duration,
    /// How long a reply may take before its connection counts as lost.
    pub(crate) reply: Duration,
    /// Most bytes in the journal. The device flushes by itself when half of them are used.
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

/// What the server has told about the export.
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

    /// Checks that a new connection has the same export, as far as the handshake tells.
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

/// The device's counters. [`UpstreamStats`] describes them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) lane_requests: AtomicU64,
    pub(super) connects: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) protocol_errors: AtomicU64,
    pub(super) resent: AtomicU64,
    pub(super) replayed: AtomicU64,
    pub(super) poisoned: AtomicBool,
}

/// A copy of the device's counters, from [`NbdDevice::stats`](super::NbdDevice::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpstreamStats {
    /// Requests sent.
    pub(crate) requests: u64,
    /// READs among the requests that were sent over a worker's own connection.
    pub(crate) lane_requests: u64,
    /// Connections made, without the first.
    pub(crate) connects: u64,
    /// Connections lost.
    pub(crate) losses: u64,
    /// Lost connections that ended because the server broke the protocol.
    pub(crate) protocol_errors: u64,
    /// Unanswered operations that were sent again.
    pub(crate) resent: u64,
    /// Answered changes that were sent again.
    pub(crate) replayed: u64,
    /// Changes may be lost, and the device fails new ones.
    pub(crate) poisoned: bool,
}

impl fmt::Display for UpstreamStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            requests,
            lane_requests,
            connects,
            losses,
            protocol_errors,
            resent,
            replayed,
            poisoned,
        } = self;
        write!(
            f,
            "{requests} requests, {lane_requests} of them by workers; {losses} connections lost, {protocol_errors} of them for protocol errors, {connects} made; "
        )?;
        write!(f, "{resent} operations and {replayed} answered changes sent again")?;
        if *poisoned { f.write_str("; changes may be lost") } else { Ok(()) }
    }
}

/// A message to the device's thread. A number of type `usize` is a slot.
pub(super) enum Event {
    Drained,
    Connected(usize, Result<(Link, Connected), UpstreamError>),
    /// A worker's lane was lost, in the period of this number.
    LaneLost(u64, UpstreamError),
}

/// State shared by the device, its thread and the lanes.
pub(super) struct Shared {
    pub(super) address: Address,
    pub(super) options: UpstreamOptions,
    /// The current period, or 0 between two periods: see [`lane`](super::lane).
    pub(super) period: AtomicU64,
    pub(super) inbox: Mutex<Inbox>,
    /// An eventfd, written when the empty inbox gets an entry.
    pub(super) wake: OwnedFd,
    pub(super) stats: Counters,
}

#[derive(Default)]
pub(super) struct Inbox {
    pub(super) operations: Vec<Operation>,
    pub(super) events: Vec<Event>,
    /// The device was dropped.
    pub(super) closing: bool,
    /// The thread has ended, so operations fail at once.
    pub(super) closed: bool,
}

impl Shared {
    pub(super) fn period(&self) -> u64 {
        // Ordering: Acquire, pairs with the Release in `set_period`; it carries everything before
        // the start of the period.
        self.period.load(Ordering::Acquire)
    }

    pub(super) fn set_period(&self, period: u64) {
        // Ordering: Release, pairs with the Acquire in `period`. A lane that sees a period connects
        // after the journal was answered. A lane whose worker was told of a loss does not see the
        // period before the loss.
        self.period.store(period, Ordering::Release);
    }

    /// Submits an operation to the thread. The operation fails at once if the thread has ended.
    pub(super) fn submit(&self, operation: Operation) {
        let refused = self.put(|inbox| match inbox.closed {
            true => Some(operation),
            false => {
                inbox.operations.push(operation);
                None
            }
        });
        if let Some(refused) = refused {
            refused.finish(Err(libc::ENOTCONN)); // outside the lock: a callback may submit again
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
            // Fails only if the count is at its maximum, and then the eventfd is readable.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
        result
    }

    pub(super) fn take(&self) -> (Vec<Operation>, Vec<Event>, bool) {
        let mut inbox = self.inbox.lock();
        (std::mem::take(&mut inbox.operations), std::mem::take(&mut inbox.events), inbox.closing)
    }
}

/// Makes operations fail once the thread ends, even by a panic.
pub(super) struct Closing(pub(super) Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.set_period(0);
        let mut inbox = self.0.inbox.lock();
        inbox.closed = true;
        let left = std::mem::take(&mut inbox.operations);
        drop(inbox);
        drop(left); // dropping an operation fails it
    }
}
