//! [`NbdDevice`]: turns calls of the cache and of workers into operations, and submits them.

use std::fmt;
use std::io::{self, IoSlice};
use std::ops::{DerefMut, Range};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::thread::{self, JoinHandle};

use bufcache::{BlockDevice, DeviceRange, DeviceSync, DeviceWrite, Load};
use nbd_protocol::{Extent, TransmissionFlags as Flags};
use percpu::sync::{Mutex, spawn};
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::oneshot;

use super::address::Address;
use super::driver::Driver;
use super::error::UpstreamError;
use super::lane;
use super::link::Link;
use super::operation::{Done, Kind, Operation, ReadBuf, Target};
use super::shared::{Closing, Counters, Export, Shared, UpstreamOptions, UpstreamStats};

/// The message of the `expect` on the receiver of a read.
const GIVEN_BACK: &str = "the drop of a read gives its buffer back";

/// An export of another NBD server as a block device.
///
/// Operations are asynchronous and pipelined over the connections; waiting operations on
/// neighbouring ranges are merged into one request. After the loss of a connection the device
/// connects again and resends what may be lost: see the [module](super).
///
/// The device never sends TRIM, because the content of a trimmed range is undefined. A discard is a
/// WRITE_ZEROES that may make a hole.
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
    /// Opens an export. Blocks until the first connection is up; the device's thread makes the
    /// others later.
    ///
    /// # Errors
    ///
    /// The reason why the first connection failed. It is not tried again.
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

    /// Returns the counters. Each is exact, but they are not read at one instant.
    pub(crate) fn stats(&self) -> UpstreamStats {
        let counters = &self.shared.stats;
        // Ordering: Relaxed; statistics. The losses are loaded with Acquire, which pairs with the
        // Release in `count_loss`.
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UpstreamStats {
            requests: get(&counters.requests),
            lane_requests: get(&counters.lane_requests),
            connects: get(&counters.connects),
            losses: counters.losses.load(Ordering::Acquire),
            protocol_errors: get(&counters.protocol_errors),
            resent: get(&counters.resent),
            replayed: get(&counters.replayed),
            poisoned: counters.poisoned.load(Ordering::Relaxed),
        }
    }

    /// Returns consecutive extents from `range.start` on, which may cover less than the range.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// The server's error, or `EOPNOTSUPP` if the server does not report extents.
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
        self.submit(kind, range, target).blocking_recv().unwrap_or_else(|_| Err(disconnected()))
    }

    /// Submits an operation. The receiver gets its result, or an error if the thread ends first.
    fn submit<T: Send + 'static>(
        &self,
        kind: Kind,
        range: Range<u64>,
        target: impl FnOnce(Done<T>) -> Target,
    ) -> oneshot::Receiver<io::Result<T>> {
        let (sender, receiver) = oneshot::channel();
        let done = Box::new(move |result| {
            let _ = sender.send(result); // fails if the receiver was dropped
        });
        self.shared.submit(Operation::new(kind, range, target(done)));
        receiver
    }

    /// Reads into a buffer, up to the end of the device. Returns the buffer and the number of
    /// bytes.
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

    /// Makes the operation of a read. A read of no bytes ends at once, without an operation.
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
    /// Dropping the future blocks until the write has ended, because the upstream may carry it out
    /// until then. The caller's bypass, which excludes other writes of these blocks, is dropped
    /// after the future.
    pub(crate) async fn write_async(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match self.submit_write(offset, &[IoSlice::new(bytes)], false)? {
            Some(write) => PendingWrite(Some(write)).await,
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
        // The callback of the last operation may drop the device, on this same thread.
        if let Some(thread) =
            self.thread.take().filter(|t| t.thread().id() != thread::current().id())
        {
            let _ = thread.join(); // the panic hook has reported a panic
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
        // No file system has this device number.
        const NBD: u64 = u64::from_be_bytes(*b"NBDMAGIC");
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

    /// The driver queues what the connections cannot take yet.
    fn write_depth(&self) -> usize {
        256
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

    /// By the protocol, a server without FLUSH has no volatile cache.
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
            Some(write) => write.blocking_recv().unwrap_or_else(|_| Err(disconnected())),
            None => Ok(()),
        }
    }

    /// Submits a write of a copy of the bytes. `None` if there are no bytes.
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

/// The error of an operation that the thread did not complete.
fn disconnected() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOTCONN)
}

/// A submitted write. Dropping it waits for the write's end.
struct PendingWrite(Option<oneshot::Receiver<io::Result<()>>>);

impl Future for PendingWrite {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(write) = &mut self.0 else { return Poll::Ready(Err(disconnected())) };
        let result = ready!(Pin::new(write).poll(context)).unwrap_or_else(|_| Err(disconnected()));
        self.0 = None;
        Poll::Ready(result)
    }
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        if let Some(write) = self.0.take() {
            let _ = write.blocking_recv(); // the caller no longer waits for the result
        }
    }
}

/// The number of bytes read, and their buffer.
type Ended<B> = (io::Result<usize>, B);

impl Shared {
    /// Reads bytes through the device's thread, to test its connections. Blocks.
    pub(super) fn probe(self: &Arc<Self>, range: Range<u64>) -> io::Result<()> {
        let (sender, receiver) = oneshot::channel();
        let buf = vec![0; (range.end - range.start) as usize];
        let read = Box::new(Read { count: buf.len(), waiting: Some((sender, buf)) });
        self.submit(Operation::new(Kind::Read, range, Target::Buffer(read)));
        receiver
            .blocking_recv()
            .map_or_else(|_| Err(disconnected()), |(result, _)| result.map(drop))
    }
}

/// The buffer of a read, and the sender that returns it.
struct Read<B> {
    /// Bytes to read.
    count: usize,
    /// `None` once the buffer was returned.
    waiting: Option<(oneshot::Sender<Ended<B>>, B)>,
}

impl<B> Read<B> {
    fn give_back(&mut self, result: io::Result<usize>) {
        if let Some((sender, buf)) = self.waiting.take() {
            let _ = sender.send((result, buf)); // fails if the receiver was dropped
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
        self.give_back(Err(disconnected()));
    }
}
