//! What ends a test whose threads sleep for ever.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// More than a machine that has other things to do keeps a thread waiting.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `f`. If `moved` says the same for 20 seconds meanwhile, prints what `say` says and ends the
/// process.
pub(crate) fn watched<R>(
    moved: impl Fn() -> u64 + Sync,
    say: impl Fn() -> String + Sync,
    f: impl FnOnce() -> R,
) -> R {
    /// Also after a panic.
    struct Done<'a>(&'a AtomicBool);

    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut since) = (moved(), Instant::now());
            while !done.load(Relaxed) {
                thread::sleep(Duration::from_millis(5));
                let now = moved();
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > PATIENCE {
                    eprintln!("nothing has moved for {PATIENCE:?}, after {now}\n{}", say());
                    process::abort();
                }
            }
        });
        let _done = Done(&done);
        f()
    })
}
