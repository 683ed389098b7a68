//! How long an operation waits, and before whom.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::{Duration, Instant, SystemTime};

use percpu::sync::Futex;

/// The moment at which an operation gives up.
///
/// A monotonic one is a length of time. A realtime one is what the system's clock shows: when that
/// is set, threads that wait follow. That is what POSIX has, and what the kernel's queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// By `CLOCK_MONOTONIC`.
    Monotonic(Instant),
    /// By `CLOCK_REALTIME`.
    Realtime(SystemTime),
}

impl Deadline {
    /// More than anybody waits: 136 years.
    const MAX_WAIT: Duration = Duration::from_secs(u32::MAX as u64);

    /// `time` from now, by the monotonic clock; at most 136 years, which is as good as no limit.
    #[must_use]
    pub fn after(time: Duration) -> Self {
        Self::Monotonic(Instant::now() + time.min(Self::MAX_WAIT))
    }

    /// The time of a C `timespec`, in seconds and nanoseconds since 1970.
    ///
    /// # Errors
    ///
    /// [`InvalidDeadline`] for what the kernel refuses: less than 0 seconds, or nanoseconds that are
    /// not in 0 to 999,999,999.
    pub fn realtime(seconds: i64, nanoseconds: i64) -> Result<Self, InvalidDeadline> {
        let seconds = u64::try_from(seconds).map_err(|_| InvalidDeadline {})?;
        let nanoseconds = u32::try_from(nanoseconds).map_err(|_| InvalidDeadline {})?;
        if nanoseconds >= 1_000_000_000 {
            return Err(InvalidDeadline {});
        }
        // A `SystemTime` goes as far as a `timespec`: this does not overflow.
        Ok(Self::Realtime(SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds)))
    }

    /// True from that moment on. A system call, or its equivalent in user space.
    ///
    /// In a model time has no measure, and may be over at any moment: always true.
    #[must_use]
    pub fn is_over(self) -> bool {
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            return true;
        }
        match self {
            Self::Monotonic(end) => Instant::now() >= end,
            Self::Realtime(end) => SystemTime::now() >= end,
        }
    }
}

impl From<Instant> for Deadline {
    fn from(end: Instant) -> Self {
        Self::Monotonic(end)
    }
}

impl From<SystemTime> for Deadline {
    fn from(end: SystemTime) -> Self {
        Self::Realtime(end)
    }
}

/// Sleeps as [`Futex::wait`] does, but not past the deadline.
pub(crate) fn sleep(futex: &Futex, seen: u32, deadline: Option<Deadline>) {
    match deadline {
        None => futex.wait(seen),
        Some(Deadline::Monotonic(end)) => {
            futex.wait_for(seen, end.saturating_duration_since(Instant::now()));
        }
        Some(Deadline::Realtime(end)) => futex.wait_until(seen, end),
    }
}

/// A time that is none: before 1970, or with nanoseconds that make no part of a second. Maps to
/// `EINVAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidDeadline {}

impl InvalidDeadline {
    /// The error as C knows it: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl fmt::Display for InvalidDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a deadline before 1970, or with nanoseconds out of 0 to 999,999,999")
    }
}

impl Error for InvalidDeadline {}

impl From<InvalidDeadline> for io::Error {
    fn from(error: InvalidDeadline) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// How long an operation waits if it cannot be done at once, and how urgent it is among those that
/// wait.
///
/// ```
/// use std::time::Duration;
/// use mq_rbtree::Wait;
///
/// let patient = Wait::FOREVER;
/// let soon = Wait::at_most(Duration::from_millis(5)).urgency(7); // before others that wait
/// # assert_ne!(patient, soon);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    length: Length,
    urgency: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    No,
    Until(Deadline),
    Forever,
}

impl Wait {
    /// Until it can be done.
    pub const FOREVER: Self = Self { length: Length::Forever, urgency: 0 };
    /// Not at all: it is refused at once (`EAGAIN`).
    pub const NO: Self = Self { length: Length::No, urgency: 0 };

    /// Until a deadline: an [`Instant`], a [`SystemTime`] or a [`Deadline`]. If that is in the past,
    /// what can be done at once is done, the rest has timed out (`ETIMEDOUT`).
    #[must_use]
    pub fn until(deadline: impl Into<Deadline>) -> Self {
        Self { length: Length::Until(deadline.into()), urgency: 0 }
    }

    /// For a length of time, from now on: see [`Deadline::after`].
    #[must_use]
    pub fn at_most(time: Duration) -> Self {
        Self::until(Deadline::after(time))
    }

    /// The same, with this urgency: whoever waits with a higher one is served before those with a
    /// lower one, of one urgency whoever came first. 0 where nothing is said.
    #[must_use]
    pub const fn urgency(self, urgency: u8) -> Self {
        Self { urgency, ..self }
    }

    pub(crate) fn is_no(self) -> bool {
        self.length == Length::No
    }

    /// `None`: there is no end to it, or no wait.
    pub(crate) fn deadline(self) -> Option<Deadline> {
        match self.length {
            Length::Until(deadline) => Some(deadline),
            Length::No | Length::Forever => None,
        }
    }

    pub(crate) fn urgency_level(self) -> u8 {
        self.urgency
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_deadline_is_over_once_reached() {
        assert!(Deadline::from(Instant::now()).is_over());
        assert!(Deadline::from(SystemTime::now()).is_over());
        assert!(!Deadline::from(Instant::now() + 60 * SECOND).is_over());
        assert!(!Deadline::from(SystemTime::now() + 60 * SECOND).is_over());
        assert!(Deadline::after(Duration::ZERO).is_over());
        assert!(!Deadline::after(Duration::MAX).is_over());
    }

    #[test]
    fn inv13_a_timespec_is_checked_as_the_kernel_checks_it() {
        let refused = Err(InvalidDeadline {});
        for (seconds, nanoseconds) in
            [(-1, 0), (i64::MIN, 0), (0, -1), (0, 1_000_000_000), (5, i64::MAX), (5, 1 << 32)]
        {
            assert_eq!(
                Deadline::realtime(seconds, nanoseconds),
                refused,
                "{seconds} {nanoseconds}"
            );
        }
        assert_eq!(Deadline::realtime(0, 0), Ok(SystemTime::UNIX_EPOCH.into()));
        let time = SystemTime::UNIX_EPOCH + Duration::new(7, 999_999_999);
        assert_eq!(Deadline::realtime(7, 999_999_999), Ok(time.into()));
        assert!(!Deadline::realtime(i64::MAX, 999_999_999).unwrap().is_over());
        assert_eq!(InvalidDeadline {}.errno(), libc::EINVAL);
    }

    #[test]
    fn a_wait_returns_its_parts() {
        let end = Instant::now() + SECOND;
        for (wait, is_no, deadline) in [
            (Wait::NO, true, None),
            (Wait::FOREVER, false, None),
            (Wait::until(end), false, Some(Deadline::Monotonic(end))),
        ] {
            assert_eq!((wait.is_no(), wait.deadline(), wait.urgency_level()), (is_no, deadline, 0));
            let urgent = wait.urgency(9);
            assert_eq!((urgent.is_no(), urgent.deadline()), (is_no, deadline));
            assert_eq!(urgent.urgency_level(), 9);
        }
        assert!(Wait::at_most(Duration::MAX).deadline().is_some_and(|end| !end.is_over()));
    }

    #[test]
    fn sleep_ends_with_each_kind_of_deadline() {
        let futex = Futex::new();
        let seen = futex.load();
        let short = Duration::from_millis(5);
        for deadline in [Deadline::after(short), (SystemTime::now() + short).into()] {
            while !deadline.is_over() {
                sleep(&futex, seen, Some(deadline));
            }
            sleep(&futex, seen, Some(deadline)); // and at once when it is over
        }
        futex.advance();
        sleep(&futex, seen, None);
    }
}
