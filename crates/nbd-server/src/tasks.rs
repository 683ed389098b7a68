//! The running operations of one worker, each a future.
//!
//! ```text
//!  wake, on any thread ─► ready list ─► the worker polls the future ─► Pending, or its result
//!                            └─► notifies the worker, if the list was empty, from another thread
//! ```
//!
//! A waker names a slot in the table of futures. If the slot belongs to another future by the time
//! the waker is used, that future is polled once in vain.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use offlock_sync::{Mutex, thread_id};
use slab::Slab;

/// The futures of one worker.
pub(crate) struct Tasks<T> {
    futures: Slab<Pin<Box<dyn Future<Output = T>>>>,
    /// The waker of each slot, made once.
    wakers: Vec<Arc<TaskWaker>>,
    ready: Arc<Ready>,
}

struct Ready {
    /// Slots whose futures are to be polled.
    places: Mutex<VecDeque<usize>>,
    /// The id of the thread that polls.
    worker: u64,
    notifier: Waker,
}

struct TaskWaker {
    place: usize,
    /// Whether the slot is on the ready list.
    is_listed: AtomicBool,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Ordering: AcqRel, here and in `Tasks::next`. If the slot is listed already, the swap
        // there reads the value stored here, which carries the waking thread's earlier writes to
        // the poll.
        if self.is_listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut places = self.ready.places.lock();
        let was_empty = places.is_empty();
        places.push_back(self.place);
        drop(places);
        // The worker checks the list before it sleeps, so its own wakes need no notification.
        if was_empty && thread_id() != self.ready.worker {
            self.ready.notifier.wake_by_ref();
        }
    }
}

impl<T> Tasks<T> {
    /// Makes the tasks of the calling thread. A wake by another thread wakes `notifier`.
    pub(crate) fn new(capacity: usize, notifier: Waker) -> Self {
        let places = Mutex::new(VecDeque::with_capacity(capacity));
        let ready = Arc::new(Ready { places, worker: thread_id(), notifier });
        Self { futures: Slab::with_capacity(capacity), wakers: Vec::new(), ready }
    }

    /// Returns whether a future is to be polled.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.places.lock().is_empty()
    }

    /// Polls a new future. Returns its result if it is ready; otherwise a later
    /// [`next`](Self::next) does.
    pub(crate) fn spawn(&mut self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let place = self.futures.insert(Box::pin(future));
        if place == self.wakers.len() {
            let (is_listed, ready) = (AtomicBool::new(false), Arc::clone(&self.ready));
            self.wakers.push(Arc::new(TaskWaker { place, is_listed, ready }));
        }
        self.poll(place)
    }

    /// Polls woken futures until one of them ends.
    pub(crate) fn next(&mut self) -> Option<T> {
        loop {
            let place = self.ready.places.lock().pop_front()?;
            self.wakers[place].is_listed.swap(false, Ordering::AcqRel); // see `wake_by_ref`
            if self.futures.contains(place) {
                let ended = self.poll(place);
                if ended.is_some() {
                    return ended;
                }
            }
        }
    }

    fn poll(&mut self, place: usize) -> Option<T> {
        let waker = Waker::from(Arc::clone(&self.wakers[place]));
        let polled = self.futures[place].as_mut().poll(&mut Context::from_waker(&waker));
        let Poll::Ready(result) = polled else { return None };
        drop(self.futures.remove(place));
        Some(result)
    }
}

/// The error of a future that panicked. The panic hook has reported the panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panicked;

/// Catches a panic of the future, so that one request does not end its worker.
pub(crate) async fn contain<T>(future: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut future = pin!(future);
    poll_fn(|context| {
        // Unwind safety: the future is not polled again.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(Panicked)),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use testkit::WakeCount;

    use super::*;

    /// A future that ends once the flag is set, and passes on the waker of its last poll.
    fn wait_for(
        flag: &Arc<AtomicBool>,
        waker: &Rc<RefCell<Option<Waker>>>,
    ) -> impl Future<Output = u32> + use<> {
        let (flag, waker) = (Arc::clone(flag), Rc::clone(waker));
        poll_fn(move |context| {
            waker.replace(Some(context.waker().clone()));
            if flag.load(Ordering::Relaxed) { Poll::Ready(7) } else { Poll::Pending }
        })
    }

    #[test]
    fn a_woken_task_is_polled_and_another_threads_wake_notifies_once() {
        let calls = WakeCount::new();
        let mut tasks = Tasks::new(1, calls.waker());
        assert_eq!(tasks.spawn(async { 3 }), Some(3));
        let (flag, waker) = (Arc::new(AtomicBool::new(false)), Rc::default());
        assert_eq!((tasks.spawn(wait_for(&flag, &waker)), tasks.futures.len()), (None, 1));
        let waker: Waker = waker.borrow_mut().take().unwrap();
        waker.wake_by_ref();
        assert!(tasks.is_ready() && tasks.next().is_none() && !tasks.is_ready());
        assert_eq!(calls.count(), 0, "its own thread's wake");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                flag.store(true, Ordering::Relaxed);
                waker.wake_by_ref();
                waker.wake_by_ref();
            });
        });
        assert_eq!((tasks.next(), tasks.next(), tasks.futures.len()), (Some(7), None, 0));
        assert_eq!(calls.count(), 1);
        // A waker of a task that has ended.
        waker.wake();
        assert_eq!(tasks.next(), None);
        assert_eq!(tasks.spawn(async { 4 }), Some(4), "its place is used again");
    }
}
