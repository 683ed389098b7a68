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

use super::device::{Database, FENCED, Inner, RETRIES, Volume};
use super::lease::{self, Lease, SnapshotRequests};
use super::patch::{BLOCK, Overlay};
use super::regions::{HEADER, Region, Regions, Stale};
use super::store::{self, Checked, Requests, sent, shown};
use crate::image_spec::VolumeUrl;

/// The start of a header: what the database is, and the version of its format.
const MAGIC: [u8; 16] = *b"offlock volume 1";
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
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// The age at which objects are deleted that nothing refers to. Above the longest request, because
/// an upload refers to its object only when it has ended.
const GARBAGE_AGE: Duration = Duration::from_secs(3600);
/// The same for a store without overwrites under a condition: see
/// `GarbageCollectorOptions::boundary_files_enabled`. No paused server wakes up after that.
const LOCAL_GARBAGE_AGE: Duration = Duration::from_secs(24 * 3600);

/// Why a volume cannot be served.
#[derive(Debug, Error)]
pub(crate) enum VolumeError {
    #[error("cannot open the store of '{volume}': {error}")]
    Store { volume: String, error: io::Error },
    #[error("there is no volume '{volume}'; ?size=BYTES behind the address creates it")]
    Missing { volume: String },
    #[error("'{volume}' has no snapshot '{name}'")]
    NoSnapshot { volume: String, name: String },
    #[error("'{volume}' has a snapshot '{name}' already")]
    SnapshotExists { volume: String, name: String },
    #[error("'{volume}' is not a volume of this program: {reason}. Nothing was written")]
    Foreign { volume: String, reason: &'static str },
    #[error(
        "'{volume}' has {has} bytes, and a volume does not become smaller than that: {asked} bytes"
    )]
    Smaller { volume: String, asked: u64, has: u64 },
    #[error("'{volume}' is served by another server; --takeover ends that one")]
    Held { volume: String },
    #[error(
        "'{volume}' is changed by another server, which a server of it with ,readonly does not follow: serve a snapshot"
    )]
    Changes { volume: String },
    #[error("stopped while '{volume}' was being opened")]
    Stopped { volume: String },
    #[error(
        "the store of '{volume}' overwrites objects that it was asked to create: it cannot keep a volume"
    )]
    Unsafe { volume: String },
    #[error("'{volume}': {FENCED} while this server opened it")]
    Fenced { volume: String },
    #[error(
        "the clock of this machine is behind that of the last server of '{volume}' or of what it wrote: set it"
    )]
    Clock { volume: String },
    #[error("the database of '{volume}' cannot be opened: {reason}")]
    Database { volume: String, reason: String },
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
        let volume = || url.address.clone();
        let fail = |error| VolumeError::Store { volume: volume(), error };
        let runtime = runtime().map_err(fail)?;
        let (store, path) = store::open(url).map_err(fail)?;
        Self::open_in(runtime, store, path, url, options)
    }

    pub(super) fn open_in(
        runtime: Runtime,
        store: Arc<dyn ObjectStore>,
        path: Path,
        url: &VolumeUrl,
        options: OpenOptions,
    ) -> Result<Self, VolumeError> {
        let store = Checked::new(store);
        let requests = Arc::clone(&store.requests);
        let place = Place { store: Arc::new(store), path, url, options };
        let opened = runtime.block_on(async {
            match select(pin!(place.open(requests)), pin!(stopped())).await {
                Either::Left((opened, _)) => opened,
                Either::Right(_) => Err(VolumeError::Stopped { volume: url.address.clone() }),
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
    pub(super) fn volume(&self) -> String {
        self.url.address.clone()
    }

    pub(super) fn of_store(&self, error: object_store::Error) -> VolumeError {
        let error = io::Error::other(shown(&error));
        VolumeError::Store { volume: self.volume(), error }
    }

    pub(super) fn of_database(&self, error: slatedb::Error) -> VolumeError {
        match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => VolumeError::Fenced { volume: self.volume() },
            _ => VolumeError::Database { volume: self.volume(), reason: shown(&error) },
        }
    }

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
    ) -> Result<(Inner, Option<Lease>), VolumeError> {
        let found = self.look().await?;
        let VolumeUrl { size, snapshot, .. } = self.url;
        let reads = self.options.read_only || snapshot.is_some();
        let len = match (&found, size) {
            (Found::Volume(has), Some(asked)) if asked < has && !reads => {
                let (asked, has) = (*asked, *has);
                return Err(VolumeError::Smaller { volume: self.volume(), asked, has });
            }
            (Found::Volume(has), None) => *has,
            (Found::Volume(has), Some(_)) if reads => *has,
            (_, Some(asked)) if !reads => *asked,
            _ => return Err(VolumeError::Missing { volume: self.volume() }),
        };
        if snapshot.is_none() && (reads || !self.options.takeover) {
            let held = lease::is_held(&*self.store, &self.lease()).await;
            let (fail, volume) = (|e| self.of_store(e), self.volume());
            match held.map_err(fail)? {
                true if reads => return Err(VolumeError::Changes { volume }),
                true => return Err(VolumeError::Held { volume }),
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
                let foreign = |reason| VolumeError::Foreign { volume: self.volume(), reason };
                (Database::Reader(reader.into()), len.ok_or(foreign("the snapshot has no header"))?)
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
            address: self.volume(),
            len,
            database,
            regions,
            commits: Arc::default(),
            last: 0.into(),
            requests,
            end: Mutex::default(),
        };
        Ok((inner, lease))
    }

    /// Looks what is at the address. Writes nothing.
    pub(super) async fn look(&self) -> Result<Found, VolumeError> {
        let foreign = |reason| Err(VolumeError::Foreign { volume: self.volume(), reason });
        // The database repeats a request for minutes, so wrong credentials and a missing bucket are found here.
        let first = || async { self.store.list(Some(&self.path)).next().await.transpose() };
        sent(first).await.map_err(|e| self.of_store(e))?;
        let manifest = self.admin().read_manifest(None).await;
        if manifest.map_err(|e| self.of_database(e))?.is_none() {
            let ours = [self.lease(), self.probe_at()];
            let others = || async {
                let other = |object: &ObjectMeta| ready(!ours.contains(&object.location));
                let mut others = pin!(self.store.list(Some(&self.path)).try_filter(other));
                others.next().await.transpose()
            };
            return match sent(others).await.map_err(|e| self.of_store(e))? {
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
            match any.await.map_err(|e| self.of_database(e))? {
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
    ) -> Result<Option<u64>, VolumeError> {
        let Some(header) = found.map_err(|e| self.of_database(e))? else { return Ok(None) };
        let foreign = |reason| VolumeError::Foreign { volume: self.volume(), reason };
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
    pub(super) async fn reader(&self, mode: DbReaderMode) -> Result<DbReader, VolumeError> {
        let options = DbReaderOptions {
            // A volume that is only read does not follow another server's changes: blocks of
            // different times would mix.
            manifest_poll_interval: NEVER,
            object_store_max_retries: Some(RETRIES),
            ..DbReaderOptions::default()
        };
        DbReader::builder(self.path.clone(), Arc::clone(&self.store))
            .with_reader_mode(mode)
            .with_options(options)
            .with_merge_operator(Arc::new(Overlay))
            .with_db_cache(Arc::new(indexes()), 0)
            .build()
            .await
            .map_err(|e| self.of_database(e))
    }

    /// Opens the database for writing, which fences an earlier server. Makes a new volume, and a
    /// larger size, durable.
    pub(super) async fn writer(
        &self,
        len: u64,
        found: &Found,
        regions: &Arc<Mutex<Regions>>,
    ) -> Result<Db, VolumeError> {
        let (fail, volume) = (|e| self.of_database(e), self.volume());
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
            return Err(VolumeError::Held { volume });
        }
        // Also if it is there: the first write fails, and ends the database, if the clock is behind the
        // last time that the database has seen.
        if let Err(error) = db.put(HEADER, &header).await {
            let is_late = matches!(error.kind(), ErrorKind::Invalid);
            return Err(if is_late { VolumeError::Clock { volume } } else { fail(error) });
        }
        if has != Some(len) {
            db.flush().await.map_err(fail)?;
            info!(volume, from = has, to = len, "the volume has its size");
        }
        Ok(db)
    }

    /// Opens the database for writing.
    async fn database(
        &self,
        clock: Arc<dyn SystemClock>,
        regions: &Arc<Mutex<Regions>>,
    ) -> Result<Db, VolumeError> {
        let (path, store) = (self.path.clone(), Arc::clone(&self.store));
        let compactor = CompactorBuilder::new(path.clone(), Arc::clone(&store))
            .with_options(CompactorOptions {
                poll_interval: MERGES,
                commit_compacted_interval: MERGES,
                scheduler_options: [("max_compaction_sources".into(), "32".into())].into(),
                worker: Some(CompactionWorkerOptions {
                    compactions_poll_interval: MERGES,
                    object_store_max_retries: Some(RETRIES),
                    ..CompactionWorkerOptions::default()
                }),
                object_store_max_retries: Some(RETRIES),
                ..CompactorOptions::default()
            })
            .with_merge_operator(Arc::new(Overlay))
            .with_sst_block_size(SstBlockSize::Block64Kib)
            .with_compaction_filter_supplier(Arc::new(Stale(Arc::clone(regions))));
        Db::builder(path, store)
            .with_settings(settings(self.url.is_local()))
            .with_system_clock(clock)
            .with_merge_operator(Arc::new(Overlay))
            .with_sst_block_size(SstBlockSize::Block64Kib)
            .with_db_cache(Arc::new(indexes()), 0)
            .with_compactor_builder(compactor)
            .build()
            .await
            .map_err(|e| self.of_database(e))
    }

    /// Refuses a store that cannot keep a volume: a create must fail if the object is there, because
    /// fencing rests on that.
    async fn probe(&self) -> Result<(), VolumeError> {
        use object_store::{Error, PutMode};
        let at = self.probe_at();
        let create = || self.store.put_opts(&at, "probe".into(), PutMode::Create.into());
        match sent(create).await {
            // Left by a server that was killed here.
            Ok(_) | Err(Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(self.of_store(error)),
        }
        let second = sent(create).await;
        let removed = sent(|| self.store.delete(&at)).await;
        match second {
            Err(Error::AlreadyExists { .. }) => removed.map_err(|e| self.of_store(e)),
            Ok(_) => Err(VolumeError::Unsafe { volume: self.volume() }),
            Err(error) => Err(self.of_store(error)),
        }
    }

    async fn regions(
        &self,
        found: Result<DbIterator, slatedb::Error>,
    ) -> Result<BTreeMap<u32, Region>, VolumeError> {
        let fail = |e| self.of_database(e);
        let (mut found, mut regions) = (found.map_err(fail)?, BTreeMap::new());
        while let Some(found) = found.next().await.map_err(fail)? {
            let entry = found.key[1..].try_into().ok().map(u32::from_be_bytes);
            let entry = entry.zip(Region::of_value(&found.value));
            let reason = "its list of regions is damaged";
            let foreign = || VolumeError::Foreign { volume: self.volume(), reason };
            let (number, region) = entry.ok_or_else(foreign)?;
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
