//! Loads that wait for a thread of the cache, while all that read the device wait for them.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crate::world::*;

const SIZE: usize = 4096;
/// Threads of a cache that read one device.
const READERS: u64 = 4;
/// The block that the verifiers of the others get.
const NEEDED: u64 = 9;

#[derive(Default)]
struct Gate(AtomicBool);

impl Gate {
    fn wait(&self) {
        wait_for("the gate", || self.0.load(Relaxed));
    }
}

/// Begins to read the block that is needed once the gate is open, if it has one.
struct Slow(MemoryDevice, Option<Arc<Gate>>);

impl BlockDevice for Slow {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(offset, buf)
    }

    fn begin_read(&self, load: Load) {
        if load.offset() == NEEDED * SIZE as u64 {
            self.1.iter().for_each(|gate| gate.wait());
        }
        load.defer();
    }
}

/// Of a device whose verifier gets another block. Behind the gate, if it has one.
fn attach(slow: Option<Arc<Gate>>, gate: Option<Arc<Gate>>) -> (Device, Arc<AtomicU64>) {
    let (itself, arrived) = (Arc::new(OnceLock::<Device>::new()), Arc::new(AtomicU64::new(0)));
    let options = AttachOptions::new().verify({
        let (itself, arrived) = (Arc::clone(&itself), Arc::clone(&arrived));
        move |block, _| {
            if block < READERS {
                arrived.fetch_add(1, Relaxed);
                gate.iter().for_each(|gate| gate.wait());
                return itself.get().unwrap().get(NEEDED).unwrap()[0] == 5;
            }
            true
        }
    });
    let disk = Slow(MemoryDevice::new(vec![5; 16 * SIZE]), slow);
    let device = Cache::new(1 << 20).unwrap().attach_with(disk, options).unwrap();
    itself.set(device.clone()).unwrap();
    (device, arrived)
}

fn ahead(device: &Device, block: u64) {
    device.readahead(block..block + 1);
}

#[test]
fn inv02_verifiers_need_a_block_that_is_queued() {
    in_time("the loads", || {
        let gate = Arc::new(Gate::default());
        let (device, arrived) = attach(None, Some(Arc::clone(&gate)));
        (0..READERS).for_each(|block| ahead(&device, block));
        wait_for("the verifiers", || arrived.load(Relaxed) == READERS);
        ahead(&device, NEEDED);
        gate.0.store(true, Relaxed);
        (0..READERS).for_each(|block| assert_eq!(device.get(block).unwrap()[0], 5));
    });
}

#[test]
fn inv02_verifiers_wait_for_a_block_before_it_is_queued() {
    in_time("the loads", || {
        let gate = Arc::new(Gate::default());
        let (device, arrived) = attach(Some(Arc::clone(&gate)), None);
        thread::scope(|scope| {
            scope.spawn(|| ahead(&device, NEEDED));
            wait_for("the load", || device.is_cached(NEEDED));
            (0..READERS).for_each(|block| ahead(&device, block));
            wait_for("the verifiers", || arrived.load(Relaxed) == READERS);
            thread::sleep(Duration::from_millis(50)); // until they sleep
            gate.0.store(true, Relaxed);
            (0..READERS).for_each(|block| assert_eq!(device.get(block).unwrap()[0], 5));
        });
    });
}
