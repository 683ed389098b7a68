//! An invalidation after a change of the device, against a load of the block.

use std::io;
use std::sync::Arc;
use std::task::{Context, Waker};

use bufcache::{BlockDevice, Cache, Device, Eviction, Load};
use percpu::sync::atomic::{AtomicU64, Ordering::Relaxed};
use percpu::sync::{model, thread};

use super::task::block_on;
use super::world::{BLOCKS, SIZE, dawdle, thoroughly};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("invalidation: look again after the load", "claim::inv10_a_claim_against_an_invalidation"),
    ("invalidation: look again after the load", "claim::inv10_an_invalidation_waits_for_a_load"),
    #[cfg(offlock_loom)] // too rare in random schedules
    ("poll: the marks are there still", "claim::inv10_an_invalidation_waits_for_a_load"),
    ("invalidate: nothing is to be waited for", "claim::inv10_a_claim_against_invalidate"),
    ("invalidation: drop the pin", "claim::inv10_an_invalidation_that_is_dropped"),
    #[cfg(offlock_loom)] // too rare in random schedules
    ("invalidation: look again at a busy block", "claim::inv10_an_invalidation_against_an_evictor"),
];

/// All blocks say how often the device was changed: by other means than the cache's.
struct Changing(AtomicU64);

impl Changing {
    fn attach(buffers: usize) -> (Arc<Self>, Device) {
        let builder = Cache::builder(buffers * SIZE).block_sizes(SIZE, SIZE);
        let changing = Arc::new(Self(AtomicU64::new(0)));
        let cache = builder.eviction(Eviction::Clock).build().unwrap();
        let device = cache.attach(Arc::clone(&changing), SIZE).unwrap();
        (changing, device)
    }

    fn change(&self) {
        self.0.store(1, Relaxed); // a device's memory orders nothing
    }

    fn now(&self) -> u8 {
        self.0.load(Relaxed) as u8
    }

    /// Does what the load is for.
    fn load(&self, mut load: Load) {
        load.fill(self.now());
        dawdle();
        load.finish(Ok(SIZE));
    }
}

impl BlockDevice for Changing {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(self.now());
        Ok(buf.len())
    }
}

#[test]
fn inv10_a_claim_against_an_invalidation() {
    model(|| against_a_claim(|device| block_on(device.invalidation(0..1)).is_ok()));
}

/// An invalidation that sleeps until the load is over.
#[test]
fn inv10_a_claim_against_invalidate() {
    model(|| against_a_claim(|device| device.invalidate(0).is_ok()));
}

/// What is loaded is new, or is forgotten.
fn against_a_claim(forget: impl Fn(&Device) -> bool) {
    let (changing, device) = Changing::attach(1);
    let claims = thread::spawn({
        let (changing, device) = (Arc::clone(&changing), device.clone());
        move || {
            if let Some(load) = device.claim(0).unwrap() {
                changing.load(load);
            }
        }
    });
    dawdle();
    changing.change();
    assert!(forget(&device));
    assert_eq!(device.get(0).unwrap()[0], 1);
    claims.join().unwrap();
}

/// It is about to end.
#[test]
fn inv10_an_invalidation_waits_for_a_load() {
    model(|| {
        let (changing, device) = Changing::attach(1);
        let load = device.claim(0).unwrap().expect("it is not there");
        let ends = thread::spawn({
            let changing = Arc::clone(&changing);
            move || changing.load(load)
        });
        changing.change();
        assert_eq!(block_on(device.invalidation(0..1)), Ok(1));
        assert_eq!(device.get(0).unwrap()[0], 1);
        ends.join().unwrap();
    });
}

/// While it waits for a load, which ends meanwhile. The buffer is of use.
#[test]
fn inv10_an_invalidation_that_is_dropped() {
    thoroughly(|| {
        let (changing, device) = Changing::attach(1);
        let load = device.claim(0).unwrap().expect("it is not there");
        let mut forgets = Box::pin(device.invalidation(0..1));
        let mut context = Context::from_waker(Waker::noop());
        assert!(forgets.as_mut().poll(&mut context).is_pending());
        let ends = thread::spawn(move || changing.load(load));
        drop(forgets);
        ends.join().unwrap();
        assert!(device.is_cached(0));
        drop(device.claim(1).unwrap().expect("there is a buffer for it"));
    });
}

/// It marked the buffer, found it in use, and puts it back.
#[test]
fn inv10_an_invalidation_against_an_evictor() {
    model(|| {
        let (changing, device) = Changing::attach(1);
        drop(device.get(0).unwrap());
        let evicts = thread::spawn({
            let device = device.clone();
            move || {
                let held = device.try_get(0);
                // There is no buffer for it while the guard lives.
                for _ in 0..2 {
                    assert!(held.is_err() || matches!(device.claim(1), Ok(None)));
                }
            }
        });
        dawdle();
        changing.change();
        block_on(device.invalidation(0..1)).unwrap();
        assert_eq!(device.get(0).unwrap()[0], 1);
        evicts.join().unwrap();
    });
}
