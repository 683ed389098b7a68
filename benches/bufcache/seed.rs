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

use bufcache::Cache;
use harness::timed::{Row, measure};
use harness::{Plan, Report, Table, number};
use parking_lot::Mutex;
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
fn always(index: &Mutex<Index>, get: Get) -> Arc<Buffer> {
    let new = black_box(Arc::<Buffer>::new_uninit());
    let mut index = index.lock();
    if let Some(found) = index.get(&get.address).cloned() {
        drop(index);
        drop(new);
        return found;
    }
    let new = initialise(new);
    index.insert(get.address, Arc::clone(&new));
    new
}

/// A get as it is since.
#[inline(always)]
fn on_miss(index: &Mutex<Index>, get: Get) -> Arc<Buffer> {
    let found = index.lock().get(&get.address).cloned();
    found.unwrap_or_else(|| {
        let new = initialise(black_box(Arc::<Buffer>::new_uninit()));
        Arc::clone(index.lock().entry(get.address).or_insert(new))
    })
}

/// All gets; each has the bytes of its buffer.
fn replay(gets: &[Get], one: impl Fn(&Mutex<Index>, Get) -> Arc<Buffer>) {
    let index = Mutex::default();
    for &get in gets {
        let buffer = one(&index, get);
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
        let before = || replay(gets, always);
        let after = || replay(gets, on_miss);
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
        let mut table = Table::new(name, ["ns/get", "allocations"]);
        table.bars = vec![0];
        for ((name, _), allocations) in builds.iter().zip(allocations) {
            let time = rounds.throughput(&format!("{name}/1")).map(|gets| 1e9 / gets);
            table.row(*name, [number(time, 1), allocations.to_string()]);
        }
        print!("{table}");
    }
}
