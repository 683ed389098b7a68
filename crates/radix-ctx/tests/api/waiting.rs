//! Waits for a removal and for a drop: blocking, with a deadline, and as a task. And user code that panics or
//! waits inside of a call.

use std::future::Future;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, Removal, WaitError};
use testkit::WakeCount;

use crate::support::{OnDrop, alone, beside_reader, drain, in_time, panics};

/// The time of waits that must not end.
const WHILE: Duration = Duration::from_millis(30);
/// The time of waits that must end: a longer one hangs.
const NEVER: Duration = Duration::from_secs(60);

type Table = CtxTable<OnDrop>;

fn poll<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Returns a context that counts its drop.
fn counted(drops: &Arc<AtomicUsize>) -> OnDrop {
    let drops = Arc::clone(drops);
    OnDrop::call(move || _ = drops.fetch_add(1, Relaxed))
}

/// Returns a table with `N` contexts that count their drops.
fn table<const N: usize>() -> (Table, [Id; N], Arc<AtomicUsize>) {
    let (table, drops) = (CtxTable::new(), Arc::default());
    let ids = [(); N].map(|()| table.insert(counted(&drops)).unwrap());
    (table, ids, drops)
}

fn assert_empty(table: &Table) {
    assert_eq!((table.len(), table.stats().pending), (0, 0));
    table.validate();
}

/// Ends each grace period that has begun. One call of `synchronize` may end an earlier one only.
fn end_grace_period() {
    rcu::synchronize().unwrap();
    rcu::synchronize().unwrap();
}

type Wait = fn(&Table, Id) -> Result<(), WaitError>;

/// The ways to remove a context and to wait for its drop.
const WAITS: [Wait; 5] = [
    |table, id| table.remove(id).unwrap().wait(),
    |table, id| table.remove(id).unwrap().wait_deadline(Instant::now() + NEVER),
    |table, id| {
        let removal = table.remove(id).unwrap();
        while !removal.is_done() {
            thread::yield_now();
        }
        Ok(())
    },
    |table, _| table.remove_all().map(|count| assert_eq!(count, 1)),
    |table, _| {
        let mut closing = table.begin_remove_all();
        closing.wait()?;
        assert!(closing.count() == 1 && closing.is_done());
        Ok(())
    },
];

/// What keeps a removed context.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeper {
    Nothing,
    Reference,
    Reader,
}

/// Each wait lasts while a reader or a reference keeps the context, and not longer.
#[test]
fn inv18_a_removal_is_waited_for_in_every_way() {
    let _alone = alone();
    for wait in WAITS {
        for keeper in [Keeper::Nothing, Keeper::Reference, Keeper::Reader] {
            let (table, [id], drops) = table();
            let held = (keeper == Keeper::Reference).then(|| table.get_ref(id).unwrap());
            thread::scope(|scope| {
                let (pinned, is_pinned) = mpsc::channel();
                scope.spawn(move || {
                    let guard = (keeper == Keeper::Reader).then(rcu::pin);
                    pinned.send(()).unwrap();
                    if keeper != Keeper::Nothing {
                        thread::sleep(WHILE);
                    }
                    drop((held, guard));
                });
                is_pinned.recv().unwrap();
                wait(&table, id).unwrap();
                assert_eq!(drops.load(Relaxed), 1, "{keeper:?}");
            });
            assert_empty(&table);
        }
    }
}

/// Returns the number of voluntary context switches of this thread, and its time on a CPU.
fn usage() -> (i64, Duration) {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for a `rusage`, which the call fills.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
    // SAFETY: a `rusage` of zeros is valid, and the call has filled it.
    let usage = unsafe { usage.assume_init() };
    let time = |of: libc::timeval| Duration::new(of.tv_sec as u64, 1_000 * of.tv_usec as u32);
    (usage.ru_nvcsw, time(usage.ru_utime) + time(usage.ru_stime))
}

/// A wait with a deadline sleeps while a reference keeps the context, and does not poll. It sleeps between its looks
/// while a reader does.
#[test]
fn inv18_a_deadline_ends_a_wait() {
    let _alone = alone();
    let (table, [first, second], _) = table();
    let times_out = |removal: &Removal<'_, OnDrop>| {
        let deadline = Instant::now() + Duration::from_millis(200);
        assert_eq!(removal.wait_deadline(deadline), Err(WaitError::TimedOut));
        assert!(!removal.is_done());
    };
    let held = table.get_ref(first).unwrap();
    let removal = table.remove(first).unwrap();
    table.flush().unwrap();
    let before = usage().0;
    times_out(&removal);
    let waited = usage().0 - before;
    assert!(waited < 50, "waited {waited} times");
    drop(held);
    assert_eq!(removal.wait_deadline(Instant::now() + NEVER), Ok(()));
    beside_reader(|end| {
        let removal = table.remove(second).unwrap();
        let before = usage().1;
        times_out(&removal);
        let ran = usage().1 - before;
        assert!(ran < Duration::from_millis(100), "on a CPU for {ran:?}");
        drop(end);
        removal.wait().unwrap();
    });
}

/// A reader that came after the grace period of a removal delays the drops of later removals only.
#[test]
fn inv18_a_wait_ends_with_the_drop_of_its_own_context() {
    let _alone = alone();
    let (table, [first, second], _) = table();
    let (removal, later) = (table.remove(first).unwrap(), table.remove(second).unwrap());
    end_grace_period();
    beside_reader(|end| {
        in_time(|| removal.wait().unwrap());
        drop(end);
        later.wait().unwrap();
    });
}

/// The calls that wait for every context of a table.
const WAITS_FOR_ALL: [fn(&Table) -> Option<WaitError>; 3] = [
    |table| table.flush().err(),
    |table| table.remove_all().err(),
    |table| table.begin_remove_all().wait().err(),
];

#[test]
fn inv18_a_wait_in_a_guard_is_refused() {
    let _alone = alone();
    let (table, ids, _) = table::<3>();
    let guard = rcu::pin();
    let removal = table.remove(ids[1]).unwrap();
    let deadline = Instant::now() + WHILE;
    assert_eq!(removal.wait_deadline(deadline), Err(WaitError::Pinned));
    assert_eq!(removal.wait(), Err(WaitError::Pinned));
    for (wait, left) in WAITS_FOR_ALL.into_iter().zip([2, 2, 0]) {
        assert_eq!(wait(&table), Some(WaitError::Pinned));
        assert_eq!(table.len(), left, "remove_all removed no context");
    }
    drop(guard);
    removal.wait().unwrap(); // a wait that was refused can be tried again
    removal.wait().unwrap();
}

/// A drop that waits for its own table gets an error, in the reclaim of a `flush` and in the drop of the last
/// reference.
#[test]
fn inv18_a_drop_that_waits_for_its_own_table_is_refused() {
    let _alone = alone();
    for by_reference in [false, true] {
        static TABLES: [OnceLock<Table>; 2] = [const { OnceLock::new() }; 2];
        let table = TABLES[usize::from(by_reference)].get_or_init(CtxTable::new);
        let results = in_time(move || {
            let (results, received) = mpsc::channel();
            let calls = move || results.send(WAITS_FOR_ALL.map(|wait| wait(table))).unwrap();
            let id = table.insert(OnDrop::call(calls)).unwrap();
            let held = by_reference.then(|| table.get_ref(id).unwrap());
            table.remove(id).unwrap();
            table.flush().unwrap();
            drop(held);
            received.recv().unwrap()
        });
        assert_eq!(results, [Some(WaitError::InDrop); 3], "by reference: {by_reference}");
        table.flush().unwrap();
        assert_empty(table);
    }
}

/// A call under a guard drops no context: the drop may wait for readers.
#[test]
fn inv18_a_call_under_a_guard_runs_no_drop() {
    let _alone = alone();
    const CALLS: [fn(&Table, Removal<'_, OnDrop>); 3] = [
        |_, removal| assert!(!removal.is_done()),
        |table, _| {
            // The last one finds no slab.
            let ids = [(); 64].map(|()| table.insert(OnDrop::nothing()).unwrap());
            assert!(ids.iter().all(|&id| table.contains(id)));
        },
        |table, _| {
            table.insert(OnDrop::nothing()).unwrap();
            assert_eq!(table.begin_remove_all().count(), 1);
        },
    ];
    for call in CALLS {
        let table = CtxTable::new();
        let (dropped, drops) = mpsc::channel();
        let waits = OnDrop::call(move || dropped.send(rcu::synchronize().is_ok()).unwrap());
        let removal = table.remove(table.insert(waits).unwrap()).unwrap();
        end_grace_period();
        let guard = rcu::pin();
        call(&table, removal);
        assert!(drops.try_recv().is_err(), "dropped under a guard");
        drop(guard);
        table.flush().unwrap();
        assert_eq!(drops.try_recv(), Ok(true), "the drop has waited for readers");
    }
}

/// Checks that a waker is called without a guard.
struct Unpinned(Arc<WakeCount>);

impl Wake for Unpinned {
    fn wake(self: Arc<Self>) {
        assert!(!rcu::is_pinned(), "woken under a guard");
        Arc::clone(&self.0).wake();
    }
}

/// Every removal wakes the tasks of its context and no others: that of one context, of some and of all, and the
/// drop of the table.
#[test]
fn inv18_every_removal_wakes_the_tasks() {
    let _alone = alone();
    /// A removal in a table of two contexts, and how many of the three tasks it wakes.
    type Way = (fn(&mut Option<Table>, Id), usize);
    const WAYS: [Way; 4] = [
        (|table, id| _ = table.as_ref().unwrap().remove(id).unwrap(), 2),
        (|table, _| assert_eq!(table.as_ref().unwrap().retain(|_, _| false), 2), 3),
        (|table, _| assert_eq!(table.as_ref().unwrap().begin_remove_all().count(), 2), 3),
        (|table, _| *table = None, 3),
    ];
    for (way, woken) in WAYS {
        let (table, [first, second], _) = table();
        let count = WakeCount::new();
        let unpinned = Arc::new(Unpinned(Arc::clone(&count)));
        let waker = Waker::from(Arc::clone(&unpinned));
        let contexts = [first, second, first, first].map(|id| table.get_ref(id).unwrap());
        let mut futures: Vec<_> =
            contexts.iter().map(|context| Box::pin(CtxRef::removed(context))).collect();
        for future in &mut futures {
            assert_eq!(poll(future.as_mut(), &waker), Poll::Pending);
            assert_eq!(poll(future.as_mut(), &waker), Poll::Pending);
        }
        drop(futures.pop()); // removes its waker
        assert_eq!(Arc::strong_count(&unpinned), 5, "this one, the waker, and three registrations");
        let mut table = Some(table);
        way(&mut table, first);
        assert_eq!(count.count(), woken);
        assert_eq!(poll(futures[0].as_mut(), &waker), Poll::Ready(()));
    }
}

/// Panics when it is woken.
struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        resume_unwind(Box::new("a waker"));
    }
}

/// Returns a context whose drop panics.
fn panicking() -> OnDrop {
    OnDrop::call(|| resume_unwind(Box::new("a drop")))
}

/// Returns a context that counts its drop, which panics if it is the first.
fn first_panics(drops: &Arc<AtomicUsize>) -> OnDrop {
    let drops = Arc::clone(drops);
    OnDrop::call(move || {
        if drops.fetch_add(1, Relaxed) == 0 {
            resume_unwind(Box::new("a drop"));
        }
    })
}

/// User code of each kind panics. The panic goes on to the caller. The other tasks are woken, and the other
/// contexts are dropped by later calls.
#[test]
fn a_panic_of_user_code_stops_nothing() {
    let _alone = alone();
    /// A call, and whether the panic of a drop reaches its caller.
    type Call = (fn(&Table, &[Id]), bool);
    const CALLS: [Call; 6] = [
        (|table, _| _ = table.remove_all(), true),
        (
            |table, ids| {
                ids.iter().for_each(|&id| _ = table.remove(id).unwrap());
                _ = table.flush();
            },
            true,
        ),
        (
            |table, ids| {
                let removals: Vec<_> = ids.iter().map(|&id| table.remove(id).unwrap()).collect();
                while !removals.iter().all(Removal::is_done) {}
            },
            true,
        ),
        (|table, ids| ids.iter().for_each(|&id| _ = table.remove(id).unwrap()), false),
        (|table, _| _ = table.retain(|_, _| false), false),
        (|table, ids| _ = table.retain(|id, _| id != ids[4] || panic!("keep")), true),
    ];
    for (number, (call, by_drop)) in CALLS.into_iter().enumerate() {
        for by_waker in [false, true] {
            let table = CtxTable::new();
            let ids = [0, 1, 2, 3, 4].map(|n| {
                let panics = !by_waker && n % 2 == 1;
                table.insert(if panics { panicking() } else { OnDrop::nothing() }).unwrap()
            });
            let count = WakeCount::new();
            let context = table.get_ref(ids[2]).unwrap();
            let mut futures: Vec<_> = Vec::new();
            if by_waker {
                for waker in [Arc::new(PanickingWaker).into(), count.waker(), count.waker()] {
                    futures.push(Box::pin(CtxRef::removed(&context)));
                    assert_eq!(poll(futures.last_mut().unwrap().as_mut(), &waker), Poll::Pending);
                }
            }
            let panicked = in_time(|| panics(|| call(&table, &ids)));
            assert!(panicked || !by_drop, "the panic of call {number}");
            let _ = panics(|| table.begin_remove_all());
            assert_eq!(count.count(), if by_waker { 2 } else { 0 }, "call {number}");
            drop(futures);
            drop(context);
            while panics(|| table.flush()) {}
            assert_empty(&table);
        }
    }
    let table = CtxTable::new();
    let held = table.insert_ref(panicking()).unwrap();
    table.remove(CtxRef::id(&held)).unwrap();
    table.flush().unwrap();
    assert!(panics(|| drop(held)), "of the last reference");
    assert_empty(&table);
}

/// RCU drops what was removed, also if `keep`, a drop or a waker panics. No later call of the table is needed.
#[test]
fn rcu_drops_what_was_removed_also_behind_a_panic() {
    let _alone = alone();
    const WAYS: [fn(&Table, &[Id; 100]); 4] = [
        |table, _| assert_eq!(table.retain(|id, _| id.index() % 10 == 0), 90),
        |table, ids| {
            let half_way = |id| id != ids[99] || panic!("keep");
            assert!(panics(|| table.retain(|id, _| half_way(id) && id.index() % 10 == 0)));
        },
        |table, ids| ids.iter().for_each(|&id| _ = table.remove(id).unwrap()),
        |table, ids| {
            let held = table.get_ref(ids[0]).unwrap();
            let mut removed = pin!(CtxRef::removed(&held));
            assert!(poll(removed.as_mut(), &Arc::new(PanickingWaker).into()).is_pending());
            assert!(panics(|| table.begin_remove_all()));
        },
    ];
    for (number, way) in WAYS.into_iter().enumerate() {
        let (table, drops) = (CtxTable::new(), Arc::new(AtomicUsize::new(0)));
        let context = || if number == 2 { first_panics(&drops) } else { counted(&drops) };
        let ids = [(); 100].map(|()| table.insert(context()).unwrap());
        way(&table, &ids);
        assert!(number >= 2 || ids.iter().step_by(10).all(|&id| table.contains(id)));
        drain();
        let left = table.len();
        assert!(drops.load(Relaxed) == 100 - left && left < 100, "way {number}: {left} left");
        table.validate();
    }
}

/// A thread waits for the end of a reclaim, in which a drop panics.
#[test]
fn a_reclaim_that_panics_lets_the_next_one_begin() {
    let _alone = alone();
    let (table, (begin, begun)) = (Table::new(), mpsc::channel());
    let slow = OnDrop::call(move || {
        begin.send(()).unwrap();
        thread::sleep(WHILE); // long enough for the other thread to wait
        resume_unwind(Box::new("a drop"));
    });
    table.remove(table.insert(slow).unwrap()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert!(panics(|| table.flush())));
        begun.recv().unwrap();
        in_time(|| table.flush().unwrap());
    });
}

/// A table is dropped while its lists have removed contexts, some with a reference. The drop of a context panics,
/// and the callback goes on with the rest.
#[test]
fn inv14_the_end_of_a_table_drops_a_removed_context_once() {
    let _alone = alone();
    for (closed, referenced) in [(false, false), (true, false), (false, true), (true, true)] {
        let (table, drops) = (CtxTable::new(), Arc::new(AtomicUsize::new(0)));
        let ids = [(); 4].map(|()| table.insert(first_panics(&drops)).unwrap());
        let held = referenced.then(|| table.get_ref(ids[1]).unwrap());
        let guard = rcu::pin(); // no list is reclaimed before the end
        for &id in &ids[..3] {
            let removal = table.remove(id).unwrap();
            assert!(!(closed && removal.is_done())); // closes the lists
        }
        drop(guard);
        assert!(panics(|| drop(table)), "closed {closed}, referenced {referenced}");
        drain();
        drop(held);
        assert_eq!(drops.load(Relaxed), 4, "closed {closed}, referenced {referenced}");
    }
}

/// The reclaim in an insert drops a context whose drop panics. The insert takes nothing of the limit then.
#[test]
fn inv15_an_insert_that_panics_gives_its_share_back() {
    let _alone = alone();
    const INSERTS: [fn(&Table) -> bool; 2] = [
        |table| table.insert(OnDrop::nothing()).is_ok(),
        |table| table.insert_ref(OnDrop::nothing()).is_ok(),
    ];
    for insert in INSERTS {
        let has_panicked = (0..1_000).any(|_| {
            let table = CtxTable::builder().max_contexts(1).max_index(0).build();
            table.remove(table.insert(panicking()).unwrap()).unwrap();
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
