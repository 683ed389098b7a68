//! One sync of the device for all who ask at the same time; and durable writes beside it.
//!
//! A sync makes durable what was written before it *began*. So who asks while one runs waits for the
//! next, which one of those who wait begins for all of them.
//!
//! A file tells one caller of what was lost of it, and then no other: of a sync and the durable writes beside
//! it, any. So who hears of nothing waits until those that ran beside it have said what they were told,
//! and has lost it as well if one of them was told of a loss.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use percpu::sync::{Mutex, check, step};

use crate::wait::{Bell, Mode, add_waker, wake_all};

#[derive(Debug)]
pub(crate) struct Group {
    state: Mutex<State>,
    /// Wakes the threads that wait for a change.
    bell: Arc<Bell>,
}

#[derive(Debug, Default)]
struct State {
    /// How many have begun; the latest of them runs, if one does.
    begun: u64,
    running: bool,
    /// The one that runs was told that all is well.
    told: bool,
    /// The latest that failed.
    failed: u64,
    /// Durable writes that have begun so far, and those that run.
    writes: u64,
    writing: Vec<u64>,
    /// How often somebody was told of a loss.
    losses: u64,
    /// Threads and tasks that wait for a change.
    wakers: Vec<Waker>,
}

impl State {
    fn writes_before(&self, number: u64) -> bool {
        self.writing.iter().any(|write| *write <= number)
    }

    /// Returns whether a caller that was told of no loss need not wait for the writes up to that number.
    fn is_told(&self, losses: u64, writes: u64) -> bool {
        self.losses != losses || !self.writes_before(writes)
    }

    /// The sync with that number runs, and the device has not answered it.
    fn asks(&self, sync: u64) -> bool {
        self.running && !self.told && self.begun == sync
    }

    fn wait(&mut self, context: &Context<'_>) {
        add_waker(&mut self.wakers, context.waker());
    }
}

/// The sync that a caller waits for.
enum Turn {
    /// It has ended: whether it succeeded.
    Over(bool),
    /// The caller begins it: its number, and the losses so far.
    Begin(u64, u64),
}

/// A durable write, from before its call of the device until it has said what it was told.
#[must_use = "syncs wait while this lives"]
pub(crate) struct Writing<'g> {
    of: &'g Group,
    number: u64,
    losses: u64,
}

impl Group {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::default()), bell: Bell::new() }
    }

    /// Returns whether a sync that began after this call has succeeded, or may have: false also if a
    /// later one failed, or a durable write did meanwhile. `sync` must not panic. `durable` is told
    /// before another begins, under a lock; what it returns is dropped without one.
    pub(crate) async fn join<T>(
        &self,
        mode: Mode,
        sync: impl Future<Output = bool>,
        durable: impl FnOnce() -> T,
    ) -> bool {
        let mut mine = None;
        let turn = self.bell.until(mode, |context| self.poll_turn(&mut mine, context)).await;
        let (number, losses) = match turn {
            Turn::Over(succeeded) => return succeeded,
            Turn::Begin(number, losses) => (number, losses),
        };
        let told_well = sync.await;
        let writes = {
            let mut state = self.state.lock();
            state.told = true;
            state.writes
        };
        if told_well {
            self.wake();
            self.bell.until(mode, |context| self.poll_told(losses, writes, None, context)).await;
        }
        let mut state = self.state.lock();
        let succeeded = told_well && state.losses == losses;
        let forgotten = succeeded.then(durable);
        state.running = false;
        if !succeeded {
            state.failed = number;
        }
        drop(state);
        self.wake();
        drop(forgotten);
        succeeded
    }

    fn poll_turn(&self, mine: &mut Option<u64>, context: &mut Context<'_>) -> Poll<Turn> {
        let mut state = self.state.lock();
        let mine = *mine.get_or_insert_with(|| {
            let mut next = state.begun;
            step!("sync: one that runs is not enough", next += 1);
            next
        });
        let ended = state.begun - u64::from(state.running);
        if ended >= mine {
            let succeeded = check!("sync: it has not failed", state.failed < mine);
            return Poll::Ready(Turn::Over(succeeded));
        }
        if state.running {
            state.wait(context);
            return Poll::Pending;
        }
        state.begun += 1;
        (state.running, state.told) = (true, false);
        Poll::Ready(Turn::Begin(state.begun, state.losses))
    }

    /// Whether the durable writes up to a number, and that sync, have said what they were told, or one of them
    /// of a loss.
    fn poll_told(
        &self,
        losses: u64,
        writes: u64,
        sync: Option<u64>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let mut state = self.state.lock();
        let asks = sync.is_some_and(|sync| state.asks(sync)) && state.losses == losses;
        if state.is_told(losses, writes) && !asks {
            return Poll::Ready(());
        }
        state.wait(context);
        Poll::Pending
    }

    /// Wakes all waiting threads and tasks.
    fn wake(&self) {
        let wakers = std::mem::take(&mut self.state.lock().wakers);
        step!("group: wake the waiters", wake_all(wakers));
    }

    /// Before the device is asked for a durable write.
    pub(crate) fn begin_write(&self) -> Writing<'_> {
        let mut state = self.state.lock();
        state.writes += 1;
        let number = state.writes;
        state.writing.push(number);
        Writing { of: self, number, losses: state.losses }
    }

    /// Somebody was told of a loss: those that run have lost it as well.
    pub(crate) fn lose(&self) {
        self.state.lock().losses += 1;
        self.wake();
    }
}

impl Writing<'_> {
    /// Whether nobody was told of a loss since it began, who may have been told instead of this one.
    /// Waits for those that run.
    pub(crate) async fn end(self, mode: Mode) -> bool {
        let Self { of, losses, .. } = self;
        drop(self); // or it would wait for itself, and others for it
        let (sync, writes) = {
            let state = of.state.lock();
            (state.begun, state.writes)
        };
        of.bell.until(mode, |context| of.poll_told(losses, writes, Some(sync), context)).await;
        of.state.lock().losses == losses
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.of.state.lock().writing.retain(|write| *write != self.number);
        self.of.wake();
    }
}
