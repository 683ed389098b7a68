//! Who waits for a context, or for the end of one: blocked, for a while, or as a future.
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

/// Long for a wait that must not end; a guess.
const WHILE: Duration = Duration::from_millis(30);
/// No wait of these tests takes so long, unless it hangs.
const NEVER: Duration = Duration::from_secs(20);

struct Unpark(Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Relaxed);
        self.0.unpark();
    }
}

/// Runs a future on this thread; panics if it is not ready in time.
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
            assert!(began.elapsed() < NEVER, "nobody wakes it");
            thread::park_timeout(WHILE);
        }
    }
}

/// Runs `f` on a thread; panics if it does not end in time.
fn in_time<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || tell.send(f()));
    let result = told.recv_timeout(NEVER).expect("it hangs");
    thread.join().unwrap().unwrap();
    result
}

/// A context that says when it is dropped.
struct Told(Arc<AtomicUsize>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn told() -> (Arc<AtomicUsize>, Told) {
    let drops = Arc::new(AtomicUsize::new(0));
    (Arc::clone(&drops), Told(drops))
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
    let said: Vec<_> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
    assert_eq!(said[..3], [Err(WaitError::Removed); 3]);
    assert_eq!(said[3], Ok(()), "notified before");
    assert!(!removal.is_done(), "we have a reference");
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
    assert_eq!(table.len(), 3, "nothing was removed");
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
        let (drops, context) = told();
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

    // A reference of another thread's holds each of them up.
    for way in 0..4 {
        let (drops, context) = told();
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
    // A reader, too.
    let (drops, context) = told();
    let id = table.insert(context).unwrap();
    let (tell, go) = mpsc::channel::<()>();
    let (pinned, is_pinned) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let guard = rcu::pin();
            pinned.send(()).unwrap();
            let _ = go.recv();
            drop(guard);
        });
        is_pinned.recv().unwrap();
        let removal = table.remove(id).unwrap();
        assert_eq!(removal.wait_timeout(WHILE), Err(WaitError::TimedOut));
        assert_eq!((drops.load(Relaxed), removal.is_done()), (0, false));
        drop(tell);
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
    assert_eq!(Arc::strong_count(&wake), 2, "one waker is kept, not three");
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
            (0..500).map(|_| table.insert(Told(Arc::clone(&drops))).unwrap()).collect();
        assert_eq!(table.remove_all(), Ok(500));
        assert_eq!(drops.load(Relaxed), 500 * round);
        assert!(ids.iter().all(|id| table.remove(*id).err() == Some(LookupError::Stale)));
        assert_eq!((table.len(), table.stats().pending), (0, 0));
        assert_eq!(table.remove_all(), Ok(0));
    }
    let held = {
        let id = table.insert(Told(Arc::clone(&drops))).unwrap();
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

/// Full of removed contexts: it waits for readers, and then for references; whichever ends first.
#[test]
fn insert_wait_takes_what_comes_free() {
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
    // One is kept by a reference; the other is removed while it waits.
    let waiter = thread::spawn(insert(10));
    thread::sleep(WHILE);
    let [first, second] = held;
    drop(second);
    table.remove(ids[1]).unwrap();
    let id = in_time(move || waiter.join().unwrap()).unwrap();
    assert_eq!((id.index(), id.generation()), (1, 2));
    // Now the reference is all there is to wait for.
    let waiter = thread::spawn(insert(11));
    thread::sleep(WHILE);
    drop(first);
    let id = in_time(move || waiter.join().unwrap()).unwrap();
    assert_eq!((id.index(), id.generation()), (0, 2));
    assert_eq!(table.insert_wait(9).unwrap_err().reason, InsertRefused::Exhausted { pending: 0 });
}

#[test]
fn insert_wait_takes_what_a_reservation_gives_back() {
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

/// A context whose drop calls its table.
struct Calls {
    table: &'static OnceLock<CtxTable<Calls>>,
    said: mpsc::Sender<[Option<WaitError>; 3]>,
}

impl Drop for Calls {
    fn drop(&mut self) {
        let table = self.table.get().unwrap();
        let flush = table.flush().err();
        let close = table.remove_all().err();
        let wait = table.begin_remove_all().wait().err();
        let _ = self.said.send([flush, close, wait]);
    }
}

/// By whoever drops it: the reclaim of a `flush`, the last reference, another context's end.
#[test]
fn inv18_a_drop_that_waits_for_its_own_table_is_told() {
    for by_reference in [false, true] {
        static TABLES: [OnceLock<CtxTable<Calls>>; 2] = [const { OnceLock::new() }; 2];
        let table = &TABLES[usize::from(by_reference)];
        let said = in_time(move || {
            let (said, hear) = mpsc::channel();
            let made = table.get_or_init(CtxTable::new);
            let id = made.insert(Calls { table, said }).unwrap();
            let held = by_reference.then(|| made.get_ref(id).unwrap());
            made.remove(id).unwrap();
            made.flush().unwrap();
            drop(held);
            hear.recv().unwrap()
        });
        assert_eq!(said, [Some(WaitError::InDrop); 3], "by reference: {by_reference}");
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

/// A context that panics when it is dropped, if it is told to.
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
    assert!(catch_unwind(AssertUnwindSafe(|| drop(held))).is_err(), "whoever put the last sees it");
    assert_eq!(table.stats().pending, 0);
    table.validate();
    table.insert(Panics(1)).unwrap();
    drop(table); // counted, and gone
}

/// [`in_time`] for what borrows.
fn in_time_scoped<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || tell.send(f()));
        told.recv_timeout(NEVER).unwrap_or_else(|_| std::process::abort())
    })
}
