//! Write-back: what is dirtied and made durable, beside what a program does without a cache of its own. The
//! same bytes, and a sync after as many of them, each time.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use bufcache::{BlockDevice, Cache, Device, FileDevice};
use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};

use crate::pages::{PAGE, fill};

/// Pages of the file.
const PAGES: usize = 1 << 13;
/// Written between two syncs.
const BATCH: usize = 512;
/// The message of `expect`: no write is refused.
const DISK: &str = "a disk that writes";

/// The order in which pages are written.
struct Next {
    random: Option<Random>,
    at: u64,
}

impl Next {
    fn new(is_random: bool) -> Self {
        Self { random: is_random.then(|| Random::new(7)), at: 0 }
    }

    fn page(&mut self) -> u64 {
        self.at = (self.at + 1) % PAGES as u64;
        self.random.as_mut().map_or(self.at, |random| random.below(PAGES) as u64)
    }
}

/// A file whose blocks are there: nothing is allocated when they are written.
fn file(path: &Path, direct: bool) -> File {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).expect(DISK)
}

fn ours(name: &str, device: impl BlockDevice, random: bool) -> Row<'static> {
    let cache = Cache::new(2 * PAGES * PAGE).expect("memory");
    let device = cache.attach(device).expect(DISK);
    let mut next = Next::new(random);
    Row::new(name, move || {
        for _ in 0..BATCH {
            let page = next.page();
            fill(page, &mut device.create(page).expect(DISK));
        }
        device.sync().expect(DISK);
        BATCH as u64
    })
}

/// By system calls, through the kernel's page cache.
fn pwrite(file: File, random: bool) -> Row<'static> {
    let (mut next, mut bytes) = (Next::new(random), [0; PAGE]);
    Row::new("pwrite, fdatasync", move || {
        for _ in 0..BATCH {
            let page = next.page();
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
    (0..PAGES).for_each(|_| io::Write::write_all(&mut named.as_file(), &[1; PAGE]).expect(DISK));
    named.as_file().sync_all().expect(DISK);
    for (group, random) in [("ascending", false), ("at random", true)] {
        let plain = |direct| FileDevice::new(file(named.path(), direct)).expect(DISK);
        let mut rows =
            vec![ours("bufcache", plain(false), random), pwrite(file(named.path(), false), random)];
        // Not every file system takes direct writes.
        if OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(named.path()).is_ok() {
            rows.push(ours("bufcache O_DIRECT", plain(true), random));
        }
        let rounds = measure(&format!("{BATCH} pages {group}, and a sync"), &plan, rows);
        report.compare(&rounds, &["bufcache", "bufcache O_DIRECT"]);
        if random {
            let ratio = rounds.time_ratio("bufcache", "pwrite, fdatasync");
            report.record("B12.sync512.pwrite_fdatasync", ratio);
        }
    }
}

/// A device that takes what it is given and has it nowhere.
pub(crate) struct Nowhere;

impl BlockDevice for Nowhere {
    fn len(&self) -> u64 {
        1 << 45
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        Ok(buf.len())
    }

    fn write(&self, _: u64, buf: &[u8]) -> io::Result<()> {
        black_box(buf);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Dirties a block.
pub(crate) fn dirty(device: &Device, block: u64) {
    device.get_mut(block).expect("memory, and a device that does not fail")[0] = block as u8;
}
