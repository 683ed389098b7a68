//! Wakers: which events wake a waiter, and which waits are refused.

use std::future::{Future, IntoFuture};
use std::mem::MaybeUninit;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, WaitError};

/// A waker that counts its calls, and panics if a guard is held.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        assert!(!rcu::is_pinned(), "woken under a guard");
        self.0.fetch_add(1, Relaxed);
    }
}

impl Count {
    fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

fn counted() -> (Arc<Count>, Waker) {
    let count = Arc::<Count>::default();
    (Arc::clone(&count), count.into())
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Returns a table with two contexts.
fn two() -> (CtxTable<u32>, Id, Id) {
    let table = CtxTable::new();
    let (first, second) = (table.insert(1).unwrap(), table.insert(2).unwrap());
    (table, first, second)
}

#[test]
fn inv18_a_waker_is_woken_for_its_own_context_only() {
    let (table, first, second) = two();
    let (count, waker) = counted();
    let mut killed = pin!(CtxRef::removed(&table.get_ref(first).unwrap()));
    assert_eq!(poll(killed.as_mut(), &waker), Poll::Pending);
    assert_eq!(poll(killed.as_mut(), &waker), Poll::Pending);
    let other = table.remove(second).unwrap();
    other.wait().unwrap();
    assert_eq!(count.get(), 0);
    table.remove(first).unwrap();
    assert_eq!(count.get(), 1);
    assert_eq!(poll(killed.as_mut(), &waker), Poll::Ready(()));
}

#[test]
fn inv18_all_wakers_are_woken_when_a_table_closes() {
    let (table, first, second) = two();
    let (count, waker) = counted();
    let mut futures: Vec<_> = [first, second]
        .into_iter()
        .map(|id| Box::pin(CtxRef::removed(&table.get_ref(id).unwrap())))
        .collect();
    for future in &mut futures {
        assert_eq!(poll(future.as_mut(), &waker), Poll::Pending);
    }
    drop(futures.pop()); // removes its waker
    assert_eq!(table.begin_remove_all().len(), 2);
    assert_eq!(count.get(), 1);
}

#[test]
fn inv18_the_last_reference_wakes_the_waiters_for_the_drop() {
    let (table, first, second) = two();
    let (count, waker) = counted();
    let context = table.get_ref(first).unwrap();
    let mut gone = pin!(table.remove(first).unwrap().into_future());
    let mut closed = pin!(table.begin_remove_all().into_future());
    table.flush().unwrap();
    assert_eq!(poll(gone.as_mut(), &waker), Poll::Pending);
    assert_eq!(poll(closed.as_mut(), &waker), Poll::Pending);
    assert_eq!(count.get(), 0, "no event has woken the futures");
    assert!(!table.contains(second));
    drop(context);
    assert_eq!(count.get(), 2);
    assert_eq!(poll(gone.as_mut(), &waker), Poll::Ready(Ok(())));
    assert_eq!(poll(closed.as_mut(), &waker), Poll::Ready(Ok(1)));
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker panics");
    }
}

#[test]
fn inv18_after_a_waker_that_panics_the_others_are_woken() {
    let (table, first, _) = two();
    let (count, waker) = counted();
    let context = table.get_ref(first).unwrap();
    let mut futures: Vec<_> = (0..8).map(|_| Box::pin(CtxRef::removed(&context))).collect();
    let panics = Waker::from(Arc::new(Panics));
    for (future, waker) in futures.iter_mut().zip([&panics, &waker].into_iter().cycle()) {
        assert_eq!(poll(future.as_mut(), waker), Poll::Pending);
    }
    let removal = table.remove(first).unwrap();
    assert_eq!(count.get(), 4);
    drop(futures);
    let mut gone = Box::pin(removal.into_future());
    table.flush().unwrap();
    assert_eq!(poll(gone.as_mut(), &panics), Poll::Pending);
    drop(context);
    assert_eq!(poll(gone.as_mut(), &panics), Poll::Ready(Ok(())));
    table.validate();
}

/// The condition of a wait may use the table: it is called without a lock and without a guard.
#[test]
fn inv18_a_condition_runs_without_a_lock() {
    let (table, first, _) = two();
    let context = table.get_ref(first).unwrap();
    let mut inserted = None;
    let found = CtxRef::wait_until(&context, |one| match inserted {
        None => {
            let id = table.insert(3).unwrap();
            drop(table.get_ref(id).unwrap());
            table.remove(id).unwrap();
            CtxRef::notify(&context);
            table.poll();
            inserted = Some(id);
            None
        }
        Some(_) => Some(*one),
    });
    assert_eq!(found, Ok(1));
}

#[test]
fn inv18_a_wait_that_was_refused_can_be_tried_again() {
    let (table, first, _) = two();
    let guard = rcu::pin(); // before the removal, so that no other thread reclaims it
    let removal = table.remove(first).unwrap();
    assert_eq!(removal.wait(), Err(WaitError::Pinned));
    drop(guard);
    removal.wait().unwrap();
    removal.wait().unwrap();
}

#[test]
fn inv18_a_future_polled_under_a_guard_is_refused() {
    let (table, first, _) = two();
    let (count, waker) = counted();
    let guard = rcu::pin();
    let mut gone = pin!(table.remove(first).unwrap().into_future());
    let mut closed = pin!(table.begin_remove_all().into_future());
    assert_eq!(poll(gone.as_mut(), &waker), Poll::Ready(Err(WaitError::Pinned)));
    assert_eq!(poll(closed.as_mut(), &waker), Poll::Ready(Err(WaitError::Pinned)));
    drop(guard);
    assert_eq!(count.get(), 0);
}

/// The result of a wait in a drop.
static RESULT: Mutex<Option<Result<(), WaitError>>> = Mutex::new(None);

struct Waits(Arc<CtxTable<Option<Waits>>>, Id);

impl Drop for Waits {
    fn drop(&mut self) {
        let mut gone = pin!(self.0.remove(self.1).unwrap().into_future());
        if let Poll::Ready(result) = poll(gone.as_mut(), Waker::noop()) {
            *RESULT.lock().unwrap() = Some(result);
        }
    }
}

#[test]
fn inv18_a_future_polled_in_a_drop_of_its_table_is_refused() {
    let table = Arc::new(CtxTable::new());
    let other = table.insert(None).unwrap();
    let id = table.insert(Some(Waits(Arc::clone(&table), other))).unwrap();
    table.remove(id).unwrap();
    table.flush().unwrap();
    assert_eq!(RESULT.lock().unwrap().take(), Some(Err(WaitError::InDrop)));
}

/// Returns the number of voluntary context switches of this thread.
fn switches() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for a `rusage`, which the call fills.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
    // SAFETY: a `rusage` of zeros is valid, and the call has filled it.
    unsafe { usage.assume_init() }.ru_nvcsw
}

/// A wait with a timeout sleeps while a reference keeps the context, and does not poll. This holds for a
/// short timeout and for the longest one.
#[test]
fn inv18_a_wait_with_a_timeout_sleeps() {
    let (table, first, second) = two();
    let contexts = [table.get_ref(first).unwrap(), table.get_ref(second).unwrap()];
    let removal = table.remove(first).unwrap();
    table.flush().unwrap();
    let before = switches();
    assert_eq!(removal.wait_timeout(Duration::from_millis(200)), Err(WaitError::TimedOut));
    let waited = switches() - before;
    assert!(waited < 50, "waited {waited} times");

    let mut closing = table.begin_remove_all();
    table.flush().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(200));
            drop(contexts);
        });
        let (before, cpu) = (switches(), cpu_time());
        closing.wait_timeout(Duration::MAX).unwrap();
        let (waited, cpu) = (switches() - before, cpu_time() - cpu);
        assert!(waited < 50 && cpu < Duration::from_millis(100), "{waited} times, {cpu:?}");
    });
    removal.wait_timeout(Duration::MAX).unwrap();
}

/// Runs a future on this thread, and returns the number of its polls.
fn block_on<F: Future>(future: F) -> (F::Output, usize) {
    struct Unpark(Thread, AtomicBool);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.1.store(true, Relaxed);
            self.0.unpark();
        }
    }
    let wake = Arc::new(Unpark(thread::current(), AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&wake));
    let (mut future, mut polls) = (pin!(future), 0);
    loop {
        while !wake.1.swap(false, Relaxed) {
            thread::park();
        }
        polls += 1;
        if let Poll::Ready(output) = poll(future.as_mut(), &waker) {
            return (output, polls);
        }
    }
}

/// The task of a future sleeps while a reader has the context, and is ready soon after the reader leaves.
#[test]
fn inv18_a_future_sleeps_while_a_reader_stays() {
    const STAYS: Duration = Duration::from_millis(500);
    let (table, first, _) = two();
    for all in [false, true] {
        let (pinned, is_pinned) = mpsc::channel();
        thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let guard = rcu::pin();
                pinned.send(()).unwrap();
                thread::sleep(STAYS);
                drop(guard);
                Instant::now()
            });
            is_pinned.recv().unwrap();
            let cpu = cpu_time();
            let polls = if all {
                let (removed, polls) = block_on(table.begin_remove_all().into_future());
                assert_eq!(removed, Ok(1));
                polls
            } else {
                let (removed, polls) = block_on(table.remove(first).unwrap().into_future());
                removed.unwrap();
                polls
            };
            let (ready, cpu) = (Instant::now(), cpu_time() - cpu);
            let late = ready.duration_since(reader.join().unwrap());
            assert!(polls > 20, "{polls} polls: it has not waited for the reader");
            assert!(polls < 1500 && cpu < STAYS / 5, "{polls} polls, {cpu:?}");
            assert!(late < STAYS, "{late:?} after the reader");
        });
    }
}

/// A future that is woken by other events during a pause does not poll more often because of them.
#[test]
fn inv18_a_future_whose_task_is_woken_often_pauses_as_before() {
    let (table, first, _) = two();
    let (count, waker) = counted();
    let guard = rcu::pin();
    let mut gone = pin!(thread::scope(|scope| {
        scope.spawn(|| table.remove(first).unwrap().into_future()).join().unwrap()
    }));
    let began = Instant::now();
    let polls = thread::scope(|scope| {
        let (gone, waker) = (&mut gone, &waker);
        let polling = scope.spawn(move || {
            let mut polls = 0;
            while began.elapsed() < Duration::from_millis(100) {
                assert_eq!(poll(gone.as_mut(), waker), Poll::Pending);
                polls += 1;
            }
            polls
        });
        polling.join().unwrap()
    });
    // 8 at once, about 14 in the first 2 ms, and one for each millisecond.
    assert!(count.get() < 150, "{} wake-ups for {polls} polls", count.get());
    drop(guard);
    while poll(gone.as_mut(), &waker).is_pending() {
        thread::yield_now();
    }
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for a `timespec`.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
