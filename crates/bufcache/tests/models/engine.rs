//! Loads in the engines of threads that wait for each other.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bufcache::{BlockDevice, Cache, Device, Eviction, Load, lent};
use offlock_sync::{model, thread};

use super::world::{BLOCKS, LONG, SIZE, look, thoroughly};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("wait: turn the engine of this thread", "engine::inv02_loads_that_are_crossed"),
    ("load: wake the tasks", "engine::inv02_loads_that_are_crossed"),
    #[cfg(offlock_loom)] // too rare in random schedules
    ("poll: the marks are there still", "engine::inv02_loads_that_are_crossed"),
    ("wait for a buffer: turn the engine", "engine::inv13_the_buffer_is_in_its_own_engine"),
];

/// Numbered blocks, read by the engine of the thread that asks.
#[derive(Default)]
struct ByEngine {
    reads: AtomicUsize,
}

impl BlockDevice for ByEngine {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.reads.fetch_add(1, Relaxed);
        buf.fill((offset / SIZE as u64) as u8);
        Ok(buf.len())
    }

    fn begin_read(&self, mut load: Load) {
        if load.is_blocking() || !lent::is_lent() {
            return load.defer();
        }
        self.reads.fetch_add(1, Relaxed);
        lent::begin(move || {
            let byte = (load.offset() / SIZE as u64) as u8;
            load.fill(byte);
            load.finish(Ok(SIZE));
        });
    }
}

fn attach(buffers: usize) -> (Arc<ByEngine>, Device) {
    let builder = Cache::builder(buffers * SIZE).block_size(SIZE);
    let builder = builder.patience(LONG).eviction(Eviction::Clock);
    let reads = Arc::new(ByEngine::default());
    let device = builder.build().unwrap().attach(Arc::clone(&reads)).unwrap();
    (reads, device)
}

/// Each begins a load, and then wants what the other may have begun.
#[test]
fn inv02_loads_that_are_crossed() {
    model(|| {
        let (reads, device) = attach(3); // one for the get that loses the race
        let engine = lent::lend();
        device.readahead(1..2);
        let other = thread::spawn({
            let device = device.clone();
            move || {
                let engine = lent::lend();
                device.readahead(2..3);
                look(&device.get(1).unwrap(), 1);
                engine.drain();
            }
        });
        look(&device.get(2).unwrap(), 2);
        engine.drain();
        other.join().unwrap();
        assert_eq!(reads.reads.load(Relaxed), 2);
    });
}

/// The only buffer is of a load that this thread's engine has not done yet.
#[test]
fn inv13_the_buffer_is_in_its_own_engine() {
    thoroughly(|| {
        let (reads, device) = attach(1);
        let _lent = lent::lend();
        device.readahead(1..2);
        look(&device.get(2).unwrap(), 2);
        assert_eq!(reads.reads.load(Relaxed), 2);
    });
}
