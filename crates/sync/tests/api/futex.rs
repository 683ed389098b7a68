//! Sleeping and waking by the kernel.

use std::sync::atomic::{AtomicBool, Ordering};
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
fn a_wait_without_a_near_end_sleeps_until_it_is_woken() {
    for wait in [Futex::wait, |futex: &Futex, seen| futex.wait_for(seen, Duration::MAX)] {
        let futex = Futex::new();
        let seen = futex.load();
        thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let mut rounds = 0;
                while futex.load() == seen {
                    wait(&futex, seen);
                    rounds += 1;
                }
                rounds
            });
            thread::sleep(Duration::from_millis(50)); // long enough for it to sleep
            futex.advance();
            futex.wake_one();
            let rounds: u32 = sleeper.join().unwrap();
            assert!(rounds < 10, "a rejected timeout makes it spin: {rounds} rounds");
        });
    }
}

#[test]
fn wake_all_wakes_every_sleeper() {
    let (futex, go) = (Futex::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let seen = futex.load();
                    if go.load(Ordering::Relaxed) {
                        break;
                    }
                    futex.wait(seen);
                }
            });
        }
        thread::sleep(Duration::from_millis(50)); // long enough for all to sleep
        go.store(true, Ordering::Relaxed);
        futex.advance();
        futex.wake_all();
    });
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
