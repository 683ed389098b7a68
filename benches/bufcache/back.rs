//! Write-back: what is dirtied and made durable, beside what a program does without a cache of its own. The
//! same bytes, and a sync after as many of them, each time.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bufcache::{Cache, FileDevice};
use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};

use crate::pages::{PAGE, fill};

/// Pages of the file.
const PAGES: usize = 1 << 13;
/// Written between two syncs.
const BATCH: usize = 512;
/// The message of `expect`: no write is refused.
const DISK: &str = "a disk that writes";

fn ours(file: File) -> Row<'static> {
    let device = FileDevice::new(file).expect(DISK);
    let cache = Cache::new(2 * PAGES * PAGE).expect("memory");
    let device = cache.attach(device).expect(DISK);
    let mut random = Random::new(7);
    Row::new("bufcache", move || {
        for _ in 0..BATCH {
            let page = random.below(PAGES) as u64;
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
            let page = random.below(PAGES) as u64;
            fill(page, &mut bytes);
            file.write_all_at(&bytes, page * PAGE as u64).expect(DISK);
        }
        file.sync_data().expect(DISK);
        BATCH as u64
    })
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let plan = Plan { min_overlap: 0.0, ..plan.clone() }; // it sleeps most of the time
    // Beside what was compiled: that is a disk.
    let folder = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let named = folder.map_or_else(tempfile::NamedTempFile::new, tempfile::NamedTempFile::new_in);
    let named = named.expect("room for a file");
    // Blocks that are there: nothing is allocated when they are written.
    (0..PAGES).for_each(|_| io::Write::write_all(&mut named.as_file(), &[1; PAGE]).expect(DISK));
    named.as_file().sync_all().expect(DISK);
    let file = || File::options().read(true).write(true).open(named.path()).expect(DISK);
    let group = format!("{BATCH} pages at random, and a sync");
    let [rounds] = measure([&group], &plan, vec![ours(file()), pwrite(file())]);
    report.compare(&rounds, &["bufcache"]);
    let ratio = rounds.time_ratio("bufcache", "pwrite, fdatasync");
    report.record("B12.sync512.pwrite_fdatasync", ratio);
}
