//! A thread that keeps the age bound where nobody retires or polls.

use std::io;
use std::time::Duration;

use super::reclaim::poll;
use super::stats::{bounds, stats};
use crate::sync::native::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, thread};

/// A running reclaimer; stops and joins on drop.
///
/// It sleeps for half the age bound (from 1 ms to 1 s), looks at the oldest retired object, and polls
/// if that has been waiting for half the bound. Without one, the bound holds only as
/// [`Bounds::age`](super::Bounds::age) says.
///
/// A drop blocks until the thread has ended: for as long as the batch of retired objects takes that
/// it may just be dropping, so do not hold a lock that such a drop takes. Dropped on the thread itself,
/// by an object that was retired, it does not wait: the thread ends after that batch.
///
/// # Examples
///
/// ```
/// use percpu::rcu::{self, Reclaimer};
///
/// let reclaimer = Reclaimer::spawn()?;
/// // ... nobody needs to poll ...
/// drop(reclaimer);
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use = "dropping it stops the thread"]
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
    /// What the system says about a new thread.
    pub fn spawn() -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread =
            thread::Builder::new().name("rcu-reclaimer".into()).spawn(move || run(&seen))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn run(stop: &AtomicBool) {
    // Ordering: Relaxed; the flag is the whole message.
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
        // Ordering: Relaxed; as in `run`, and `unpark` follows.
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() == thread::current().id() {
            return; // detaches it
        }
        thread.thread().unpark();
        // It only panics with a bug of ours; the drops that it runs are caught.
        let _ = thread.join();
    }
}
