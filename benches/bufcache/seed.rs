//! The change of XFS that this crate grew from: a buffer that is allocated on every call in case there is none,
//! against one that is allocated where there is none, with nothing else different. And bufcache beside them.
//!
//! Published: the allocator took 5.6 % of all samples before and 3.8 % after, the release 3.4 % and 2.0 %.
//!
//! Both builds are ours: an ordered index under one lock, and buffers with a count, 448 bytes of
//! header and their bytes. "Before" initialises the new buffer under the lock if it is wanted, as XFS
//! did; "after" outside, and looks again.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bufcache::Cache;
use harness::timed::{Row, measure, on_one_cpu};
use harness::{Plan, Report, Table, number, percentile};
use parking_lot::{Mutex, MutexGuard};
use recordings::xfsbuf::{CREATE8, UNLINK8};

use crate::ours::{Numbers, OPEN};
use crate::replay::{Get, SECTOR, gets};
use testkit::alloc::counted;

/// A buffer of the seed's.
struct Buffer {
    _header: [u64; 56],
    bytes: OnceLock<Box<[u8]>>,
}

type Index = BTreeMap<u32, Arc<Buffer>>;

/// The times for which the lock was held, in nanoseconds; empty where they are not measured.
type Holds = Vec<f64>;

/// The lock, and when it was taken.
struct Locked<'a, const TIMED: bool> {
    index: MutexGuard<'a, Index>,
    since: Option<Instant>,
}

impl<'a, const TIMED: bool> Locked<'a, TIMED> {
    #[inline(always)]
    fn new(index: &'a Mutex<Index>) -> Self {
        let index = index.lock();
        Self { index, since: TIMED.then(Instant::now) }
    }

    #[inline(always)]
    fn unlock(self, holds: &mut Holds) {
        if let Some(since) = self.since {
            holds.push(since.elapsed().as_nanos() as f64);
        }
    }
}

#[inline(always)]
fn initialise(new: Arc<MaybeUninit<Buffer>>) -> Arc<Buffer> {
    let mut new = new;
    let at = Arc::get_mut(&mut new).expect("it was just made");
    at.write(Buffer { _header: [0; 56], bytes: OnceLock::new() });
    // SAFETY: written just now.
    unsafe { new.assume_init() }
}

/// A get as it was before.
#[inline(always)]
fn always<const TIMED: bool>(index: &Mutex<Index>, get: Get, holds: &mut Holds) -> Arc<Buffer> {
    let new = black_box(Arc::<Buffer>::new_uninit());
    let mut locked = Locked::<TIMED>::new(index);
    if let Some(found) = locked.index.get(&get.address).cloned() {
        locked.unlock(holds);
        drop(new);
        return found;
    }
    let new = initialise(new);
    locked.index.insert(get.address, Arc::clone(&new));
    locked.unlock(holds);
    new
}

/// A get as it is since.
#[inline(always)]
fn on_miss<const TIMED: bool>(index: &Mutex<Index>, get: Get, holds: &mut Holds) -> Arc<Buffer> {
    let locked = Locked::<TIMED>::new(index);
    let found = locked.index.get(&get.address).cloned();
    locked.unlock(holds);
    found.unwrap_or_else(|| {
        let new = initialise(black_box(Arc::<Buffer>::new_uninit()));
        let mut locked = Locked::<TIMED>::new(index);
        let first = Arc::clone(locked.index.entry(get.address).or_insert(new));
        locked.unlock(holds);
        first
    })
}

/// All gets; each has the bytes of its buffer.
fn replay(
    gets: &[Get],
    holds: &mut Holds,
    one: impl Fn(&Mutex<Index>, Get, &mut Holds) -> Arc<Buffer>,
) {
    let index = Mutex::default();
    for &get in gets {
        let buffer = one(&index, get, holds);
        let bytes = || vec![0; usize::from(get.length) * SECTOR].into();
        black_box(buffer.bytes.get_or_init(bytes)[0]);
    }
}

const BEFORE: &str = "allocate always";
const AFTER: &str = "allocate on miss";
const OURS: &str = "bufcache";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    for recording in [UNLINK8, CREATE8] {
        let gets = &gets(&recording)[..];
        // One length, as here the time of a lookup counts; frames are there already.
        let cache = Cache::builder(8192 * SECTOR).block_size(SECTOR).build().expect(OPEN);
        let disk = cache.attach(Numbers(1 << 32)).expect(OPEN);
        let before = || replay(gets, &mut Vec::new(), always::<false>);
        let after = || replay(gets, &mut Vec::new(), on_miss::<false>);
        let ours = || {
            for &get in gets {
                black_box(disk.get(u64::from(get.address)).expect(OPEN)[0]);
            }
        };
        let empty = || (0..8).for_each(|_| _ = cache.shrink(usize::MAX));
        ours(); // the first reads begin with this thread's slots
        empty();
        let builds: [(_, &dyn Fn()); 3] = [(BEFORE, &before), (AFTER, &after), (OURS, &ours)];
        let allocations = builds.map(|(_, run)| counted(run).1.allocations);
        let rows = builds.map(|(name, run)| {
            let row = Row::new(name, move || {
                run();
                gets.len() as u64
            });
            if name == OURS { row.before(empty) } else { row }
        });
        let creates = recording.allocations;
        let name = format!("{}: {} gets, {creates} creates", recording.name, gets.len());
        let rounds = measure(&name, plan, rows.into());
        report.show(&rounds);
        report.against(&rounds, AFTER, 1, &[BEFORE]);
        let mut held = [const { Vec::new() }; 3];
        on_one_cpu(|| {
            replay(gets, &mut held[0], always::<true>);
            replay(gets, &mut held[1], on_miss::<true>);
        });
        let columns = ["ns/get", "allocations", "hold p50, ns", "p99.9", "longest"];
        let mut table = Table::new(name, columns);
        table.bars = vec![0];
        for (((name, _), allocations), held) in builds.iter().zip(allocations).zip(&held) {
            let time = rounds.throughput(&format!("{name}/1")).map(|gets| 1e9 / gets);
            let held = [50.0, 99.9, 100.0].map(|part| percentile(held, part));
            let held = held.map(|nanos| nanos.map_or(String::new(), |nanos| format!("{nanos:.0}")));
            let first = [number(time, 1), allocations.to_string()];
            table.row(*name, first.into_iter().chain(held));
        }
        print!("{table}");
    }
}
