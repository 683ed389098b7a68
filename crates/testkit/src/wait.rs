//! Waiting for another thread's effect.

use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Much longer than any test waits or needs, also beside other programs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` returns true.
///
/// # Panics
///
/// Panics after a minute.
#[track_caller]
pub fn wait_until(condition: impl FnMut() -> bool) {
    wait_for("the condition", condition);
}

/// [`wait_until`], where the panic names what was waited for.
#[track_caller]
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// Runs `work` on a new thread, and returns its result. A panic of `work` goes on here.
///
/// # Panics
///
/// Panics after a minute, and leaves the thread. The panic names `what`.
#[track_caller]
pub fn in_time<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        let result = work();
        let _ = done.send(());
        result
    });
    // A panic of `work` disconnects the channel.
    let is_late = ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
    assert!(!is_late, "not within {PATIENCE:?}: {what}");
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
