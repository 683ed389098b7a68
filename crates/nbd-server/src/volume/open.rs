//! Opening a volume: what is at its address, whether that may be used, and the settings of the
//! database.

use std::collections::BTreeMap;
use std::future::ready;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use offlock_sync::Mutex;
use slatedb::admin::Admin;
use slatedb::config::{
    CompactionWorkerOptions, CompactorOptions, DbReaderOptions, GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions, Settings,
};
use slatedb::db_cache::moka::{MokaCache, MokaCacheOptions};
use slatedb::{
    CloseReason, CompactorBuilder, Db, DbIterator, DbReader, DbReaderMode, ErrorKind, SstBlockSize,
};
use slatedb_common::clock::{DefaultSystemClock, SystemClock};
use thiserror::Error;
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::SignalKind;
use tracing::info;

use super::device::{Database, FENCED, Inner, Volume};
use super::lease::{self, Lease, SnapshotRequests};
use super::patch::{BLOCK, Overlay};
use super::regions::{HEADER, Region, Regions, Stale};
use super::store::{self, Checked, RETRIES, Requests, sent, shown};
use super::url::VolumeUrl;

/// The start of a header: what the database is, and the version of its format.
const MAGIC: [u8; 16] = *b"offlock volume 2";
/// Bytes of the database's log and new tables that the store has not confirmed. Writers wait above.
const UNCONFIRMED: usize = 128 << 20;
/// Bytes of a new table.
const TABLE: usize = 32 << 20;
/// Bytes of the tables' indexes and blocks in memory. The data of the volume is in bufcache; this
/// holds the block of 64 KiB whose parts are read one after the other.
const INDEXES: u64 = 32 << 20;
/// How often the database asks the store for news: of another server (two requests), and of tables to
/// be merged (six). An idle volume is to send at most 12 requests a minute.
const NEWS: Duration = Duration::from_secs(60);
const MERGES: Duration = Duration::from_secs(75);
/// The merges at a time, the tables or runs of each, and the bytes that are read ahead of all together. The defaults
/// read 8 MiB ahead of each table, of up to four merges of four parts: a merge took 300 MB. New tables are merged first,
/// so with one merge at a time runs are merged only once there are [`SOURCES`] of them, and meanwhile no table is.
const MERGES_AT_ONCE: usize = 2;
const SOURCES: usize = 32;
const AHEAD_OF_SOURCES: usize = 32 << 20;
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// The age at which objects are deleted that nothing refers to. Above the longest request, because
/// an upload refers to its object only when it has ended.
const GARBAGE_AGE: Duration = Duration::from_secs(3600);
/// The same for a store without overwrites under a condition: see
/// `GarbageCollectorOptions::boundary_files_enabled`. No paused server wakes up after that.
const LOCAL_GARBAGE_AGE: Duration = Duration::from_secs(24 * 3600);

/// A volume that cannot be served, and why.
#[derive(Debug, Error)]
#[error("volume '{address}': {problem}")]
pub(crate) struct VolumeError {
    address: String,
    problem: Problem,
}

impl VolumeError {
    pub(super) fn new(url: &VolumeUrl, problem: Problem) -> Self {
        Self { address: url.address.clone(), problem }
    }
}

/// Why a volume cannot be served.
#[derive(Debug, Error)]
pub(super) enum Problem {
    #[error("cannot open its store: {0}")]
    Store(#[from] io::Error),
    #[error("there is none; ?size=BYTES behind the address creates it")]
    Missing,
    #[error("it has no snapshot '{0}'")]
    NoSnapshot(String),
    #[error("it has a snapshot '{0}' already")]
    SnapshotExists(String),
    #[error("it is no volume of this program: {0}. Nothing was written")]
    Foreign(&'static str),
    #[error("it has {has} bytes, and a volume does not become smaller than that: {asked} bytes")]
    Smaller { asked: u64, has: u64 },
    #[error("it is served by another server; --takeover ends that one")]
    Held,
    #[error(
        "it is changed by another server, which a server with ,readonly does not follow: serve a snapshot"
    )]
    Changes,
    #[error("stopped while it was being opened")]
    Stopped,
    #[error("its store overwrites objects that it was asked to create: it cannot keep a volume")]
    Unsafe,
    #[error("{FENCED} while this server opened it")]
    Fenced,
    #[error(
        "the clock of this machine is behind that of the last server of the volume or of what it wrote: set it"
    )]
    Clock,
    #[error("its database cannot be opened: {0}")]
    Database(String),
}

impl From<object_store::Error> for Problem {
    fn from(error: object_store::Error) -> Self {
        Self::Store(io::Error::other(shown(&error)))
    }
}

impl From<slatedb::Error> for Problem {
    fn from(error: slatedb::Error) -> Self {
        match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => Self::Fenced,
            _ => Self::Database(shown(&error)),
        }
    }
}

/// How a volume is opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenOptions {
    pub(crate) read_only: bool,
    /// Do not look whether another server has the volume.
    pub(crate) takeover: bool,
}

/// What is at an address.
pub(super) enum Found {
    Nothing,
    /// A database without any data: its creation was interrupted.
    Empty,
    /// A volume with this many bytes.
    Volume(u64),
}

impl Volume {
    /// Opens a volume, or creates it with the size of its address. Blocks.
    pub(crate) fn open(url: &VolumeUrl, options: OpenOptions) -> Result<Self, VolumeError> {
        let opened = runtime().and_then(|runtime| Ok((runtime, store::open(url)?)));
        let (runtime, (store, path)) =
            opened.map_err(|error| VolumeError::new(url, error.into()))?;
        Self::open_in(runtime, store, path, url, options)
            .map_err(|problem| VolumeError::new(url, problem))
    }

    pub(super) fn open_in(
        runtime: Runtime,
        store: Arc<dyn ObjectStore>,
        path: Path,
        url: &VolumeUrl,
        options: OpenOptions,
    ) -> Result<Self, Problem> {
        let store = Checked::new(store);
        let requests = Arc::clone(&store.requests);
        let place = Place { store: Arc::new(store), path, url, options };
        let opened = runtime.block_on(async {
            match select(pin!(place.open(requests)), pin!(stopped())).await {
                Either::Left((opened, _)) => opened,
                Either::Right(_) => Err(Problem::Stopped),
            }
        });
        // A request of the store may still run.
        let (inner, lease) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let volume = Self { inner: Arc::new(inner), lease, runtime: Some(runtime) };
        if let Database::Writer(db) = &volume.inner.database {
            // A server that has nothing to write sees the end too.
            let (mut status, inner) = (db.subscribe(), Arc::downgrade(&volume.inner));
            volume.spawn(async move {
                let ended = status.wait_for(|status| status.close_reason.is_some()).await;
                let reason = ended.ok().and_then(|status| status.close_reason);
                let Some(inner) = inner.upgrade() else { return };
                match reason {
                    Some(CloseReason::Fenced) => inner.end_by(FENCED),
                    Some(CloseReason::Panic) => inner.end_by("the database has failed"),
                    _ => {}
                }
            });
        }
        Ok(volume)
    }
}

/// Waits for SIGTERM or SIGINT, whose handler of the server is not asked before the volumes are open.
async fn stopped() {
    let signal = |kind| tokio::signal::unix::signal(kind);
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    select(pin!(terminate.recv()), pin!(interrupt.recv())).await;
}

/// Makes the threads of a volume.
pub(super) fn runtime() -> io::Result<Runtime> {
    let mut threads = runtime::Builder::new_multi_thread();
    threads.worker_threads(2).thread_name("volume").enable_all().build()
}

/// The address of a volume in its store.
pub(super) struct Place<'u> {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) url: &'u VolumeUrl,
    pub(super) options: OpenOptions,
}

impl Place<'_> {
    pub(super) fn admin(&self) -> Admin {
        Admin::builder(self.path.clone(), Arc::clone(&self.store)).build()
    }

    /// The path of the object of [`lease`].
    pub(super) fn lease(&self) -> Path {
        self.path.clone().join("server")
    }

    /// The path of the object that tries the store before a volume is created.
    fn probe_at(&self) -> Path {
        self.path.clone().join("probe")
    }

    pub(super) async fn open(
        self,
        requests: Arc<Requests>,
    ) -> Result<(Inner, Option<Lease>), Problem> {
        let found = self.look().await?;
        let VolumeUrl { size, snapshot, .. } = self.url;
        let reads = self.options.read_only || snapshot.is_some();
        let len = match (&found, size) {
            (Found::Volume(has), Some(asked)) if asked < has && !reads => {
                let (asked, has) = (*asked, *has);
                return Err(Problem::Smaller { asked, has });
            }
            (Found::Volume(has), None) => *has,
            (Found::Volume(has), Some(_)) if reads => *has,
            (_, Some(asked)) if !reads => *asked,
            _ => return Err(Problem::Missing),
        };
        if snapshot.is_none() && (reads || !self.options.takeover) {
            let held = lease::is_held(&*self.store, &self.lease()).await;
            match held? {
                true if reads => return Err(Problem::Changes),
                true => return Err(Problem::Held),
                false => {}
            }
        }
        let regions = Arc::<Mutex<Regions>>::default();
        let (database, len) = match snapshot {
            None if !reads => (Database::Writer(self.writer(len, &found, &regions).await?), len),
            None => (Database::Reader(self.reader(DbReaderMode::FollowLatest).await?.into()), len),
            Some(name) => {
                let id = self.snapshot(name).await?.id;
                let reader = self.reader(DbReaderMode::Checkpoint(id)).await?;
                let len = self.header(reader.get(HEADER).await)?;
                let len = len.ok_or(Problem::Foreign("the snapshot has no header"))?;
                (Database::Reader(reader.into()), len)
            }
        };
        let found = match &database {
            Database::Writer(db) => self.regions(db.scan_prefix([1], ..).await).await?,
            Database::Reader(reader) => self.regions(reader.scan_prefix([1], ..).await).await?,
        };
        *regions.lock() = Regions::of_store(found);
        let lease = match &database {
            Database::Writer(db) => {
                let snapshots = Some(SnapshotRequests::new(&self.store, &self.path, db));
                Some(Lease::begin(Arc::clone(&self.store), self.lease(), snapshots).await)
            }
            Database::Reader(_) => None,
        };
        let inner = Inner {
            address: self.url.address.clone(),
            len,
            database,
            regions,
            commits: Arc::default(),
            last: 0.into(),
            records: 0.into(),
            requests,
            end: Mutex::default(),
        };
        Ok((inner, lease))
    }

    /// Looks what is at the address. Writes nothing.
    pub(super) async fn look(&self) -> Result<Found, Problem> {
        let foreign = |reason| Err(Problem::Foreign(reason));
        // The database repeats a request for minutes, so wrong credentials and a missing bucket are found here.
        let first = || async { self.store.list(Some(&self.path)).next().await.transpose() };
        sent(first).await?;
        let manifest = self.admin().read_manifest(None).await;
        if manifest?.is_none() {
            let ours = [self.lease(), self.probe_at()];
            let others = || async {
                let other = |object: &ObjectMeta| ready(!ours.contains(&object.location));
                let mut others = pin!(self.store.list(Some(&self.path)).try_filter(other));
                others.next().await.transpose()
            };
            return match sent(others).await? {
                Some(_) => foreign("there are other objects below its path"),
                None => Ok(Found::Nothing),
            };
        }
        let reader = self.reader(DbReaderMode::FollowLatest).await?;
        let found = async {
            if let Some(len) = self.header(reader.get(HEADER).await)? {
                return Ok(Found::Volume(len));
            }
            let any = async { reader.scan(..).await?.next().await };
            match any.await? {
                Some(_) => foreign("the database has other data"),
                None => Ok(Found::Empty),
            }
        };
        let found = found.await;
        let _ = reader.close().await; // it has read only
        found
    }

    /// Returns the size in a header, `None` without one.
    fn header(
        &self,
        found: Result<Option<slatedb::bytes::Bytes>, slatedb::Error>,
    ) -> Result<Option<u64>, Problem> {
        let Some(header) = found? else { return Ok(None) };
        let foreign = Problem::Foreign;
        let (magic, rest) = header.split_first_chunk().ok_or(foreign("its header is damaged"))?;
        if magic[..15] != MAGIC[..15] {
            return Err(foreign("its header is another program's"));
        }
        if *magic != MAGIC {
            return Err(foreign("it has the format of another version"));
        }
        let parsed: Option<[u8; 16]> = rest.try_into().ok();
        let Some([a, b, c, d, e, f, g, h, block @ ..]) = parsed else {
            return Err(foreign("its header is damaged"));
        };
        if u64::from_be_bytes(block) != BLOCK {
            return Err(foreign("its blocks have another size"));
        }
        let len = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        if !(1..=VolumeUrl::MOST).contains(&len) {
            return Err(foreign("its header is damaged"));
        }
        Ok(Some(len))
    }

    /// Opens the database for reading, as it is now. Writes nothing.
    pub(super) async fn reader(&self, mode: DbReaderMode) -> Result<DbReader, Problem> {
        let options = DbReaderOptions {
            // A volume that is only read does not follow another server's changes: blocks of
            // different times would mix.
            manifest_poll_interval: NEVER,
            object_store_max_retries: Some(RETRIES),
            ..DbReaderOptions::default()
        };
        Ok(DbReader::builder(self.path.clone(), Arc::clone(&self.store))
            .with_reader_mode(mode)
            .with_options(options)
            .with_merge_operator(Arc::new(Overlay))
            .with_db_cache(Arc::new(indexes()), 0)
            .build()
            .await?)
    }

    /// Opens the database for writing, which fences an earlier server. Makes a new volume, and a
    /// larger size, durable.
    pub(super) async fn writer(
        &self,
        len: u64,
        found: &Found,
        regions: &Arc<Mutex<Regions>>,
    ) -> Result<Db, Problem> {
        if let Found::Nothing = found {
            self.probe().await?;
        }
        let header = [&MAGIC[..], &len.to_be_bytes(), &BLOCK.to_be_bytes()].concat();
        let clock = Arc::new(DefaultSystemClock::new());
        #[cfg(test)]
        super::device::tests::pass_by().await;
        let db = self.database(clock, regions).await?;
        // Another server may have created or grown it since `look`.
        let has = self.header(db.get(HEADER).await)?;
        if has.is_some_and(|has| has > len) {
            return Err(Problem::Held);
        }
        // Also if it is there: the first write fails, and ends the database, if the clock is behind the
        // last time that the database has seen.
        if let Err(error) = db.put(HEADER, &header).await {
            let is_late = matches!(error.kind(), ErrorKind::Invalid);
            return Err(if is_late { Problem::Clock } else { error.into() });
        }
        if has != Some(len) {
            db.flush().await?;
            info!(volume = self.url.address, from = has, to = len, "the volume has its size");
        }
        Ok(db)
    }

    /// Opens the database for writing.
    async fn database(
        &self,
        clock: Arc<dyn SystemClock>,
        regions: &Arc<Mutex<Regions>>,
    ) -> Result<Db, Problem> {
        let (path, store) = (self.path.clone(), Arc::clone(&self.store));
        let compactor = CompactorBuilder::new(path.clone(), Arc::clone(&store))
            .with_options(CompactorOptions {
                poll_interval: MERGES,
                commit_compacted_interval: MERGES,
                scheduler_options: [("max_compaction_sources".into(), SOURCES.to_string())].into(),
                max_concurrent_compactions: MERGES_AT_ONCE,
                worker: Some(CompactionWorkerOptions {
                    compactions_poll_interval: MERGES,
                    max_concurrent_compactions: MERGES_AT_ONCE,
                    max_subcompactions: 1,
                    max_fetch_tasks: 1,
                    bytes_to_fetch: AHEAD_OF_SOURCES / SOURCES / MERGES_AT_ONCE,
                    object_store_max_retries: Some(RETRIES),
                    ..CompactionWorkerOptions::default()
                }),
                object_store_max_retries: Some(RETRIES),
                ..CompactorOptions::default()
            })
            .with_merge_operator(Arc::new(Overlay))
            .with_sst_block_size(SstBlockSize::Block64Kib)
            .with_compaction_filter_supplier(Arc::new(Stale(Arc::clone(regions))));
        Ok(Db::builder(path, store)
            .with_settings(settings(self.url.is_local()))
            .with_system_clock(clock)
            .with_merge_operator(Arc::new(Overlay))
            .with_sst_block_size(SstBlockSize::Block64Kib)
            .with_db_cache(Arc::new(indexes()), 0)
            .with_compactor_builder(compactor)
            .build()
            .await?)
    }

    /// Refuses a store that cannot keep a volume: a create must fail if the object is there, because
    /// fencing rests on that.
    async fn probe(&self) -> Result<(), Problem> {
        use object_store::{Error, PutMode};
        let at = self.probe_at();
        let create = || self.store.put_opts(&at, "probe".into(), PutMode::Create.into());
        match sent(create).await {
            // Left by a server that was killed here.
            Ok(_) | Err(Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let second = sent(create).await;
        let removed = sent(|| self.store.delete(&at)).await;
        match second {
            Err(Error::AlreadyExists { .. }) => Ok(removed?),
            Ok(_) => Err(Problem::Unsafe),
            Err(error) => Err(error.into()),
        }
    }

    async fn regions(
        &self,
        found: Result<DbIterator, slatedb::Error>,
    ) -> Result<BTreeMap<u32, Region>, Problem> {
        let (mut found, mut regions) = (found?, BTreeMap::new());
        while let Some(found) = found.next().await? {
            let entry = found.key[1..].try_into().ok().map(u32::from_be_bytes);
            let entry = entry.zip(Region::of_value(&found.value));
            let damaged = Problem::Foreign("its list of regions is damaged");
            let (number, region) = entry.ok_or(damaged)?;
            regions.insert(number, region);
        }
        Ok(regions)
    }
}

fn indexes() -> MokaCache {
    let options = MokaCacheOptions { max_capacity: INDEXES, ..MokaCacheOptions::default() };
    MokaCache::new_with_opts(options)
}

fn settings(is_local: bool) -> Settings {
    let min_age = if is_local { LOCAL_GARBAGE_AGE } else { GARBAGE_AGE };
    let directory = Some(GarbageCollectorDirectoryOptions {
        interval: Some(Duration::from_secs(1200)),
        min_age,
        dry_run: false,
    });
    Settings {
        // A FLUSH of a client flushes, and a full buffer does.
        flush_interval: None,
        manifest_poll_interval: NEWS,
        l0_sst_size_bytes: TABLE,
        // Tables are merged at each look for them, and until then there may be many.
        l0_max_ssts: 256,
        l0_max_ssts_per_key: 256,
        max_unflushed_bytes: UNCONFIRMED,
        object_store_max_retries: Some(RETRIES),
        // The builder has one, with a filter.
        compactor_options: None,
        // The tests' time runs ahead of that of their store.
        garbage_collector_options: (!cfg!(test)).then_some(GarbageCollectorOptions {
            manifest_options: directory,
            wal_options: directory,
            // A fence that is deleted lets a paused server write.
            wal_fence_options: None,
            compacted_options: directory,
            compactions_options: directory,
            detach_options: None,
            metric_level: None,
            boundary_files_enabled: !is_local,
            object_store_max_retries: Some(RETRIES),
        }),
        ..Settings::default()
    }
}
