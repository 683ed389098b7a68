//! Loads that go on while their requester does something else: tasks, engines, readahead.

use crate::world::*;

const SIZE: usize = 4096;
/// Much longer than anything takes that is waited for.
const LONG: Duration = Duration::from_secs(60);

/// Takes a load that was begun.
fn take(kept: &KeptDevice) -> Load {
    let start = Instant::now();
    loop {
        if let Some(load) = kept.loads.lock().pop() {
            return load;
        }
        assert!(start.elapsed() < LONG, "no load was begun");
        thread::yield_now();
    }
}

/// Fills a load with the number of its block.
fn fill(mut load: Load) {
    let number = load.offset() / SIZE as u64;
    load.fill(number as u8);
    let len = load.len();
    load.finish(Ok(len));
}

fn kept(buffers: usize) -> (Arc<KeptDevice>, Cache, bufcache::Device) {
    let device = Arc::new(KeptDevice::new(100 * SIZE));
    let cache = Cache::builder(buffers * SIZE).patience(Duration::from_millis(50)).build().unwrap();
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    (device, cache, disk)
}

#[test]
fn inv13_readahead_begins_what_the_device_begins_and_keeps_no_pin() {
    let (device, cache, disk) = kept(4);
    disk.readahead(0..1);
    disk.readahead(0..1); // as good as there
    assert_eq!(device.begun(), 1);
    fill(take(&device));
    let guard = disk.try_get(0).unwrap();
    assert_eq!(guard[0], 0);
    (1..5).for_each(|block| disk.readahead(block..block + 1));
    assert_eq!(
        (device.begun(), cache.stats().ahead_dropped),
        (4, 1),
        "a guard keeps the last buffer"
    );
    drop(guard);
    disk.readahead(4..5);
    assert_eq!(device.begun(), 5, "the unused buffer is taken");
    disk.readahead(5..6);
    assert_eq!((device.begun(), cache.stats().ahead_dropped), (5, 2));
    (0..4).for_each(|_| fill(take(&device)));
    let freed: usize = (0..4).map(|_| cache.shrink(4)).sum();
    assert_eq!((freed, cache.stats().evictions), (4, 5), "a pin was kept");
}

#[test]
fn tasks_read_by_the_engine_that_their_thread_has_lent() {
    let cache = Cache::new(64 * SIZE).unwrap();
    let disk = cache.attach(FileDevice::new(numbered_file()).unwrap()).unwrap();
    assert_eq!(disk.get(1).unwrap()[0], 1);
    let engine = Rc::new(Engine::new().unwrap());
    let lent = lend_engine(&engine);
    assert_eq!(disk.get(2).unwrap()[0], 2);
    assert_eq!(engine.stats().accepted, 0, "a thread that waits reads itself");
    let plug = engine.plug();
    disk.readahead(8..16);
    assert_eq!(engine.stats().accepted, 8);
    assert!(disk.try_get(9).is_err(), "it is in the engine still");
    assert_eq!(disk.get(9).map(drop), Err(GetError::WouldDeadlock)); // only this thread can end it
    assert_eq!(disk.get(20).unwrap()[0], 20);
    drop(plug);
    engine.drain().unwrap();
    assert!((8..16).all(|block| disk.try_get(block).is_ok()));
    let both = async {
        let (one, two) = (disk.get_async(30), disk.get_async(31));
        (one.await.unwrap()[0], two.await.unwrap()[0])
    };
    assert_eq!(engine.block_on(both).unwrap(), (30, 31));
    drop(lent);
    assert_eq!(disk.get(40).unwrap()[0], 40);
    assert_eq!((engine.stats().accepted, Rc::strong_count(&engine)), (10, 1));
}

#[test]
fn loads_that_are_crossed_are_refused() {
    in_time("crossed loads", || {
        let cache = Cache::new(128 * SIZE).unwrap();
        let disk = cache.attach(FileDevice::new(numbered_file()).unwrap()).unwrap();
        for round in 0..20 {
            for block in 0..64 {
                disk.invalidate(block).unwrap();
            }
            let begun = Barrier::new(2);
            thread::scope(|scope| {
                for side in [0, 1] {
                    let (disk, begun) = (&disk, &begun);
                    scope.spawn(move || {
                        let engine = Rc::new(Engine::builder().depth(8).build().unwrap());
                        let _lent = lend_engine(&engine);
                        // Neither is plugged, one, or both.
                        let plug = (round % 3 > side).then(|| engine.plug());
                        let (mine, yours) = (side * 8, (1 - side) * 8);
                        disk.readahead(mine..mine + 4);
                        begun.wait();
                        let refused = |block| match disk.get(block) {
                            Ok(guard) => guard[0] == block as u8, // an engine that was not plugged
                            Err(error) => error == GetError::WouldDeadlock,
                        };
                        assert!((yours..yours + 4).all(refused));
                        begun.wait();
                        drop(plug);
                        engine.drain().unwrap();
                        // A thread without operations in its engine waits for the other's.
                        for block in yours..yours + 4 {
                            assert_eq!(disk.get(block).unwrap()[0], block as u8);
                        }
                    });
                }
            });
        }
        let stats = cache.stats();
        assert_eq!((stats.reads, stats.misses), (160, 160), "{stats}");
    });
}

#[test]
fn an_engine_without_room_leaves_operations_to_the_cache() {
    in_time("a full engine", || {
        let cache = Cache::new(128 * SIZE).unwrap();
        let disk = cache.attach(FileDevice::new(numbered_file()).unwrap()).unwrap();
        let engine = Rc::new(Engine::builder().depth(2).capacity(2).build().unwrap());
        let _lent = lend_engine(&engine);
        let plug = engine.plug();
        disk.readahead(0..8);
        for block in (2..8).rev() {
            assert_eq!(disk.get(block).unwrap()[0], block as u8);
        }
        assert_eq!(disk.get(1).map(drop), Err(GetError::WouldDeadlock));
        assert_eq!(block_on(disk.sync_async()), Ok(()));
        drop(plug);
        engine.drain().unwrap();
        assert_eq!(disk.get(1).unwrap()[0], 1);
        assert_eq!(cache.stats().reads, 8);
    });
}

#[test]
fn no_buffer_becomes_free_while_its_own_engine_fills_all() {
    in_time("a buffer", || {
        let patience = Duration::from_millis(50);
        let cache = Cache::builder(8 * SIZE).patience(patience).build().unwrap();
        let disk = cache.attach(FileDevice::new(numbered_file()).unwrap()).unwrap();
        let engine = Rc::new(Engine::new().unwrap());
        let _lent = lend_engine(&engine);
        let plug = engine.plug();
        (0..8).for_each(|block| disk.readahead(block..block + 1));
        assert_eq!(disk.get(20).map(drop), Err(GetError::NoFreeBuffers));
        drop(plug);
        engine.drain().unwrap();
        assert_eq!(disk.get(20).unwrap()[0], 20);
    });
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("as it was told to");
    }
}

#[test]
fn a_waker_that_panics_keeps_no_task_asleep() {
    let (kept, cache, disk) = kept(8);
    let panics = Waker::from(Arc::new(Panics));
    let woken = Arc::new(WakeCount::default());
    let mut tasks = [1, 1].map(|block| Box::pin(disk.get_async(block)));
    for (task, waker) in tasks.iter_mut().zip([panics.clone(), Waker::from(Arc::clone(&woken))]) {
        assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    fill(take(&kept));
    assert_eq!(woken.count(), 1);
    // Nor does it end the thread that reads for tasks: the device blocks.
    let slow = FaultDevice::new(MemoryDevice::new(vec![7; 8 * SIZE]));
    slow.inject(Operation::Read, .., Fault::Delay(Duration::from_millis(20)));
    let disk = cache.attach(slow).unwrap();
    for block in 0..3 {
        let mut task = Box::pin(disk.get_async(block));
        assert!(task.as_mut().poll(&mut Context::from_waker(&panics)).is_pending());
        in_time("a read after a panic", {
            let disk = disk.clone();
            move || drop(block_on(disk.get_async(block)).unwrap())
        });
    }
}

/// Hands the reads of a device to threads of its own, which have the blocking method called.
struct HandedOver(FaultDevice<MemoryDevice>);

impl BlockDevice for HandedOver {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        thread::sleep(Duration::from_millis(30)); // so that the requester sleeps
        self.0.read(offset, buf)
    }

    fn begin_read(&self, load: Load) {
        assert!(load.is_blocking());
        thread::spawn(move || {
            let is_blocking = load.is_blocking();
            load.defer();
            assert!(!is_blocking, "that thread does not wait for it");
        });
    }
}

#[test]
fn inv02_a_thread_is_woken_by_a_load_that_another_thread_defers() {
    in_time("a load", || {
        let device = FaultDevice::new(MemoryDevice::new(vec![5; 8 * SIZE]));
        device.inject_at(Operation::Read, 0..SIZE as u64, Fault::Error(libc::EIO));
        let cache = Cache::new(1 << 20).unwrap();
        let disk = cache.attach(HandedOver(device)).unwrap();
        assert_eq!(disk.get(1).unwrap()[0], 5);
        assert_eq!(disk.get(0).err(), Some(GetError::Io { errno: libc::EIO, block: 0 }));
    });
}
