//! An invalidation after a change of the device, against a load of the block.

use std::io;
use std::sync::Arc;

use crate::{BlockDevice, Cache, Device, Eviction, Load};
use offlock_sync::atomic::{AtomicU64, Ordering::Relaxed};
use offlock_sync::{model, thread};

use super::world::{BLOCKS, SIZE, dawdle};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] =
    &[("invalidate: nothing is to be waited for", "claim::inv10_a_claim_against_invalidate")];

/// All blocks say how often the device was changed: by other means than the cache's.
struct Changing(AtomicU64);

impl Changing {
    fn attach(buffers: usize) -> (Arc<Self>, Device) {
        let builder = Cache::builder(buffers * SIZE).block_size(SIZE);
        let changing = Arc::new(Self(AtomicU64::new(0)));
        let cache = builder.eviction(Eviction::Clock).build().unwrap();
        let device = cache.attach(Arc::clone(&changing)).unwrap();
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

/// An invalidation that sleeps until the load is over: the loaded bytes are new, or are dropped.
#[test]
fn inv10_a_claim_against_invalidate() {
    model(against_a_claim);
}

fn against_a_claim() {
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
    device.invalidate(0).unwrap();
    assert_eq!(device.get(0).unwrap()[0], 1);
    claims.join().unwrap();
}
