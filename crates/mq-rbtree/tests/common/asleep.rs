//! Threads that sleep in a wait.

use std::fs;
use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Longer than any thread takes to fall asleep.
const LONG: Duration = Duration::from_secs(60);

/// Starts a thread, and returns when `is_listed` holds and the thread sleeps afterwards. Sleep alone does
/// not show a wait: on a busy machine the thread may sleep before it, for a page or a lock. Nor does the
/// list alone: a listed thread looks once more at what it waits for, and may take that from others.
pub(crate) fn asleep<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    f: impl FnOnce() -> R + Send + 'scope,
    is_listed: impl Fn() -> bool,
) -> ScopedJoinHandle<'scope, R> {
    let (send_id, id) = mpsc::channel();
    let thread = scope.spawn(move || {
        // SAFETY: has no preconditions.
        send_id.send(unsafe { libc::gettid() }).unwrap();
        f()
    });
    let stat = format!("/proc/self/task/{}/stat", id.recv().unwrap());
    // Format: pid (name) state ...
    let sleeps = || {
        let stat = fs::read_to_string(&stat).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('S'))
    };
    let start = Instant::now();
    while !(is_listed() && sleeps() || thread.is_finished()) {
        assert!(start.elapsed() < LONG, "it does not fall asleep");
        thread::sleep(Duration::from_micros(200));
    }
    thread
}
