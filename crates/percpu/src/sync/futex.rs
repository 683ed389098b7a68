//! A number to sleep on until it changes: the kernel's futex, or a model checker's locks.

use std::time::{Duration, SystemTime};

use super::atomic::{AtomicU32, Ordering};
use super::mutant;

/// A number that counts changes, and where threads sleep until there is another.
///
/// Whoever waits for something reads the number, looks whether it has to wait, and sleeps if the
/// number is still the same. Whoever changes something advances the number, and wakes.
#[derive(Debug)]
pub struct Futex {
    changes: AtomicU32,
    #[cfg(any(offlock_loom, offlock_shuttle))]
    sleepers: (super::Mutex<()>, super::Condvar),
}

impl Futex {
    /// Makes one where nobody sleeps.
    #[must_use]
    pub fn new() -> Self {
        Self {
            changes: AtomicU32::new(0),
            #[cfg(any(offlock_loom, offlock_shuttle))]
            sleepers: (super::Mutex::new(()), super::Condvar::new()),
        }
    }

    /// The number of changes: who goes on to [`wait`](Self::wait) with it is told of any later one.
    /// Wait-free.
    #[inline]
    pub fn load(&self) -> u32 {
        // Ordering: Acquire pairs with the Release in `advance`; it carries what was changed.
        self.changes.load(Ordering::Acquire)
    }

    /// Counts a change, which [`wake_one`](Self::wake_one) or [`wake_all`](Self::wake_all) must
    /// follow. Wait-free; for a signal handler too.
    #[inline]
    pub fn advance(&self) {
        let release =
            if mutant("futex-advance-is-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `load`; it carries what was changed.
        self.changes.fetch_add(1, release);
    }

    /// Sleeps until it is woken, if there was no change since `seen` was loaded; or returns without
    /// either, so look again.
    ///
    /// The number wraps: whoever is kept from here for exactly 2^32 changes misses them.
    pub fn wait(&self, seen: u32) {
        self.sleep(seen);
    }

    /// As [`wait`](Self::wait), but also ends once `time` of the monotonic clock is over. A time
    /// that the kernel cannot count is no limit.
    ///
    /// In a model time may be over at any moment: it returns at once.
    pub fn wait_for(&self, seen: u32, time: Duration) {
        self.sleep_for(seen, time);
    }

    /// As [`wait`](Self::wait), but also ends once the system's clock shows `end`, however it came
    /// to: when the clock is set, the wait follows.
    ///
    /// In a model time may be over at any moment: it returns at once.
    pub fn wait_until(&self, seen: u32, end: SystemTime) {
        self.sleep_until(seen, end);
    }

    /// Wakes a thread that sleeps, if there is one. One system call, which takes no lock of this
    /// process and leaves `errno` as it is: for a signal handler too.
    pub fn wake_one(&self) {
        self.wake(false);
    }

    /// Wakes every thread that sleeps; otherwise as [`wake_one`](Self::wake_one).
    pub fn wake_all(&self) {
        self.wake(!mutant("futex-wake-all-wakes-one"));
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
impl Futex {
    fn sleep(&self, seen: u32) {
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let forever = std::ptr::null::<libc::timespec>();
        // Not looked at: whoever is woken (0), interrupted (EINTR) or late (EAGAIN) looks again.
        // SAFETY: the kernel reads the number, which `self` keeps alive, and no time.
        unsafe { libc::syscall(libc::SYS_futex, self.changes.as_ptr(), op, seen, forever) };
    }

    fn sleep_for(&self, seen: u32, time: Duration) {
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let time = timespec(time);
        // Not looked at, as above.
        // SAFETY: the kernel reads the number, which `self` keeps alive, and a time of this frame.
        unsafe { libc::syscall(libc::SYS_futex, self.changes.as_ptr(), op, seen, &raw const time) };
    }

    fn sleep_until(&self, seen: u32, end: SystemTime) {
        let op = libc::FUTEX_WAIT_BITSET | libc::FUTEX_CLOCK_REALTIME | libc::FUTEX_PRIVATE_FLAG;
        // All that is before 1970 is over, as 1970 is.
        let end = timespec(end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let (word, unused) = (self.changes.as_ptr(), std::ptr::null::<u32>());
        let (end, any) = (&raw const end, libc::FUTEX_BITSET_MATCH_ANY);
        // Not looked at, as above.
        // SAFETY: the kernel reads the number, which `self` keeps alive, and a time of this frame.
        unsafe { libc::syscall(libc::SYS_futex, word, op, seen, end, unused, any) };
    }

    fn wake(&self, all: bool) {
        let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        let most = if all { libc::c_int::MAX } else { 1 };
        // SAFETY: gives the address of this thread's `errno`.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: this thread's own, and nobody has a reference to it.
        let before = unsafe { *errno };
        // SAFETY: the kernel takes the address for a name, of a number that `self` keeps alive.
        unsafe { libc::syscall(libc::SYS_futex, self.changes.as_ptr(), op, most) };
        // It fails only where a filter refuses it, but then it must not tell whom we interrupt.
        // SAFETY: as above.
        unsafe { *errno = before };
    }
}

/// What the kernel cannot count it saturates, and so does this.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// The kernel looks at the number and at who sleeps under a lock of its own: so here.
#[cfg(any(offlock_loom, offlock_shuttle))]
impl Futex {
    fn sleep(&self, seen: u32) {
        let (lock, woken) = &self.sleepers;
        let mut held = lock.lock();
        // Ordering: Relaxed; a waker that was here before has left its change behind the lock, one
        // that comes later wakes us.
        if self.changes.load(Ordering::Relaxed) == seen || mutant("futex-sleeps-without-a-look") {
            woken.wait(&mut held);
        }
    }

    fn sleep_for(&self, _seen: u32, _time: Duration) {}

    fn sleep_until(&self, _seen: u32, _end: SystemTime) {}

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

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
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
    fn whoever_sleeps_for_an_age_sleeps_and_is_woken() {
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
                assert!(rounds < 10, "it slept: a refused time would make it spin, {rounds}");
            });
        }
    }

    #[test]
    fn all_who_sleep_are_woken() {
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
        // SAFETY: gives the address of this thread's `errno`.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: this thread's own.
        unsafe { *errno = libc::EXDEV };
        Futex::new().wake_one();
        Futex::new().wake_all();
        // SAFETY: as above.
        assert_eq!(unsafe { *errno }, libc::EXDEV);
    }
}
