//! B5: hits with a few misses among them, and misses alone. A miss fills a page of 4 KiB, and a page
//! that was not used goes.
//!
//! Every cache is full before the first window. While a cache fills, a miss also pays for memory that the
//! process has not touched before. In a virtual machine with free page reporting, the first touch of a huge page
//! takes 4 to 5 ms if the host has taken the page back, and 0.2 ms if it has not: a matter of the seconds before.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Arc;

use bufcache::{BlockDevice, Cache};
use harness::timed::{Row, measure};
use harness::{Case, Group, Plan, Report, two};
use lru::LruCache;
use rustc_hash::FxBuildHasher;

use crate::keys::zipf;
use crate::ours::{Numbers, OPEN, Ours};
use crate::pages::{PAGE, Pages, fill, place};
use crate::peers::{Moka, QuickPages};

/// Room, and what is asked for again and again.
const ROOM: usize = 1 << 16;
const PAGES: usize = ROOM / 4 * 3;
const READS: usize = 1 << 20;
/// One read in so many is of a page that was not asked for before: 0.3 %.
const RARE: u64 = 333;
/// Room where everything is a miss.
const FULL: usize = 1 << 12;
/// Pages written for each read of the clocks, which take five times as long as a page of the map.
const BATCH: u64 = 64;

/// New pages of a thread: apart from the other's, and from those in the cache.
fn fresh(thread: usize, count: u64) -> u64 {
    (thread as u64 + 1) << 32 | count
}

fn mixed<'a, P: Pages>(plan: &Plan, keys: &'a [u32]) -> Vec<Case<'a>> {
    let pages = Arc::new(full::<P>());
    let case = |&threads: &usize| {
        let pages = Arc::clone(&pages);
        Case::new(P::NAME, threads, move |thread| {
            let pages = Arc::clone(&pages);
            let first = thread * keys.len() / threads;
            // Of this case: what the row with another number of threads asked for is not asked for again.
            let (mut new, mut left) = ((threads as u64) << 24, RARE);
            move |count| {
                left -= 1;
                let number = if left > 0 {
                    u64::from(keys[(first + count as usize) & (keys.len() - 1)])
                } else {
                    (new, left) = (new + 1, RARE);
                    fresh(thread, new)
                };
                black_box(pages.read(number, place(number)));
            }
        })
    };
    plan.threads.iter().map(case).collect()
}

fn missing<P: Pages>() -> [Case<'static>; 2] {
    let pages = Arc::new(P::filled(FULL, FULL));
    [1, 2].map(|threads| {
        let pages = Arc::clone(&pages);
        Case::new(P::NAME, threads, move |thread| {
            let pages = Arc::clone(&pages);
            move |count| {
                let number = fresh(thread, (threads as u64) << 28 | count);
                black_box(pages.read(number, place(number)));
            }
        })
    })
}

/// A full cache: the pages that are asked for again and again, and others behind them.
fn full<P: Pages>() -> P {
    let pages = P::filled(PAGES, ROOM);
    for number in PAGES..2 * ROOM {
        black_box(pages.read(number as u64, place(number as u64)));
    }
    // What the second half has displaced.
    (0..PAGES as u64).for_each(|number| _ = black_box(pages.read(number, place(number))));
    pages
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let keys = zipf(PAGES, 0.99, READS);
    let rounds = Group::new("64k pages, 99.7 % hits")
        .cases(mixed::<Ours>(plan, &keys))
        .cases(mixed::<QuickPages>(plan, &keys))
        .cases(mixed::<Moka>(plan, &keys))
        .run(plan);
    report.compare(&rounds, &[Ours::NAME]);
    report.record("B5.mix.quick_cache", rounds.time_ratio(Ours::NAME, QuickPages::NAME));
    let both = rounds.time_ratio(&two(Ours::NAME), &two(QuickPages::NAME));
    report.record("B5.mix.quick_cache_2t", both);

    let rounds = Group::new("insert and evict, 4k pages")
        .cases(missing::<Ours>())
        .cases(missing::<QuickPages>())
        .cases(missing::<Moka>())
        .run(plan);
    report.compare(&rounds, &[Ours::NAME]);
    report.record("B5.insert_evict.quick_cache", rounds.time_ratio(Ours::NAME, QuickPages::NAME));
}

/// Misses that write their page, so that each evicted page is written to a device that takes no time.
pub(crate) fn run_dirty(plan: &Plan, report: &mut Report) {
    let cache = Cache::builder(FULL * PAGE).dirty_limits(100, 100).build().expect(OPEN);
    let device = cache.attach(Numbers).expect(OPEN);
    let mut new = 0;
    let ours = Row::new(Ours::NAME, move || {
        for _ in 0..BATCH {
            new += 1;
            fill(new, &mut device.create(new).expect(OPEN));
        }
        BATCH
    });
    let mut new = 0;
    // The thread that inserts a page writes the evicted page to the device.
    let room = NonZeroUsize::new(FULL).expect("room for a page");
    let mut map = LruCache::<u64, Box<[u8]>, _>::with_hasher(room, FxBuildHasher);
    let lru = Row::new("LruCache", move || {
        for _ in 0..BATCH {
            new += 1;
            let mut page = vec![0; PAGE].into_boxed_slice();
            fill(new, &mut page);
            if let Some((number, old)) = map.push(new, page) {
                Numbers.write(number * PAGE as u64, &old).expect(OPEN);
            }
        }
        BATCH
    });
    let group = "write and evict what was written, 4k pages";
    let [rounds] = measure([group], plan, vec![ours, lru]);
    report.compare(&rounds, &[Ours::NAME]);
    report.record("B12.dirty_evict.map", rounds.time_ratio(Ours::NAME, "LruCache"));
    println!("- bufcache: {}", cache.stats());
}
