//! Calls that block, as tasks make them.

use std::pin::Pin;
use std::sync::mpsc::channel;

use bufcache::OwnedWriteGuard;

use crate::world::*;

/// A call that waits for the holder of a block takes the patience of [`new`].
const FAST: Duration = Duration::from_secs(30);

fn begin(future: impl Future) {
    // The call may have ended already: a thread of the cache makes it.
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}

/// A call by a thread of the cache reports for the handle that made it.
#[test]
fn inv17_a_call_is_told_of_a_write_error_once() {
    let (_cache, device, disk) = new();
    let (caller, other) = (device.clone(), device.clone());
    device.create(1).unwrap().fill(2);
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    device.flush().unwrap_err();
    let sync = |device: &Device| block_on(device.call_async(|device| device.sync()));
    assert_eq!(sync(&device), Ok(()), "the handle was told");
    assert_eq!(sync(&caller), Err(WriteError::Earlier { errno: libc::ENOSPC }));
    assert_eq!((sync(&caller), caller.sync()), (Ok(()), Ok(())));
    block_on(other.call_async(|device| drop(device.get(0).unwrap()))); // which reports nothing
    assert_eq!(other.sync(), Err(WriteError::Earlier { errno: libc::ENOSPC }));
    assert_eq!(sync(&other), Ok(()));
}

/// It is long enough for what happens before its end, also on a busy machine.
#[test]
fn two_waits_of_one_task_of_which_one_ends_early_leave_the_other_its_time() {
    let (_cache, device, _disk) = patient(Duration::from_secs(1), 16, AttachOptions::new());
    let device = &device;
    let get = |block| -> Got<'_> { Box::pin(async move { device.get_async(block).await.err() }) };
    let (mut ends, mut waits) = (get(2), get(1));
    let woken = WakeCount::new();
    let waker = woken.waker();
    let mut context = Context::from_waker(&waker);
    let first = device.get_mut(1).unwrap();
    let second = block_on(device.get_mut_async(2)).unwrap();
    assert!(ends.as_mut().poll(&mut context).is_pending());
    assert!(waits.as_mut().poll(&mut context).is_pending());
    drop(second);
    assert_eq!(ends.as_mut().poll(&mut context), Poll::Ready(None));
    let before = woken.count();
    wait_for("the end of the patience", || woken.count() > before);
    assert_eq!(waits.as_mut().poll(&mut context), Poll::Ready(Some(GetError::Busy)));
    drop(first);
}

/// Its wait for a guard and the one for the pin that the guard becomes end before a wait that begins with the pin.
#[test]
fn a_task_that_waits_for_a_guard_and_then_for_its_pin_has_one_patience() {
    let (_cache, device, _disk) = patient(Duration::from_millis(100), 16, AttachOptions::new());
    let (mut waits, mut later) = (count_at(&device, 1), count_at(&device, 2));
    let mut context = Context::from_waker(Waker::noop());
    let guard = device.get(1).unwrap();
    let _other = block_on(device.get_async(2)).unwrap();
    assert!(waits.as_mut().poll(&mut context).is_pending());
    thread::sleep(Duration::from_millis(10));
    let _pin = guard.pin().unwrap();
    drop(guard);
    assert!(later.as_mut().poll(&mut context).is_pending());
    wait_for("the later end", || later.as_mut().poll(&mut context).is_ready());
    assert_eq!(waits.as_mut().poll(&mut context), Poll::Ready(Some(GetError::Busy)));
}

type Got<'d> = Pin<Box<dyn Future<Output = Option<GetError>> + 'd>>;

/// Locks a block as a task, and counts there.
fn count_at(device: &Device, block: u64) -> Got<'_> {
    Box::pin(async move {
        match device.get_mut_async(block).await {
            Ok(mut guard) => guard[0] += 1,
            Err(error) => return Some(error),
        }
        None
    })
}

/// More tasks than a device has threads for calls wait for one block: the calls of its holder run.
#[test]
fn inv25_tasks_that_wait_for_a_block_leave_the_threads_to_its_holder() {
    const TASKS: usize = 40;
    let (_cache, device, _disk) = new();
    drop(device.get(0).unwrap());
    let calls = || {
        let began = Instant::now();
        block_on(device.create_async(1)).unwrap().fill(2);
        assert_eq!(block_on(device.call_async(|device| device.blocks())), 64);
        assert_eq!(block_on(device.get_async(2)).unwrap()[0], 1);
        assert!(began.elapsed() < FAST, "they waited: {:?}", began.elapsed());
    };
    for by_pin in [false, true] {
        let hold = || {
            let guard = (!by_pin).then(|| block_on(device.get_mut_async(0)).unwrap());
            (guard, by_pin.then(|| block_on(device.get_async(0)).unwrap()))
        };
        // Each on a thread of its own, beside threads that block.
        let held = hold();
        let (tell, told) = channel();
        thread::scope(|scope| {
            for _ in 0..TASKS {
                let (device, tell) = (device.clone(), tell.clone());
                scope.spawn(move || {
                    let mut task = count_at(&device, 0);
                    let mut context = Context::from_waker(Waker::noop());
                    assert!(task.as_mut().poll(&mut context).is_pending());
                    tell.send(()).unwrap();
                    assert_eq!(block_on(task), None);
                });
            }
            for _ in 0..4 {
                scope.spawn(|| device.get_mut(0).unwrap()[0] += 1);
            }
            (0..TASKS).for_each(|_| told.recv().unwrap());
            calls();
            drop(held);
        });
    }
    assert_eq!(usize::from(device.get(0).unwrap()[0]), 1 + 2 * TASKS + 2 * 4);
}

/// Calls occupy all threads that a device may have. Each task holds a block while it creates another.
#[test]
fn inv25_tasks_that_create_a_block_leave_the_threads_to_its_holder() {
    const TASKS: usize = 40;
    const CALLS: usize = 16;
    let (_cache, device, _disk) = new();
    let gate = Arc::new(Barrier::new(CALLS + 1));
    for _ in 0..CALLS {
        let gate = Arc::clone(&gate);
        begin(device.call_async(move |_| gate.wait().is_leader()));
    }
    thread::scope(|scope| {
        for _ in 0..TASKS {
            scope.spawn(|| {
                block_on(async {
                    let mut guard = device.create_async(0).await.unwrap();
                    device.create_async(1).await.unwrap().fill(2);
                    guard.fill(1);
                });
            });
        }
    });
    block_on(device.close_async()).unwrap(); // needs no thread for a call, either
    gate.wait();
    assert_eq!(device.get(0).unwrap()[SIZE - 1], 1);
}

/// Threads make sixteen calls that wait for a sync, and the task whose turn the sync is needs a
/// thread to ask the device.
#[test]
fn inv23_calls_that_wait_for_a_sync_leave_a_thread_to_it() {
    const CALLS: usize = 16;
    let (_cache, device, disk) = new();
    for round in 0..10 {
        disk.inject_next(Operation::Sync, Fault::Delay(Duration::from_millis(50)));
        let (before, (tell, told)) = (disk.count(Operation::Sync), channel());
        let first = device.clone();
        let first = thread::spawn(move || block_on(first.sync_async()));
        wait_for("the first sync", || disk.count(Operation::Sync) > before);
        let second = device.clone();
        let mut second = Box::pin(async move { second.sync_async().await });
        assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        for _ in 0..CALLS {
            let tell = tell.clone();
            begin(device.call_async(move |device| tell.send(device.sync())));
        }
        for _ in 0..CALLS {
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(Ok(())), "round {round}");
        }
        assert_eq!(block_on(second), Ok(()));
        assert_eq!(first.join().unwrap(), Ok(()));
    }
}

/// The drop of a guard wakes the task that is next, not each task that waits.
#[test]
fn tasks_get_a_block_in_the_order_in_which_they_came() {
    const TASKS: usize = 50;
    let (_cache, device, _disk) = new();
    let mut held = block_on(device.create_async(0)).unwrap();
    type Locks<'d> = Pin<Box<dyn Future<Output = Result<OwnedWriteGuard, GetError>> + 'd>>;
    let new = |_| -> (Locks<'_>, _) { (Box::pin(device.get_mut_async(0)), WakeCount::new()) };
    let mut tasks: Vec<_> = (0..TASKS).map(new).collect();
    let poll = |(task, woken): &mut (Locks<'_>, Arc<WakeCount>)| {
        task.as_mut().poll(&mut Context::from_waker(&woken.waker()))
    };
    assert!(tasks.iter_mut().all(|task| poll(task).is_pending()));
    for at in 0..TASKS {
        drop(held);
        let Poll::Ready(guard) = poll(&mut tasks[at]) else { panic!("task {at} waits") };
        held = guard.unwrap();
        let next = tasks.get_mut(at + 1);
        assert!(next.is_none_or(|next| next.1.count() == 1 && poll(next).is_pending()));
    }
    let counts: usize = tasks.iter().map(|(_, woken)| woken.count()).sum();
    assert_eq!(counts, 2 * TASKS - 1); // each as the next, and when it has the block
}

/// The first task in line is polled no more. The next one gets the block before its patience is over.
#[test]
fn a_task_that_is_not_polled_keeps_the_block_from_no_other() {
    const PATIENCE: Duration = Duration::from_secs(10);
    let (_cache, device, _disk) = patient(PATIENCE, 16, AttachOptions::new()); // the second waits for a quarter of it
    let held = block_on(device.create_async(0)).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let [mut first, mut second] = [(); 2].map(|()| count_at(&device, 0));
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    drop(held);
    let began = Instant::now();
    assert_eq!(block_on(second), None);
    assert!(began.elapsed() < PATIENCE * 9 / 10, "{:?}", began.elapsed());
    assert_eq!(block_on(first), None);
}

/// The buffer that the pin keeps is not the block's any more.
#[test]
fn a_task_waits_for_no_pin_of_a_block_that_is_invalidated() {
    let (_cache, device, _disk) = new();
    let pin = block_on(device.get_async(0)).unwrap();
    let woken = WakeCount::new();
    let waker = woken.waker();
    let mut task = count_at(&device, 0);
    assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    device.invalidate(0).unwrap();
    assert_eq!(woken.count(), 1);
    assert_eq!(block_on(task), None);
    assert_eq!((pin[0], device.get(0).unwrap()[0]), (1, 2));
}

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future that each wake-up polls, on its own thread; and whether one came during a poll.
struct Inline(Mutex<(Option<Boxed>, bool)>);

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let mut state = self.0.lock().unwrap();
        state.1 = true;
        let Some(mut future) = state.0.take() else { return };
        let waker = Waker::from(Arc::clone(&self));
        while state.1 {
            state.1 = false;
            drop(state);
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return;
            }
            state = self.0.lock().unwrap();
        }
        state.0 = Some(future);
    }
}

/// Each of many tasks is polled where the one before drops its guard: not all of them on one stack.
#[test]
fn tasks_that_are_polled_where_they_are_woken_do_not_overflow_the_stack() {
    const TASKS: usize = 20_000;
    let (_cache, device, _disk) = patient(Duration::from_secs(600), 16, AttachOptions::new());
    let pin = block_on(device.get_async(0)).unwrap();
    let (tell, told) = channel();
    for _ in 0..TASKS {
        let (device, tell) = (device.clone(), tell.clone());
        let locks = async move { tell.send(device.get_mut_async(0).await.err()).unwrap() };
        Arc::new(Inline(Mutex::new((Some(Box::pin(locks)), false)))).wake();
    }
    drop(pin);
    (0..TASKS).for_each(|_| assert_eq!(told.recv().unwrap(), None));
}

/// A thread that waited for the block by a pin has it when the drop of that pin wakes the task: that
/// is no guard of the task's own.
#[test]
fn a_writer_is_not_refused_where_a_reader_wakes_it() {
    let (cache, device, _disk) = new();
    for round in 0..50 {
        let guard = device.create(0).unwrap();
        thread::scope(|scope| {
            let waited = cache.stats().waited;
            let reads = scope.spawn(|| drop(device.get(0).unwrap()));
            wait_for("the reader", || cache.stats().waited > waited);
            let (tell, told) = channel();
            let device = device.clone();
            let locks = async move { tell.send(device.get_mut_async(0).await.err()).unwrap() };
            Arc::new(Inline(Mutex::new((Some(Box::pin(locks)), false)))).wake();
            drop(guard);
            assert_eq!(told.recv().unwrap(), None, "round {round}");
            reads.join().unwrap();
        });
    }
}

#[test]
fn inv25_calls_of_a_device_that_hangs_delay_no_other() {
    let (cache, device, disk) = new();
    let hangs = disk.hold(Operation::Sync);
    for _ in 0..40 {
        begin(device.sync_async());
    }
    let other = cache.attach(MemoryDevice::new(vec![1; 64 * SIZE])).unwrap();
    let began = Instant::now();
    block_on(async {
        other.create_async(1).await.unwrap().fill(2);
        other.sync_async().await.unwrap();
        assert_eq!(other.get_async(2).await.unwrap()[0], 1);
    });
    assert!(began.elapsed() < FAST, "they waited: {:?}", began.elapsed());
    drop(hangs);
}

/// Its block was not there, so the call takes a buffer that has the bytes of another block.
#[test]
fn inv03_a_create_whose_task_is_gone_leaves_zeros() {
    let (_cache, device, _disk) = new();
    for block in 0..16 {
        device.create(block).unwrap().fill(7);
    }
    device.sync().unwrap();
    for block in 16..32 {
        begin(device.create_async(block));
        wait_for("the create", || device.is_cached(block));
        assert!(device.get(block).unwrap().iter().all(|&byte| byte == 0), "block {block}");
    }
    device.sync().unwrap();
    device.invalidate(16).unwrap();
    assert!(device.get(16).unwrap().iter().all(|&byte| byte == 0), "it was clean");
}

/// No thread needs a buffer, and the cleaner has nothing to do for an hour.
#[test]
fn inv26_tasks_that_only_write_wait_for_the_device() {
    for create in [false, true] {
        let (cache, device, _disk) = new();
        for block in 0..64 {
            let guard = block_on(async {
                if create {
                    device.create_async(block).await
                } else {
                    device.get_mut_async(block).await
                }
            });
            guard.unwrap_or_else(|error| panic!("block {block}: {error}")).fill(7);
        }
        assert_eq!(cache.stats().get, 64);
    }
}

/// Runs a job once when it is woken.
struct Does(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Does {
    fn wake(self: Arc<Self>) {
        let job = self.0.lock().unwrap().take();
        job.into_iter().for_each(|job| job());
    }
}

/// A block that a discard waits for is modified before the discard looks at it again.
#[test]
fn inv17_a_discard_that_fails_keeps_what_was_written_while_it_waited() {
    for how in ["discard", "zero"] {
        let (cache, device, disk) = new();
        device.create(0).unwrap()[0] = 5;
        // The lock of block 0 waits for a pin. So it is woken when the discard takes its mark off
        // block 0, to wait for the load of block 1.
        let pin = block_on(device.get_async(0)).unwrap();
        let load = device.claim(1).unwrap().unwrap();
        let of = device.clone();
        let job = move || {
            load.finish(Ok(SIZE));
            of.get_mut(1).unwrap()[0] = 7;
        };
        let does = Arc::new(Does(Mutex::new(Some(Box::new(job)))));
        let waker = Waker::from(Arc::clone(&does));
        let mut lock = Box::pin(device.get_mut_async(0));
        assert!(lock.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        disk.inject_next(Operation::Discard, Fault::Error(libc::EIO));
        disk.inject_next(Operation::Zero, Fault::Error(libc::EIO));
        let failed = block_on(async {
            match how {
                "discard" => device.discard_async(0..2).await,
                _ => device.zero_async(0..2).await,
            }
        });
        assert_eq!(failed, Err(WriteError::Io { errno: libc::EIO, block: 0 }));
        assert!(does.0.lock().unwrap().is_none(), "block 1 was modified meanwhile");
        assert_eq!(cache.stats().dirty, 2 * SIZE, "{how}: both blocks are dirty still");
        assert_eq!(device.get(1).unwrap()[0], 7);
        drop((lock, pin));
    }
}

type Task<'d> = Pin<Box<dyn Future<Output = ()> + 'd>>;
type Begin = for<'d> fn(&'d Device) -> Task<'d>;

fn task<'d, T>(future: impl Future<Output = T> + 'd) -> Task<'d> {
    Box::pin(async { drop(future.await) })
}

/// Polls once. Returns whether the task waits.
fn is_pending(task: &mut Task<'_>, woken: &Arc<WakeCount>) -> bool {
    let waker = woken.waker();
    task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
}

/// The device of a close that fails without its task is dropped by the thread that ends the
/// operations of the device, which must not wait for the next one.
#[test]
fn inv23_the_thread_that_ends_a_close_does_not_wait_for_the_device() {
    let (_cache, disk, hung) = kept(LONG);
    let _releases = Releases(&hung);
    block_on(disk.create_async(1)).unwrap().fill(7);
    let mut close = task(async move { disk.close_async().await });
    assert!(is_pending(&mut close, &WakeCount::new()));
    drop(close);
    hung.refuse(0..u64::MAX, libc::EIO);
    assert_eq!(hung.end_writes(), 1);
    hung.refuse(0..0, 0);
    assert_eq!(hung.end_syncs(), 1);
    wait_for("the drop of the device", || Arc::strong_count(&hung) == 1);
    assert_eq!(hung.blocked(), ["bufcache"]);
    let mut bytes = [0; SIZE];
    hung.read(SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes, [7; SIZE]);
}

/// Returns the time that this thread has run: other programs do not change it.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call stores one `timespec` to `time`.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the time that `count` tasks take to begin a wait and to be woken.
fn wake(count: usize, wait: Begin) -> Duration {
    let (_cache, disk, hung) = &kept(10 * LONG);
    let _releases = Releases(hung);
    let written = block_on(disk.create_async(1)).unwrap();
    let mut discard = task(disk.discard_async(2..3));
    assert!(is_pending(&mut discard, &WakeCount::new()));
    let woken: Vec<_> = (0..count).map(|_| WakeCount::new()).collect();
    let began = cpu_time();
    let mut waits: Vec<_> = woken.iter().map(|_| wait(disk)).collect();
    for (wait, woken) in waits.iter_mut().zip(&woken) {
        assert!(is_pending(wait, woken));
    }
    drop(written);
    hung.release();
    let time = cpu_time() - began;
    assert!(woken.iter().all(|woken| woken.count() > 0));
    time
}

/// Sixteen times as many tasks take sixteen times as long, not 256 times.
#[test]
fn a_wake_up_costs_what_it_wakes() {
    let waits: [(&str, Begin); 3] = [
        ("a load", |disk| task(disk.get_async(0))),
        ("a writer", |disk| task(disk.get_async(1))),
        ("a discard", |disk| task(disk.get_async(2))),
    ];
    for (what, wait) in waits {
        let least = |count| (0..3).map(|_| wake(count, wait)).min().unwrap();
        let (few, many) = (least(1_000), least(16_000));
        assert!(many < 64 * few, "{what}: {few:?} for 1,000 tasks, {many:?} for 16,000");
    }
}
