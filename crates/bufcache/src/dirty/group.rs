//! Group commit: one sync of the device for all callers that ask at the same time, and durable
//! writes beside it.
//!
//! A sync makes durable the writes that ended before it *began*. A caller that asks while a sync
//! runs waits for the next one, which one of the waiting callers begins for all.
//!
//! The kernel reports lost writes of a file once: to one of the sync and the durable writes that
//! run at the time. So a sync or durable write that saw no error waits for those that ran beside
//! it, and fails if one of them saw a loss.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use offlock_sync::{Mutex, WaitSet, check, step};

use crate::wait::wake_all;

#[derive(Debug)]
pub(crate) struct Group {
    state: Mutex<State>,
    /// The threads and tasks that wait for a change of the state.
    waiters: WaitSet,
}

#[derive(Debug, Default)]
struct State {
    /// The number of syncs that have begun. Only the latest can be running.
    begun: u64,
    running: bool,
    /// The device has answered the running sync.
    is_answered: bool,
    /// The number of the latest sync that failed.
    failed: u64,
    /// The number of durable writes that have begun.
    writes: u64,
    /// The numbers of the durable writes that run.
    writing: Vec<u64>,
    /// The number of reports of lost writes.
    losses: u64,
}

impl State {
    /// Returns whether a durable write up to that number runs.
    fn has_write_up_to(&self, number: u64) -> bool {
        self.writing.iter().any(|write| *write <= number)
    }

    /// Returns whether the sync with that number runs and the device has not answered it.
    fn is_unanswered(&self, sync: u64) -> bool {
        self.running && !self.is_answered && self.begun == sync
    }

    /// Returns what a caller does about the sync that it needs, whose number is `mine`.
    fn turn(&mut self, mine: u64) -> Poll<Turn> {
        let ended = self.begun - u64::from(self.running);
        if ended >= mine {
            let succeeded = check!("sync: it has not failed", self.failed < mine);
            return Poll::Ready(Turn::Over(succeeded, self.losses));
        }
        if self.running {
            return Poll::Pending;
        }
        self.begun += 1;
        (self.running, self.is_answered) = (true, false);
        Poll::Ready(Turn::Begin(self.begun, self.losses))
    }

    /// Returns ready once the results of the durable writes up to `writes`, and of the sync `sync`,
    /// are noted, or a loss after the first `losses` is.
    fn results(&self, losses: u64, writes: u64, sync: Option<u64>) -> Poll<()> {
        let is_unanswered = sync.is_some_and(|sync| self.is_unanswered(sync));
        let is_open = is_unanswered || self.has_write_up_to(writes);
        if is_open && self.losses == losses { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// What a caller does about the sync that it needs.
enum Turn {
    /// Nothing, because the sync has ended: whether it succeeded, and the number of losses so far.
    Over(bool, u64),
    /// The caller begins the sync: its number, and the number of losses so far.
    Begin(u64, u64),
}

/// A durable write, which begins before its call of the device and ends when its result is noted.
#[must_use = "syncs wait while this lives"]
pub(crate) struct Writing<'g> {
    of: &'g Group,
    number: u64,
    losses: u64,
}

impl Group {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::default()), waiters: WaitSet::new() }
    }

    /// Returns the number of losses that were reported so far. A caller reads it before the writes that
    /// it makes durable with [`join`](Self::join).
    pub(crate) fn losses(&self) -> u64 {
        self.state.lock().losses
    }

    /// Waits for a sync that began after this call, and begins it if no other caller does. Returns
    /// whether it succeeded: false also if a later sync, or a durable write beside it, has failed, or
    /// if there are more losses than `since`. A reset may have ended the poisoning meanwhile: then the
    /// device may have lost the caller's writes, and their blocks are dirty again.
    ///
    /// `sync` must not panic. `durable` is called under a lock before the next sync begins; its
    /// result is dropped without the lock.
    pub(crate) async fn join<T>(
        &self,
        since: u64,
        sync: impl Future<Output = bool>,
        durable: impl FnOnce() -> T,
    ) -> bool {
        let mine = {
            let mut next = self.state.lock().begun;
            step!("sync: one that runs is not enough", next += 1);
            next
        };
        let turn = self.until(|state| state.turn(mine)).await;
        let is_kept =
            |losses| check!("sync: nothing is lost since the caller wrote", losses == since);
        let (number, losses) = match turn {
            Turn::Over(succeeded, losses) => return succeeded && is_kept(losses),
            Turn::Begin(number, losses) => (number, losses),
        };
        let succeeded_now = sync.await;
        let writes = {
            let mut state = self.state.lock();
            state.is_answered = true;
            state.writes
        };
        if succeeded_now {
            self.wake();
            self.until(|state| state.results(losses, writes, None)).await;
        }
        let mut state = self.state.lock();
        let succeeded = succeeded_now && state.losses == losses;
        let forgotten = succeeded.then(durable);
        state.running = false;
        if !succeeded {
            state.failed = number;
        }
        drop(state);
        self.wake();
        drop(forgotten);
        succeeded && is_kept(losses)
    }

    /// Waits until `poll` is ready, which is called under the lock.
    async fn until<T>(&self, mut poll: impl FnMut(&mut State) -> Poll<T>) -> T {
        let mut waiter = pin!(self.waiters.waiter());
        let mut look = || match poll(&mut self.state.lock()) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        };
        poll_fn(|context| waiter.as_mut().poll(context, &mut look)).await
    }

    /// Wakes all waiting threads and tasks.
    fn wake(&self) {
        step!("group: wake the waiters", wake_all(self.waiters.take(None)));
    }

    /// Begins a durable write. The caller calls this before it asks the device.
    pub(crate) fn begin_write(&self) -> Writing<'_> {
        let mut state = self.state.lock();
        state.writes += 1;
        let number = state.writes;
        state.writing.push(number);
        Writing { of: self, number, losses: state.losses }
    }

    /// Notes a report of lost writes, and calls `poison` under the same lock. The sync and the
    /// durable writes that run fail.
    pub(crate) fn lose(&self, poison: impl FnOnce()) {
        let mut state = self.state.lock();
        poison();
        state.losses += 1;
        drop(state);
        self.wake();
    }

    /// Calls `forgive` under the lock unless more losses than `since` were reported. Returns whether
    /// it did.
    pub(crate) fn forgive(&self, since: u64, forgive: impl FnOnce()) -> bool {
        let state = self.state.lock();
        let is_current = check!("reset: nothing is lost since it looked", state.losses == since);
        is_current.then(forgive).is_some()
    }
}

impl Writing<'_> {
    /// Ends the write, after the device has reported success. Waits for the sync and the durable
    /// writes that run. Returns false if one of them saw a loss, which may be one of this write.
    pub(crate) async fn end(self) -> bool {
        let Self { of, losses, .. } = self;
        drop(self); // before the wait, because others wait for this write
        let (sync, writes) = {
            let state = of.state.lock();
            (state.begun, state.writes)
        };
        of.until(|state| state.results(losses, writes, Some(sync))).await;
        of.state.lock().losses == losses
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.of.state.lock().writing.retain(|write| *write != self.number);
        self.of.wake();
    }
}
