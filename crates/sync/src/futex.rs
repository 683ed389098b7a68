//! A futex: a counter of changes on which threads sleep until the next change.
//!
//! A build for a model checker uses the checker's locks instead of the system call.

#[cfg(not(offlock_model))]
use std::ptr;
use std::time::{Duration, Instant};

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
    pub fn wait(&self, seen: u32) {
        self.sleep(seen, None);
    }

    /// Sleeps like [`wait`](Self::wait), but at most for `time` on the monotonic clock. A time that
    /// is too long for the kernel sets no limit.
    ///
    /// A model has no clock. The call returns at once there, as after the shortest time.
    pub fn wait_for(&self, seen: u32, time: Duration) {
        self.sleep(seen, Some(time));
    }

    /// Sleeps like [`wait`](Self::wait), but at most until the deadline, if there is one. Returns whether the
    /// deadline was still to come.
    pub fn wait_until(&self, seen: u32, deadline: Option<Instant>) -> bool {
        let Some(deadline) = deadline else {
            self.wait(seen);
            return true;
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            self.wait_for(seen, left);
        }
        !left.is_zero()
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
    fn sleep(&self, seen: u32, time: Option<Duration>) {
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let time = time.map(|time| libc::timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), // the kernel saturates too
            tv_nsec: time.subsec_nanos().into(),
        });
        let (word, time) =
            (self.changes.as_ptr(), time.as_ref().map_or(ptr::null(), ptr::from_ref));
        // After a wake-up, a change (EAGAIN), the timeout and a signal the caller checks its
        // condition again.
        // SAFETY: the kernel reads the counter, which `self` keeps alive, and the local `time` or none.
        unsafe { libc::syscall(libc::SYS_futex, word, op, seen, time) };
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

/// The futex of a model. The kernel compares the counter and queues the sleeper under one lock, and
/// so does this.
#[cfg(offlock_model)]
impl Futex {
    fn sleep(&self, seen: u32, time: Option<Duration>) {
        if time.is_some() {
            return;
        }
        let (lock, woken) = &self.sleepers;
        let mut held = lock.lock();
        // Ordering: Relaxed; if the waker took the lock first, the lock carries its change. If it
        // takes the lock later, it wakes this thread.
        if check!("futex: no change", self.changes.load(Ordering::Relaxed) == seen) {
            woken.wait(&mut held);
        }
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
