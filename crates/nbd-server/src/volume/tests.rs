//! Volumes over a store with faults, in memory or in a folder. The time of most runtimes is virtual, so that waits
//! for the store take none.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::task::Waker;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult,
};
use testkit::WakeCount;
use testkit::rng::{Rng, seeded};
use tokio::runtime;
use tokio::time::Instant;

use super::super::regions::HEADER;
use super::*;
use crate::volume::VolumeUrl;
use crate::volume::open::{self, OpenOptions, Place, Problem};
use crate::volume::{lease, store};

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// It fails, and nothing was done.
    Fails,
    /// It is done, and the answer is an error.
    Unanswered,
    /// A create is refused with 409, although there is no such object.
    Conflict,
    /// A create overwrites.
    Overwrites,
    /// The parts of an upload fail, or the body of an object breaks off.
    Parts,
    /// The request that ends an upload is carried out twice, and the second answer comes.
    Repeated,
    /// It has no end.
    Hangs,
}

/// A request to the store: its number, whether it changes anything, and whether it begins an upload in parts.
struct Request {
    number: u64,
    changes: bool,
    in_parts: bool,
}

type Rule = Box<dyn FnMut(&Request) -> Fault + Send>;

struct Faulty {
    store: Arc<dyn ObjectStore>,
    requests: AtomicU64,
    rule: Mutex<Rule>,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl Faulty {
    fn new(
        store: &Arc<impl ObjectStore>,
        rule: impl FnMut(&Request) -> Fault + Send + 'static,
    ) -> Arc<Self> {
        let rule: Rule = Box::new(rule);
        let store = Arc::clone(store) as _;
        Arc::new(Self { store, requests: 0.into(), rule: Mutex::new(rule) })
    }

    async fn fault(&self, changes: bool) -> object_store::Result<Fault> {
        self.fault_of(changes, false).await
    }

    async fn fault_of(&self, changes: bool, in_parts: bool) -> object_store::Result<Fault> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let fault = (self.rule.lock())(&Request { number, changes, in_parts });
        match fault {
            Fault::Fails => Err(broken()),
            Fault::Hangs => std::future::pending().await,
            fault => Ok(fault),
        }
    }
}

fn broken() -> Error {
    Error::Generic { store: "Faulty", source: "a fault".into() }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut opts: PutOptions,
    ) -> object_store::Result<PutResult> {
        match (self.fault(true).await?, &opts.mode) {
            (Fault::Unanswered, _) => {
                self.store.put_opts(location, payload, opts).await?;
                return Err(broken());
            }
            (Fault::Conflict, PutMode::Create) => {
                let path = location.to_string();
                return Err(Error::AlreadyExists { path, source: "409".into() });
            }
            (Fault::Overwrites, _) => opts.mode = PutMode::Overwrite,
            _ => {}
        }
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        let fault = self.fault_of(true, true).await?;
        let upload = self.store.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload { upload, fault }))
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        let fault = self.fault(false).await?;
        let mut found = self.store.get_opts(location, options).await?;
        if fault == Fault::Parts {
            found.payload = GetResultPayload::Stream(stream::iter([Err(broken())]).boxed());
        }
        Ok(found)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        match (self.rule.lock())(&Request { number, changes: true, in_parts: false }) {
            Fault::Fails => locations.map(|_| Err(broken())).boxed(),
            _ => self.store.delete_stream(locations),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        match (self.rule.lock())(&Request { number, changes: false, in_parts: false }) {
            Fault::Fails => stream::once(async { Err(broken()) }).boxed(),
            Fault::Hangs => stream::pending().boxed(),
            _ => self.store.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.fault(false).await?;
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.fault(true).await?;
        self.store.copy_opts(from, to, options).await
    }
}

/// An upload in parts that fails in a part, is not completed, or whose end is not told.
#[derive(Debug)]
struct Upload {
    upload: Box<dyn MultipartUpload>,
    fault: Fault,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> object_store::UploadPart {
        match self.fault {
            Fault::Parts => Box::pin(async { Err(broken()) }),
            _ => self.upload.put_part(data),
        }
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        match self.fault {
            Fault::Conflict => Err(broken()),
            Fault::Unanswered => {
                self.upload.complete().await?;
                Err(broken())
            }
            Fault::Repeated => {
                self.upload.complete().await?;
                let path = "the upload".into();
                Err(Error::NotFound { path, source: "it has ended".into() })
            }
            _ => self.upload.complete().await,
        }
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        self.upload.abort().await
    }
}

/// Makes a runtime whose time passes at once when all tasks wait for it.
fn virtual_time() -> Runtime {
    let _ = tracing_subscriber::fmt()
        .with_test_writer()
        .with_max_level(tracing::Level::WARN)
        .try_init();
    runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

thread_local! {
    /// The virtual time by which the next server of this thread is ahead of the real one: a database
    /// takes no writes of a server whose time is behind that of the server before.
    static AHEAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Brings the time of a server to [`AHEAD`], and lets the next server be further ahead.
pub(in crate::volume) async fn pass_by() {
    let ahead = AHEAD.get();
    tokio::time::sleep(ahead).await;
    AHEAD.set(ahead + Duration::from_secs(3600));
}

const TAKEOVER: OpenOptions = OpenOptions { read_only: false, takeover: true };

fn open_with(
    store: Arc<dyn ObjectStore>,
    address: &str,
    options: OpenOptions,
) -> Result<Volume, Problem> {
    let url = VolumeUrl::parse(address).unwrap().unwrap();
    Volume::open_in(virtual_time(), store, Path::from("v"), &url, options)
}

/// Opens a volume with a size, or as it is there.
fn open(store: Arc<dyn ObjectStore>, size: u64) -> Volume {
    let size = if size > 0 { format!("?size={size}") } else { String::new() };
    open_with(store, &format!("memory:///v{size}"), TAKEOVER).unwrap()
}

const SECTOR: u64 = 512;
/// Two whole regions, and a part of one.
const SIZE: u64 = 2 * REGION + (300 << 10);
/// The bytes that the tests write: at the start, around the end of a region, and the last region.
const WINDOWS: [Range<u64>; 3] =
    [0..256 << 10, REGION - (128 << 10)..REGION + (128 << 10), 2 * REGION..SIZE];

/// The sectors that do not have zeros.
type Model = BTreeMap<u64, u8>;

/// Returns a sector of the windows that differs from the model.
fn difference(volume: &Volume, model: &Model) -> Option<String> {
    for window in WINDOWS {
        let mut bytes = vec![0xEE; (window.end - window.start) as usize];
        assert_eq!(volume.read(window.start, &mut bytes).unwrap(), bytes.len());
        for (sector, bytes) in (window.start / SECTOR..).zip(bytes.chunks(SECTOR as usize)) {
            let wanted = model.get(&sector).copied().unwrap_or(0);
            if bytes != [wanted; SECTOR as usize] {
                return Some(format!("sector {sector} has {} in place of {wanted}", bytes[0]));
            }
        }
    }
    None
}

/// A change of a volume.
#[derive(Clone, Debug)]
enum Change {
    Write(Range<u64>, u8),
    Discard(Range<u64>),
}

impl Change {
    fn random(rng: &mut Rng) -> Self {
        let window = &WINDOWS[rng.usize(..3)];
        let (first, end) = (window.start / SECTOR, window.end / SECTOR);
        let start = rng.u64(first..end);
        let stop = end.min(start + 1 + rng.u64(..300));
        match rng.u8(..10) {
            0 if rng.bool() => Self::Discard(rng.u64(..SIZE / SECTOR)..SIZE / SECTOR),
            0 => {
                let granule = [0, 63, 64, 128][rng.usize(..4)] * GRANULE / SECTOR;
                let start = granule.saturating_sub(rng.u64(..300));
                Self::Discard(
                    start..(granule + GRANULE / SECTOR - rng.u64(..300)).min(SIZE / SECTOR),
                )
            }
            1 => Self::Discard(0..rng.u64(..=2) * REGION / SECTOR),
            2..4 => Self::Discard(start..stop),
            _ => Self::Write(start..stop, rng.u8(1..)),
        }
    }

    fn make(&self, volume: &Volume) -> io::Result<()> {
        match self {
            Self::Write(sectors, byte) => {
                let bytes = vec![*byte; ((sectors.end - sectors.start) * SECTOR) as usize];
                volume.write(sectors.start * SECTOR, &bytes)
            }
            Self::Discard(sectors) => {
                let len = (sectors.end - sectors.start) * SECTOR;
                BlockDevice::discard(volume, sectors.start * SECTOR, len)
            }
        }
    }

    fn note(&self, model: &mut Model) {
        match self {
            Self::Write(sectors, byte) => {
                model.extend(sectors.clone().map(|sector| (sector, *byte)));
            }
            Self::Discard(sectors) => model.retain(|sector, _| !sectors.contains(sector)),
        }
    }
}

fn database(volume: &Volume) -> &Db {
    let Database::Writer(db) = &volume.inner.database else { panic!("it is only read") };
    db
}

/// Writes a table of everything so far.
fn write_table(volume: &Volume) -> io::Result<()> {
    let options = FlushOptions { flush_type: FlushType::MemTable };
    let flush = volume.inner.in_time("flush", database(volume).flush_with_options(options));
    volume.block_on(flush)
}

/// Lets the tasks of the volume run for this long.
fn pass(volume: &Volume, time: Duration) {
    let sleep = async {
        tokio::time::sleep(time).await;
        Ok(())
    };
    volume.block_on(sleep).unwrap();
}

/// Compares a volume with a model over random changes, tables, compactions and new servers. Returns the number of
/// faults.
fn compare<S: ObjectStore>(store: S, seed: u64, rule: fn(&mut Rng) -> Fault) -> u64 {
    let (store, mut rng) = (Arc::new(store), seeded(seed));
    let faults = Arc::new(AtomicU64::new(0));
    let next = |rng: &mut Rng| {
        let (mut rng, faults) = (Rng::with_seed(rng.u64(..)), Arc::clone(&faults));
        Faulty::new(&store, move |request| {
            let fault = rule(&mut rng);
            let is_fault = fault == Fault::Fails || request.changes && fault != Fault::None;
            faults.fetch_add(is_fault.into(), Ordering::Relaxed);
            fault
        })
    };
    let (mut volume, mut model) = (open(next(&mut rng), SIZE), Model::new());
    for step in 0..120 {
        let change = Change::random(&mut rng);
        change.make(&volume).unwrap();
        change.note(&mut model);
        match rng.u8(..16) {
            0..3 => volume.sync().unwrap(),
            3 => write_table(&volume).unwrap(),
            4 => pass(&volume, Duration::from_secs(45)),
            5 => {
                drop(volume);
                volume = open(next(&mut rng), 0);
            }
            6..9 => assert_eq!(difference(&volume, &model), None, "step {step}: {change:?}"),
            _ => {}
        }
    }
    assert_eq!(difference(&volume, &model), None);
    drop(volume);
    assert_eq!(difference(&open(store, 0), &model), None);
    faults.load(Ordering::Relaxed)
}

#[test]
fn a_volume_reads_as_it_was_written() {
    compare(InMemory::new(), 0, |_| Fault::None);
    let folder = tempfile::tempdir().unwrap();
    compare(LocalFileSystem::new_with_prefix(folder.path()).unwrap(), 1, |_| Fault::None);
}

/// One request in three fails, is done without an answer, or is refused with 409: hundreds.
#[test]
fn a_bad_store_loses_nothing() {
    let rule = |rng: &mut Rng| match rng.u8(..9) {
        0 => Fault::Fails,
        1 => Fault::Unanswered,
        2 => Fault::Conflict,
        _ => Fault::None,
    };
    let faults: u64 = (20..24).map(|seed| compare(InMemory::new(), seed, rule)).sum();
    assert!(faults > 200, "{faults}");
    let folder = tempfile::tempdir().unwrap();
    // The database knows its own create by the metadata of the object, which a folder has not. It takes a create
    // without an answer for another server's there, and ends.
    let rule = |rng: &mut Rng| match rng.u8(..24) {
        0 => Fault::Fails,
        1 => Fault::Conflict,
        _ => Fault::None,
    };
    compare(LocalFileSystem::new_with_prefix(folder.path()).unwrap(), 11, rule);
}

/// A table whose upload in parts fails is written again, unless only the last answer is lost or repeated.
#[test]
fn a_table_in_parts_is_written_in_spite_of_failures() {
    let faults = [Fault::Fails, Fault::Parts, Fault::Conflict, Fault::Unanswered, Fault::Repeated];
    let mut faults = faults.into_iter();
    let uploads = Arc::new(AtomicU64::new(0));
    let faulty = Faulty::new(&Arc::new(InMemory::new()), {
        let uploads = Arc::clone(&uploads);
        move |request| match request.in_parts {
            true => {
                uploads.fetch_add(1, Ordering::Relaxed);
                faults.next().unwrap_or(Fault::None)
            }
            false => Fault::None,
        }
    });
    let volume = open(faulty, SIZE);
    let mut bytes = vec![7; 24 << 20];
    for count in [4, 5] {
        volume.write(0, &bytes).unwrap();
        write_table(&volume).unwrap();
        assert_eq!(uploads.load(Ordering::Relaxed), count);
    }
    bytes.fill(0);
    volume.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 7));
}

/// The changes of the histories that end at each request to the store.
fn history() -> Vec<Change> {
    let at = |window: usize, from: u64, count: u64| {
        let start = WINDOWS[window].start / SECTOR + from;
        start..start + count
    };
    let write = |window, from, count, byte| Change::Write(at(window, from, count), byte);
    vec![
        write(0, 0, 8, 1),
        write(1, 200, 200, 2),
        write(0, 4, 8, 3),
        write(2, 100, 128, 4),
        Change::Discard(0..REGION / SECTOR),
        write(0, 8, 16, 5),
        write(1, 256, 3, 6),
        Change::Discard(at(2, 110, 200)),
        write(0, 0, 256, 7),
        Change::Discard(0..SIZE / SECTOR),
        write(1, 0, 300, 8),
        write(2, 0, 1, 9),
    ]
}

/// Makes the history, with a sync behind every second change, tables and compactions. Returns the
/// number of changes that were synced, and of those that were begun.
fn play(volume: &Volume, changes: &[Change]) -> (usize, usize) {
    let mut synced = 0;
    for (number, change) in (1..).zip(changes) {
        if change.make(volume).is_err() {
            return (synced, number);
        }
        if number % 2 == 0 {
            if volume.sync().is_err() {
                return (synced, number);
            }
            synced = number;
            if write_table(volume).is_err() {
                return (synced, number);
            }
        }
        pass(volume, Duration::from_secs(45));
    }
    (synced, changes.len())
}

/// A crash at each request leaves a prefix of the changes, with at least those that were synced.
#[test]
fn a_crash_at_each_request_leaves_what_was_synced() {
    let changes = history();
    let mut models = vec![Model::new()];
    for change in &changes {
        let mut model = models.last().unwrap().clone();
        change.note(&mut model);
        models.push(model);
    }
    for (ends, last) in [(Fault::Hangs, Fault::None), (Fault::Hangs, Fault::Unanswered)] {
        let mut is_complete = false;
        for stop in (0..).step_by(if cfg!(debug_assertions) { 5 } else { 1 }) {
            if is_complete {
                break;
            }
            let store = Arc::new(InMemory::new());
            let reached = Arc::new(AtomicBool::new(false));
            let faulty = Faulty::new(&store, {
                let reached = Arc::clone(&reached);
                move |request| match request.number.cmp(&stop) {
                    std::cmp::Ordering::Less => Fault::None,
                    std::cmp::Ordering::Equal => {
                        reached.store(true, Ordering::Relaxed);
                        last
                    }
                    std::cmp::Ordering::Greater => ends,
                }
            });
            let address = format!("memory:///v?size={SIZE}");
            // A server that waits for the store for ever is one that was killed.
            let opened = within(&faulty, &address);
            let (synced, begun) = opened.as_ref().map_or((0, 0), |volume| play(volume, &changes));
            drop(opened);
            is_complete = !reached.load(Ordering::Relaxed);
            let volume = open(store, SIZE);
            let found =
                (synced..=begun).find(|&count| difference(&volume, &models[count]).is_none());
            assert!(found.is_some(), "stopped at {stop}: {synced} to {begun}");
        }
    }
}

/// Opens a volume; `None` if that does not end.
fn within(store: &Arc<Faulty>, address: &str) -> Option<Volume> {
    let url = VolumeUrl::parse(address).unwrap().unwrap();
    let runtime = virtual_time();
    let place = Place {
        store: Arc::clone(store) as _,
        path: Path::from("v"),
        url: &url,
        options: TAKEOVER,
    };
    let opens =
        async { tokio::time::timeout(AHEAD.get() + PATIENCE, place.open(Arc::default())).await };
    let (inner, lease) = runtime.block_on(opens).ok()?.ok()?;
    Some(Volume { inner: Arc::new(inner), lease, runtime: Some(runtime) })
}

/// A server is stopped at each of its requests, another takes the volume over and writes, and the
/// first goes on.
#[test]
fn a_server_that_was_paused_at_any_request_changes_nothing_more() {
    let (mine, others) = (Change::Write(0..4, 1), Change::Write(2..6, 2));
    let late = Change::Write(100..104, 3);
    for stop in 0.. {
        let store = Arc::new(InMemory::new());
        drop(open(Arc::clone(&store) as _, SIZE));
        let armed = Arc::new(AtomicBool::new(false));
        let taken = Arc::new(AtomicBool::new(false));
        let first = Faulty::new(&store, {
            let (store, armed, taken) =
                (Arc::clone(&store), Arc::clone(&armed), Arc::clone(&taken));
            let (others, mut count) = (others.clone(), 0);
            move |request| {
                if armed.load(Ordering::Relaxed) && request.changes {
                    if count == stop {
                        let (store, others) = (Arc::clone(&store), others.clone());
                        let ahead = AHEAD.get();
                        let second = thread::spawn(move || {
                            AHEAD.set(ahead);
                            let second = open(store, 0);
                            others.make(&second).unwrap();
                            second.sync().unwrap();
                        });
                        second.join().unwrap();
                        taken.store(true, Ordering::Relaxed);
                    }
                    count += 1;
                }
                Fault::None
            }
        });
        let volume = open(first, 0);
        let wakes = WakeCount::new();
        assert_eq!(volume.ended(&wakes.waker()), None);
        armed.store(true, Ordering::Relaxed);
        let synced = mine.make(&volume).and_then(|()| volume.sync()).is_ok();
        let _ = write_table(&volume);
        pass(&volume, Duration::from_secs(60));
        if !taken.load(Ordering::Relaxed) {
            assert!(stop > 2, "it sends some requests");
            break;
        }
        pass(&volume, Duration::from_secs(60)); // it may have been stopped late
        let ended = volume.ended(Waker::noop());
        assert_eq!((ended, wakes.count()), (Some(FENCED), 1), "stopped at {stop}");
        AHEAD.set(AHEAD.get() + Duration::from_secs(7200));
        assert!(late.make(&volume).and_then(|()| volume.sync()).is_err(), "it has ended");
        drop(volume);
        let after = open(store, 0);
        let mut model = Model::new();
        if synced {
            mine.note(&mut model);
        }
        others.note(&mut model);
        let with_mine = {
            let mut model = model.clone();
            mine.note(&mut model);
            others.note(&mut model);
            model
        };
        let is_there = difference(&after, &model).is_none();
        assert!(is_there || difference(&after, &with_mine).is_none(), "stopped at {stop}");
    }
}

/// Returns a store whose requests fail while the word is set, and the store below it.
fn may_be_away() -> (Arc<InMemory>, Arc<AtomicBool>, Arc<Faulty>) {
    let (store, away) = (Arc::new(InMemory::new()), Arc::new(AtomicBool::new(false)));
    let faulty = Faulty::new(&store, {
        let away = Arc::clone(&away);
        move |_| if away.load(Ordering::Relaxed) { Fault::Fails } else { Fault::None }
    });
    (store, away, faulty)
}

#[test]
fn a_flush_waits_for_a_store_that_is_away_and_fails_after_a_while() {
    let (_, away, faulty) = may_be_away();
    let volume = open(faulty, SIZE);
    let write = Change::Write(0..8, 1);
    write.make(&volume).unwrap();
    volume.sync().unwrap();
    away.store(true, Ordering::Relaxed);
    volume.sync().expect("nothing was written since");
    write.make(&volume).unwrap();
    let now = || volume.block_on(async { Ok(Instant::now()) }).unwrap();
    let since = now();
    comes_back(&volume, &away);
    volume.sync().expect("it comes back");
    assert!(now() - since > Duration::from_secs(29));
    write.make(&volume).unwrap();
    away.store(true, Ordering::Relaxed);
    let since = now();
    assert!(volume.sync().is_err(), "it does not");
    assert!(now() - since <= PATIENCE + Duration::from_secs(1));
    // Writes fail within a bounded time, too, once there is no room for them.
    let since = now();
    let long = vec![1; 16 << 20];
    let failed = (0..20).find(|number| volume.write(number * long.len() as u64, &long).is_err());
    assert!(failed.is_some());
    assert!(now() - since <= 2 * PATIENCE + Duration::from_secs(1));
}

/// Lets the store be away for 30 s more.
fn comes_back(volume: &Volume, away: &Arc<AtomicBool>) {
    let away = Arc::clone(away);
    volume.spawn(async move {
        tokio::time::sleep(Duration::from_secs(30)).await;
        away.store(false, Ordering::Relaxed);
    });
}

/// The batch of a write that has failed because the store was away may still be added to the log. Zeros that are
/// acknowledged later are behind it.
#[test]
fn zeros_are_behind_a_write_that_was_not_waited_for() {
    let (_, away, faulty) = may_be_away();
    let volume = open(faulty, 32 * REGION);
    away.store(true, Ordering::Relaxed);
    let mut bytes = vec![1; GRANULE as usize];
    let failed = (0..32).find(|region| volume.write(region * REGION, &bytes).is_err()).unwrap();
    comes_back(&volume, &away);
    volume.zero(failed * REGION, GRANULE).unwrap();
    pass(&volume, Duration::from_secs(60));
    volume.read(failed * REGION, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
}

#[test]
fn what_is_no_volume_is_refused_and_stays_as_it_is() {
    let contents = |store: &Arc<InMemory>| {
        let all = store.list(None).map(|object| {
            let object = object.unwrap();
            (object.location, object.e_tag, object.last_modified)
        });
        let mut all: Vec<_> = virtual_time().block_on(all.collect());
        all.sort();
        all
    };
    let refused = |store: &Arc<InMemory>, address: &str, options, named: &str| {
        let before = contents(store);
        let error = open_with(Arc::clone(store) as _, address, options).err().unwrap().to_string();
        assert!(error.contains(named), "{error}");
        assert_eq!(contents(store), before, "{error}");
    };
    let put = |store: &Arc<InMemory>, key: &[u8], value: &[u8]| {
        virtual_time().block_on(async {
            let db = Db::open("v", Arc::clone(store) as _).await.unwrap();
            db.put(key, value).await.unwrap();
            db.close().await.unwrap();
        });
    };
    let store = Arc::new(InMemory::new());
    refused(&store, "memory:///v", TAKEOVER, "?size=BYTES");
    put(&store, b"their key", b"their value");
    refused(&store, "memory:///v?size=1G", TAKEOVER, "other data");
    let headers: [(&[u8], &str); 5] = [
        (b"offlock volume 1 and more", "another version"),
        (b"their header, and it is long", "another program's"),
        (b"offlock volume 2 and more", "damaged"),
        (b"offlock volume 2\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\0\0\0\0\0\x01\0\0", "damaged"),
        (b"short", "damaged"),
    ];
    for (header, named) in headers {
        put(&store, &HEADER, header);
        refused(&store, "memory:///v?size=1G", TAKEOVER, named);
    }
    let store = Arc::new(InMemory::new());
    virtual_time().block_on(store.put(&Path::from("v/photo.jpg"), "x".into())).unwrap();
    refused(&store, "memory:///v?size=1G", TAKEOVER, "other objects");

    let store = Arc::new(InMemory::new());
    let volume = open(Arc::clone(&store) as _, 1 << 30);
    refused(&store, "memory:///v", OpenOptions::default(), "--takeover");
    drop(volume);
    refused(&store, "memory:///v?size=1M", TAKEOVER, "does not become smaller");
    refused(&store, "memory:///v?snapshot=x", TAKEOVER, "no snapshot 'x'");
    assert_eq!(open(Arc::clone(&store) as _, 1 << 40).len(), 1 << 40, "it grows");
    assert_eq!(open(Arc::clone(&store) as _, 0).len(), 1 << 40, "and has its size");

    let overwrites = Faulty::new(&Arc::new(InMemory::new()), |_| Fault::Overwrites);
    let error = open_with(overwrites, "memory:///v?size=1G", TAKEOVER).err().unwrap();
    assert!(matches!(error, Problem::Unsafe), "{error}");
}

/// A read leaves out what has no key of a block.
#[test]
fn a_foreign_key_between_blocks_is_no_block() {
    let volume = open(Arc::new(InMemory::new()), SIZE);
    volume.write(0, &[1; 2 * BLOCK as usize]).unwrap();
    let key = [&block_key(0, 0, 0)[..], &[0xFF, 0xFF]].concat();
    let put = async {
        let put = database(&volume).put(key, b"theirs").await;
        put.map(drop).map_err(|error| volume.inner.failed("write", &error))
    };
    volume.block_on(put).unwrap();
    let mut bytes = [0xEE; 2 * BLOCK as usize];
    volume.read(0, &mut bytes).unwrap();
    assert!(bytes == [1; 2 * BLOCK as usize]);
}

/// A TRIM of 2 TiB is one request, and of an empty volume none. Linux sends a long TRIM in parts of 4 GiB less one block,
/// and qemu of 2 GiB, so that they end within a region: they write little.
#[test]
fn a_long_trim_is_short_wherever_it_ends() {
    const TIB: u64 = 1 << 40;
    let volume = open(Arc::new(InMemory::new()), 4 * TIB);
    let sent = || {
        let requests = volume.requests();
        [&requests.puts, &requests.bytes_put].map(|count| count.load(Ordering::Relaxed))
    };
    let read = |at: u64| {
        let mut block = [0xEE; BLOCK as usize];
        volume.read(at, &mut block).unwrap();
        block
    };
    pass(&volume, Duration::from_millis(1)); // tasks that have begun
    let before = sent();
    volume.inner_discard(0, 4 * TIB);
    assert_eq!(sent(), before, "of nothing");
    for region in 0..2056 {
        volume.write(region * REGION + 4096, &[1; 4096]).unwrap();
        volume.write((region + 1) * REGION - BLOCK, &[2; BLOCK as usize]).unwrap();
    }
    volume.sync().unwrap();
    let before = sent();
    volume.inner_discard(0, 2 * TIB);
    volume.sync().unwrap();
    assert_eq!(sent()[0], before[0] + 1);
    for region in 0..2048 {
        assert!(read(region * REGION) == [0; BLOCK as usize], "region {region}");
    }
    let before = sent();
    volume.inner_discard(2 * TIB, 4 * REGION - 4096);
    volume.inner_discard(2 * TIB + 4 * REGION - 4096, 2 * REGION);
    volume.sync().unwrap();
    let written = sent()[1] - before[1];
    assert!(written < 64 << 10, "{written} bytes");
    for (region, has) in [(0, 0), (3, 0), (4, 0), (5, 2)] {
        let block = read(2 * TIB + (region + 1) * REGION - BLOCK);
        let zeros = if region == 5 { block.len() - 4096 } else { block.len() };
        assert!(block[..zeros].iter().all(|&byte| byte == 0), "region {region}");
        assert!(block[zeros..].iter().all(|&byte| byte == has), "region {region}");
    }
    assert_eq!(read(2 * TIB + 6 * REGION)[4096..4098], [1, 1], "behind the TRIM");
}

/// The end of a volume within a granule is that of the granule, until the volume grows.
#[test]
fn a_trim_up_to_the_end_is_whole_and_leaves_zeros_when_the_volume_grows() {
    let (store, len) = (Arc::new(InMemory::new()), GRANULE + 3 * BLOCK + 512);
    let volume = open(Arc::clone(&store) as _, len);
    volume.write(GRANULE, &vec![1; (len - GRANULE) as usize]).unwrap();
    volume.inner_discard(GRANULE, len - GRANULE);
    assert_eq!(volume.part(0, len), (true, len), "no data is left");
    volume.sync().unwrap();
    drop(volume);
    let volume = open(store, 2 * GRANULE);
    let mut bytes = vec![0xEE; GRANULE as usize];
    volume.read(GRANULE, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    volume.write(len, &[2; 512]).unwrap();
    volume.inner_discard(GRANULE, len - GRANULE);
    volume.read(GRANULE, &mut bytes).unwrap();
    let at = (len - GRANULE) as usize;
    assert!(bytes[..at].iter().all(|&byte| byte == 0));
    assert_eq!(bytes[at..at + 513], [&[2; 512][..], &[0]].concat(), "now it is a part");
}

/// The database counts the bytes of its records, not their number.
#[test]
fn many_small_records_become_tables() {
    let volume = open(Arc::new(InMemory::new()), REGION);
    for at in (0..REGION).step_by(GRANULE as usize) {
        volume.write(at, &[1; 4096]).unwrap();
    }
    volume.sync().unwrap();
    let puts = || volume.requests().puts.load(Ordering::Relaxed);
    pass(&volume, Duration::from_millis(1)); // tasks that have begun
    let before = puts();
    for _ in 0..2 {
        volume.inner.records.store(RECORDS - 500, Ordering::Relaxed);
        for number in 0..600 {
            volume.inner_discard(number * BLOCK, 4096);
        }
    }
    assert!(puts() >= before + 4, "two logs and two tables, without a FLUSH");
    let mut bytes = [0xEE; 4096];
    volume.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096]);
}

/// The write after which a table is written does not wait for the store. The next one does.
#[test]
fn a_write_does_not_wait_for_a_table() {
    let (_, away, faulty) = may_be_away();
    let volume = open(faulty, SIZE);
    let now = || volume.block_on(async { Ok(Instant::now()) }).unwrap();
    let records = || volume.inner.records.load(Ordering::Relaxed);
    volume.inner.records.store(RECORDS, Ordering::Relaxed);
    away.store(true, Ordering::Relaxed);
    comes_back(&volume, &away);
    let since = now();
    volume.write(0, &[1; 512]).unwrap();
    assert!(now() - since < Duration::from_secs(1));
    assert!(records() > RECORDS, "none is written yet");
    volume.write(0, &[2; 512]).unwrap();
    assert!(now() - since > Duration::from_secs(29));
    assert_eq!(records(), 1);
}

/// A client that sends no FLUSH does not let the server keep each change of a region.
#[test]
fn the_changes_of_regions_that_are_kept_are_bounded() {
    let volume = open(Arc::new(InMemory::new()), REGION);
    volume.inner.records.store(RECORDS - 500, Ordering::Relaxed);
    for number in 0..400 {
        let at = number % (REGION / GRANULE) * GRANULE;
        volume.write(at, &[1; 512]).unwrap();
        volume.inner_discard(at, GRANULE);
    }
    let kept = volume.inner.regions.lock().unconfirmed.len();
    assert!(kept < 600, "{kept} of 800");
}

/// A FLUSH is one request, whatever was written; an idle volume sends some.
#[test]
fn requests_are_few() {
    let store = Arc::new(InMemory::new());
    let volume = open(Arc::clone(&store) as _, 64 << 30);
    let sent = |volume: &Volume| volume.requests().figures()[..3].iter().sum::<u64>();
    let mut rng = seeded(1);
    for (count, wanted) in [(1, 1), (100, 1), (0, 0)] {
        pass(&volume, Duration::from_millis(1)); // tasks that have begun
        let before = sent(&volume);
        for _ in 0..count {
            volume.write(rng.u64(..16 << 20) * 4096, &[1; 4096]).unwrap();
        }
        volume.sync().unwrap();
        let sent = sent(&volume) - before;
        assert_eq!(sent, wanted, "{count} writes and a FLUSH");
    }
    let before = sent(&volume);
    pass(&volume, Duration::from_secs(600));
    let idle = sent(&volume) - before;
    assert!(idle <= 120, "{idle} in 10 minutes");
    // The first read of a server reads the index, too; a later one of another block is one request.
    volume.write(0, &[7; 8 * BLOCK as usize]).unwrap();
    write_table(&volume).unwrap();
    drop(volume);
    let volume = open(store, 0);
    let mut bytes = [0; 4096];
    for (at, most) in [(0, 4), (4096, 0), (5 * BLOCK, 1)] {
        let before = sent(&volume);
        volume.read(at, &mut bytes).unwrap();
        assert!(sent(&volume) - before <= most, "{} requests at {at}", sent(&volume) - before);
    }
    assert_eq!(bytes, [7; 4096]);
}

impl Volume {
    fn inner_discard(&self, offset: u64, len: u64) {
        BlockDevice::discard(self, offset, len).unwrap();
    }
}

/// The space of a region that was trimmed is given back by compactions.
#[test]
fn compactions_drop_the_blocks_of_trimmed_regions() {
    let volume = open(Arc::new(InMemory::new()), SIZE);
    let stored = || {
        let count = async {
            let mut found = database(&volume).scan_prefix([2], ..).await.unwrap();
            let mut count = 0;
            while found.next().await.unwrap().is_some() {
                count += 1;
            }
            Ok(count)
        };
        volume.block_on(count).unwrap()
    };
    for number in 0..4 {
        volume.write(number * BLOCK, &[1; BLOCK as usize]).unwrap();
        volume.sync().unwrap();
        write_table(&volume).unwrap();
    }
    assert_eq!(stored(), 4);
    volume.inner_discard(0, REGION);
    volume.sync().unwrap();
    for number in 0..4 {
        volume.write(REGION + number * BLOCK, &[1; BLOCK as usize]).unwrap();
        volume.sync().unwrap();
        write_table(&volume).unwrap();
    }
    pass(&volume, Duration::from_secs(400));
    assert_eq!(stored(), 4, "those of the other region");
}

/// Tables that are written all the time do not keep the runs of merged tables from being merged: at
/// as many runs as one merge takes, no table is merged any more, and later writes wait.
#[test]
fn runs_are_merged_while_tables_are_written() {
    let volume = open(Arc::new(InMemory::new()), SIZE);
    for number in 0..200 {
        volume.write(number * BLOCK, &[1; BLOCK as usize]).unwrap();
        write_table(&volume).unwrap();
        pass(&volume, Duration::from_secs(15));
        let runs = database(&volume).manifest().compacted().len();
        assert!(runs < 12, "{runs} runs after {number} tables");
    }
}

#[test]
fn a_snapshot_keeps_what_the_volume_had() {
    let store = Arc::new(InMemory::new());
    let volume = open(Arc::clone(&store) as _, SIZE);
    let (first, second) = (Change::Write(0..8, 1), Change::Write(4..12, 2));
    first.make(&volume).unwrap();
    volume.sync().unwrap();
    let take = |name: &'static str, runtime: Runtime| {
        let (store, ahead) = (Arc::clone(&store), AHEAD.get());
        thread::spawn(move || {
            AHEAD.set(ahead);
            let url = VolumeUrl::parse("memory:///v").unwrap().unwrap();
            let (path, options) = (Path::from("v"), OpenOptions::default());
            let place = Place { store, path, url: &url, options };
            runtime.block_on(async { place.create_snapshot(SIZE, name).await })
        })
    };
    // The server makes it.
    let taken = take("one", open::runtime().unwrap());
    let is_asked = || virtual_time().block_on(store.head(&Path::from("v/snapshot"))).is_ok();
    testkit::wait_until(is_asked);
    pass(&volume, 2 * lease::RENEWAL);
    taken.join().unwrap().unwrap();
    second.make(&volume).unwrap();
    volume.inner_discard(REGION, REGION);
    volume.sync().unwrap();
    write_table(&volume).unwrap();
    drop(volume);
    // Without a server.
    take("two", virtual_time()).join().unwrap().unwrap();
    let error = take("two", virtual_time()).join().unwrap().unwrap_err();
    assert!(matches!(error, Problem::SnapshotExists(_)), "{error}");
    AHEAD.set(AHEAD.get() + Duration::from_secs(7200));
    let volume = open(Arc::clone(&store) as _, 0);
    volume.inner_discard(0, SIZE);
    volume.sync().unwrap();
    write_table(&volume).unwrap();
    let mut model = Model::new();
    for (name, change) in [("one", first), ("two", second)] {
        change.note(&mut model);
        let address = format!("memory:///v?snapshot={name}");
        let snapshot = open_with(Arc::clone(&store) as _, &address, TAKEOVER).unwrap();
        assert!(snapshot.is_read_only());
        assert_eq!(difference(&snapshot, &model), None, "snapshot {name}");
        assert!(snapshot.write(0, &[1; 512]).is_err());
    }
    assert_eq!(difference(&volume, &Model::new()), None);
}

/// A failure of the store leaves no volume without its lease, or with one after its end.
#[test]
fn a_lease_is_written_in_spite_of_failures() {
    // The first PUT, and of the end the GET and the PUT.
    let faulty = Faulty::new(&Arc::new(InMemory::new()), |request| match request.number {
        0 | 2 | 4 => Fault::Fails,
        _ => Fault::None,
    });
    let (store, path) = (Arc::clone(&faulty) as Arc<dyn ObjectStore>, Path::from("server"));
    virtual_time().block_on(async {
        let lease = lease::Lease::begin(Arc::clone(&store), path.clone(), None).await;
        assert!(faulty.store.head(&path).await.is_ok(), "it is there");
        lease.end().await;
        let text = faulty.store.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(text, "closed");
    });
}

/// A refused create is "already there" only if the object is.
#[test]
fn a_refused_create_is_already_there_only_if_the_object_is() {
    use Fault::{Conflict, Fails, None};
    let create = |faults: Vec<Fault>, is_there: bool| {
        let (store, at) = (Arc::new(InMemory::new()), Path::from("x"));
        let faulty = Faulty::new(&store, move |request| {
            faults.get(request.number as usize).copied().unwrap_or(None)
        });
        let checked = store::Checked::new(faulty);
        virtual_time().block_on(async {
            if is_there {
                store.put(&at, "old".into()).await.unwrap();
            }
            checked.put_opts(&at, "new".into(), PutMode::Create.into()).await
        })
    };
    assert!(create(vec![], false).is_ok());
    assert!(create(vec![Conflict], false).is_ok());
    assert!(matches!(create(vec![], true), Err(Error::AlreadyExists { .. })));
    // It is not known whether the object is there.
    assert!(matches!(create(vec![Conflict, Fails], false), Err(Error::Generic { .. })));
    assert!(matches!(create([Conflict, None].repeat(6), false), Err(Error::Generic { .. })));
}

/// Each kind of request is counted once if it fails, and none twice.
#[test]
fn each_failure_is_counted() {
    let (a, b) = (Path::from("a"), Path::from("b"));
    let store = Arc::new(InMemory::new());
    let fault = Arc::new(Mutex::new(Fault::Fails));
    let faulty = Faulty::new(&store, {
        let fault = Arc::clone(&fault);
        move |_| *fault.lock()
    });
    let checked = store::Checked::new(faulty);
    let failed = || checked.requests.failed.load(Ordering::Relaxed);
    virtual_time().block_on(async {
        assert!(checked.put(&a, "x".into()).await.is_err());
        assert!(checked.get(&a).await.is_err());
        assert!(checked.list(None).next().await.unwrap().is_err());
        assert!(checked.list_with_delimiter(None).await.is_err());
        assert!(checked.copy(&a, &b).await.is_err());
        assert!(checked.put_multipart(&a).await.is_err());
        assert!(checked.delete(&a).await.is_err());
        assert_eq!(failed(), 7);
        *fault.lock() = Fault::Parts;
        store.put(&a, "x".into()).await.unwrap();
        assert!(checked.get(&a).await.unwrap().bytes().await.is_err(), "it breaks off");
        assert_eq!(failed(), 8);
        let mut upload = checked.put_multipart(&b).await.unwrap();
        assert!(upload.put_part("x".into()).await.is_err());
        assert_eq!(failed(), 9);
        *fault.lock() = Fault::Conflict;
        let mut upload = checked.put_multipart(&b).await.unwrap();
        upload.put_part("x".into()).await.unwrap();
        assert!(upload.complete().await.is_err());
        assert_eq!(failed(), 10);
        *fault.lock() = Fault::None;
        let none = checked.head(&b).await;
        assert!(matches!(none, Err(Error::NotFound { .. })), "which is no failure");
    });
    assert_eq!(failed(), 10);
}

#[test]
fn addresses_in_errors_have_no_query() {
    let error = io::Error::other(
        "GET \"https://host/b?X-Amz-Signature=abc&x=1\" failed: why? (http://h/?k=1)",
    );
    let text = shown(&error);
    assert!(!text.contains("abc") && !text.contains("k=1"), "{text}");
    assert!(text.contains("https://host/b?...") && text.contains("failed: why?"), "{text}");
}

/// The parts of a volume that have data, against a map of granules.
#[test]
fn a_granule_has_the_data_and_the_generation_of_its_last_change() {
    const SIZE: u64 = 3 * REGION;
    let mut rng = seeded(3);
    let mut regions = Regions::default();
    let mut model = vec![Granule::default(); (SIZE / GRANULE) as usize];
    for batch in 0..400 {
        let at = rng.usize(..model.len());
        let count = if rng.u8(..4) == 0 { 64 } else { 1 + rng.usize(..3) };
        let has_data = rng.bool();
        let mut changed = BTreeMap::new();
        for (number, granule) in model.iter_mut().enumerate().skip(at).take(count) {
            granule.generation += u32::from(!has_data);
            granule.has_data = has_data;
            let (region, number) = (number as u32 / 64, number as u64 % 64);
            let region = changed.entry(region).or_insert_with(|| regions.get(region));
            region.set(number * GRANULE, *granule);
            assert_eq!(Region::of_value(&region.value()).as_ref(), Some(&*region));
        }
        regions.change(batch, changed);
        let start = rng.u64(..SIZE);
        let end = start + 1 + rng.u64(..SIZE - start);
        let mut at = start;
        while at < end {
            let (is_hole, till) = regions.part(at, end);
            assert!(till > at && till <= end);
            let touched = (at / GRANULE) as usize..till.div_ceil(GRANULE) as usize;
            assert!(model[touched].iter().all(|granule| granule.has_data != is_hole));
            at = till;
        }
        let found: Vec<_> = regions.with_data(start..end).collect();
        let split: Vec<_> = runs(start, end - start).map(|run| (run.region, run.bytes)).collect();
        assert!(found.iter().all(|part| split.contains(part)), "{found:?} of {split:?}");
        for (region, bytes) in split {
            let granule = regions.get(region).granule_at(bytes.start);
            assert_eq!(granule, model[region as usize * 64 + (bytes.start / GRANULE) as usize]);
            assert_eq!(found.contains(&(region, bytes)), granule.has_data);
        }
    }
    assert!(Region::of_value(&[0; 4]).is_none() && Region::of_value(&[0; 10]).is_none());
}
