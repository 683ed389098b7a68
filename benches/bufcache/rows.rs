//! B4, B7, B9 and B12: allocations, threads that miss one page, the page cache of the kernel, write-back.

use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use bufcache::{Cache, FileDevice};
use bufcache_test::{Fault, FaultDevice, Operation};
use harness::timed::{Row, measure};
use harness::{Case, Group, Plan, Random, Report, Table, number};
use testkit::alloc::counted;

use crate::keys::zipf;
use crate::ours::{Numbers, OPEN, Ours};
use crate::pages::{PAGE, Pages, fill, place, word};
use crate::peers::{Moka, QuickPages};

const FULL: usize = 1024;
const OPS: u64 = 20_000;

fn allocations<P: Pages>(table: &mut Table) -> [f64; 2] {
    let pages = P::filled(FULL / 2, FULL);
    let reads = |numbers: &mut dyn Iterator<Item = u64>| {
        numbers.for_each(|number| _ = black_box(pages.read(number, place(number))));
    };
    let mut hits = (0..OPS).map(|at| at % (FULL as u64 / 2));
    reads(&mut hits.by_ref().take(FULL)); // what a thread's first need
    let hit = counted(|| reads(&mut hits)).1.allocations as f64 / (OPS - FULL as u64) as f64;
    let first = FULL as u64;
    reads(&mut (first..first + OPS)); // full from here on
    let miss =
        counted(|| reads(&mut (first + OPS..first + 2 * OPS))).1.allocations as f64 / OPS as f64;
    table.row(P::NAME, [hit, miss].map(|count| number(Some(count), 3)));
    [hit, miss]
}

/// B4: allocations per hit, and per miss of a cache that is full.
pub(crate) fn run_alloc(_plan: &Plan, report: &mut Report) {
    let mut table = Table::new("allocations", ["per hit", "per miss"]);
    let [hit, miss] = allocations::<Ours>(&mut table);
    allocations::<QuickPages>(&mut table);
    allocations::<Moka>(&mut table);
    print!("{table}");
    report.record("B4.allocs.hit.n", Some(hit));
    report.record("B4.allocs.miss.n", Some(miss));
}

const THREADS: usize = 8;
const MISSED: u64 = 200;

/// The time of a read: each thread has the time to miss.
const READ: Duration = Duration::from_micros(200);

/// B7: threads that miss one page at once.
pub(crate) fn run_once(_plan: &Plan, report: &mut Report) {
    let cache = Cache::new(2 * MISSED as usize * PAGE).expect(OPEN);
    let numbers = Arc::new(FaultDevice::new(Numbers));
    numbers.inject(Operation::Read, .., Fault::Delay(READ));
    let device = cache.attach(Arc::clone(&numbers)).expect(OPEN);
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for number in 0..MISSED {
                    barrier.wait();
                    assert_eq!(word(&device.get(number).expect(OPEN), 0), number);
                }
            });
        }
    });
    let stats = cache.stats();
    let reads = numbers.count(Operation::Read) as f64 / MISSED as f64;
    println!("- {THREADS} threads, {MISSED} pages: {reads} reads a page; {stats}");
    report.record("B7.reads_per_8_missers.n", Some(reads));
}

const CACHED: usize = 1 << 12;
const READS: usize = 1 << 16;

/// Reads along the keys, each time another way.
fn reading<'a>(
    name: &str,
    keys: &'a [u32],
    read: impl Fn(u64, usize) + Sync + Copy + 'a,
) -> Case<'a> {
    Case::new(name, 1, move |_| {
        move |count| {
            let number = u64::from(keys[count as usize & (READS - 1)]);
            read(number, place(number));
        }
    })
}

/// B9: a page that is there, and the page cache of the kernel.
pub(crate) fn run_pread(plan: &Plan, report: &mut Report) {
    let mut file = tempfile::tempfile().expect("room for a file of 16 MiB");
    let mut page = [0; PAGE];
    for number in 0..CACHED as u64 {
        fill(number, &mut page);
        file.write_all(&page).expect("room for a file of 16 MiB");
    }
    let cache = Cache::new(2 * CACHED * PAGE).expect(OPEN);
    let own = FileDevice::new(file.try_clone().expect("a descriptor")).expect("a file");
    let device = &cache.attach(own).expect(OPEN);
    for number in 0..CACHED as u64 {
        assert_eq!(word(&device.get(number).expect("a file that can be read"), 8), number);
    }
    let (file, keys) = (&file, &zipf(CACHED, 0.99, READS)[..]);
    let offset = |number: u64| number * PAGE as u64;
    let copied = |number: u64| {
        let mut page = [0_u8; PAGE];
        page.copy_from_slice(&device.get(number).expect(OPEN));
        black_box(&page);
    };
    let rounds = Group::new("a page of a file, cached")
        .case(reading("bufcache 8 B", keys, |number, at| {
            black_box(word(&device.get(number).expect(OPEN), at));
        }))
        .case(reading("bufcache copy 4 KiB", keys, |number, _| copied(number)))
        .case(reading("pread 8 B", keys, |number, at| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, offset(number) + at as u64).expect("it is there");
            black_box(bytes);
        }))
        .case(reading("pread 4 KiB", keys, |number, _| {
            let mut page = [0; PAGE];
            file.read_exact_at(&mut page, offset(number)).expect("it is there");
            black_box(&page);
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "bufcache 8 B", 1, &["pread 8 B", "pread 4 KiB"]);
    report.against(&rounds, "bufcache copy 4 KiB", 1, &["pread 4 KiB"]);
    let over = |ours: &str| rounds.time_ratio(&format!("{ours}/1"), "pread 4 KiB/1");
    report.record("B9.guard8_vs_pread", over("bufcache 8 B"));
    report.record("B9.copy4k_vs_pread", over("bufcache copy 4 KiB"));
}

/// Pages of the file.
const FILE: usize = 1 << 13;
/// Written between two syncs.
const BATCH: usize = 512;
/// The message of `expect`: no write is refused.
const DISK: &str = "a disk that writes";

fn ours(file: File) -> Row<'static> {
    let device = FileDevice::new(file).expect(DISK);
    let cache = Cache::new(2 * FILE * PAGE).expect("memory");
    let device = cache.attach(device).expect(DISK);
    let mut random = Random::new(7);
    Row::new("bufcache", move || {
        for _ in 0..BATCH {
            let page = random.below(FILE) as u64;
            fill(page, &mut device.create(page).expect(DISK));
        }
        device.sync().expect(DISK);
        BATCH as u64
    })
}

/// By system calls, through the kernel's page cache.
fn pwrite(file: File) -> Row<'static> {
    let (mut random, mut bytes) = (Random::new(7), [0; PAGE]);
    Row::new("pwrite, fdatasync", move || {
        for _ in 0..BATCH {
            let page = random.below(FILE) as u64;
            fill(page, &mut bytes);
            file.write_all_at(&bytes, page * PAGE as u64).expect(DISK);
        }
        file.sync_data().expect(DISK);
        BATCH as u64
    })
}

/// Write-back: what is dirtied and made durable, beside what a program does without a cache of its own. The
/// same bytes, and a sync after as many of them, each time.
pub(crate) fn run_back(plan: &Plan, report: &mut Report) {
    let plan = Plan { min_overlap: 0.0, ..plan.clone() }; // it sleeps most of the time
    // Beside what was compiled: that is a disk.
    let folder = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let named = folder.map_or_else(tempfile::NamedTempFile::new, tempfile::NamedTempFile::new_in);
    let named = named.expect("room for a file");
    // Blocks that are there: nothing is allocated when they are written.
    (0..FILE).for_each(|_| named.as_file().write_all(&[1; PAGE]).expect(DISK));
    named.as_file().sync_all().expect(DISK);
    let file = || File::options().read(true).write(true).open(named.path()).expect(DISK);
    let group = format!("{BATCH} pages at random, and a sync");
    let [rounds] = measure([&group], &plan, vec![ours(file()), pwrite(file())]);
    report.compare(&rounds, &["bufcache"]);
    let ratio = rounds.time_ratio("bufcache", "pwrite, fdatasync");
    report.record("B12.sync512.pwrite_fdatasync", ratio);
}
