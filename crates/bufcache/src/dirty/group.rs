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
    /// The device has answered the sync that runs.
    told: bool,
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
    fn writes_before(&self, number: u64) -> bool {
        self.writing.iter().any(|write| *write <= number)
    }

    /// Returns whether a caller that was told of no loss need not wait for the writes up to that
    /// number.
    fn is_told(&self, losses: u64, writes: u64) -> bool {
        self.losses != losses || !self.writes_before(writes)
    }

    /// Returns whether the sync with that number runs and the device has not answered it.
    fn asks(&self, sync: u64) -> bool {
        self.running && !self.told && self.begun == sync
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
        (self.running, self.told) = (true, false);
        Poll::Ready(Turn::Begin(self.begun, self.losses))
    }

    /// Returns ready once the results of the durable writes up to `writes`, and of the sync `sync`,
    /// are noted, or a loss after the first `losses` is.
    fn told(&self, losses: u64, writes: u64, sync: Option<u64>) -> Poll<()> {
        let asks = sync.is_some_and(|sync| self.asks(sync)) && self.losses == losses;
        if self.is_told(losses, writes) && !asks { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// What a caller does about the sync that it needs.
enum Turn {
    /// Nothing: it has ended. `true` if it succeeded, and the number of losses so far.
    Over(bool, u64),
    /// The caller begins it. Its number, and the number of losses so far.
    Begin(u64, u64),
}

/// A durable write, from before its call of the device until its result is noted.
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

    /// The losses that were reported so far. A caller reads it before it writes what it makes durable
    /// with [`join`](Self::join).
    pub(crate) fn losses(&self) -> u64 {
        self.state.lock().losses
    }

    /// Waits for a sync that began after this call, and begins it if no other caller does. Returns
    /// whether it succeeded: false also if a later sync, or a durable write beside it, has failed, or
    /// if there are more losses than `since`. A reset may have ended the poisoning meanwhile: then
    /// what the caller wrote may be lost on the device, and dirty again.
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
        let is_there =
            |losses| check!("sync: nothing is lost since the caller wrote", losses == since);
        let (number, losses) = match turn {
            Turn::Over(succeeded, losses) => return succeeded && is_there(losses),
            Turn::Begin(number, losses) => (number, losses),
        };
        let succeeded_now = sync.await;
        let writes = {
            let mut state = self.state.lock();
            state.told = true;
            state.writes
        };
        if succeeded_now {
            self.wake();
            self.until(|state| state.told(losses, writes, None)).await;
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
        succeeded && is_there(losses)
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
        let is_told = check!("reset: nothing is lost since it looked", state.losses == since);
        is_told.then(forgive).is_some()
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
        of.until(|state| state.told(losses, writes, Some(sync))).await;
        of.state.lock().losses == losses
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.of.state.lock().writing.retain(|write| *write != self.number);
        self.of.wake();
    }
}
