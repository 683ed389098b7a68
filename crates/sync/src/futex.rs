//! A futex: a counter of changes on which threads sleep until the next change.
//!
//! A build for a model checker uses the checker's locks instead of the system call.

use std::time::{Duration, SystemTime};

use super::atomic::{AtomicU32, Ordering};
#[cfg(offlock_model)]
use super::label::check;
use super::label::{order, step};

/// A counter of changes on which threads sleep until the next change.
///
/// A waiter loads the counter, checks its condition, and sleeps only while the counter still has
/// the loaded value. A waker changes the condition, advances the counter, and wakes.
#[derive(Debug)]
pub struct Futex {
    changes: AtomicU32,
    #[cfg(offlock_model)]
    sleepers: (super::Mutex<()>, super::Condvar),
}

impl Futex {
    /// Creates a futex with a counter of 0 and no sleepers.
    #[must_use]
    pub fn new() -> Self {
        Self {
            changes: AtomicU32::new(0),
            #[cfg(offlock_model)]
            sleepers: (super::Mutex::new(()), super::Condvar::new()),
        }
    }

    /// Returns the counter. A [`wait`](Self::wait) with this value does not miss a later change.
    /// Wait-free.
    #[inline]
    pub fn load(&self) -> u32 {
        // Ordering: Acquire pairs with the Release in `advance`; it carries the condition that the
        // waker changed.
        self.changes.load(Ordering::Acquire)
    }

    /// Counts a change. The caller must then call [`wake_one`](Self::wake_one) or
    /// [`wake_all`](Self::wake_all). Wait-free; a signal handler may call it.
    #[inline]
    pub fn advance(&self) {
        // Ordering: Release pairs with the Acquire in `load`; it carries the condition that the
        // calling thread changed.
        self.changes.fetch_add(1, order!(Release, "futex: the condition has changed"));
    }

    /// Sleeps until a wake-up. Returns at once if the counter is no longer `seen`.
    ///
    /// The call may also return without a wake-up and without a change, so the caller must check
    /// its condition again. The counter wraps: a thread that is preempted before this call for
    /// exactly 2^32 changes misses them.
    ///
    /// Returns true if a signal handler interrupted the sleep. After a handler with `SA_RESTART` the
    /// kernel continues the sleep. In a model it is false.
    pub fn wait(&self, seen: u32) -> bool {
        self.sleep(seen)
    }

    /// Sleeps like [`wait`](Self::wait), but at most for `time` on the monotonic clock. A time that
    /// is too long for the kernel sets no limit.
    ///
    /// Any signal handler interrupts it. A model has no clock. The call returns at once there, as
    /// after the shortest time.
    pub fn wait_for(&self, seen: u32, time: Duration) -> bool {
        self.sleep_for(seen, time)
    }

    /// Sleeps like [`wait`](Self::wait), but at most until the system clock reaches `end`. If the
    /// clock is set, the end of the wait moves with it.
    ///
    /// Any signal handler interrupts it. A model has no clock. The call returns at once there, as if
    /// `end` were past.
    pub fn wait_until(&self, seen: u32, end: SystemTime) -> bool {
        self.sleep_until(seen, end)
    }

    /// Wakes one sleeping thread, if there is one.
    ///
    /// Makes one system call, takes no lock of the process and preserves `errno`, so a signal
    /// handler may call it.
    pub fn wake_one(&self) {
        self.wake(false);
    }

    /// Wakes every sleeping thread. The rest is as for [`wake_one`](Self::wake_one).
    pub fn wake_all(&self) {
        step!("futex: wake all", self.wake(true));
    }
}

#[cfg(not(offlock_model))]
impl Futex {
    fn sleep(&self, seen: u32) -> bool {
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let forever = std::ptr::null::<libc::timespec>();
        // SAFETY: the kernel reads the counter, which `self` keeps alive. The timeout is null.
        let woken =
            unsafe { libc::syscall(libc::SYS_futex, self.changes.as_ptr(), op, seen, forever) };
        is_interrupted(woken)
    }

    fn sleep_for(&self, seen: u32, time: Duration) -> bool {
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let time = timespec(time);
        let (word, time) = (self.changes.as_ptr(), &raw const time);
        // SAFETY: the kernel reads the counter, which `self` keeps alive, and the local `time`.
        is_interrupted(unsafe { libc::syscall(libc::SYS_futex, word, op, seen, time) })
    }

    fn sleep_until(&self, seen: u32, end: SystemTime) -> bool {
        let op = libc::FUTEX_WAIT_BITSET | libc::FUTEX_CLOCK_REALTIME | libc::FUTEX_PRIVATE_FLAG;
        // A time before 1970 is past, like the start of 1970, which takes its place.
        let end = timespec(end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let (word, unused) = (self.changes.as_ptr(), std::ptr::null::<u32>());
        let (end, any) = (&raw const end, libc::FUTEX_BITSET_MATCH_ANY);
        // SAFETY: the kernel reads the counter, which `self` keeps alive, and the local `end`.
        is_interrupted(unsafe { libc::syscall(libc::SYS_futex, word, op, seen, end, unused, any) })
    }

    fn wake(&self, all: bool) {
        let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        let most = if all { libc::c_int::MAX } else { 1 };
        // SAFETY: the function has no preconditions.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the `errno` of the calling thread, to which there are no references.
        let before = unsafe { *errno };
        // SAFETY: the kernel uses the address only to find the sleepers. `self` keeps it mapped.
        unsafe { libc::syscall(libc::SYS_futex, self.changes.as_ptr(), op, most) };
        // The call fails only if a seccomp filter refuses it. The code that a signal handler
        // interrupts must not see the error.
        // SAFETY: the `errno` of the calling thread, to which there are no references.
        unsafe { *errno = before };
    }
}

/// Returns whether a signal handler interrupted the sleep. Otherwise the caller checks its condition
/// again: after a wake-up (0), a change (EAGAIN) and the timeout (ETIMEDOUT).
#[cfg(not(offlock_model))]
fn is_interrupted(woken: libc::c_long) -> bool {
    woken < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
}

/// Converts a duration. Saturates, as the kernel does with times that are too long for it.
#[cfg(not(offlock_model))]
fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// The futex of a model. The kernel compares the counter and queues the sleeper under one lock, and
/// so does this.
#[cfg(offlock_model)]
impl Futex {
    fn sleep(&self, seen: u32) -> bool {
        let (lock, woken) = &self.sleepers;
        let mut held = lock.lock();
        // Ordering: Relaxed; if the waker took the lock first, the lock carries its change. If it
        // takes the lock later, it wakes this thread.
        if check!("futex: no change", self.changes.load(Ordering::Relaxed) == seen) {
            woken.wait(&mut held);
        }
        false
    }

    fn sleep_for(&self, _seen: u32, _time: Duration) -> bool {
        false
    }

    fn sleep_until(&self, _seen: u32, _end: SystemTime) -> bool {
        false
    }

    fn wake(&self, all: bool) {
        let (lock, woken) = &self.sleepers;
        let _held = lock.lock();
        if all { woken.notify_all() } else { woken.notify_one() }
    }
}

impl Default for Futex {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
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
}
