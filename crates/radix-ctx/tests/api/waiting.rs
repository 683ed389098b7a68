//! Waits for a removal and for a drop: blocking, with a deadline, and as a task.

use std::future::Future;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, LookupError, Removal, WaitError};

use crate::alone::{alone, drain};

/// The time of waits that must not end.
const WHILE: Duration = Duration::from_millis(30);
/// The time of waits that must end: a longer one hangs.
const NEVER: Duration = Duration::from_secs(60);

/// A waker that counts its calls, and panics if a guard is held.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        assert!(!rcu::is_pinned(), "woken under a guard");
        self.0.fetch_add(1, Relaxed);
    }
}

fn counted() -> (Arc<Count>, Waker) {
    let count = Arc::<Count>::default();
    (Arc::clone(&count), count.into())
}

fn poll<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Returns a table with two contexts.
fn two() -> (CtxTable<u32>, Id, Id) {
    let table = CtxTable::new();
    let (first, second) = (table.insert(1).unwrap(), table.insert(2).unwrap());
    (table, first, second)
}

/// Ends each grace period that has begun. One call of `synchronize` may end an earlier one only.
fn end_grace_period() {
    rcu::synchronize().unwrap();
    rcu::synchronize().unwrap();
}

/// Runs `f` on another thread. Ends the process if it does not end in time.
fn in_time<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || sender.send(f()));
        receiver.recv_timeout(NEVER).unwrap_or_else(|_| std::process::abort())
    })
}

/// A context that counts its drops.
struct CountsDrops(Arc<AtomicUsize>);

impl Drop for CountsDrops {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Each wait lasts while a reader or a reference keeps the context, and not longer.
#[test]
fn inv18_a_removal_is_waited_for_in_every_way() {
    let _alone = alone();
    type Way = fn(&CtxTable<CountsDrops>, Id);
    const WAYS: [Way; 4] = [
        |table, id| table.remove(id).unwrap().wait().unwrap(),
        |table, id| table.remove(id).unwrap().wait_deadline(Instant::now() + NEVER).unwrap(),
        |table, id| {
            let removal = table.remove(id).unwrap();
            while !removal.is_done() {
                thread::yield_now();
            }
        },
        |table, _| assert_eq!(table.remove_all(), Ok(1)),
    ];
    let table = CtxTable::new();
    for way in WAYS {
        for (with_reference, with_reader) in [(false, false), (true, false), (false, true)] {
            let drops = Arc::new(AtomicUsize::new(0));
            let id = table.insert(CountsDrops(Arc::clone(&drops))).unwrap();
            let held = with_reference.then(|| table.get_ref(id).unwrap());
            thread::scope(|scope| {
                let (pinned, is_pinned) = mpsc::channel();
                scope.spawn(move || {
                    let guard = with_reader.then(rcu::pin);
                    pinned.send(()).unwrap();
                    if with_reader || with_reference {
                        thread::sleep(WHILE);
                    }
                    drop((held, guard));
                });
                is_pinned.recv().unwrap();
                way(&table, id);
                assert_eq!(drops.load(Relaxed), 1);
            });
        }
    }
}

#[test]
fn inv18_a_deadline_ends_a_wait() {
    let _alone = alone();
    let (table, first, second) = two();
    let held = table.get_ref(first).unwrap();
    let removal = table.remove(first).unwrap();
    let wait =
        |removal: &radix_ctx::Removal<'_, u32>| removal.wait_deadline(Instant::now() + WHILE);
    assert_eq!(wait(&removal), Err(WaitError::TimedOut));
    assert!(!removal.is_done());
    drop(held);
    assert_eq!(removal.wait_deadline(Instant::now() + NEVER), Ok(()));
    let (pinned, is_pinned) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let guard = rcu::pin();
            pinned.send(()).unwrap();
            let _ = ended.recv();
            drop(guard);
        });
        is_pinned.recv().unwrap();
        let removal = table.remove(second).unwrap();
        assert_eq!(wait(&removal), Err(WaitError::TimedOut));
        assert!(!removal.is_done());
        drop(end);
        removal.wait().unwrap();
    });
}

/// A reader that came after the grace period of a removal delays the drops of later removals only.
#[test]
fn inv18_a_wait_ends_with_the_drop_of_its_own_context() {
    let _alone = alone();
    let (table, first, second) = two();
    let (removal, later) = (table.remove(first).unwrap(), table.remove(second).unwrap());
    end_grace_period();
    let (pinned, is_pinned) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _guard = rcu::pin();
            pinned.send(()).unwrap();
            let _ = ended.recv();
        });
        is_pinned.recv().unwrap();
        in_time(|| removal.wait().unwrap());
        drop(end);
        later.wait().unwrap();
    });
}

/// A context whose drop waits for readers.
struct WaitsForReaders(mpsc::Sender<bool>);

impl Drop for WaitsForReaders {
    fn drop(&mut self) {
        let _ = self.0.send(rcu::synchronize().is_ok()); // no receiver if the test has ended
    }
}

/// A call under a guard drops no context: the drop may wait for readers.
#[test]
fn inv18_a_call_under_a_guard_runs_no_drop() {
    let _alone = alone();
    type Call = fn(&CtxTable<WaitsForReaders>, Removal<'_, WaitsForReaders>);
    const CALLS: [Call; 3] = [
        |_, removal| assert!(!removal.is_done()),
        |table, _| {
            let ids = [(); 64].map(|()| {
                let (unheard, _) = mpsc::channel();
                table.insert(WaitsForReaders(unheard)).unwrap() // the last one finds no slab
            });
            assert!(ids.iter().all(|&id| table.contains(id)));
        },
        |table, _| {
            let (unheard, _) = mpsc::channel();
            table.insert(WaitsForReaders(unheard)).unwrap();
            assert_eq!(table.begin_remove_all().count(), 1);
        },
    ];
    for call in CALLS {
        let table = CtxTable::new();
        let (dropped, drops) = mpsc::channel();
        let removal = table.remove(table.insert(WaitsForReaders(dropped)).unwrap()).unwrap();
        end_grace_period();
        let guard = rcu::pin();
        call(&table, removal);
        assert!(drops.try_recv().is_err(), "dropped under a guard");
        drop(guard);
        table.flush().unwrap();
        assert_eq!(drops.try_recv(), Ok(true), "the drop has waited for readers");
    }
}

#[test]
fn inv18_a_wait_in_a_guard_is_refused() {
    let _alone = alone();
    let table = CtxTable::new();
    let ids = [1, 2, 3].map(|value| table.insert(value).unwrap());
    let guard = rcu::pin();
    assert_eq!(table.flush(), Err(WaitError::Pinned));
    assert_eq!(table.remove_all(), Err(WaitError::Pinned));
    assert_eq!(table.len(), 3, "remove_all removed no context");
    let removal = table.remove(ids[1]).unwrap();
    assert_eq!(removal.wait_deadline(Instant::now() + WHILE), Err(WaitError::Pinned));
    assert_eq!(removal.wait(), Err(WaitError::Pinned));
    assert_eq!(table.begin_remove_all().wait(), Err(WaitError::Pinned));
    drop(guard);
    removal.wait().unwrap(); // a wait that was refused can be tried again
    removal.wait().unwrap();
}

#[test]
fn inv14_remove_all_drops_everything_once() {
    let _alone = alone();
    let table = CtxTable::new();
    let drops = Arc::new(AtomicUsize::new(0));
    for round in 1..4 {
        let ids: Vec<Id> =
            (0..500).map(|_| table.insert(CountsDrops(Arc::clone(&drops))).unwrap()).collect();
        assert_eq!(table.remove_all(), Ok(500));
        assert_eq!(drops.load(Relaxed), 500 * round);
        assert!(ids.iter().all(|id| table.remove(*id).err() == Some(LookupError::Stale)));
        assert_eq!((table.len(), table.stats().pending), (0, 0));
        assert_eq!(table.remove_all(), Ok(0));
    }
    let held = table.insert_ref(CountsDrops(Arc::clone(&drops))).unwrap();
    let mut closing = table.begin_remove_all();
    assert_eq!((closing.count(), closing.is_done()), (1, false));
    drop(held);
    assert_eq!(closing.wait(), Ok(()));
    assert!(closing.is_done());
    assert_eq!(drops.load(Relaxed), 1501);
}

/// Returns the number of voluntary context switches of this thread.
fn switches() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for a `rusage`, which the call fills.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
    // SAFETY: a `rusage` of zeros is valid, and the call has filled it.
    unsafe { usage.assume_init() }.ru_nvcsw
}

/// A wait with a deadline sleeps while a reference keeps the context, and does not poll.
#[test]
fn inv18_a_wait_with_a_deadline_sleeps() {
    let _alone = alone();
    let (table, first, _) = two();
    let _held = table.get_ref(first).unwrap();
    let removal = table.remove(first).unwrap();
    table.flush().unwrap();
    let before = switches();
    let deadline = Instant::now() + Duration::from_millis(200);
    assert_eq!(removal.wait_deadline(deadline), Err(WaitError::TimedOut));
    let waited = switches() - before;
    assert!(waited < 50, "waited {waited} times");
}

#[test]
fn inv18_a_waker_is_woken_for_its_own_context_only() {
    let _alone = alone();
    let (table, first, second) = two();
    let (count, waker) = counted();
    let context = table.get_ref(first).unwrap();
    let mut removed = pin!(CtxRef::removed(&context));
    assert_eq!(poll(removed.as_mut(), &waker), Poll::Pending);
    assert_eq!(poll(removed.as_mut(), &waker), Poll::Pending);
    table.remove(second).unwrap().wait().unwrap();
    assert_eq!(count.0.load(Relaxed), 0);
    table.remove(first).unwrap();
    assert_eq!(count.0.load(Relaxed), 1);
    assert_eq!(poll(removed.as_mut(), &waker), Poll::Ready(()));
}

/// Every removal wakes, that of one context, of some and of all, and the drop of the table.
#[test]
fn inv18_every_removal_wakes_the_tasks() {
    let _alone = alone();
    type Way = fn(CtxTable<u32>, Id);
    const WAYS: [Way; 4] = [
        |table, id| _ = table.remove(id).unwrap(),
        |table, _| assert_eq!(table.retain(|_, _| false), 2),
        |table, _| assert_eq!(table.begin_remove_all().count(), 2),
        |table, _| drop(table),
    ];
    for way in WAYS {
        let (table, first, second) = two();
        let (count, waker) = counted();
        let contexts = [first, second, first].map(|id| table.get_ref(id).unwrap());
        let mut futures: Vec<_> =
            contexts.iter().map(|context| Box::pin(CtxRef::removed(context))).collect();
        for future in &mut futures {
            assert_eq!(poll(future.as_mut(), &waker), Poll::Pending);
        }
        drop(futures.swap_remove(1)); // removes its waker
        assert_eq!(Arc::strong_count(&count), 4, "this one, the waker, and two registrations");
        way(table, first);
        assert_eq!(count.0.load(Relaxed), 2);
    }
}

/// Panics when it is dropped, or woken.
struct Panics(bool);

impl Drop for Panics {
    fn drop(&mut self) {
        if self.0 {
            std::panic::resume_unwind(Box::new("a drop"));
        }
    }
}

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

/// User code of each kind panics. The panic goes on to the caller. The other tasks are woken, and the other
/// contexts are dropped by later calls.
#[test]
fn a_panic_of_user_code_stops_nothing() {
    let _alone = alone();
    type Call = fn(&CtxTable<Panics>, &[Id]) -> bool;
    const CALLS: [Call; 6] = [
        |table, _| table.remove_all().is_ok(),
        |table, ids| {
            ids.iter().for_each(|&id| _ = table.remove(id).unwrap());
            table.flush().is_ok()
        },
        |table, ids| {
            let removals: Vec<_> = ids.iter().map(|&id| table.remove(id).unwrap()).collect();
            while !removals.iter().all(Removal::is_done) {}
            true
        },
        |table, ids| {
            ids.iter().for_each(|&id| _ = table.remove(id).unwrap());
            table.remove(ids[0]).is_ok()
        },
        |table, _| table.retain(|_, _| false) == 5,
        |table, ids| table.retain(|id, _| if id == ids[4] { panic!("keep") } else { true }) == 5,
    ];
    for (number, call) in CALLS.into_iter().enumerate() {
        for by_waker in [false, true] {
            let table = CtxTable::new();
            let ids =
                [0, 1, 2, 3, 4].map(|n| table.insert(Panics(!by_waker && n % 2 == 1)).unwrap());
            let (count, waker) = counted();
            let context = table.get_ref(ids[2]).unwrap();
            let mut futures: Vec<_> = Vec::new();
            if by_waker {
                let panics = Waker::from(Arc::new(Panics(false)));
                for waker in [&panics, &waker, &waker] {
                    futures.push(Box::pin(CtxRef::removed(&context)));
                    assert_eq!(poll(futures.last_mut().unwrap().as_mut(), waker), Poll::Pending);
                }
            }
            let called = in_time(|| catch_unwind(AssertUnwindSafe(|| call(&table, &ids))));
            assert!(called.is_err() || number == 3 || number == 4, "the panic of call {number}");
            let _ = catch_unwind(AssertUnwindSafe(|| table.begin_remove_all()));
            assert_eq!(count.0.load(Relaxed), if by_waker { 2 } else { 0 }, "call {number}");
            drop(futures);
            drop(context);
            while let Err(_panic) = catch_unwind(AssertUnwindSafe(|| table.flush())) {}
            assert_eq!((table.len(), table.stats().pending), (0, 0), "call {number}");
            table.validate();
        }
    }
    let table = CtxTable::new();
    let held = table.insert_ref(Panics(true)).unwrap();
    table.remove(CtxRef::id(&held)).unwrap();
    table.flush().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(held))).is_err(), "of the last reference");
    assert_eq!(table.stats().pending, 0);
    table.validate();
    table.insert(Panics(true)).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(table))).is_err(), "of the table");
}

/// A context that counts its drops. The first one panics.
struct FirstPanics(&'static AtomicUsize);

impl Drop for FirstPanics {
    fn drop(&mut self) {
        if self.0.fetch_add(1, Relaxed) == 0 {
            std::panic::resume_unwind(Box::new("a drop"));
        }
    }
}

/// A table is dropped while its lists have removed contexts, some with a reference. The drop of a context panics,
/// and the callback goes on with the rest.
#[test]
fn inv14_the_end_of_a_table_drops_a_removed_context_once() {
    let _alone = alone();
    for (closed, referenced) in [(false, false), (true, false), (false, true), (true, true)] {
        let drops: &'static AtomicUsize = Box::leak(Box::default());
        let table = CtxTable::new();
        let ids = [(); 4].map(|()| table.insert(FirstPanics(drops)).unwrap());
        let held = referenced.then(|| table.get_ref(ids[1]).unwrap());
        let guard = rcu::pin(); // no list is reclaimed before the end
        for &id in &ids[..3] {
            let removal = table.remove(id).unwrap();
            assert!(!(closed && removal.is_done())); // closes the lists
        }
        drop(guard);
        let end = catch_unwind(AssertUnwindSafe(|| drop(table)));
        assert!(end.is_err(), "closed {closed}, referenced {referenced}");
        drain();
        drop(held);
        assert_eq!(drops.load(Relaxed), 4, "closed {closed}, referenced {referenced}");
    }
}

/// The reclaim in an insert drops a context whose drop panics. The insert takes nothing of the limit then.
#[test]
fn inv15_an_insert_that_panics_gives_its_share_back() {
    let _alone = alone();
    const INSERTS: [fn(&CtxTable<Panics>) -> bool; 2] = [
        |table| table.insert(Panics(false)).is_ok(),
        |table| table.insert_ref(Panics(false)).is_ok(),
    ];
    for insert in INSERTS {
        let has_panicked = (0..1_000).any(|_| {
            let table = CtxTable::builder().max_contexts(1).max_index(0).build();
            table.remove(table.insert(Panics(true)).unwrap()).unwrap();
            let call = || catch_unwind(AssertUnwindSafe(|| insert(&table)));
            let refused = |inserted: &Result<bool, _>| matches!(inserted, Ok(false));
            // Refused until the grace period has ended. It succeeds if RCU was faster.
            let inserted =
                in_time(|| std::iter::repeat_with(call).find(|got| !refused(got)).unwrap());
            inserted.is_err() && {
                assert!(table.is_empty() && insert(&table), "one more fits");
                true
            }
        });
        assert!(has_panicked);
    }
}

/// A context whose drop calls its table.
struct Calls {
    table: &'static OnceLock<CtxTable<Calls>>,
    results: mpsc::Sender<[Option<WaitError>; 3]>,
}

impl Drop for Calls {
    fn drop(&mut self) {
        let table = self.table.get().unwrap();
        let flush = table.flush().err();
        let close = table.remove_all().err();
        let wait = table.begin_remove_all().wait().err();
        let _ = self.results.send([flush, close, wait]);
    }
}

/// A drop that waits for its own table gets an error, in the reclaim of a `flush` and in the drop of the last
/// reference.
#[test]
fn inv18_a_drop_that_waits_for_its_own_table_is_refused() {
    let _alone = alone();
    for by_reference in [false, true] {
        static TABLES: [OnceLock<CtxTable<Calls>>; 2] = [const { OnceLock::new() }; 2];
        let table = &TABLES[usize::from(by_reference)];
        let results = in_time(move || {
            let (results, received) = mpsc::channel();
            let made = table.get_or_init(CtxTable::new);
            let id = made.insert(Calls { table, results }).unwrap();
            let held = by_reference.then(|| made.get_ref(id).unwrap());
            made.remove(id).unwrap();
            made.flush().unwrap();
            drop(held);
            received.recv().unwrap()
        });
        assert_eq!(results, [Some(WaitError::InDrop); 3], "by reference: {by_reference}");
        let made = table.get().unwrap();
        made.flush().unwrap();
        made.validate();
        assert_eq!((made.len(), made.stats().pending), (0, 0));
    }
}
