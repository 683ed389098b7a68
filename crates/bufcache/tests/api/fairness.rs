//! One device that is full or hangs, beside others in the same cache.

use crate::world::*;

/// Blocks of the cache, and of each device four times as many.
const BLOCKS: usize = 64;
/// How long a thread waits for a buffer of the device that is full or hangs.
const PATIENCE: Duration = Duration::from_secs(6);
/// How long an operation on another device may take: much longer than one in memory, and less than a wait.
const FAST: Duration = Duration::from_secs(4);

fn cache() -> Cache {
    let builder = Cache::builder(BLOCKS * SIZE).block_size(SIZE);
    builder.patience(PATIENCE).build().unwrap()
}

fn memory() -> MemoryDevice {
    MemoryDevice::new(vec![1; 4 * BLOCKS * SIZE])
}

fn disk() -> Disk {
    Arc::new(FaultDevice::new(memory()))
}

/// Three devices: two in memory, to be written and to be read, besides the one in question. Returns the most
/// buffers that this one may have dirty: half if the others have wanted some before it, else three quarters
/// (the usual limit) and the one at which it is noticed.
fn others(cache: &Cache, came_before: bool) -> ([Device; 2], usize) {
    let devices = [(); 2].map(|()| cache.attach(memory()).unwrap());
    if came_before {
        devices.iter().for_each(|device| drop(device.get(0).unwrap()));
    }
    (devices, if came_before { BLOCKS / 2 } else { BLOCKS * 3 / 4 + 1 })
}

/// Writes to every block of a healthy device and reads every block of another, each within [`FAST`].
fn others_are_fast(written: &Device, read: &Device) {
    for round in 0..2 {
        for block in 0..written.blocks() {
            let began = Instant::now();
            written.get_mut(block).expect("a healthy device").fill(round);
            assert!(began.elapsed() < FAST, "a write took {:?}", began.elapsed());
            let began = Instant::now();
            assert_eq!(read.get(block).expect("a device that is read")[0], 1);
            assert!(began.elapsed() < FAST, "a read took {:?}", began.elapsed());
        }
    }
}

#[test]
fn inv25_a_full_device_delays_no_other() {
    [true, false].into_iter().for_each(beside_a_full_device);
}

fn beside_a_full_device(others_came_before: bool) {
    let cache = cache();
    let disk = disk();
    let full = cache.attach(Arc::clone(&disk)).unwrap();
    let ([written, read], most) = others(&cache, others_came_before);
    disk.inject(Operation::Write, .., Fault::Error(libc::ENOSPC));
    let refused = (0..full.blocks()).find_map(|block| {
        if block as usize >= most - 1 {
            // At the limit the cleaner has written, and has noticed that the device fails: a guard of a block
            // waits for its write.
            wait_for("the cleaner", || disk.count(Operation::Write) > 0);
            (0..block).for_each(|dirty| drop(full.get_mut(dirty).unwrap()));
        }
        match full.get_mut(block) {
            Ok(mut guard) => {
                guard.fill(7);
                None
            }
            Err(error) => Some((block, error)),
        }
    });
    let (dirty, error) = refused.expect("a limit");
    assert!(dirty > 0 && dirty as usize <= most, "{dirty} of {BLOCKS} buffers are dirty");
    assert_eq!(error, GetError::Io { errno: libc::ENOSPC, block: dirty });
    others_are_fast(&written, &read);
    // Its reads go on, and so do writes to what is dirty already.
    assert_eq!((full.get(0).unwrap()[0], full.get(dirty).unwrap()[0]), (7, 1));
    full.get_mut(0).unwrap().fill(8);
    // Past the cache it meets its error, or succeeds; then it may have buffers again.
    assert!(full.write_around(dirty, &[9; SIZE]).is_err());
    disk.heal();
    full.write_around(dirty, &[9; SIZE]).unwrap();
    full.get_mut(dirty + 1).unwrap().fill(10);
    full.sync().unwrap_or_else(|error| assert!(error.to_string().contains("earlier"), "{error}"));
    let values = [0, 1, dirty, dirty + 1].map(|block| full.get(block).unwrap()[0]);
    assert_eq!(values, [8, 7, 9, 10]);
}

#[test]
fn inv25_a_device_that_hangs_delays_no_other() {
    [true, false].into_iter().for_each(beside_a_device_that_hangs);
}

fn beside_a_device_that_hangs(others_came_before: bool) {
    let cache = cache();
    let disk = disk();
    let hung = cache.attach(Arc::clone(&disk)).unwrap();
    let held = disk.hold(Operation::Write);
    let ([written, read], most) = others(&cache, others_came_before);
    thread::scope(|scope| {
        let held = held; // dropped before the threads are joined, also where a check fails
        // It dirties as many buffers as it gets, and then hangs, or is refused.
        let writer = scope.spawn(|| {
            (0..hung.blocks()).find(|&block| {
                if block as usize >= most - 1 {
                    wait_for("the cleaner", || disk.count(Operation::Write) > 0);
                }
                match hung.get_mut(block) {
                    Ok(mut guard) => {
                        guard.fill(7);
                        false
                    }
                    Err(_) => true,
                }
            })
        });
        wait_for("the cleaner", || disk.count(Operation::Write) > 0);
        thread::sleep(Duration::from_millis(500)); // the writer dirties what it may, or hangs, too
        let dirty = cache.stats().dirty / SIZE;
        assert!((1..=most).contains(&dirty), "{dirty} of {BLOCKS} buffers are dirty");
        others_are_fast(&written, &read);
        drop(held);
        writer.join().unwrap();
    });
    hung.sync().unwrap();
    assert_eq!(hung.get(0).unwrap()[0], 7);
}

/// Also to those that have asked for nothing yet.
#[test]
fn inv25_reads_that_hang_leave_the_others_their_share() {
    let readahead = |hung: &Device, block| hung.readahead(block..block + 1);
    let get = |hung: &Device, block| {
        let mut get = Box::pin(hung.get_async(block));
        let is_pending = get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
        assert_eq!(is_pending, block as usize <= BLOCKS / 3);
    };
    let claim = |hung: &Device, block| std::mem::forget(hung.claim(block).unwrap());
    type Read<'r> = &'r dyn Fn(&Device, u64);
    let ways: [(&str, Read<'_>); 3] =
        [("readahead", &readahead), ("get_async", &get), ("claim", &claim)];
    for ((way, read), came_before) in ways.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let cache = cache();
        let keeps = Arc::new(KeptDevice::new(4 * BLOCKS * SIZE));
        let hung = cache.attach(Arc::clone(&keeps)).unwrap();
        let ([written, other], _) = others(&cache, came_before);
        (0..BLOCKS as u64).for_each(|block| read(&hung, block));
        let held = (0..BLOCKS as u64).filter(|&block| hung.is_cached(block)).count();
        assert_eq!(held, BLOCKS / 3 + 1, "by {way}");
        others_are_fast(&written, &other);
        assert!(block_on(other.get_async(0)).is_ok());
    }
}

/// Idle devices cost a busy one at most three shares, and a device that is alone has all buffers: those that were
/// there before cost nothing.
#[test]
fn inv25_idle_devices_leave_a_busy_one_a_quarter() {
    for (idle, most) in [(0, BLOCKS), (1, BLOCKS / 2), (3, BLOCKS / 4), (50, BLOCKS / 4)] {
        let cache = cache();
        drop(others(&cache, true));
        let keeps = Arc::new(KeptDevice::new(4 * BLOCKS * SIZE));
        let busy = cache.attach(Arc::clone(&keeps)).unwrap();
        let _idle: Vec<_> = (0..idle).map(|_| cache.attach(memory()).unwrap()).collect();
        (0..BLOCKS as u64).for_each(|block| busy.readahead(block..block + 1));
        assert_eq!(keeps.loads.lock().len(), most, "beside {idle} idle devices");
        keeps.loads.lock().clear();
    }
}

/// Two devices with faults that can be chosen, so that the limits of several devices hold.
fn failing() -> (Cache, Disk, [Device; 2]) {
    let cache = cache();
    let disk = disk();
    let options = || AttachOptions::new().on_loss(|_| {});
    let one = cache.attach_with(Arc::clone(&disk), options()).unwrap();
    let other = cache.attach_with(memory(), options()).unwrap();
    (cache, disk, [one, other])
}

#[test]
fn inv25_a_failing_device_without_dirty_buffers_may_have_one() {
    let (_cache, disk, [device, _other]) = failing();
    disk.inject_at(Operation::Write, 0..SIZE as u64, Fault::Error(libc::EIO));
    device.get_mut(0).unwrap().fill(7);
    assert!(device.flush().is_err());
    assert_eq!(device.get_mut(1).err(), Some(GetError::Io { errno: libc::EIO, block: 1 }));
    device.try_bypass(2..3).unwrap().expect("no block is in the way").finish(Ok(())).unwrap();
    drop(device.get_mut(1).expect("a write past the cache has succeeded"));
    assert!(device.flush().is_err());
    assert_eq!(device.get_mut(1).err(), Some(GetError::Io { errno: libc::EIO, block: 1 }));
    device.invalidate(0).unwrap();
    device.get_mut(1).expect("no write has failed that is still owed").fill(7);
    assert!(device.sync().is_err(), "it tells of the earlier error");
    device.sync().unwrap();
}

/// One device's blocks are written without a sync.
#[test]
fn inv25_three_devices_that_hang_do_not_keep_the_cleaner_from_others() {
    let builder = Cache::builder(BLOCKS * SIZE).block_size(SIZE);
    let cache = builder.patience(PATIENCE).write_back_after(Duration::ZERO).build().unwrap();
    let disks = [(); 3].map(|()| disk());
    let hung = disks.each_ref().map(|disk| cache.attach(Arc::clone(disk)).unwrap());
    let healthy = cache.attach(memory()).unwrap();
    let held = disks.each_ref().map(|disk| disk.hold(Operation::Write)); // dropped before the devices
    for device in &hung {
        device.get_mut(0).unwrap().fill(7);
    }
    thread::sleep(Duration::from_millis(500)); // the cleaner is at them
    for block in 0..3 {
        healthy.get_mut(block).unwrap().fill(7);
        wait_for("a write to the healthy device", || !healthy.is_newer(0..3));
    }
    drop(held);
    wait_for("writes to the others", || cache.stats().dirty == 0);
}

/// The thread that waits for the next round takes the load.
#[test]
fn inv25_a_load_that_takes_long_does_not_keep_the_cleaner_from_its_device() {
    let builder = Cache::builder(BLOCKS * SIZE).block_size(SIZE);
    let cache = builder.write_back_after(Duration::ZERO).build().unwrap();
    let disk = disk();
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    let _held = disk.hold(Operation::Read); // dropped before the device
    device.create(0).unwrap().fill(7);
    device.readahead(1..2);
    wait_for("the cleaner", || cache.stats().dirty == 0);
}
