//! Writers against readers and the device, and what a sync says.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Cache, Device, Eviction, GetError, Wal};
use percpu::sync::native::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use percpu::sync::{Mutex, model, thread};

use super::world::{BLOCKS, SIZE, dawdle};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("write-without-a-fence", "write::inv15_a_writer_against_a_reader"),
    ("write-without-a-scan", "write::inv15_a_writer_against_a_reader"),
    ("write-scan-relaxed", "write::inv15_a_writer_against_a_reader"),
    (
        "pin-without-a-word-to-the-writer",
        "write::inv15_a_writer_against_a_guard_that_becomes_a_pin",
    ),
    ("unmark-wakes-nobody", "write::inv15_who_waits_for_a_writer_is_woken"),
    ("write-during-write-back", "write::inv15_a_writer_against_the_device"),
    ("clean-before-the-write", "write::inv17_a_write_that_fails"),
    ("sync-without-the-device", "write::inv20_a_sync_against_the_cleaner"),
    ("join-a-sync-that-runs", "write::inv20_a_sync_that_runs_is_not_enough"),
    ("reset-waits-for-nobody", "write::inv18_a_reset_against_the_cleaner"),
    ("two-resets-at-once", "write::inv18_two_resets"),
    ("failed-write-is-clean", "write::inv17_a_write_that_fails"),
    ("write-what-is-held", "write::inv16_held_back_and_behind_the_log"),
    ("write-before-the-log", "write::inv16_held_back_and_behind_the_log"),
    ("close-refuses-nobody", "write::inv19_a_creator_against_a_close"),
    ("close-waits-for-no-writer", "write::inv19_a_writer_against_a_close"),
];

/// Of those, what only a checker of weak memory can see.
pub(super) const LOOM_ONLY: &[&str] = &["write-without-a-fence", "write-scan-relaxed"];

/// Keeps what it is given, and knows what of it is durable. Its lock is the checker's: in which order a
/// write ends and a sync begins matters.
#[derive(Default)]
struct Disk {
    state: Mutex<State>,
    /// So many writes fail first.
    failing: AtomicUsize,
    /// So many syncs fail first, and give up what they should have made durable.
    giving_up: AtomicUsize,
    /// How long a write goes on that has ended.
    lingers: AtomicUsize,
    log: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Of each block that was written: what, and whether that has ended.
    written: Vec<(u64, u8, bool)>,
    durable: Vec<(u64, u8)>,
    writing: Vec<u64>,
}

impl Disk {
    fn state<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock())
    }

    fn durable(&self, block: u64) -> u8 {
        self.state(|state| {
            let last = state.durable.iter().rev().find(|(of, _)| *of == block);
            last.map_or(0, |(_, byte)| *byte)
        })
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(0);
        Ok(buf.len())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let block = offset / SIZE as u64;
        let left = self.failing.load(Relaxed);
        self.failing.store(left.saturating_sub(1), Relaxed);
        if left > 0 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let byte = buf[0];
        let at = self.state(|state| {
            assert!(!state.writing.contains(&block), "two writes of one block at a time");
            state.writing.push(block);
            state.written.push((block, byte, false));
            state.written.len() - 1
        });
        thread::yield_now();
        dawdle();
        assert!(buf.iter().all(|other| *other == byte), "it changed while it was written");
        self.state(|state| {
            state.writing.retain(|other| *other != block);
            state.written[at].2 = true;
        });
        for _ in 0..self.lingers.load(Relaxed) {
            thread::yield_now(); // before the cache hears of it
            dawdle();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let ended: Vec<_> = self.state(|state| {
            let ended = state.written.iter().filter(|(_, _, ended)| *ended);
            ended.map(|&(block, byte, _)| (block, byte)).collect()
        });
        thread::yield_now();
        // Long enough for others to write something and to ask for a sync, too.
        (0..8).for_each(|_| dawdle());
        let left = self.giving_up.load(Relaxed);
        self.giving_up.store(left.saturating_sub(1), Relaxed);
        if left > 0 {
            self.state(|state| state.written.iter_mut().for_each(|write| write.2 = false));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.state(|state| state.durable.extend(ended));
        Ok(())
    }
}

impl Wal for Disk {
    fn durable(&self) -> u64 {
        self.log.load(Relaxed)
    }

    fn flush(&self, number: u64) -> io::Result<()> {
        self.log.store(number, Relaxed);
        Ok(())
    }
}

/// Two buffers, and a device.
fn world(failing: usize, patience: Duration) -> (Arc<Disk>, Device) {
    let builder = Cache::builder(2 * SIZE).block_sizes(SIZE, SIZE).patience(patience);
    let builder = builder.eviction(Eviction::Clock).dirty_limits(100, 100);
    let disk = Arc::new(Disk { failing: AtomicUsize::new(failing), ..Disk::default() });
    let options = AttachOptions::new(SIZE).on_loss(|_| {}).wal(Arc::clone(&disk) as _);
    let device = builder.build().unwrap().attach_with(Arc::clone(&disk), options).unwrap();
    (disk, device)
}

const LONG: Duration = Duration::from_secs(3600);

fn fill(device: &Device, block: u64, byte: u8) {
    let mut guard = device.get_mut(block).unwrap();
    guard[..SIZE / 2].fill(byte);
    dawdle();
    guard[SIZE / 2..].fill(byte);
}

#[test]
fn inv15_a_writer_against_a_reader() {
    model(|| {
        let (_disk, device) = world(0, LONG);
        drop(device.get(0).unwrap());
        let reads = thread::spawn({
            let device = device.clone();
            move || {
                if let Ok(guard) = device.try_get(0) {
                    let first = guard[0];
                    dawdle();
                    assert!(guard.iter().all(|byte| *byte == first));
                }
            }
        });
        fill(&device, 0, 1);
        reads.join().unwrap();
        assert_eq!(device.get(0).unwrap()[0], 1);
    });
}

#[test]
fn inv15_a_writer_against_a_guard_that_becomes_a_pin() {
    model(|| {
        let (_disk, device) = world(0, LONG);
        drop(device.get(0).unwrap());
        let reads = thread::spawn({
            let device = device.clone();
            move || {
                let Ok(guard) = device.try_get(0) else { return };
                let first = guard[0];
                thread::yield_now(); // the writer's turn, which loom need not find
                dawdle();
                let pin = guard.pin().unwrap();
                drop(guard);
                thread::yield_now();
                dawdle();
                assert!(pin.iter().all(|byte| *byte == first));
            }
        });
        fill(&device, 0, 1);
        reads.join().unwrap();
        assert_eq!(device.get(0).unwrap()[0], 1);
    });
}

#[test]
fn inv15_who_waits_for_a_writer_is_woken() {
    model(|| {
        let (_disk, device) = world(0, LONG);
        let mut guard = device.get_mut(0).unwrap();
        let reads = thread::spawn({
            let device = device.clone();
            move || assert_eq!(device.get(0).unwrap()[0], 1)
        });
        dawdle();
        guard.fill(1);
        drop(guard);
        reads.join().unwrap();
    });
}

#[test]
fn inv15_a_writer_against_the_device() {
    model(|| {
        let (disk, device) = world(0, LONG);
        fill(&device, 0, 1);
        let flushes = thread::spawn({
            let device = device.clone();
            move || device.flush().unwrap()
        });
        fill(&device, 0, 2);
        flushes.join().unwrap();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 2);
    });
}

/// Whoever writes it back, a sync says that it is durable only once it is.
#[test]
fn inv20_a_sync_against_the_cleaner() {
    model(|| {
        let (disk, device) = world(0, LONG);
        fill(&device, 0, 1);
        let flushes = thread::spawn({
            let device = device.clone();
            move || device.flush().unwrap()
        });
        dawdle();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
        flushes.join().unwrap();
    });
}

#[test]
fn inv20_a_sync_that_runs_is_not_enough() {
    model(|| {
        let (disk, device) = world(0, LONG);
        let syncs = thread::spawn({
            let device = device.clone();
            move || device.sync().unwrap()
        });
        fill(&device, 0, 1);
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
        syncs.join().unwrap();
    });
}

/// A sync fails that may have met the block or not: a reset finds it, wherever it is.
#[test]
fn inv18_a_reset_against_the_cleaner() {
    model(|| {
        let (disk, device) = world(0, LONG);
        disk.giving_up.store(1, Relaxed);
        disk.lingers.store(16, Relaxed);
        let fails = thread::spawn({
            let device = device.clone();
            move || {
                assert!(device.sync().is_err());
                assert!(device.reset().unwrap().is_empty(), "it is cached");
            }
        });
        if let Ok(mut guard) = device.get_mut(0) {
            guard.fill(1);
            drop(guard);
            let _ = device.flush(); // it may be poisoned
        }
        fails.join().unwrap();
        fill(&device, 1, 1);
        let _ = device.sync(); // an error that was met before, perhaps
        device.sync().unwrap();
        let there = device.get(0).unwrap()[0];
        assert_eq!(disk.durable(0), there);
    });
}

/// One that ends late does not forget the sync that failed behind the other.
#[test]
fn inv18_two_resets() {
    model(|| {
        let (disk, device) = world(0, LONG);
        fill(&device, 0, 1);
        disk.giving_up.store(1, Relaxed);
        assert!(device.sync().is_err());
        let other = thread::spawn({
            let device = device.clone();
            move || assert!(device.reset().unwrap().is_empty(), "it is cached")
        });
        thread::yield_now();
        dawdle();
        assert!(device.reset().unwrap().is_empty());
        disk.giving_up.store(1, Relaxed);
        assert!(device.sync().is_err());
        other.join().unwrap();
        assert!(device.reset().unwrap().is_empty());
        let _ = device.sync(); // an error that was met before, perhaps
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}

#[test]
fn inv17_a_write_that_fails() {
    model(|| {
        let (disk, device) = world(2, LONG);
        fill(&device, 0, 1);
        assert!(device.flush().is_err());
        for block in 1..4 {
            drop(device.get(block));
        }
        assert_eq!(device.get(0).unwrap()[0], 1);
        let _ = device.sync(); // what it met before, perhaps
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}

#[test]
fn inv16_held_back_and_behind_the_log() {
    model(|| {
        let (disk, device) = world(0, Duration::ZERO);
        let mut guard = device.get_mut(0).unwrap();
        guard.fill(1);
        guard.set_lsn(7);
        let hold = guard.hold_back();
        drop(guard);
        assert!(device.flush().is_err());
        assert!(disk.state(|state| state.written.is_empty()));
        drop(hold);
        device.flush().unwrap();
        assert_eq!(disk.log.load(Relaxed), 7);
    });
}

/// What a writer was let write is durable once the close says so.
#[test]
fn inv19_a_writer_against_a_close() {
    model(|| {
        let (disk, device) = world(0, LONG);
        drop(device.get(0).unwrap());
        let writes = thread::spawn({
            let device = device.clone();
            move || match device.get_mut(0) {
                Ok(mut guard) => {
                    guard.fill(1);
                    thread::yield_now(); // the turn of who closes, which loom need not find
                    dawdle();
                    1
                }
                Err(error) => {
                    assert_eq!(error, GetError::Closed);
                    0
                }
            }
        });
        let _kept = device.clone(); // the end of the last handle would write it
        dawdle();
        device.close().unwrap();
        let durable = disk.durable(0);
        assert_eq!(durable, writes.join().unwrap());
    });
}

#[test]
fn inv19_a_creator_against_a_close() {
    model(|| {
        let (disk, device) = world(0, LONG);
        let creates = thread::spawn({
            let device = device.clone();
            move || match device.create(0) {
                Ok(mut guard) => {
                    guard.fill(1);
                    thread::yield_now(); // the turn of who closes, which loom need not find
                    dawdle();
                    1
                }
                Err(error) => {
                    assert_eq!(error, GetError::Closed);
                    0
                }
            }
        });
        let _kept = device.clone(); // the end of the last handle would write it
        device.close().unwrap();
        let durable = disk.durable(0);
        assert_eq!(durable, creates.join().unwrap());
    });
}
