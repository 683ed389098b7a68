//! Sleeping and waking on a futex, with and without a time limit.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Instant;

use super::*;

#[test]
fn a_wait_for_what_is_past_returns_at_once() {
    let futex = Futex::new();
    let seen = futex.load();
    futex.advance();
    futex.wait(seen);
    assert_eq!(futex.load(), seen.wrapping_add(1));
}

#[test]
fn a_timed_wait_ends_in_time_but_not_before() {
    const SHORT: Duration = Duration::from_millis(20);
    let futex = Futex::new();
    let seen = futex.load();

    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < SHORT {
        futex.wait_for(seen, SHORT.saturating_sub(start.elapsed()));
        rounds += 1;
    }
    let end = SystemTime::now() + SHORT;
    while SystemTime::now() < end {
        futex.wait_until(seen, end);
        rounds += 1;
    }
    assert!(rounds < 20, "it slept: {rounds} rounds");
}

#[test]
fn a_time_that_is_over_or_a_change_ends_a_timed_wait_at_once() {
    let futex = Futex::new();
    let (seen, long) = (futex.load(), Duration::MAX);
    futex.wait_for(seen, Duration::ZERO);
    futex.wait_until(seen, SystemTime::now() - Duration::from_secs(1));
    futex.wait_until(seen, SystemTime::UNIX_EPOCH - Duration::from_secs(1));
    futex.advance();
    futex.wait_for(seen, long);
    futex.wait_until(seen, SystemTime::now() + Duration::from_secs(1 << 40));
}

#[test]
fn a_wait_without_a_near_end_sleeps_until_it_is_woken() {
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(i64::MAX as u64);
    for by_the_clock in [false, true] {
        let wait = |futex: &Futex, seen| match by_the_clock {
            false => futex.wait_for(seen, Duration::MAX),
            true => futex.wait_until(seen, far),
        };
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
