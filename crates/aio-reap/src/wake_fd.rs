//! One descriptor a foreign loop can poll for everything the engine may want attention for.
//!
//! ```text
//!            ┌ the backend's own descriptor: a completion is there
//!  epoll fd ─┼ kick (eventfd): work was left over, or another thread woke a future
//!            ├ retry (timerfd): the kernel had no room and nothing is in flight
//!            └ deadline (timerfd): a request or a wait is to end
//! ```
//!
//! The backend's descriptor is watched only once somebody has asked for ours: who is watched pays
//! for it with each completion, which goes through epoll then.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use crate::sys;

/// First and last delay of the retry timer; guesses: about a disk's service time, and a tenth of
/// a second, which nobody notices as load.
const FIRST_RETRY: Duration = Duration::from_micros(100);
const LAST_RETRY: Duration = Duration::from_millis(100);

pub(crate) struct WakeFd {
    epoll: OwnedFd,
    /// The backend's; at most two.
    backend: Vec<RawFd>,
    kick: Arc<OwnedFd>,
    retry: OwnedFd,
    deadline: OwnedFd,
    /// What `deadline` is set to.
    set_to: Cell<Option<Instant>>,
    /// Somebody polls `epoll`, so left-over work must ring.
    watched: Cell<bool>,
    /// `epoll` could not be told to watch the backend: it rings all the time, so that nothing is
    /// missed.
    deaf: Cell<bool>,
    kicked: Cell<bool>,
    /// Others have the kick too: it may ring without `kicked`.
    foreign: Cell<bool>,
    /// What the retry timer was armed with; it runs, or has run out unanswered.
    retrying: Cell<Option<Duration>>,
    /// What it will be armed with next.
    delay: Cell<Duration>,
}

impl WakeFd {
    pub(crate) fn new(backend: Vec<RawFd>) -> io::Result<Self> {
        let (epoll, kick) = (sys::epoll()?, sys::eventfd()?);
        let (retry, deadline) = (sys::timerfd()?, sys::timerfd()?);
        for fd in [kick.as_raw_fd(), retry.as_raw_fd(), deadline.as_raw_fd()] {
            sys::epoll_add(&epoll, fd)?;
        }
        Ok(Self {
            epoll,
            backend,
            kick: Arc::new(kick),
            retry,
            deadline,
            set_to: Cell::new(None),
            watched: Cell::new(false),
            deaf: Cell::new(false),
            kicked: Cell::new(false),
            foreign: Cell::new(false),
            retrying: Cell::new(None),
            delay: Cell::new(FIRST_RETRY),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.watch();
        self.epoll.as_fd()
    }

    fn watch(&self) {
        if !self.watched.replace(true) {
            self.watch_backend();
        }
    }

    fn watch_backend(&self) {
        let watch = |&fd| match sys::epoll_add(&self.epoll, fd) {
            Err(error) => error.raw_os_error() == Some(libc::EEXIST), // by an earlier attempt
            Ok(()) => true,
        };
        let deaf = !self.backend.iter().all(watch);
        if deaf {
            sys::signal(&self.kick);
        } else if self.deaf.get() {
            self.kicked.set(true); // to be answered
        }
        self.deaf.set(deaf);
    }

    /// An eventfd that any thread may signal to end [`wait`](Self::wait).
    pub(crate) fn foreign_kick(&self) -> &Arc<OwnedFd> {
        self.foreign.set(true);
        &self.kick
    }

    /// Makes the descriptor readable until [`clear`](Self::clear), if anybody polls it.
    pub(crate) fn kick(&self) {
        if self.watched.get() && !self.kicked.replace(true) {
            sys::signal(&self.kick);
        }
    }

    /// Arms the retry timer, each time later until [`progress`](Self::progress).
    pub(crate) fn retry_later(&self) {
        if self.retrying.get().is_some() {
            return;
        }
        let delay = self.delay.get();
        self.retrying.set(Some(delay));
        self.delay.set((delay * 2).min(LAST_RETRY));
        if sys::arm(&self.retry, delay).is_err() {
            // Cannot happen for a valid timer; a kick retries at once rather than never.
            self.retrying.set(None);
            self.watch();
            self.kick();
        }
    }

    /// Makes the descriptor readable at a time, or at none, if anybody polls it.
    #[inline]
    pub(crate) fn wake_at(&self, at: Option<Instant>) {
        if self.watched.get() && self.set_to.get() != at {
            self.set_deadline(at);
        }
    }

    #[cold]
    fn set_deadline(&self, at: Option<Instant>) {
        self.set_to.set(at);
        let set = match at {
            Some(at) => sys::arm(&self.deadline, at.saturating_duration_since(Instant::now())),
            None => sys::disarm(&self.deadline),
        };
        if set.is_err() {
            self.kick(); // cannot happen for a valid timer; early rather than never
        }
    }

    /// How long after it was armed the retry timer rings, if it is armed.
    pub(crate) fn retry_delay(&self) -> Option<Duration> {
        self.retrying.get()
    }

    /// A request got somewhere: the next retry starts from the shortest delay.
    pub(crate) fn progress(&self) {
        self.delay.set(FIRST_RETRY);
    }

    /// Takes note of every ring so far, before looking for work.
    pub(crate) fn clear(&self) {
        if self.deaf.get() {
            self.watch_backend();
        }
        let foreign = self.foreign.get() && self.watched.get();
        if (self.kicked.get() || foreign) && !self.deaf.get() {
            self.kicked.set(false);
            sys::drain(&self.kick);
        }
        if self.retrying.take().is_some() {
            // Also before it ran out: later nobody would know that it has to be silenced.
            let _ = sys::disarm(&self.retry);
        }
    }

    /// Sleeps until it rings, the time is over or a signal comes.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let mut fds = [self.kick.as_raw_fd(), self.retry.as_raw_fd(), -1, -1];
        fds.iter_mut().skip(2).zip(&self.backend).for_each(|(place, &fd)| *place = fd);
        sys::poll_readable(&fds, timeout)?;
        if self.foreign.get() {
            self.kicked.set(true); // it may have been the kick: `clear` empties it
        }
        Ok(())
    }
}
