//! Write-back and syncs of tasks: no thread of the cache has a part in those of a device that begins its operations.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::{fs, mem};

use bufcache::DeviceChange;

use crate::world::*;

const SIZE: usize = 4096;

fn new() -> KeptDevice {
    let mut kept = KeptDevice::new(1024 * SIZE);
    kept.reads = true;
    kept
}

fn attach(patience: Duration) -> (Cache, Device, Arc<KeptDevice>) {
    attach_kept(patience, new())
}

fn attach_kept(patience: Duration, kept: KeptDevice) -> (Cache, Device, Arc<KeptDevice>) {
    let builder = Cache::builder(512 * SIZE).write_back_after(Duration::from_secs(3600));
    let cache = builder.dirty_limits(100, 100).patience(patience).build().unwrap();
    let kept = Arc::new(kept);
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&kept), options).unwrap();
    (cache, device, kept)
}

fn is_ready(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Scattered blocks and one run, as many at once as the device takes, and a sync behind all of them: this thread ends
/// each step, and so makes the next.
#[test]
fn inv20_a_sync_of_a_task_begins_when_its_writes_have_ended() {
    for (depth, expected) in [(0, [32, 32, 32, 5].as_slice()), (60, &[60, 41]), (1 << 20, &[101])] {
        check_batches(depth, expected);
    }
}

fn check_batches(depth: usize, expected: &[usize]) {
    let mut kept = new();
    kept.depth = depth;
    let (cache, device, kept) = attach_kept(Duration::from_secs(5), kept);
    for block in (0..200).step_by(2).chain(300..400) {
        device.create(block).unwrap().fill(2);
    }
    let mut sync = pin!(device.sync_async());
    let mut batches = vec![];
    while !is_ready(sync.as_mut()) {
        let ended = kept.end_writes();
        if ended > 0 {
            batches.push(ended);
        } else {
            assert_eq!(cache.stats().dirty, 0, "a sync before its writes have ended");
            assert_eq!(kept.end_syncs(), 1);
        }
    }
    assert_eq!((&batches[..], cache.stats().write_calls), (expected, 101));
    assert!(kept.blocked().is_empty());
}

/// Of any number that were asked for while one ran, one more is made; writes go on beside it.
#[test]
fn inv20_syncs_of_tasks_share_one_that_began_behind_their_writes() {
    let (cache, device, kept) = attach(Duration::from_secs(5));
    device.create(1).unwrap().fill(2);
    let mut first = pin!(device.sync_async());
    assert!(!is_ready(first.as_mut()));
    assert_eq!(kept.end_writes(), 1);
    assert_eq!(kept.syncs.lock().len(), 1);
    let mut others: Vec<_> = (2..10)
        .map(|block| {
            device.create(block).unwrap().fill(2);
            let mut sync = Box::pin(device.sync_async());
            assert!(!is_ready(sync.as_mut()));
            assert_eq!(kept.end_writes(), 1, "a sync that runs delays no write");
            sync
        })
        .collect();
    assert_eq!(cache.stats().dirty, 0);
    assert_eq!(kept.end_syncs(), 1);
    assert!(is_ready(first.as_mut()));
    assert!(!others.iter_mut().any(|sync| is_ready(sync.as_mut())), "one that ran is not enough");
    assert_eq!(kept.end_syncs(), 1);
    assert!(others.iter_mut().all(|sync| is_ready(sync.as_mut())));
    assert_eq!(cache.stats().syncs, 2);
}

/// A block under its writer does not keep those behind it from the device.
#[test]
fn a_flush_waits_for_a_marked_block_behind_the_writes_of_the_others() {
    let (cache, device, kept) = attach(Duration::from_secs(60));
    (0..20).for_each(|block| device.create(block).unwrap().fill(2));
    let guard = device.get_mut(7).unwrap();
    let mut flush = pin!(device.flush_async());
    assert!(!is_ready(flush.as_mut()));
    assert_eq!(kept.end_writes(), 2, "the blocks before it and those behind it");
    assert!(!is_ready(flush.as_mut()), "the writer has the last block");
    drop(guard);
    while !is_ready(flush.as_mut()) {
        kept.end_writes();
    }
    assert_eq!((cache.stats().write_calls, cache.stats().dirty), (3, 0));
}

/// Whichever comes second waits, or does without; a bypass does not overtake a discard that waits. The thread that
/// ends the one begins the other.
#[test]
fn inv15_a_bypass_and_a_discard_of_a_task_exclude_each_other() {
    let (cache, device, kept) = attach(Duration::from_secs(5));
    let ranges = || kept.ranges.lock().len();
    let bypass = |blocks| device.try_bypass(blocks).unwrap();
    device.create(3).unwrap().fill(2);
    let first = bypass(2..4).expect("nothing is in the way");
    let mut flush = pin!(device.flush_async());
    assert!(!is_ready(flush.as_mut()), "the block is the bypass's");
    let mut discard = pin!(device.discard_async(3..6));
    assert!(!is_ready(discard.as_mut()) && ranges() == 0);
    assert!(bypass(5..6).is_none(), "the discard came before");
    first.finish(Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
    // The flush, woken first, has the block until its write ends.
    assert!(ranges() == 0 && bypass(5..6).is_none());
    assert_eq!(kept.end_writes(), 1);
    assert!(is_ready(flush.as_mut()));
    assert_eq!(ranges(), 1, "the thread that ends the write begins the discard");
    assert!(bypass(5..6).is_none());
    let range = kept.ranges.lock().pop().unwrap();
    range.finish(Ok(()));
    assert!(is_ready(discard.as_mut()));
    bypass(5..6).expect("the range is free").finish(Ok(())).unwrap();
    assert_eq!(cache.stats().dirty, 0);
}

/// The drop of a guard lets the flush go on, whose callback asks for the block: the thread holds no guard any more.
#[test]
fn inv23_a_guard_has_ended_when_its_drop_wakes_a_task() {
    let itself = Arc::new(Mutex::<Option<Device>>::new(None));
    let told = Arc::new(Mutex::new(None));
    let look = {
        let (itself, told) = (Arc::clone(&itself), Arc::clone(&told));
        move |block: u64, _: &[u8]| {
            let device = itself.lock().unwrap().clone();
            let asked = device.map(|device| device.try_get_mut(block).map(drop));
            *told.lock().unwrap() = asked;
            true
        }
    };
    let options = AttachOptions::new().on_loss(|_| {}).before_write(look);
    let kept = Arc::new(new());
    let device = Cache::new(1 << 20).unwrap().attach_with(Arc::clone(&kept), options).unwrap();
    *itself.lock().unwrap() = Some(device.clone());
    device.create(1).unwrap().fill(2);
    let guard = device.get_mut(1).unwrap();
    let mut flush = pin!(device.flush_async());
    assert!(!is_ready(flush.as_mut()));
    *told.lock().unwrap() = None;
    drop(guard);
    assert_eq!(*told.lock().unwrap(), Some(Err(GetError::WouldBlock)), "the device has the block");
    assert_eq!(kept.end_writes(), 1);
    assert!(is_ready(flush.as_mut()));
    *itself.lock().unwrap() = None;
}

struct Log(AtomicUsize, Mutex<Vec<String>>);

impl Wal for Log {
    fn durable(&self) -> u64 {
        self.0.load(SeqCst) as u64
    }

    fn flush(&self, number: u64) -> io::Result<()> {
        self.1.lock().unwrap().push(thread::current().name().unwrap_or_default().into());
        self.0.store(number as usize, SeqCst);
        Ok(())
    }
}

/// The log's flush may block, so a thread of the cache calls it.
#[test]
fn inv16_a_log_is_flushed_beside_the_thread_of_a_task() {
    let log = Arc::new(Log(AtomicUsize::new(0), Mutex::default()));
    let kept = Arc::new(new());
    let options = AttachOptions::new().on_loss(|_| {}).wal(Arc::clone(&log) as _);
    let device = Cache::new(1 << 20).unwrap().attach_with(Arc::clone(&kept), options).unwrap();
    let mut guard = device.create(1).unwrap();
    guard.fill(2);
    guard.set_lsn(7);
    drop(guard);
    let flush = device.flush_async();
    thread::scope(|scope| {
        let ends = scope.spawn(|| testkit::wait::wait_for("it", || kept.end_writes() == 1));
        assert_eq!(block_on(flush), Ok(()));
        ends.join().unwrap();
    });
    assert_eq!(*log.1.lock().unwrap(), ["bufcache"]);
}

fn engine_disk(blocks: u64) -> (tempfile::NamedTempFile, File) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(blocks * SIZE as u64).unwrap();
    let other = file.reopen().unwrap();
    (file, other)
}

/// By the engine of this thread. A blocking call of the same thread meanwhile is refused.
#[test]
fn inv23_a_lent_engine_writes_and_syncs_for_tasks() {
    let (file, other) = engine_disk(1024);
    let cache = Cache::builder(600 * SIZE).dirty_limits(100, 100).build().unwrap();
    let device = cache.attach(FileDevice::new(other).unwrap()).unwrap();
    let engine = Rc::new(Engine::new().unwrap());
    let lent = lend_engine(&engine);
    let wait = |future| engine.block_on(future).unwrap();
    for round in 1..5_u8 {
        for block in (0..1000).step_by(2) {
            device.create(block).unwrap().fill(round);
        }
        let plug = engine.plug(); // only a wait submits
        let mut flush = Box::pin(device.flush_async());
        let begun = is_ready(flush.as_mut());
        assert!(!begun, "the engine has not been turned");
        match round {
            1 => assert_eq!(wait(flush), Ok(())),
            // A writer of the same thread, for a block that is in the thread's own engine.
            2 => assert_eq!(device.get_mut(0).map(drop), Err(GetError::WouldDeadlock)),
            // A blocking sync of the same thread.
            3 => assert_eq!(device.sync(), Err(WriteError::WouldDeadlock { block: None })),
            // A durable write of a task.
            _ => {
                let mut sync = Box::pin(device.write_through_async(0..1));
                let _ = is_ready(sync.as_mut());
                assert_eq!(engine.block_on(sync).unwrap(), Ok(()));
            }
        }
        drop(plug);
        assert_eq!(engine.block_on(device.sync_async()).unwrap(), Ok(()));
        for block in (0..1000).step_by(2) {
            let mut there = [0; 100];
            file.as_file().read_exact_at(&mut there, block * SIZE as u64).unwrap();
            assert_eq!(there, [round; 100], "block {block}");
        }
    }
    let plug = engine.plug();
    let mut discard = Box::pin(device.discard_async(2..4));
    assert!(!is_ready(discard.as_mut()));
    assert_eq!(device.get(2).map(drop), Err(GetError::WouldDeadlock));
    drop(plug);
    assert_eq!(engine.block_on(discard).unwrap(), Ok(()));
    assert_eq!(engine.block_on(device.zero_async(4..1000)).unwrap(), Ok(()));
    assert_eq!(engine.block_on(device.get_async(998)).unwrap().unwrap()[0], 0);
    assert_eq!(engine.block_on(device.sync_async()).unwrap(), Ok(()));
    device.create(5).unwrap().fill(9);
    let before = engine.stats().accepted;
    assert_eq!(engine.block_on(device.write_through_async(5..6)).unwrap(), Ok(()));
    assert_eq!(engine.stats().accepted - before, 2, "a durable write is a write and a sync");
    // What is in an engine that ends is written all the same.
    device.create(1).unwrap().fill(9);
    mem::forget(engine.plug());
    let mut sync = Box::pin(device.sync_async());
    assert!(!is_ready(sync.as_mut()));
    drop((lent, engine));
    assert_eq!(block_on(sync), Ok(()));
    assert_eq!(fs::read(file.path()).unwrap()[SIZE], 9);
    assert_eq!(device.get_mut(1).map(drop), Ok(()), "no mark is left");
}

/// By the device, in reverse, and by the blocking method.
#[test]
fn inv17_the_result_of_a_write_is_that_of_its_block_in_whatever_order_writes_end() {
    let ends: [fn(&KeptDevice, Vec<DeviceChange>); 3] = [
        |kept, writes| writes.into_iter().for_each(|write| kept.end_write(write)),
        |kept, writes| writes.into_iter().rev().for_each(|write| kept.end_write(write)),
        |_, writes| writes.into_iter().rev().for_each(DeviceChange::defer),
    ];
    for (number, end) in ends.into_iter().enumerate() {
        let (_cache, device, kept) = attach(Duration::from_secs(60));
        for block in [1, 3] {
            device.create(block).unwrap().fill(2); // no neighbours: two writes
        }
        kept.refuse(SIZE as u64..2 * SIZE as u64, libc::EIO);
        let mut flush = Box::pin(device.flush_async());
        assert!(!is_ready(flush.as_mut()));
        let writes = mem::take(&mut *kept.writes.lock());
        assert_eq!(writes.len(), 2);
        end(&kept, writes);
        let error = WriteError::Io { errno: libc::EIO, block: 1 };
        assert_eq!(block_on(flush), Err(error), "{number}");
        assert_eq!((device.is_newer(1..2), device.is_newer(3..4)), (true, false), "{number}");
        let mut bytes = [0; SIZE];
        kept.read(3 * SIZE as u64, &mut bytes).unwrap();
        assert_eq!(bytes[0], 2, "{number}");
    }
}
