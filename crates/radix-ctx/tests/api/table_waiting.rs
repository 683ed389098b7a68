//! Waits on a context, for its removal and for its drop: blocking, with a timeout, and as a future.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::future::{Future, IntoFuture};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, InsertRefused, LookupError, WaitError};

/// A timeout for waits that must not end. A guess.
const WHILE: Duration = Duration::from_millis(30);
/// The timeout of waits that must end: a longer one hangs.
const NEVER: Duration = Duration::from_secs(20);

struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Relaxed);
        self.0.unpark();
    }
}

/// Runs a future on this thread. Panics if it is not ready in time.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let wake = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&wake));
    let began = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while !wake.1.swap(false, Relaxed) {
            assert!(began.elapsed() < NEVER, "the future was not woken in {NEVER:?}");
            thread::park_timeout(WHILE);
        }
    }
}

/// Runs `f` on another thread. Panics if it does not end in time.
fn in_time<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(f()));
    let result = receiver.recv_timeout(NEVER).expect("the closure hangs");
    thread.join().unwrap().unwrap();
    result
}

/// A context that counts its drops.
struct CountsDrops(Arc<AtomicUsize>);

impl Drop for CountsDrops {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn counts_drops() -> (Arc<AtomicUsize>, CountsDrops) {
    let drops = Arc::new(AtomicUsize::new(0));
    (Arc::clone(&drops), CountsDrops(drops))
}

#[test]
fn inv18_a_waiter_wakes_when_its_context_is_removed() {
    let table = CtxTable::new();
    let id = table.insert(AtomicU64::new(0)).unwrap();
    let waiters: Vec<_> = (0..4)
        .map(|number| {
            let context = table.get_ref(id).unwrap();
            thread::spawn(move || match number {
                0 => CtxRef::wait_until(&context, |at| (at.load(Relaxed) == 9).then_some(())),
                1 => CtxRef::wait_timeout(&context, NEVER, |_| None),
                2 => {
                    block_on(CtxRef::removed(&context));
                    Err(WaitError::Removed)
                }
                _ => CtxRef::wait_until(&context, |at| (at.load(Relaxed) == 1).then_some(())),
            })
        })
        .collect();
    thread::sleep(WHILE);
    let context = table.get_ref(id).unwrap();
    context.store(1, Relaxed);
    CtxRef::notify(&context);
    thread::sleep(WHILE);
    let removal = table.remove(id).unwrap();
    assert!(CtxRef::is_removed(&context));
    let results: Vec<_> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
    assert_eq!(results[..3], [Err(WaitError::Removed); 3]);
    assert_eq!(results[3], Ok(()), "the condition was true before the removal");
    assert!(!removal.is_done(), "this thread has a reference");
    drop(context);
    removal.wait().unwrap();
}

#[test]
fn inv18_a_wait_in_a_guard_is_refused() {
    let table = CtxTable::new();
    let ids = [1, 2, 3].map(|value| table.insert(value).unwrap());
    let context = table.get_ref(ids[0]).unwrap();
    let guard = rcu::pin();
    assert_eq!(CtxRef::wait_until(&context, |_| None::<()>), Err(WaitError::Pinned));
    assert_eq!(table.flush(), Err(WaitError::Pinned));
    assert_eq!(table.remove_all(), Err(WaitError::Pinned));
    assert_eq!(table.len(), 3, "remove_all removed no context");
    let removal = table.remove(ids[1]).unwrap();
    assert_eq!(removal.wait_timeout(WHILE), Err(WaitError::Pinned));
    assert_eq!(removal.wait(), Err(WaitError::Pinned));
    assert_eq!(table.begin_remove_all().wait(), Err(WaitError::Pinned));
    drop(guard);
    assert_eq!(table.flush().map(|vacated| vacated <= 2), Ok(true));
}

#[test]
fn a_removal_is_waited_for_in_every_way() {
    let table = CtxTable::new();
    let remove = || {
        let (drops, context) = counts_drops();
        let id = table.insert(context).unwrap();
        (drops, table.remove(id).unwrap())
    };
    let (drops, removal) = remove();
    removal.wait().unwrap();
    assert_eq!(drops.load(Relaxed), 1);
    let (drops, removal) = remove();
    removal.wait_timeout(NEVER).unwrap();
    assert_eq!(drops.load(Relaxed), 1);
    let (drops, removal) = remove();
    while !removal.is_done() {
        thread::yield_now();
    }
    assert_eq!(drops.load(Relaxed), 1);
    let (drops, removal) = remove();
    block_on(removal.into_future()).unwrap();
    assert_eq!(drops.load(Relaxed), 1);

    // With a reference of another thread, each wait lasts until it is dropped.
    for way in 0..4 {
        let (drops, context) = counts_drops();
        let id = table.insert(context).unwrap();
        let held = table.get_ref(id).unwrap();
        let removal = table.remove(id).unwrap();
        assert_eq!(removal.wait_timeout(WHILE), Err(WaitError::TimedOut));
        assert!(!removal.is_done());
        let user = thread::spawn(move || {
            thread::sleep(WHILE);
            drop(held);
        });
        match way {
            0 => removal.wait().unwrap(),
            1 => removal.wait_timeout(NEVER).unwrap(),
            2 => block_on(removal.into_future()).unwrap(),
            _ => assert_eq!(block_on(table.begin_remove_all().into_future()), Ok(0)),
        }
        assert_eq!(drops.load(Relaxed), 1, "way {way}");
        user.join().unwrap();
    }
    // With a reader, too.
    let (drops, context) = counts_drops();
    let id = table.insert(context).unwrap();
    let (end, ended) = mpsc::channel::<()>();
    let (pinned, is_pinned) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let guard = rcu::pin();
            pinned.send(()).unwrap();
            let _ = ended.recv();
            drop(guard);
        });
        is_pinned.recv().unwrap();
        let removal = table.remove(id).unwrap();
        assert_eq!(removal.wait_timeout(WHILE), Err(WaitError::TimedOut));
        assert_eq!((drops.load(Relaxed), removal.is_done()), (0, false));
        drop(end);
        block_on(removal.into_future()).unwrap();
        assert_eq!(drops.load(Relaxed), 1);
    });
}

#[test]
fn a_future_that_is_dropped_leaves_no_waker() {
    let table = CtxTable::new();
    let id = table.insert(5).unwrap();
    let context = table.get_ref(id).unwrap();
    let wake = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&wake));
    let mut waiting = CtxRef::removed(&context);
    for _ in 0..3 {
        let polled = Pin::new(&mut waiting).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
    }
    drop(waker);
    assert_eq!(Arc::strong_count(&wake), 2, "the context keeps one waker");
    drop(waiting);
    assert_eq!(Arc::strong_count(&wake), 1);
    drop(table.remove(id).unwrap().into_future());
    assert!(!wake.1.load(Relaxed));
}

#[test]
fn inv14_close_all_drops_everything_once() {
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
    let held = {
        let id = table.insert(CountsDrops(Arc::clone(&drops))).unwrap();
        table.get_ref(id).unwrap()
    };
    let mut closing = table.begin_remove_all();
    assert_eq!((closing.len(), closing.is_empty(), closing.is_done()), (1, false, false));
    assert_eq!(closing.wait_timeout(WHILE), Err(WaitError::TimedOut));
    drop(held);
    assert_eq!(closing.wait(), Ok(()));
    assert!(closing.is_done());
    assert_eq!(drops.load(Relaxed), 1501);
}

/// In a table full of removed contexts `insert_wait` waits for readers and for references, whichever
/// leaves first.
#[test]
fn insert_wait_takes_an_index_that_becomes_vacant() {
    let table = Arc::new(CtxTable::builder().max_index(1).build().unwrap());
    let ids = [1, 2].map(|value| table.insert(value).unwrap());
    assert_eq!(table.insert_wait(9).unwrap_err().reason, InsertRefused::Exhausted { pending: 0 });
    let held = ids.map(|id| table.get_ref(id).unwrap());
    table.remove(ids[0]).unwrap();
    let guard = rcu::pin();
    assert_eq!(table.insert_wait(9).unwrap_err().reason, InsertRefused::Deadlock);
    drop(guard);
    let insert = |value| {
        let table = Arc::clone(&table);
        move || table.insert_wait(value)
    };
    // A reference keeps one context. The other is removed while the insert waits.
    let waiter = thread::spawn(insert(10));
    thread::sleep(WHILE);
    let [first, second] = held;
    drop(second);
    table.remove(ids[1]).unwrap();
    let id = in_time(move || waiter.join().unwrap()).unwrap();
    assert_eq!((id.index(), id.generation()), (1, 2));
    // Only the reference is left to wait for.
    let waiter = thread::spawn(insert(11));
    thread::sleep(WHILE);
    drop(first);
    let id = in_time(move || waiter.join().unwrap()).unwrap();
    assert_eq!((id.index(), id.generation()), (0, 2));
    assert_eq!(table.insert_wait(9).unwrap_err().reason, InsertRefused::Exhausted { pending: 0 });
}

#[test]
fn insert_wait_takes_the_index_of_a_dropped_reservation() {
    let table = Arc::new(CtxTable::builder().max_index(1).build().unwrap());
    let id = table.insert(1).unwrap();
    let held = table.get_ref(id).unwrap();
    table.remove(id).unwrap();
    let reservation = table.reserve().unwrap();
    let waiter = thread::spawn({
        let table = Arc::clone(&table);
        move || table.insert_wait(2)
    });
    thread::sleep(WHILE);
    drop(reservation);
    let id = in_time(move || waiter.join().unwrap()).unwrap();
    assert_eq!((id.index(), id.generation()), (1, 2));
    drop(held);
}

/// A closed table refuses every kind of insert, and the values come back. Reservations are kept.
#[test]
fn a_closed_table_refuses_inserts() {
    let table = CtxTable::builder().max_index(100).max_contexts(3).build().unwrap();
    let first = table.insert(String::from("first")).unwrap();
    let reservation = table.reserve().unwrap();
    assert!(!table.is_closed());
    table.close();
    table.close();
    assert!(table.is_closed());
    let refused = table.insert(String::from("second")).unwrap_err();
    assert_eq!((refused.value.as_str(), refused.reason), ("second", InsertRefused::Closed));
    let second = || String::from("second");
    for reason in [
        table.insert_in(7.., second()).unwrap_err().reason,
        table.insert_cyclic(second()).unwrap_err().reason,
        table.insert_wait(second()).unwrap_err().reason,
        table.insert_ref(second()).unwrap_err().reason,
        table.reserve().unwrap_err().reason,
    ] {
        assert_eq!(reason, InsertRefused::Closed);
    }
    assert_eq!(table.next_free(), None);
    assert_eq!(table.usage().contexts, 2, "a refused insert gives back its place");
    let reserved = reservation.commit(second());
    assert_eq!(table.with(reserved, |second| second == "second"), Ok(true));
    table.remove(first).unwrap();
    table.flush().unwrap(); // the index is vacant again
    assert_eq!(table.insert(second()).unwrap_err().reason, InsertRefused::Closed);
    assert_eq!(table.remove_all(), Ok(1));
    table.validate();
}

#[test]
fn a_close_ends_an_insert_that_waits() {
    let table = Arc::new(CtxTable::builder().max_index(0).build().unwrap());
    let id = table.insert(1).unwrap();
    let held = table.get_ref(id).unwrap();
    table.remove(id).unwrap();
    let waiter = thread::spawn({
        let table = Arc::clone(&table);
        move || table.insert_wait(2).map_err(|refused| refused.reason)
    });
    thread::sleep(WHILE);
    table.close();
    assert_eq!(in_time(move || waiter.join().unwrap()), Err(InsertRefused::Closed));
    drop(held);
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

/// A payload that panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !thread::panicking() {
            panic_any("the payload");
        }
    }
}

/// A context whose drop panics for 1, and for 2 panics with a [`Bomb`].
struct Panics(u32);

impl Drop for Panics {
    fn drop(&mut self) {
        match self.0 {
            1 => std::panic::resume_unwind(Box::new("a drop")),
            2 => std::panic::resume_unwind(Box::new(Bomb)),
            _ => {}
        }
    }
}

#[test]
fn a_drop_that_panics_stops_nothing() {
    let table = CtxTable::new();
    for kind in [0, 1, 2, 0, 1] {
        table.insert(Panics(kind)).unwrap();
    }
    assert_eq!(in_time_scoped(|| table.remove_all()), Ok(5));
    assert_eq!(table.stats().panics, 3);
    table.validate();
    let id = table.insert(Panics(1)).unwrap();
    let held = table.get_ref(id).unwrap();
    table.remove(id).unwrap();
    table.flush().unwrap();
    assert!(
        catch_unwind(AssertUnwindSafe(|| drop(held))).is_err(),
        "the drop of the last reference panics"
    );
    assert_eq!(table.stats().pending, 0);
    table.validate();
    table.insert(Panics(1)).unwrap();
    drop(table); // catches the panic of the drop
}

/// [`in_time`] for a closure that borrows.
fn in_time_scoped<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || sender.send(f()));
        receiver.recv_timeout(NEVER).unwrap_or_else(|_| std::process::abort())
    })
}
