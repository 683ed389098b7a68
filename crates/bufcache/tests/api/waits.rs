//! What waits for what: each call against each thing that may have its block or its device, made by a thread and by
//! a task; until that thing has ended, for as long as the cache waits, and until the task is gone.
//!
//! A call that does not wait by the table succeeds at once. A call that must not wait is refused where its form that
//! may wait would wait.

use std::fmt;
use std::thread::JoinHandle;

use crate::calls::*;
use crate::world::*;

/// Longer than a thread takes that waits for nothing.
const MOMENT: Duration = Duration::from_millis(10);
/// The patience of a call that is refused.
const SHORT: Duration = Duration::from_millis(60);

/// The calls have to do with block 1.
const AT: At = (1, 0..3);

const CALLS: [Call; 12] = [
    Get,
    GetMut,
    Create,
    Invalidate,
    Flush,
    Sync,
    WriteThrough,
    Discard,
    Zero,
    WriteAround,
    Reset,
    Close,
];

/// The first byte that a get returns, or the name of the error.
type Told = Result<Option<u8>, String>;

fn told(result: Result<Option<u8>, impl fmt::Debug>) -> Told {
    result.map_err(|error| {
        let error = format!("{error:?}");
        let name = error.trim_start_matches("Get(").split([' ', ')']).next();
        name.unwrap_or_default().to_string()
    })
}

/// What a call returns that succeeds where the block has this byte.
fn done(call: Call, byte: u8) -> Told {
    Ok((call == Get).then_some(byte))
}

fn begin(disk: &Device, call: Call, of_task: bool) -> JoinHandle<Told> {
    let disk = disk.clone();
    thread::spawn(move || told(make(&disk, call, AT, of_task)))
}

#[track_caller]
fn end(call: JoinHandle<Told>) -> Told {
    wait_for("the end of the call", || call.is_finished());
    call.join().unwrap()
}

/// What has block 1, or the device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    Loading,
    Claim,
    WriteGuard,
    /// Of a block that is not dirty: no list has it.
    OwnedWriteGuard,
    ReadGuard,
    Pin,
    WriteBack,
    Discarding,
    /// The block is not cached.
    Zeroing,
    Bypass,
    Syncing,
}

use Holder::*;

/// Begins a call of a task that is gone at once.
fn abandon(call: impl Future) {
    assert!(pin!(call).poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

/// Lets the holder have block 1. Returns the byte that the block has then, and what ends the holder.
fn hold<'d>(
    kept: &'d KeptDevice,
    disk: &'d Device,
    holder: Holder,
) -> (u8, Box<dyn FnOnce() + 'd>) {
    if !matches!(holder, Loading | Claim | Zeroing) {
        disk.create(1).unwrap().fill(2);
    }
    let (byte, end): (_, Box<dyn FnOnce()>) = match holder {
        Loading => {
            disk.readahead(1..2);
            (1, Box::new(|| kept.release()))
        }
        Claim => {
            let mut load = disk.claim(1).unwrap().unwrap();
            load.fill(5);
            (5, Box::new(|| load.finish(Ok(SIZE))))
        }
        WriteGuard => {
            let mut guard = disk.get_mut(1).unwrap();
            (6, Box::new(move || guard.fill(6)))
        }
        OwnedWriteGuard => {
            kept.does(Begun::Deferred);
            disk.flush().unwrap();
            let mut guard = block_on(disk.get_mut_async(1)).unwrap();
            (7, Box::new(move || guard.fill(7)))
        }
        ReadGuard => {
            let guard = disk.get(1).unwrap();
            (2, Box::new(|| drop(guard)))
        }
        Pin => {
            let pin = block_on(disk.get_async(1)).unwrap();
            (2, Box::new(|| drop(pin)))
        }
        WriteBack => {
            abandon(disk.flush_async());
            (2, Box::new(|| kept.release()))
        }
        Discarding => {
            abandon(disk.discard_async(1..2));
            (2, Box::new(|| kept.release()))
        }
        Zeroing => {
            abandon(disk.zero_async(1..2));
            (1, Box::new(|| kept.release()))
        }
        Bypass => {
            let bypass = disk.try_bypass(1..2).unwrap().unwrap();
            (2, Box::new(|| bypass.finish(Ok(())).unwrap()))
        }
        Syncing => {
            abandon(disk.sync_async());
            assert_eq!(kept.end_writes(), 1);
            (2, Box::new(|| kept.release()))
        }
    };
    kept.does(Begun::Deferred);
    (byte, end)
}

/// Fails unless the calls in `waits`, and no others, wait for the holder. Those in `endless` wait for longer than the
/// patience.
fn check(holder: Holder, waits: &[Call], endless: &[Call]) {
    let all = CALLS.into_iter().flat_map(|call| [false, true].map(|of_task| (call, of_task)));
    for (call, of_task) in all {
        let what = format!("{call:?}, of a task: {of_task}, against {holder:?}");
        let (_cache, disk, kept) = kept(Duration::MAX);
        let _releases = Releases(&kept);
        let (byte, ends) = hold(&kept, &disk, holder);
        let begun = begin(&disk, call, of_task);
        if !waits.contains(&call) {
            assert_eq!(end(begun), done(call, byte), "{what}");
            ends();
            continue;
        }
        thread::sleep(MOMENT);
        assert!(!begun.is_finished(), "no wait: {what}");
        ends();
        assert_eq!(end(begun), done(call, byte), "{what}");
        check_free(&disk, call, &what);
        check_end_of_patience(holder, call, of_task, endless.contains(&call));
        if of_task {
            check_task_that_is_gone(holder, call);
        }
    }
    check_tries(holder, waits);
}

/// Nothing has the block, or the device is closed.
#[track_caller]
fn check_free(disk: &Device, call: Call, what: &str) {
    let expected = if call == Close { Err("Closed".into()) } else { Ok(None) };
    let look = || end(begin(disk, GetMut, false));
    wait_for(what, || look() == expected); // a close may go on
}

fn check_end_of_patience(holder: Holder, call: Call, of_task: bool, is_endless: bool) {
    let what = format!("{call:?}, of a task: {of_task}, against {holder:?}");
    let (_cache, disk, kept) = kept(SHORT);
    let _releases = Releases(&kept);
    let (byte, ends) = hold(&kept, &disk, holder);
    let (began, begun) = (Instant::now(), begin(&disk, call, of_task));
    if is_endless {
        thread::sleep(SHORT + MOMENT);
        assert!(!begun.is_finished(), "refused: {what}");
        ends();
        return assert_eq!(end(begun), done(call, byte), "{what}");
    }
    // A close does without the end of a load.
    let is_without = call == Close && matches!(holder, Loading | Claim);
    let expected = if is_without { done(call, byte) } else { Err("Busy".into()) };
    assert_eq!(end(begun), expected, "{what}");
    assert!(began.elapsed() >= SHORT - MOMENT, "refused at once: {what}");
    ends();
    check_free(&disk, if is_without { Close } else { Get }, &what);
}

/// Polled once, on the holder's own thread, which is not the task's.
fn check_task_that_is_gone(holder: Holder, call: Call) {
    let what = format!("{call:?} of a task that is gone, against {holder:?}");
    let (_cache, disk, kept) = kept(LONG);
    let _releases = Releases(&kept);
    let (_, ends) = hold(&kept, &disk, holder);
    let woken = WakeCount::new();
    let mut task = Box::pin(by_task(&disk, call, AT));
    let waker = woken.waker();
    assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "{what}");
    drop((task, waker));
    assert_eq!(Arc::strong_count(&woken), 1, "its waker is kept: {what}");
    ends();
    check_free(&disk, call, &what);
}

/// A call that must not wait is refused, and counted, where the one that may wait would wait.
fn check_tries(holder: Holder, waits: &[Call]) {
    let (cache, disk, kept) = kept(LONG);
    let _releases = Releases(&kept);
    let (_, ends) = hold(&kept, &disk, holder);
    thread::scope(|scope| {
        let (disk, before) = (&disk, cache.stats());
        let tries = move || {
            let tries = [
                disk.try_get(1).map(drop),
                disk.try_get_mut(1).map(drop),
                disk.try_create(1).map(drop),
            ];
            (tries, disk.try_bypass(0..3).unwrap().is_none())
        };
        let (tries, is_excluded) = scope.spawn(tries).join().unwrap();
        let refused = [Get, GetMut, Create].map(|call| waits.contains(&call));
        assert_eq!(
            tries.each_ref().map(|told| *told == Err(GetError::WouldBlock)),
            refused,
            "{tries:?}"
        );
        assert_eq!(is_excluded, waits.contains(&Discard), "{holder:?}");
        let (stats, count) =
            (cache.stats(), refused.into_iter().filter(|&refused| refused).count());
        assert_eq!(
            (stats.get - before.get, stats.busy - before.busy),
            (3, count as u64),
            "{holder:?}"
        );
    });
    ends();
}

/// What the write guard of a dirty block keeps waiting; a reset only if a sync has failed. A load, or the guard of a
/// clean block, keep all but the last three waiting.
const WAITING: [Call; 11] =
    [Get, GetMut, Create, Invalidate, Discard, Zero, WriteAround, Close, Flush, Sync, WriteThrough];

#[test]
fn inv02_calls_wait_for_a_load() {
    check(Loading, &WAITING[..8], &WAITING[..7]);
    check(Claim, &WAITING[..8], &WAITING[..7]);
}

/// It has pinned the block, which it cannot lock at once.
#[test]
fn inv02_a_writer_waits_for_the_load_that_it_begins() {
    let (_cache, disk, kept) = kept(LONG);
    let _releases = Releases(&kept);
    let begun = begin(&disk, GetMut, false);
    wait_for("the load", || kept.begun() == 1);
    kept.release();
    assert_eq!(end(begun), Ok(None));
}

#[test]
fn inv15_calls_wait_for_a_writer() {
    check(WriteGuard, &WAITING, &[]);
    check(OwnedWriteGuard, &WAITING[..8], &[]);
}

#[test]
fn inv15_writers_wait_for_a_reader() {
    check(ReadGuard, &[GetMut, Create], &[]);
    check(Pin, &[GetMut, Create], &[]);
}

#[test]
fn inv15_calls_wait_for_the_device_to_write_their_block() {
    check(WriteBack, &WAITING[1..], &[]);
}

#[test]
fn inv15_calls_wait_for_a_change_of_the_device() {
    let ranges = [Discard, Zero, WriteAround, Close];
    check(Discarding, &WAITING[1..], &ranges);
    check(Bypass, &WAITING[1..], &ranges);
    let waits = [Get, GetMut, Create, Discard, Zero, WriteAround, Close];
    check(Zeroing, &waits, &waits);
}

#[test]
fn inv20_calls_wait_for_a_sync() {
    let waits = [Sync, WriteThrough, Close];
    check(Syncing, &waits, &waits);
}

/// At once, except for one that has claimed the load: another thread may have it.
#[test]
fn a_thread_that_would_wait_for_itself_is_refused() {
    let all: [(Holder, &[Call], Duration); 3] = [
        (WriteGuard, &WAITING, LONG),
        (ReadGuard, &[GetMut, Create], LONG),
        (Claim, &WAITING[..7], SHORT),
    ];
    for (holder, refused, patience) in all {
        for call in CALLS {
            let (_cache, disk, kept) = kept(patience);
            let _releases = Releases(&kept);
            let (byte, ends) = hold(&kept, &disk, holder);
            let told = told(make(&disk, call, AT, false));
            let is_refused = told == Err("WouldDeadlock".into());
            assert_eq!(is_refused, refused.contains(&call), "{call:?} beside an own {holder:?}");
            assert!(
                is_refused || told == done(call, byte),
                "{call:?} beside an own {holder:?}: {told:?}"
            );
            ends();
            check_free(&disk, if is_refused { Get } else { call }, "the end");
        }
    }
}

/// A write that waits while the device is closed is refused.
#[test]
fn inv19_a_writer_that_waits_is_refused_once_the_device_is_closed() {
    for (call, of_task) in [(GetMut, false), (Create, false), (GetMut, true), (Create, true)] {
        let (_cache, disk, kept) = kept(LONG);
        let _releases = Releases(&kept);
        let (_, ends) = hold(&kept, &disk, Pin);
        let begun = begin(&disk, call, of_task);
        thread::sleep(MOMENT);
        assert_eq!(end(begin(&disk, Close, of_task)), Ok(None));
        ends();
        assert_eq!(end(begun), Err("Closed".into()), "{call:?}, of a task: {of_task}");
    }
}
