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
//! | `operation` | what the cache asks for |
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
//! 5. After a lost connection nothing is sent before the journal was, and no change of the journal is
//!    sent while another change is in flight.
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

mod address;
mod connection;
mod driver;
mod error;
mod journal;
mod lane;
mod link;
mod operation;
mod secure;

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::{DerefMut, Range};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bufcache::{BlockDevice, DeviceRange, DeviceSync, DeviceWrite, Load};
use nbd_protocol::{Connected, Extent, MAX_PAYLOAD, TransmissionFlags as Flags};
use percpu::sync::{Mutex, spawn};
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

pub(crate) use self::address::Address;
use self::driver::{Driver, Event};
pub(crate) use self::error::UpstreamError;
pub(crate) use self::lane::Lanes;
use self::link::Link;
use self::operation::{Done, Kind, Operation, ReadBuf, Target};

/// Why the buffer of a read is always received.
const GIVEN_BACK: &str = "the drop of a read gives its buffer back";
/// Connections to a server that offers several. A guess.
const CONNECTIONS: usize = 4;

/// How patient the device is, and what it keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpstreamOptions {
    /// Most connections, to a server that offers several.
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

/// An export of another NBD server.
///
/// All operations are begun without a wait, and pipelined over the connections; neighbours that wait go as one
/// request. A lost connection is made anew, and what may be lost is sent again: see the [module](self).
///
/// TRIM is never sent, as what it leaves is not defined: a discard is a WRITE_ZEROES that may make a hole.
///
/// ```ignore
/// let device = NbdDevice::open("nbd://localhost/disk".parse()?, UpstreamOptions::default())?;
/// let disk = Cache::new(64 << 20)?.attach(device, 4096)?;
/// ```
pub(crate) struct NbdDevice {
    shared: Arc<Shared>,
    export: Export,
    thread: Option<JoinHandle<()>>,
}

impl NbdDevice {
    /// Connects. Blocks until the first connection is there; the others follow.
    ///
    /// # Errors
    ///
    /// Why there is no connection. It is not tried again.
    pub(crate) fn open(address: Address, options: UpstreamOptions) -> Result<Self, UpstreamError> {
        let (link, connected) = Link::connect(&address, true)?;
        let export = Export::new(&connected);
        let several = export.has(Flags::CAN_MULTI_CONN);
        let connections = if several { options.connections.max(1) } else { 1 };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|error| UpstreamError::Socket(error.into()))?;
        let (inbox, stats) = (Mutex::default(), Counters::default());
        let period = AtomicU64::new(u64::from(connections > 1));
        let shared = Arc::new(Shared { address, options, period, inbox, wake, stats });
        let driver =
            Driver::new(Arc::clone(&shared), options, export, (link, &connected), connections);
        let closing = Closing(Arc::clone(&shared));
        let thread = spawn("upstream".into(), move || {
            let _closing = closing;
            driver.run();
        });
        let thread = Some(thread.map_err(UpstreamError::Socket)?);
        Ok(Self { shared, export, thread })
    }

    /// What happened so far. Each figure is right by itself.
    pub(crate) fn stats(&self) -> UpstreamStats {
        let Counters {
            requests,
            lane_requests,
            connects,
            losses,
            lies,
            resent,
            replayed,
            poisoned,
        } = &self.shared.stats;
        // Ordering: Relaxed; statistics.
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UpstreamStats {
            requests: get(requests),
            lane_requests: get(lane_requests),
            connects: get(connects),
            losses: get(losses),
            lies: get(lies),
            resent: get(resent),
            replayed: get(replayed),
            poisoned: poisoned.load(Ordering::Relaxed),
        }
    }

    /// What is allocated from `range.start` on: extents one behind the other, perhaps of less than the range. Blocks.
    ///
    /// # Errors
    ///
    /// The server's; `EOPNOTSUPP` where it does not tell.
    pub(crate) fn extents(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        self.wait(Kind::Status, range, |done| Target::Extents(Vec::new(), done))
    }

    /// Submits an operation, and waits for its end.
    fn wait<T: Send + 'static>(
        &self,
        kind: Kind,
        range: Range<u64>,
        target: impl FnOnce(Done<T>) -> Target,
    ) -> io::Result<T> {
        self.submit(kind, range, target).blocking_recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Submits an operation. Its end is received, or an error if the thread ends before.
    fn submit<T: Send + 'static>(
        &self,
        kind: Kind,
        range: Range<u64>,
        target: impl FnOnce(Done<T>) -> Target,
    ) -> oneshot::Receiver<io::Result<T>> {
        let (sender, receiver) = oneshot::channel();
        let done = Box::new(move |result| {
            let _ = sender.send(result); // unless it is not awaited any more
        });
        self.shared.submit(Operation::new(kind, range, target(done)));
        receiver
    }

    /// Reads into a buffer, as far as the device has bytes, and gives it back with their count.
    pub(crate) async fn read_async<B: DerefMut<Target = [u8]> + Send + 'static>(
        &self,
        offset: u64,
        buf: B,
    ) -> Ended<B> {
        let (operation, receiver) = self.read_into(offset, buf);
        if let Some(Err(operation)) =
            operation.map(|operation| lane::begin(&self.shared, self.export, operation))
        {
            self.shared.submit(operation);
        }
        receiver.await.expect(GIVEN_BACK)
    }

    /// Makes the operation of a read, unless it has ended.
    fn read_into<B: DerefMut<Target = [u8]> + Send + 'static>(
        &self,
        offset: u64,
        buf: B,
    ) -> (Option<Operation>, oneshot::Receiver<Ended<B>>) {
        let count = self.len().saturating_sub(offset).min(buf.len() as u64);
        let (sender, receiver) = oneshot::channel();
        let read = Box::new(Read { count: count as usize, waiting: Some((sender, buf)) });
        if count == 0 {
            read.finish(Ok(()));
            return (None, receiver);
        }
        let range = offset..offset + count;
        (Some(Operation::new(Kind::Read, range, Target::Buffer(read))), receiver)
    }

    /// Writes a copy of the bytes.
    ///
    /// The drop of the future blocks until the write has ended, because the upstream may carry it out until then:
    /// what keeps other writes from these blocks, such as a bypass, is dropped behind the future.
    pub(crate) async fn write_async(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.submit_write(offset, &[IoSlice::new(bytes)], false)? {
            Some(write) => Begun(Some(write)).await,
            None => Ok(()),
        }
    }

    fn zeros(&self, no_hole: bool) -> Result<Kind, io::Error> {
        match self.export.has(Flags::SEND_WRITE_ZEROES) {
            true => Ok(Kind::Zeros { no_hole }),
            false => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        }
    }

    fn begin_zeros(&self, range: DeviceRange, no_hole: bool) {
        match self.zeros(no_hole) {
            Err(error) => range.finish(Err(error)),
            Ok(kind) => {
                let bytes = range.offset()..range.offset() + range.len();
                self.shared.submit(Operation::new(kind, bytes, Target::Range(range)));
            }
        }
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.shared.put(|inbox| inbox.closing = true);
        // The last operation may be what kept the device: then this is the thread itself.
        if let Some(thread) =
            self.thread.take().filter(|t| t.thread().id() != thread::current().id())
        {
            let _ = thread.join(); // a panic was printed
        }
    }
}

impl fmt::Debug for NbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdDevice")
            .field("address", &self.shared.address)
            .field("export", &self.export)
            .finish_non_exhaustive()
    }
}

impl BlockDevice for NbdDevice {
    fn len(&self) -> u64 {
        let unit = u64::from(self.export.min_block);
        self.export.size / unit * unit
    }

    fn identity(&self) -> Option<(u64, u64)> {
        const NBD: u64 = u64::from_be_bytes(*b"NBDMAGIC"); // no number of a file system
        Some((NBD, self.shared.address.identity()))
    }

    fn is_read_only(&self) -> bool {
        self.export.has(Flags::READ_ONLY)
    }

    fn alignment(&self) -> usize {
        self.export.min_block as usize
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.len().saturating_sub(offset).min(buf.len() as u64);
        if count == 0 {
            return Ok(0);
        }
        let (operation, receiver) = self.read_into(offset, vec![0; count as usize]);
        operation.into_iter().for_each(|operation| self.shared.submit(operation));
        let (result, bytes) = receiver.blocking_recv().expect(GIVEN_BACK);
        let count = result?;
        buf[..count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn begin_read(&self, load: Load) {
        let offset = load.offset();
        let count = self.len().saturating_sub(offset).min(load.len() as u64);
        match count {
            0 => load.finish(Ok(0)),
            _ => self.shared.submit(Operation::new(
                Kind::Read,
                offset..offset + count,
                Target::Load(load),
            )),
        }
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored(offset, &[IoSlice::new(buf)])
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_durable(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.write_all(offset, parts, false)
    }

    fn write_vectored_durable(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.write_all(offset, parts, true)
    }

    fn begin_write(&self, write: DeviceWrite) {
        let len: usize = write.parts().iter().map(|part| part.len()).sum();
        let range = write.offset()..write.offset() + len as u64;
        if self.is_read_only() {
            write.finish(Err(io::Error::from_raw_os_error(libc::EROFS)));
        } else if len == 0 {
            write.finish(Ok(()));
        } else {
            let kind = Kind::Write { durable: write.is_durable() };
            self.shared.submit(Operation::new(kind, range, Target::Write(write)));
        }
    }

    fn begin_discard(&self, range: DeviceRange) {
        self.begin_zeros(range, false);
    }

    fn begin_zero(&self, range: DeviceRange) {
        self.begin_zeros(range, true);
    }

    fn begin_sync(&self, sync: DeviceSync) {
        match self.export.has(Flags::SEND_FLUSH) {
            true => self.shared.submit(Operation::new(Kind::Flush, 0..0, Target::Sync(sync))),
            false => sync.finish(Ok(())),
        }
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.wait(self.zeros(true)?, offset..offset + len, Target::Unit)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.wait(self.zeros(false)?, offset..offset + len, Target::Unit)
    }

    /// A server without FLUSH has, as the protocol has it, nothing that a flush could save.
    fn sync(&self) -> io::Result<()> {
        match self.export.has(Flags::SEND_FLUSH) {
            true => self.wait(Kind::Flush, 0..0, Target::Unit),
            false => Ok(()),
        }
    }
}

impl NbdDevice {
    fn write_all(&self, offset: u64, parts: &[IoSlice<'_>], durable: bool) -> io::Result<()> {
        match self.submit_write(offset, parts, durable)? {
            Some(write) => write.blocking_recv().unwrap_or_else(|_| Err(gone())),
            None => Ok(()),
        }
    }

    /// Submits a write of a copy of the bytes, if there are any.
    fn submit_write(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        durable: bool,
    ) -> io::Result<Option<oneshot::Receiver<io::Result<()>>>> {
        if self.is_read_only() {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let bytes: Arc<[u8]> = match parts {
            [one] => Arc::from(&**one),
            _ => {
                let mut all = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
                parts.iter().for_each(|part| all.extend_from_slice(part));
                all.into()
            }
        };
        let range = offset..offset + bytes.len() as u64;
        if range.is_empty() {
            return Ok(None);
        }
        let kind = Kind::Write { durable };
        Ok(Some(self.submit(kind, range, |done| Target::Bytes(bytes, done))))
    }
}

/// The error of operations that the thread has not ended.
fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOTCONN)
}

/// A write until its end, for which its drop waits.
struct Begun(Option<oneshot::Receiver<io::Result<()>>>);

impl Future for Begun {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(write) = &mut self.0 else { return Poll::Ready(Err(gone())) };
        let result = ready!(Pin::new(write).poll(context)).unwrap_or_else(|_| Err(gone()));
        self.0 = None;
        Poll::Ready(result)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(write) = self.0.take() {
            let _ = write.blocking_recv(); // its result has no receiver any more
        }
    }
}

/// How many bytes were read, and their buffer.
type Ended<B> = (io::Result<usize>, B);

/// The buffer of a read, and where it goes back to.
struct Read<B> {
    /// Bytes to be filled.
    count: usize,
    /// `None` once it went back.
    waiting: Option<(oneshot::Sender<Ended<B>>, B)>,
}

impl<B> Read<B> {
    fn give_back(&mut self, result: io::Result<usize>) {
        if let Some((sender, buf)) = self.waiting.take() {
            let _ = sender.send((result, buf)); // unless it is not awaited any more
        }
    }
}

impl<B: DerefMut<Target = [u8]> + Send> ReadBuf for Read<B> {
    fn bytes(&mut self) -> &mut [u8] {
        self.waiting.as_mut().map_or(&mut [], |(_, buf)| &mut buf[..self.count])
    }

    fn finish(mut self: Box<Self>, result: io::Result<()>) {
        let count = self.count;
        self.give_back(result.map(|()| count));
    }
}

impl<B> Drop for Read<B> {
    fn drop(&mut self) {
        self.give_back(Err(gone()));
    }
}
