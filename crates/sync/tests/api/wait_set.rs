//! The list of waiters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use offlock_sync::{WaitSet, Waiter};
use testkit::WakeCount;

fn wait(waiter: Pin<&mut Waiter<'_>>, waker: &Arc<WakeCount>) -> Poll<u8> {
    waiter.poll(&mut Context::from_waker(&waker.waker()), || None)
}

/// Waiters in a list, in this order, and their wakers.
struct Line<'a, const N: usize> {
    waiters: [Pin<Box<Waiter<'a>>>; N],
    wakers: [Arc<WakeCount>; N],
}

impl<'a, const N: usize> Line<'a, N> {
    fn new(waiters: [Waiter<'a>; N]) -> Self {
        let wakers = [(); N].map(|()| WakeCount::new());
        let mut line = Self { waiters: waiters.map(Box::pin), wakers };
        (0..N).for_each(|n| line.wait(n));
        line
    }

    /// Polls a waiter, which waits.
    fn wait(&mut self, n: usize) {
        assert!(wait(self.waiters[n].as_mut(), &self.wakers[n]).is_pending());
    }

    fn counts(&self) -> [usize; N] {
        self.wakers.each_ref().map(|waker| waker.count())
    }
}

#[test]
fn waiters_are_woken_in_order_and_one_that_was_woken_in_vain_keeps_its_place() {
    let set = WaitSet::new();
    let mut line = Line::new([(); 3].map(|()| set.waiter()));
    line.wait(0);
    set.wake_one();
    assert_eq!(line.counts(), [1, 0, 0]);
    set.wake_one();
    assert_eq!(line.counts(), [1, 1, 0]);
    line.wait(1);
    line.wait(0); // the first one again
    set.wake_one();
    assert_eq!(line.counts(), [2, 1, 0]);
    set.wake_all();
    assert_eq!((line.counts(), set.waiting()), ([2, 2, 1], 0));
    set.wake_all();
    assert_eq!(line.counts(), [2, 2, 1], "none is listed");
}

/// Polls its waiter in each wake-up, a hundred times at most.
struct Polls {
    waiter: Mutex<Pin<Box<Waiter<'static>>>>,
    wakes: AtomicUsize,
}

impl Polls {
    fn poll(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        let mut waiter = self.waiter.lock().unwrap();
        let polled = waiter.as_mut().poll(&mut Context::from_waker(&waker), || None::<()>);
        assert!(polled.is_pending());
    }
}

impl Wake for Polls {
    fn wake(self: Arc<Self>) {
        if self.wakes.fetch_add(1, Ordering::Relaxed) < 100 {
            self.poll();
        }
    }
}

#[test]
fn a_waiter_that_waits_again_is_not_woken_again_by_the_same_call() {
    let set: &'static WaitSet = Box::leak(Box::default());
    let waiter = Mutex::new(Box::pin(set.waiter()));
    let polls = Arc::new(Polls { waiter, wakes: AtomicUsize::new(0) });
    polls.poll();
    let mut behind = Line::new([set.waiter()]);
    for (call, units) in [(1, usize::MAX), (2, 2)] {
        set.wake_for(units);
        assert_eq!((polls.wakes.load(Ordering::Relaxed), behind.counts()), (call, [call]));
        behind.wait(0);
    }
    polls.waiter.lock().unwrap().set(set.waiter()); // drops its waker
}

/// Each waiter that was woken has a unit, until it looks. A waiter that needs more units than there are
/// does not keep those behind it waiting.
#[test]
fn units_are_counted_for_those_that_were_woken() {
    let set = WaitSet::new();
    let mut line = Line::new([2, 1, 1, 1].map(|needs| set.waiter_needing(needs)));
    set.wake_for(0);
    set.wake_for(1);
    set.wake_for(1);
    assert_eq!(line.counts(), [0, 1, 0, 0]);
    set.wake_for(2);
    assert_eq!(line.counts(), [0, 1, 1, 0], "one unit is left, and the first waiter needs two");
    set.wake_for(4);
    assert_eq!(line.counts(), [1, 1, 1, 1]);
    (0..4).for_each(|n| line.wait(n));
    set.wake_for(2);
    assert_eq!(line.counts(), [2, 2, 1, 1], "the units were given back, and a waiter takes one");
}

#[test]
fn wakers_of_one_key_are_taken_and_the_others_stay() {
    let set = WaitSet::new();
    let mut line = Line::new([7, 8, 7, 7].map(|key| set.waiter_for(key)));
    let taken = set.take(Some(7));
    assert_eq!(line.counts(), [0; 4], "taken and not woken");
    taken.wake();
    assert_eq!(line.counts(), [1, 0, 1, 1]);
    set.take(Some(7)).wake();
    line.wait(2); // keeps its key
    drop(set.take(Some(7)));
    assert_eq!(line.counts(), [1, 0, 2, 1]);
    set.take(None).wake();
    assert_eq!(line.counts(), [1, 1, 2, 1]);
}

#[test]
fn a_thread_waits_until_it_is_woken_or_until_the_deadline() {
    let (set, open) = (WaitSet::new(), AtomicU32::new(0));
    let ready = || (open.load(Ordering::Relaxed) == 1).then_some("open");
    assert_eq!(set.wait(Some(Instant::now()), ready), None);
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(set.wait(Some(soon), ready), None);
    assert!(Instant::now() >= soon && set.waiting() == 0, "the wait has left the list");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| set.wait(None, ready));
        while set.waiting() == 0 {
            std::thread::yield_now();
        }
        open.store(1, Ordering::Relaxed);
        set.wake_all();
        assert_eq!(waiting.join().unwrap(), Some("open"));
    });
}

#[test]
fn a_dropped_waiter_is_in_no_list_and_passes_its_wake_up_on() {
    let set = WaitSet::new();
    let mut line = Line::new([set.waiter(), set.waiter()]);
    set.wake_one();
    assert_eq!(line.counts(), [1, 0]);
    line.waiters[0].set(set.waiter()); // drops the first one
    assert_eq!(line.counts(), [1, 1], "the drop passed it on");
    assert_eq!(Arc::strong_count(&line.wakers[0]), 1, "no waker is left");
    line.wait(0);
    line.waiters[0].set(set.waiter());
    set.wake_all();
    assert_eq!(line.counts(), [1, 1]);
    assert_eq!(Arc::strong_count(&line.wakers[0]), 1);
}

#[test]
fn a_value_ends_the_wait_and_takes_the_wake_up_with_it() {
    let set = WaitSet::new();
    let mut line = Line::new([set.waiter(), set.waiter()]);
    set.wake_one();
    let waker = line.wakers[0].waker();
    let ready = line.waiters[0].as_mut().poll(&mut Context::from_waker(&waker), || Some(7));
    assert_eq!(ready, Poll::Ready(7));
    line.waiters[0].set(set.waiter()); // drops the first one
    assert_eq!(line.counts(), [1, 0]);
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("planted");
    }
}

#[test]
fn a_waker_that_panics_keeps_no_other_waiter_waiting() {
    const CALLS: [fn(&WaitSet); 2] = [WaitSet::wake_all, |set| set.take(None).wake()];
    for call in CALLS {
        let set = WaitSet::new();
        let bad = Waker::from(Arc::new(Panics));
        let good = WakeCount::new();
        let (a, mut b) = (pin!(set.waiter()), pin!(set.waiter()));
        assert!(a.poll(&mut Context::from_waker(&bad), || None::<u8>).is_pending());
        assert!(wait(b.as_mut(), &good).is_pending());
        assert!(catch_unwind(AssertUnwindSafe(|| call(&set))).is_err());
        assert_eq!(good.count(), 1);
        assert!(wait(b.as_mut(), &good).is_pending(), "no lock is held");
    }
}
