//! A thread that enforces the age bound while no other thread retires or polls.

use std::io;
use std::time::Duration;

use super::reclaim::poll;
use super::stats::{bounds, stats};
use crate::sync::native::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, thread};

/// A thread that frees retired objects in time. Dropping it stops and joins the thread.
///
/// The thread sleeps for half the age bound (from 1 ms to 1 s), checks the oldest retired object,
/// and polls if that object has waited for half the bound. [`Bounds::age`](super::Bounds::age) says
/// how the bound is enforced without a reclaimer.
///
/// The drop blocks until the thread has ended. The thread may be dropping a batch of retired
/// objects, so do not hold a lock that such a drop takes. If a retired object drops the reclaimer
/// on the reclaimer's own thread, the drop does not wait, and the thread ends after that batch.
///
/// ```
/// use offlock_percpu::rcu::{self, Reclaimer};
///
/// let reclaimer = Reclaimer::spawn()?;
/// // ... retired objects are freed without calls of `poll` ...
/// drop(reclaimer);
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use = "dropping the reclaimer stops its thread"]
#[derive(Debug)]
pub struct Reclaimer {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Reclaimer {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The error of the system if it cannot create a thread.
    pub fn spawn() -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread =
            thread::Builder::new().name("rcu-reclaimer".into()).spawn(move || run(&seen))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn run(stop: &AtomicBool) {
    // Ordering: Relaxed; the flag publishes no other data.
    while !stop.load(Ordering::Relaxed) {
        let half = bounds().age / 2;
        thread::park_timeout(half.clamp(Duration::from_millis(1), Duration::from_secs(1)));
        let stats = stats();
        if stats.pending != 0 && stats.oldest_pending.is_none_or(|age| age >= half) {
            poll();
        }
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        // Ordering: Relaxed; the flag publishes no other data, and `unpark` makes `run` load it.
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() == thread::current().id() {
            return; // detaches the thread
        }
        thread.thread().unpark();
        // The thread panics only with a bug in this module: panics of the drops it runs are caught.
        let _ = thread.join();
    }
}
