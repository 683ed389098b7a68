//! The end of a test that makes no progress.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::wait::PATIENCE;

/// Runs `f`. If `progress` returns the same number for a minute meanwhile, prints the text of
/// `report` and aborts the process.
pub fn watched<R>(
    progress: impl Fn() -> u64 + Sync,
    report: impl Fn() -> String + Sync,
    f: impl FnOnce() -> R,
) -> R {
    /// Stops the watching thread, after a panic in `f` too.
    struct Done<'a>(&'a AtomicBool);

    impl Drop for Done<'_> {
        fn drop(&mut self) {
            // Ordering: Relaxed; the flag carries no other memory.
            self.0.store(true, Relaxed);
        }
    }

    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut since) = (progress(), Instant::now());
            // Ordering: Relaxed; the flag carries no other memory.
            while !done.load(Relaxed) {
                thread::sleep(Duration::from_millis(5));
                let now = progress();
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > PATIENCE {
                    eprintln!("no progress for {PATIENCE:?}, after {now} steps\n{}", report());
                    process::abort();
                }
            }
        });
        let _done = Done(&done);
        f()
    })
}
