//! Deadlines, and how an operation waits.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::{Duration, Instant, SystemTime};

use percpu::sync::Futex;

use crate::error::to_io_error;

/// The moment at which an operation gives up.
///
/// A monotonic deadline is unaffected by changes of the system clock. A realtime deadline follows
/// the system clock: if that is set while a thread waits, the wait ends earlier or later. POSIX
/// queues have realtime deadlines.
///
/// ```
/// use std::time::{Duration, Instant, SystemTime};
/// use mq_rbtree::{Deadline, Queue, ReceiveError, Wait};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// let timeout = Duration::from_millis(5);
/// for deadline in [
///     Deadline::after(timeout),                      // monotonic
///     Deadline::from(Instant::now() + timeout),      // the same
///     Deadline::from(SystemTime::now() + timeout),   // realtime
///     Deadline::realtime(1_700_000_000, 0)?,         // a C `timespec`; this one is over
/// ] {
///     assert_eq!(queue.receive_with(Wait::until(deadline)), Err(ReceiveError::Timeout));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// A moment of `CLOCK_MONOTONIC`.
    Monotonic(Instant),
    /// A moment of `CLOCK_REALTIME`.
    Realtime(SystemTime),
}

impl Deadline {
    /// The longest timeout: 136 years.
    const MAX_WAIT: Duration = Duration::from_secs(u32::MAX as u64);

    /// The deadline of an operation that must not wait.
    pub(crate) const PAST: Self = Self::Realtime(SystemTime::UNIX_EPOCH);

    /// Returns the monotonic deadline `time` from now; at most 136 years, which is as good as no
    /// limit.
    #[must_use]
    pub fn after(time: Duration) -> Self {
        Self::Monotonic(Instant::now() + time.min(Self::MAX_WAIT))
    }

    /// Returns the realtime deadline of a C `timespec`: seconds and nanoseconds since 1970.
    ///
    /// # Errors
    ///
    /// [`InvalidDeadline`] for what the kernel refuses: negative seconds, or nanoseconds outside 0
    /// to 999,999,999.
    pub fn realtime(seconds: i64, nanoseconds: i64) -> Result<Self, InvalidDeadline> {
        let (Ok(whole), 0..1_000_000_000) = (u64::try_from(seconds), nanoseconds) else {
            return Err(InvalidDeadline { seconds, nanoseconds });
        };
        // This cannot overflow: a `SystemTime` has the range of a `timespec`.
        Ok(Self::Realtime(SystemTime::UNIX_EPOCH + Duration::new(whole, nanoseconds as u32)))
    }

    /// Returns true from that moment on. Reads the clock.
    ///
    /// In a model build it is always true, because a model has no time and a wait may end at any
    /// moment.
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

/// Sleeps as [`Futex::wait`] does, at most until the deadline. Returns whether a signal handler
/// interrupted the sleep.
pub(crate) fn sleep(futex: &Futex, seen: u32, deadline: Option<Deadline>) -> bool {
    match deadline {
        None => futex.wait(seen),
        Some(Deadline::Monotonic(end)) => {
            futex.wait_for(seen, end.saturating_duration_since(Instant::now()))
        }
        Some(Deadline::Realtime(end)) => futex.wait_until(seen, end),
    }
}

/// The `timespec` of [`Deadline::realtime`] was invalid. Maps to `EINVAL`.
///
/// ```
/// use mq_rbtree::Deadline;
///
/// let error = Deadline::realtime(7, 1_000_000_000).unwrap_err();
/// assert_eq!((error.seconds, error.nanoseconds), (7, 1_000_000_000));
/// assert!(error.to_string().contains("1000000000 nanoseconds"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidDeadline {
    /// The seconds since 1970.
    pub seconds: i64,
    /// The nanoseconds.
    pub nanoseconds: i64,
}

impl InvalidDeadline {
    /// Returns the errno: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl fmt::Display for InvalidDeadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, nanoseconds } = self;
        write!(
            f,
            "the deadline has {seconds} seconds and {nanoseconds} nanoseconds; \
             these must be at least 0, and the nanoseconds at most 999999999"
        )
    }
}

to_io_error!(InvalidDeadline);

/// How long an operation waits if it cannot complete at once, and how urgent its wait is.
///
/// ```
/// use std::time::Duration;
/// use mq_rbtree::{Queue, ReceiveError, Wait};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// queue.send_with("a message", 7, Wait::NO)?;                // as `try_send`
/// assert_eq!(queue.receive_with(Wait::FOREVER)?.0, "a message"); // as `receive`
/// let soon = Wait::at_most(Duration::from_millis(5));
/// assert_eq!(queue.receive_with(soon), Err(ReceiveError::Timeout));
/// let before_others = soon.urgency(7); // served before waiters of urgency 0 to 6
/// assert_eq!(queue.receive_with(before_others), Err(ReceiveError::Timeout));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    length: Length,
    urgency: u8,
    interruptible: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    No,
    Until(Deadline),
    Forever,
}

impl Wait {
    /// Waits without a time limit.
    pub const FOREVER: Self = Self { length: Length::Forever, urgency: 0, interruptible: false };
    /// Does not wait: the operation is refused at once (`EAGAIN`).
    pub const NO: Self = Self { length: Length::No, ..Self::FOREVER };

    /// Waits until a deadline: an [`Instant`], a [`SystemTime`] or a [`Deadline`].
    ///
    /// With a deadline in the past, an operation that can complete at once completes; any other
    /// times out (`ETIMEDOUT`).
    #[must_use]
    pub fn until(deadline: impl Into<Deadline>) -> Self {
        Self { length: Length::Until(deadline.into()), ..Self::FOREVER }
    }

    /// Waits for at most this time, from now on: see [`Deadline::after`].
    #[must_use]
    pub fn at_most(time: Duration) -> Self {
        Self::until(Deadline::after(time))
    }

    /// Sets the urgency of the wait; the default is 0.
    ///
    /// Waiters of a higher urgency are served first. Waiters of equal urgency are served in their
    /// order of arrival.
    #[must_use]
    pub const fn urgency(self, urgency: u8) -> Self {
        Self { urgency, ..self }
    }

    /// Makes the wait of a thread end with `Interrupted` (`EINTR`) when a signal handler has run in its
    /// sleep. By default a wait goes on after a signal.
    ///
    /// A send gives its message back. As in `mq_receive`, a wait without a deadline goes on after a
    /// handler that was installed with `SA_RESTART`, as signal-hook, ctrlc and tokio install theirs.
    /// Use `sigaction` without `SA_RESTART`, or a deadline: a wait with a deadline ends.
    ///
    /// A signal that comes before the sleep is not noticed: before the call, while the thread spins
    /// for some microseconds, or while it waits for the lock. `mq_receive` has such a moment as well.
    /// A program that must not miss a signal waits with a deadline and looks for itself, or sends the
    /// signal again until the thread has answered.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mq_rbtree::{Queue, ReceiveError, Wait};
    ///
    /// let queue: Queue<&str> = Queue::new(8)?;
    /// let wait = Wait::at_most(Duration::from_millis(5)).interruptible();
    /// match queue.receive_with(wait) {
    ///     Ok((message, _)) => println!("{message}"),
    ///     Err(ReceiveError::Interrupted) => println!("a signal"),
    ///     Err(other) => println!("{other}"),
    /// }
    /// # Ok::<(), mq_rbtree::BuildError>(())
    /// ```
    #[must_use]
    pub const fn interruptible(self) -> Self {
        Self { interruptible: true, ..self }
    }

    pub(crate) fn is_interruptible(self) -> bool {
        self.interruptible
    }

    /// Returns a wait that is over.
    pub(crate) fn ended(self) -> Self {
        Self { length: Length::Until(Deadline::PAST), ..self }
    }

    pub(crate) fn is_no(self) -> bool {
        self.length == Length::No
    }

    /// Returns the deadline, or `None` if there is no time limit or no wait.
    pub(crate) fn deadline(self) -> Option<Deadline> {
        match self.length {
            Length::Until(deadline) => Some(deadline),
            Length::No | Length::Forever => None,
        }
    }

    /// Returns whether the deadline is over.
    pub(crate) fn is_over(self) -> bool {
        self.deadline().is_some_and(Deadline::is_over)
    }

    pub(crate) fn urgency_level(self) -> u8 {
        self.urgency
    }
}
