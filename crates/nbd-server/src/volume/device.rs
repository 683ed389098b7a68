//! A volume as a device of the cache: how its bytes lie in the database.

#[cfg(test)]
#[path = "tests.rs"]
pub(super) mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, Change, DeviceChange, Load};
use offlock_sync::Mutex;
use slatedb::bytes::Bytes;
use slatedb::config::{FlushOptions, FlushType, ScanOptions};
use slatedb::{CloseReason, Db, DbIterator, DbReader, ErrorKind, WriteBatch};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::OwnedMutexGuard;
use tracing::{error, warn};

use super::lease::Lease;
use super::patch::{self, BLOCK};
use super::regions::{
    GRANULE, Granule, REGION, Region, Regions, block_key, block_of_key, granules, region_key,
};
use super::store::{Requests, shown};

/// How long an operation of the database may take, with the store's retries. A longer
/// outage should be seen, and the kernel's NBD clients are as patient.
const PATIENCE: Duration = Duration::from_secs(120);
/// The bytes that a read of several blocks fetches ahead.
const READ_AHEAD: usize = 1 << 20;
/// The regions that one batch of a TRIM changes at most.
const REGIONS: u64 = 1024;
/// A table of the log's records is written after this many. The database counts only their bytes, but
/// a small record, such as that of a TRIM, takes about 700 bytes of memory.
const RECORDS: u64 = 1 << 16;

pub(super) enum Database {
    Writer(Db),
    /// A snapshot, or a volume that is only read.
    Reader(Box<DbReader>),
}

/// A volume as a device. Dropping it closes the database.
pub(crate) struct Volume {
    pub(super) inner: Arc<Inner>,
    pub(super) lease: Option<Lease>,
    /// `None` once the drop has taken it.
    pub(super) runtime: Option<Runtime>,
}

pub(super) struct Inner {
    /// The address of the volume, for messages.
    pub(super) address: String,
    pub(super) len: u64,
    pub(super) database: Database,
    pub(super) regions: Arc<Mutex<Regions>>,
    /// Held while a batch is made and added to the log, so that the regions change in the order of
    /// the log. A batch waits for the store only while the database asks its writers to wait.
    pub(super) commits: Arc<tokio::sync::Mutex<()>>,
    /// The number of the last batch. Ordering: Relaxed, all: a sync reads it after the writes that
    /// it must cover have returned, which the caller orders.
    pub(super) last: AtomicU64,
    /// The records since the last table by [`RECORDS`]. Ordering: Relaxed, all: changed under `commits`.
    pub(super) records: AtomicU64,
    pub(super) requests: Arc<Requests>,
    pub(super) end: Mutex<End>,
}

/// The end of the volume before its server's.
#[derive(Default)]
pub(super) struct End {
    reason: Option<&'static str>,
    waker: Option<Waker>,
}

impl Volume {
    pub(crate) fn requests(&self) -> &Requests {
        &self.inner.requests
    }

    /// Returns why the volume can no longer be changed: another server has taken it over, or the
    /// database has failed. While it can, `waker` is kept, and woken at its end.
    pub(crate) fn ended(&self, waker: &Waker) -> Option<&'static str> {
        let mut end = self.inner.end.lock();
        end.waker = Some(waker.clone());
        end.reason
    }

    #[cfg(test)]
    pub(crate) fn end_by(&self, reason: &'static str) {
        self.inner.end_by(reason);
    }

    /// Runs an operation on the threads of the volume. It goes on if the future is dropped.
    async fn run<T: Send + 'static>(
        &self,
        operation: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        let runtime = self.runtime.as_ref().ok_or_else(eio)?;
        runtime.spawn(operation).await.map_err(|_| eio())
    }

    /// Reads bytes from `offset` on. Returns their number.
    pub(crate) async fn read_async(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let (inner, mut bytes) = (Arc::clone(&self.inner), Vec::new());
        let has_room = bytes.try_reserve_exact(buf.len());
        has_room.map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        bytes.resize(buf.len(), 0);
        let read = async move { inner.read(offset, &mut bytes).await.map(|count| (count, bytes)) };
        let (count, bytes) = self.run(read).await??;
        buf[..count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    /// Writes bytes.
    pub(crate) async fn write_async(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (inner, parts) = (Arc::clone(&self.inner), Part::of(offset, bytes));
        self.run(async move { inner.write(parts).await }).await?
    }

    /// Returns whether there is a hole at `at`, and where the hole or the data ends, at most at `end`.
    /// Only whole granules without any data are holes.
    pub(crate) fn part(&self, at: u64, end: u64) -> (bool, u64) {
        self.inner.regions.lock().part(at, end)
    }

    /// Runs an operation while the calling thread waits. It must not be a thread of the volume.
    fn block_on<T>(&self, operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        self.runtime.as_ref().ok_or_else(eio)?.block_on(operation)
    }

    pub(super) fn spawn(&self, operation: impl Future<Output = ()> + Send + 'static) {
        // Without a runtime the operation is dropped, which ends it with an error.
        if let Some(runtime) = &self.runtime {
            runtime.spawn(operation);
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let (inner, lease) = (Arc::clone(&self.inner), self.lease.take());
        let close = move || close(&inner, lease, runtime);
        match Handle::try_current() {
            Err(_) => close(),
            // The last reference was that of an operation, whose thread must not wait for itself. The cache
            // has synced what it must before.
            Ok(_) => drop(thread::spawn(close)),
        }
    }
}

/// Closes the database and the store.
fn close(inner: &Inner, lease: Option<Lease>, runtime: Runtime) {
    let closed = runtime.block_on(async {
        let close = async {
            match &inner.database {
                Database::Writer(db) => db.close().await,
                Database::Reader(reader) => reader.close().await,
            }
        };
        let closed = tokio::time::timeout(PATIENCE, close).await;
        if let (Some(lease), false) = (lease, inner.has_ended()) {
            lease.end().await;
        }
        closed
    });
    let volume = &inner.address;
    match closed {
        Ok(Ok(())) => {}
        // What was synced is in the store; the next server replays the log.
        Ok(Err(error)) => warn!(volume, error = shown(&error), "not closed"),
        Err(_) => warn!(volume, "not closed: the store did not answer"),
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
}

impl Inner {
    /// Bounds the time of an operation of the database, and translates its error.
    async fn in_time<T>(
        &self,
        what: &str,
        operation: impl Future<Output = Result<T, slatedb::Error>>,
    ) -> io::Result<T> {
        match tokio::time::timeout(PATIENCE, operation).await {
            Ok(done) => done.map_err(|error| self.failed(what, &error)),
            Err(_) => Err(self.silent(what)),
        }
    }

    /// Logs the error of an operation of the database, and ends the volume if the database has ended.
    fn failed(&self, what: &str, error: &slatedb::Error) -> io::Error {
        match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => self.end_by(FENCED),
            ErrorKind::Closed(CloseReason::Clean) => {}
            ErrorKind::Closed(_) => self.end_by("the database has failed"),
            _ => warn!(volume = self.address, error = shown(error), "a {what} has failed"),
        }
        eio()
    }

    /// Logs that the store has not answered.
    fn silent(&self, what: &str) -> io::Error {
        warn!(volume = self.address, "a {what} has failed: no answer of the store in {PATIENCE:?}");
        eio()
    }

    /// Ends the volume: nothing changes it any more.
    pub(super) fn end_by(&self, reason: &'static str) {
        let mut end = self.end.lock();
        if end.reason.is_some() {
            return;
        }
        error!(volume = self.address, "the volume has ended: {reason}");
        end.reason = Some(reason);
        let waker = end.waker.take();
        drop(end);
        waker.iter().for_each(Waker::wake_by_ref);
    }

    fn has_ended(&self) -> bool {
        self.end.lock().reason.is_some()
    }

    fn db(&self) -> io::Result<&Db> {
        match &self.database {
            Database::Writer(_) if self.has_ended() => Err(eio()),
            Database::Writer(db) => Ok(db),
            Database::Reader(_) => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    /// Reads bytes from `offset` on. Returns their number.
    async fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let count = (buf.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        let buf = &mut buf[..count];
        buf.fill(0);
        for run in runs(offset, count as u64) {
            let granule = self.regions.lock().granule_at(run.region, run.bytes.start);
            if granule.has_data {
                let start = (run.start() - offset) as usize;
                let into = &mut buf[start..start + run.len() as usize];
                self.read_run(&run, granule.generation, into).await?;
            }
        }
        Ok(count)
    }

    /// Reads the bytes of one granule.
    async fn read_run(&self, run: &Run, generation: u32, into: &mut [u8]) -> io::Result<()> {
        let key = |block| block_key(run.region, generation, block);
        let blocks = run.blocks();
        if blocks.start + 1 == blocks.end {
            let key = key(blocks.start as u16);
            let found = match &self.database {
                Database::Writer(db) => self.in_time("read", db.get(key)).await?,
                Database::Reader(reader) => self.in_time("read", reader.get(key)).await?,
            };
            return found
                .map_or(Ok(()), |value| patch::copy(&value, run.bytes.start % BLOCK, into));
        }
        let keys = key(blocks.start as u16)..=key((blocks.end - 1) as u16);
        let options = ScanOptions::default().with_read_ahead_bytes(READ_AHEAD);
        let scan = async {
            let mut found: DbIterator = match &self.database {
                Database::Writer(db) => db.scan_with_options(keys, &options).await?,
                Database::Reader(reader) => reader.scan_with_options(keys, &options).await?,
            };
            while let Some(found) = found.next().await? {
                let Some((_, _, block)) = block_of_key(&found.key) else { continue };
                let block = u64::from(block) * BLOCK;
                let part = run.bytes.start.max(block)..run.bytes.end.min(block + BLOCK);
                let at = (part.start - run.bytes.start) as usize;
                let into = &mut into[at..at + (part.end - part.start) as usize];
                if let Err(error) = patch::copy(&found.value, part.start - block, into) {
                    return Ok(Err(error));
                }
            }
            Ok(Ok(()))
        };
        self.in_time("read", scan).await?
    }

    /// Waits for the batches that have begun.
    async fn turn(&self, what: &str) -> io::Result<OwnedMutexGuard<()>> {
        let turn = Arc::clone(&self.commits).lock_owned();
        tokio::time::timeout(PATIENCE, turn).await.map_err(|_| self.silent(what))
    }

    /// Adds a batch to the log. `fill` adds the changes of blocks to the batch, and returns their number and the
    /// regions that change with it.
    ///
    /// A batch that has begun goes on if this function stops to wait for it: the regions must change with the
    /// log. The next batch waits for it.
    async fn commit(
        self: &Arc<Self>,
        what: &str,
        fill: impl FnOnce(&Self, &mut WriteBatch) -> io::Result<(u64, BTreeMap<u32, Region>)>
        + Send
        + 'static,
    ) -> io::Result<()> {
        self.db()?;
        let turn = self.turn(what).await?;
        let inner = Arc::clone(self);
        let add = tokio::spawn(async move {
            let mut batch = WriteBatch::new();
            let (count, regions) = fill(&inner, &mut batch)?;
            for (&number, region) in &regions {
                batch.put_bytes(region_key(number), region.value());
            }
            if batch.is_empty() {
                return Ok(());
            }
            let count = count + regions.len() as u64;
            let records = inner.records.fetch_add(count, Ordering::Relaxed);
            let added =
                inner.db()?.write(batch).await.map_err(|error| inner.failed("write", &error));
            // After an error it is not known whether the log has the batch.
            let added = added.inspect_err(|_| inner.end_by("the database has failed"))?;
            inner.last.store(added.seqnum(), Ordering::Relaxed);
            inner.regions.lock().change(added.seqnum(), regions);
            if records >= RECORDS {
                // The write has succeeded. The next batch waits: the records in memory are bounded.
                tokio::spawn(async move { inner.write_table(turn).await });
            }
            Ok(())
        });
        match tokio::time::timeout(PATIENCE, add).await {
            Ok(added) => added.map_err(|_| eio())?,
            Err(_) => Err(self.silent(what)),
        }
    }

    /// Writes a table of the log's records. After an error the next batch begins another.
    async fn write_table(&self, _turn: OwnedMutexGuard<()>) {
        let Ok(db) = self.db() else { return };
        let table = FlushOptions { flush_type: FlushType::MemTable };
        if let Err(error) = db.flush_with_options(table).await {
            self.failed("table", &error);
            return;
        }
        self.records.store(0, Ordering::Relaxed);
        self.regions.lock().confirm(db.status().durable_seq);
    }

    /// Writes parts of blocks, as one batch.
    async fn write(self: &Arc<Self>, parts: Vec<Part>) -> io::Result<()> {
        let fill = move |inner: &Self, batch: &mut WriteBatch| {
            let (regions, mut begun) = (inner.regions.lock(), BTreeMap::new());
            let count = parts.len() as u64;
            for Part { region: number, block, is_whole, value } in parts {
                let at = u64::from(block) * BLOCK;
                let now = || regions.granule_at(number, at);
                let begins = |region: &Region| region.granule_at(at);
                let mut granule = begun.get(&number).map_or_else(now, begins);
                if !granule.has_data {
                    granule.has_data = true;
                    begun.entry(number).or_insert_with(|| regions.get(number)).set(at, granule);
                }
                let key = block_key(number, granule.generation, block);
                match is_whole {
                    true => batch.put_bytes(key, value),
                    false => batch.merge(key, value),
                }
            }
            Ok((count, begun))
        };
        self.commit("write", fill).await
    }

    /// Makes bytes read as zeros, and gives their space back.
    async fn discard(self: &Arc<Self>, offset: u64, len: u64) -> io::Result<()> {
        let (mut at, end) = (offset, offset + len);
        // A write that was not waited for may still begin a region.
        drop(self.turn("TRIM").await?);
        loop {
            let next = self.regions.lock().next(at);
            let Some(start) = next.filter(|&start| start < end) else { return Ok(()) };
            at = end.min((start / REGION + REGIONS) * REGION);
            let part = start..at;
            let fill = move |inner: &Self, batch: &mut WriteBatch| {
                let (regions, mut emptied) = (inner.regions.lock(), BTreeMap::new());
                let mut count = 0;
                for (number, part) in regions.with_data(part) {
                    let start = part.start / GRANULE * GRANULE;
                    let till = inner.len - u64::from(number) * REGION;
                    let generation = regions.granule_at(number, start).generation;
                    if part == (start..till.min(start + GRANULE)) {
                        let generation = generation.checked_add(1).ok_or_else(eio)?;
                        let empty = Granule { generation, has_data: false };
                        let region = || regions.get(number);
                        emptied.entry(number).or_insert_with(region).set(start, empty);
                        continue;
                    }
                    let run = Run { region: number, bytes: part };
                    for (block, part) in run.parts() {
                        let key = block_key(number, generation, block);
                        let len = part.end - part.start;
                        count += 1;
                        match len {
                            BLOCK => batch.delete(key),
                            _ => batch.merge(key, patch::of_part(part.start, len, None)),
                        }
                    }
                }
                Ok((count, emptied))
            };
            self.commit("TRIM", fill).await?;
        }
    }

    /// Waits until the store has confirmed all batches so far. Without a batch since the last
    /// confirmed one it sends no request, and succeeds even while the store is away.
    async fn sync(&self) -> io::Result<()> {
        let db = self.db()?;
        if db.status().durable_seq < self.last.load(Ordering::Relaxed) {
            self.in_time("flush", db.flush()).await?;
        }
        self.regions.lock().confirm(db.status().durable_seq);
        Ok(())
    }
}

/// Why a volume ends when another server opens it.
pub(super) const FENCED: &str = "another server has taken it over";

fn eio() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

/// Bytes within one granule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    region: u32,
    /// Relative to the region.
    bytes: Range<u64>,
}

impl Run {
    /// Returns the offset on the volume.
    fn start(&self) -> u64 {
        u64::from(self.region) * REGION + self.bytes.start
    }

    fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Returns the blocks of the region that have the bytes.
    fn blocks(&self) -> Range<u64> {
        self.bytes.start / BLOCK..self.bytes.end.div_ceil(BLOCK)
    }

    /// Returns the offset of a block on the volume.
    fn start_of(&self, block: u16) -> u64 {
        u64::from(self.region) * REGION + u64::from(block) * BLOCK
    }

    /// Returns the blocks of the region, and the part of each, relative to the block.
    fn parts(&self) -> impl Iterator<Item = (u16, Range<u64>)> + '_ {
        self.blocks().map(|block| {
            let start = block * BLOCK;
            let part = self.bytes.start.max(start)..self.bytes.end.min(start + BLOCK);
            (block as u16, part.start - start..part.end - start)
        })
    }
}

/// A written part of a block.
struct Part {
    region: u32,
    block: u16,
    is_whole: bool,
    /// As the database stores it.
    value: Bytes,
}

impl Part {
    /// Splits bytes that are written at `offset` at the ends of blocks.
    fn of(offset: u64, bytes: &[u8]) -> Vec<Self> {
        let mut parts = Vec::new();
        for run in runs(offset, bytes.len() as u64) {
            for (block, part) in run.parts() {
                let at = (run.start_of(block) + part.start - offset) as usize;
                let len = part.end - part.start;
                let value = patch::of_part(part.start, len, Some(&bytes[at..at + len as usize]));
                parts.push(Self { region: run.region, block, is_whole: len == BLOCK, value });
            }
        }
        parts
    }
}

/// Splits a range at the ends of granules.
fn runs(offset: u64, len: u64) -> impl Iterator<Item = Run> {
    granules(offset..offset + len).map(|part| {
        let region = part.start / REGION;
        let start = region * REGION;
        Run { region: region as u32, bytes: part.start - start..part.end - start }
    })
}

impl BlockDevice for Volume {
    fn len(&self) -> u64 {
        self.inner.len
    }

    fn is_read_only(&self) -> bool {
        matches!(self.inner.database, Database::Reader(_))
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.block_on(self.inner.read(offset, buf))
    }

    fn begin_read(&self, mut load: Load) {
        let inner = Arc::clone(&self.inner);
        self.spawn(async move {
            let offset = load.offset();
            let result = inner.read(offset, &mut load).await;
            load.finish(result);
        });
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.block_on(self.inner.write(Part::of(offset, buf)))
    }

    fn begin(&self, change: DeviceChange) {
        let inner = Arc::clone(&self.inner);
        self.spawn(async move {
            let result = match change.change() {
                Change::Write { offset, parts, durable } => {
                    let written = inner.write(Part::of(offset, &joined(parts))).await;
                    if durable && written.is_ok() { inner.sync().await } else { written }
                }
                Change::Discard { offset, len } | Change::Zero { offset, len } => {
                    inner.discard(offset, len).await
                }
                Change::Sync => inner.sync().await,
            };
            change.finish(result);
        });
    }

    fn write_depth(&self) -> usize {
        256
    }

    /// As a discard: the space of a volume is never reserved.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.discard(offset, len)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.block_on(self.inner.discard(offset, len))
    }

    fn sync(&self) -> io::Result<()> {
        self.block_on(self.inner.sync())
    }
}

/// Joins parts that are adjacent on the device.
fn joined<'p>(parts: &'p [IoSlice<'_>]) -> Cow<'p, [u8]> {
    match parts {
        [part] => Cow::Borrowed(part),
        parts => Cow::Owned(parts.iter().map(|part| &**part).collect::<Vec<&[u8]>>().concat()),
    }
}
