//! Sleeping and waking by the kernel.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use offlock_sync::Futex;

#[test]
fn a_time_that_is_over_or_a_change_ends_a_wait_at_once_and_no_time_ends_early() {
    const SHORT: Duration = Duration::from_millis(20);
    let futex = Futex::new();
    let seen = futex.load();
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < SHORT {
        futex.wait_for(seen, SHORT.saturating_sub(start.elapsed()));
        rounds += 1;
    }
    assert!(rounds < 10, "it slept: {rounds} rounds");
    futex.wait_for(seen, Duration::ZERO);
    futex.advance();
    futex.wait(seen);
    futex.wait_for(seen, Duration::MAX);
    assert_eq!(futex.load(), seen.wrapping_add(1));
}

#[test]
fn sleepers_without_a_near_end_sleep_until_they_are_woken() {
    type Case = (u32, fn(&Futex, u32), fn(&Futex));
    let cases: [Case; 3] = [
        (1, Futex::wait, Futex::wake_one),
        (1, |futex, seen| futex.wait_for(seen, Duration::MAX), Futex::wake_one),
        (3, Futex::wait, Futex::wake_all),
    ];
    for (sleepers, wait, wake) in cases {
        let (futex, rounds) = (Futex::new(), AtomicU32::new(0));
        let seen = futex.load();
        thread::scope(|scope| {
            for _ in 0..sleepers {
                scope.spawn(|| {
                    while futex.load() == seen {
                        wait(&futex, seen);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            thread::sleep(Duration::from_millis(50)); // long enough for them to sleep
            futex.advance();
            wake(&futex);
        });
        assert!(
            rounds.load(Ordering::Relaxed) < 30,
            "a rejected timeout makes it spin: {rounds:?}"
        );
    }
}

#[test]
fn a_wake_leaves_errno_alone() {
    // SAFETY: the function has no preconditions.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the `errno` of this thread, to which there are no references.
    unsafe { *errno = libc::EXDEV };
    Futex::new().wake_one();
    Futex::new().wake_all();
    // SAFETY: the `errno` of this thread, to which there are no references.
    assert_eq!(unsafe { *errno }, libc::EXDEV);
}
