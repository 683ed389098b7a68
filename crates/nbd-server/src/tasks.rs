//! The running operations of one worker, each a future.
//!
//! ```text
//!  wake, on any thread ─► list of woken futures ─► the worker polls the future ─► Pending, or its result
//!                            └─► notifies the worker: the first wake since, from another thread
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::stream::{FuturesUnordered, Stream};
use offlock_sync::thread_id;

/// The futures of one worker.
pub(crate) struct Tasks<T> {
    futures: FuturesUnordered<Pin<Box<dyn Future<Output = T>>>>,
    woken: Arc<Woken>,
    /// Wakes by `woken`.
    waker: Waker,
}

/// Wakes the worker.
struct Woken {
    /// A future may have to be polled.
    is_set: AtomicBool,
    /// The id of the thread that polls.
    worker: u64,
    notifier: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Ordering: AcqRel, with the swap in `Tasks::next`. The future was listed before this call, so a
        // poll behind a swap that reads the value stored here finds it. If a store of the worker has
        // replaced that value, the poll finds the future all the same or is woken again:
        // `FuturesUnordered` registers its waker before it looks at its list.
        let was_set = self.is_set.swap(true, Ordering::AcqRel);
        // The worker checks the flag before it sleeps, so its own wakes need no notification.
        if !was_set && thread_id() != self.worker {
            self.notifier.wake_by_ref();
        }
    }
}

impl<T> Tasks<T> {
    /// Makes the tasks of the calling thread. A wake by another thread wakes `notifier`.
    pub(crate) fn new(notifier: Waker) -> Self {
        let is_set = AtomicBool::new(false);
        let woken = Arc::new(Woken { is_set, worker: thread_id(), notifier });
        let waker = Waker::from(Arc::clone(&woken));
        Self { futures: FuturesUnordered::new(), woken, waker }
    }

    /// Returns whether a future may have to be polled.
    pub(crate) fn is_ready(&self) -> bool {
        self.woken.is_set.load(Ordering::Acquire)
    }

    /// Adds a future, for [`next`](Self::next) to poll.
    pub(crate) fn spawn(&mut self, future: impl Future<Output = T> + 'static) {
        self.futures.push(Box::pin(future));
        self.woken.is_set.store(true, Ordering::Release);
    }

    /// Polls woken futures until one of them ends. Returns `None` if none ends, or if one yields
    /// before: then [`is_ready`](Self::is_ready) stays true.
    pub(crate) fn next(&mut self) -> Option<T> {
        if !self.woken.is_set.swap(false, Ordering::AcqRel) {
            return None;
        }
        let mut context = Context::from_waker(&self.waker);
        match Pin::new(&mut self.futures).poll_next(&mut context) {
            Poll::Ready(Some(ended)) => {
                self.woken.is_set.store(true, Ordering::Release); // there may be more
                Some(ended)
            }
            Poll::Ready(None) | Poll::Pending => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::poll_fn;
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
        let mut tasks = Tasks::new(calls.waker());
        tasks.spawn(async { 3 });
        assert_eq!((tasks.next(), tasks.next()), (Some(3), None));
        let (flag, waker) = (Arc::new(AtomicBool::new(false)), Rc::default());
        tasks.spawn(wait_for(&flag, &waker));
        let rest = |tasks: &mut Tasks<_>| {
            while tasks.is_ready() {
                assert_eq!(tasks.next(), None);
            }
        };
        rest(&mut tasks);
        let waker: Waker = waker.borrow_mut().take().unwrap();
        waker.wake_by_ref();
        assert!(tasks.is_ready());
        rest(&mut tasks);
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
        waker.wake(); // of a task that has ended
        assert_eq!(tasks.next(), None);
    }
}
