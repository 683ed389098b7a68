//! When a device may be attached again: once nothing of it is in flight.

use std::io::ErrorKind;
use std::mem::take;
use std::sync::atomic::Ordering::SeqCst;

use bufcache::Bypass;

use crate::world::*;

const SIZE: usize = 512;
const BUFFERS: usize = 64;
/// The cache's patience.
const SHORT: Duration = Duration::from_millis(300);

/// A cache, and a device that keeps the operations which it begins.
fn new(write_back_after: Duration) -> (Cache, Arc<KeptDevice>) {
    let builder = Cache::builder(BUFFERS * SIZE).block_size(SIZE);
    let builder = builder.dirty_limits(100, 100).write_back_after(write_back_after);
    let mut disk = KeptDevice::new(2 * BUFFERS * SIZE);
    disk.identity = Some((1, 2));
    (builder.patience(SHORT).build().unwrap(), Arc::new(disk))
}

fn attach(cache: &Cache, disk: &Arc<impl BlockDevice>) -> Result<Device, BuildError> {
    cache.attach_with(Arc::clone(disk), AttachOptions::new().on_loss(|_| {}))
}

fn is_attached(cache: &Cache, disk: &Arc<impl BlockDevice>) -> bool {
    matches!(attach(cache, disk), Err(BuildError::Attached))
}

type Hung = (Cache, Arc<FaultDevice<KeptDevice>>, Arc<AtomicBool>);

/// The cleaner writes in its first round, when all blocks are dirty, and the device does not answer. Then the last
/// handle is dropped; the device panics at the writes of its thread.
fn dropped_while_it_writes() -> Hung {
    let (cache, kept) = new(Duration::ZERO);
    let disk = Arc::new(FaultDevice::new(Arc::into_inner(kept).unwrap()));
    let [hung, waits] = [true, false].map(|flag| Arc::new(AtomicBool::new(flag)));
    let (is_hung, is_waiting) = (Arc::clone(&hung), Arc::clone(&waits));
    disk.on_operation(move |operation, _| {
        if operation == Operation::Write && is_hung.load(SeqCst) {
            assert_eq!(thread::current().name(), Some("bufcache"), "as it is told to");
            is_waiting.store(true, SeqCst);
            wait_for("the device", || !is_hung.load(SeqCst));
        }
    });
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    let options = AttachOptions::new().on_loss(move |error| *tell.lock().unwrap() = Some(error));
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    for block in 0..BUFFERS as u64 {
        device.create(block).unwrap().fill(2);
    }
    wait_for("a write that hangs", || waits.load(SeqCst));
    let start = Instant::now();
    drop(device);
    let most = 30 * SHORT; // one patience for each block would be 64
    assert!(start.elapsed() < most, "the drop waits for each block: {:?}", start.elapsed());
    let told = told.lock().unwrap().take();
    // The thread that drops the handle writes what became dirty after the cleaner had begun.
    let expected = matches!(told, Some(WriteError::Busy { .. } | WriteError::Panicked { .. }));
    assert!(expected, "{told:?}");
    (cache, disk, hung)
}

/// The device has no handle any more, and its blocks were told to be lost: their buffers are of use again.
fn check_that_nothing_is_dirty(cache: &Cache, disk: &Arc<impl BlockDevice>) {
    wait_for("the end of the operation", || attach(cache, disk).is_ok());
    assert_eq!(cache.stats().dirty, 0);
    let device = attach(cache, disk).unwrap();
    let got: Vec<_> = (0..BUFFERS as u64).map(|block| device.get(block)).collect();
    assert!(got.iter().all(|got| got.as_ref().is_ok_and(|bytes| bytes[0] == 1)));
}

#[test]
fn inv23_a_device_is_attached_again_only_after_its_last_write_has_ended() {
    let (cache, disk, hung) = dropped_while_it_writes();
    assert!(is_attached(&cache, &disk));
    hung.store(false, SeqCst);
    wait_for("the end of the last write", || attach(&cache, &disk).is_ok());
    let device = attach(&cache, &disk).unwrap();
    assert_eq!(device.get(0).unwrap()[0], 2, "the old write came first");
    device.get_mut(0).unwrap().fill(3);
    device.sync().unwrap();
    let mut bytes = [0; SIZE];
    disk.read(0, &mut bytes).unwrap();
    assert_eq!(bytes[0], 3);
}

#[test]
fn inv23_a_write_that_fails_after_the_last_handle_leaves_nothing_dirty() {
    let (cache, disk, hung) = dropped_while_it_writes();
    disk.inject(Operation::Write, .., Fault::Error(libc::EIO));
    hung.store(false, SeqCst);
    check_that_nothing_is_dirty(&cache, &disk);
}

/// Two discards, of which the second waits for the first. Their tasks are gone at once.
fn discard(device: &Device) -> Option<Bypass> {
    for _ in 0..2 {
        let discard = pin!(device.discard_async(0..8));
        assert!(discard.poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    None
}

/// Each operation that is in flight when the last handle goes, and that fails after that.
#[test]
fn inv23_an_operation_keeps_the_device_attached_and_leaves_nothing_dirty() {
    type Begin = fn(&Device) -> Option<Bypass>;
    let begins: [Begin; 3] = [
        discard,
        |device| device.try_bypass(0..8).unwrap(),
        |device| {
            device.readahead(100..101);
            None
        },
    ];
    for begin in begins {
        let (cache, disk) = new(Duration::from_secs(3600));
        let device = attach(&cache, &disk).unwrap();
        (0..8).for_each(|block| device.create(block).unwrap().fill(2));
        disk.refuse(0..u64::MAX, libc::EIO);
        let bypass = begin(&device);
        drop(device);
        assert!(is_attached(&cache, &disk));
        if let Some(bypass) = bypass {
            bypass.finish(Err(ErrorKind::Other.into())).unwrap_err();
        }
        drop((take(&mut *disk.loads.lock()), take(&mut *disk.ranges.lock())));
        assert!(disk.ranges.lock().is_empty(), "the second begins though the device is gone");
        disk.does(Begun::Deferred);
        check_that_nothing_is_dirty(&cache, &disk);
    }
}
