//! One descriptor that an event loop polls for everything that needs a turn of the engine.
//!
//! ```text
//!            ┌ the backend's own descriptor: a completion is there
//!  epoll fd ─┼ kick (eventfd): work was left over, or another thread woke a future
//!            └ timer (timerfd): a request is to end, or is to be tried again
//! ```
//!
//! The epoll descriptor watches the backend's descriptor only after the program has asked for the
//! engine's, because each completion of a watched descriptor costs a call of epoll's code in the
//! kernel.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use offlock_sync::Arc;

use crate::sys;

/// The first and the longest delay of a retry: about the service time of a disk,
/// and a tenth of a second, which causes no load.
const FIRST_RETRY: Duration = Duration::from_micros(100);
const LAST_RETRY: Duration = Duration::from_millis(100);

/// The descriptors that wake an engine, and their state.
pub(crate) struct WakeFd {
    epoll: OwnedFd,
    /// The backend's descriptors; at most two.
    backend: Vec<RawFd>,
    pub(crate) kick: Arc<OwnedFd>,
    timer: OwnedFd,
    /// The time that `timer` is set to.
    timer_at: Cell<Option<Instant>>,
    /// The program may poll `epoll`, so left-over work must kick.
    watched: Cell<bool>,
    /// `epoll` could not watch the backend. The kick then stays signalled, so that no completion is
    /// missed.
    unwatched_backend: Cell<bool>,
    kicked: Cell<bool>,
    /// Other threads have the kick too, so it may be signalled while `kicked` is false.
    kick_is_shared: Cell<bool>,
    /// The delay of the retry that is due, and its time. `None` after `clear`.
    retrying: Cell<Option<(Duration, Instant)>>,
    /// The delay of the next retry.
    delay: Cell<Duration>,
}

impl WakeFd {
    pub(crate) fn new(backend: Vec<RawFd>) -> io::Result<Self> {
        let (epoll, kick, timer) = (sys::epoll()?, sys::eventfd()?, sys::timerfd()?);
        for fd in [kick.as_raw_fd(), timer.as_raw_fd()] {
            sys::epoll_add(&epoll, fd)?;
        }
        Ok(Self {
            epoll,
            backend,
            kick: Arc::new(kick),
            timer,
            timer_at: Cell::new(None),
            watched: Cell::new(false),
            unwatched_backend: Cell::new(false),
            kicked: Cell::new(false),
            kick_is_shared: Cell::new(false),
            retrying: Cell::new(None),
            delay: Cell::new(FIRST_RETRY),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        if !self.watched.replace(true) {
            self.watch_backend();
        }
        self.epoll.as_fd()
    }

    /// Lets `epoll` watch the backend's descriptors. If it cannot, signals the kick, whose turn tries
    /// again.
    #[cold]
    fn watch_backend(&self) {
        let is_watched = |&fd| match sys::epoll_add(&self.epoll, fd) {
            Ok(()) => true,
            // An earlier attempt added it.
            Err(error) => error.raw_os_error() == Some(libc::EEXIST),
        };
        self.unwatched_backend.set(!self.backend.iter().all(is_watched));
        if self.unwatched_backend.get() {
            self.kicked.set(true);
            sys::signal(&self.kick);
        }
    }

    /// Returns an eventfd that any thread may signal to end [`wait`](Self::wait).
    pub(crate) fn shared_kick(&self) -> &Arc<OwnedFd> {
        self.kick_is_shared.set(true);
        &self.kick
    }

    /// Makes the descriptor readable until [`clear`](Self::clear), if the program has it.
    pub(crate) fn kick(&self) {
        if self.watched.get() && !self.kicked.replace(true) {
            sys::signal(&self.kick);
        }
    }

    /// Causes a turn after a delay, which doubles each time until [`progress`](Self::progress).
    /// [`wake_at`](Self::wake_at) follows.
    pub(crate) fn retry_later(&self) {
        if self.retrying.get().is_none() {
            let delay = self.delay.get();
            self.retrying.set(Some((delay, Instant::now() + delay)));
            self.delay.set((delay * 2).min(LAST_RETRY));
        }
    }

    /// Makes the descriptor readable at the time `deadline`, and at that of the retry, if the program
    /// has it.
    #[inline]
    pub(crate) fn wake_at(&self, deadline: Option<Instant>) {
        if self.watched.get() {
            let retry = self.retrying.get().map(|(_, at)| at);
            let at = deadline.into_iter().chain(retry).min();
            if self.timer_at.get() != at {
                self.set_timer(at);
            }
        }
    }

    #[cold]
    fn set_timer(&self, at: Option<Instant>) {
        self.timer_at.set(at);
        let after = at.map(|at| at.saturating_duration_since(Instant::now()));
        if sys::set_timer(&self.timer, after).is_err() {
            self.kick(); // cannot happen with a valid timer; a turn now instead of never
        }
    }

    /// Returns the delay of the retry, if one is due.
    pub(crate) fn retry_delay(&self) -> Option<Duration> {
        self.retrying.get().map(|(delay, _)| delay)
    }

    /// Records progress: the next retry has the shortest delay.
    pub(crate) fn progress(&self) {
        self.delay.set(FIRST_RETRY);
    }

    /// Clears the kick and the retry. The caller looks for work, and then calls
    /// [`wake_at`](Self::wake_at).
    pub(crate) fn clear(&self) {
        if self.unwatched_backend.get() {
            self.watch_backend();
        }
        let kick_is_shared = self.kick_is_shared.get() && self.watched.get();
        if (self.kicked.get() || kick_is_shared) && !self.unwatched_backend.get() {
            self.kicked.set(false);
            sys::drain(&self.kick);
        }
        self.retrying.set(None);
    }

    /// Sleeps until a descriptor is readable, the time is over, or a signal arrives.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let mut fds = [self.kick.as_raw_fd(), -1, -1];
        fds.iter_mut().skip(1).zip(&self.backend).for_each(|(place, &fd)| *place = fd);
        let slept = sys::poll_readable(&fds, timeout);
        if self.kick_is_shared.get() {
            self.kicked.set(true); // the kick may have been the reason, so `clear` empties it
        }
        slept.map(drop)
    }
}
