//! One sync of the device for all who ask at the same time; and durable writes beside it.
//!
//! A sync makes durable what was written before it *began*. So who asks while one runs waits for the
//! next, which one of those who wait begins for all of them.
//!
//! A file tells one caller of what was lost of it, and then no other: of a sync and the durable writes beside
//! it, any. So who hears of nothing waits until those that ran beside it have said what they were told,
//! and has lost it as well if one of them was told of a loss.

use percpu::sync::{Condvar, Mutex, mutant};

#[derive(Debug)]
pub(crate) struct Group {
    state: Mutex<State>,
    ended: Condvar,
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
}

impl State {
    fn writes_before(&self, number: u64) -> bool {
        self.writing.iter().any(|write| *write <= number)
    }
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
        Self { state: Mutex::new(State::default()), ended: Condvar::new() }
    }

    /// Returns whether a sync that began after this call has succeeded, or may have: false also if a
    /// later one failed, or a durable write did meanwhile. Blocks; `sync` must not panic. `durable` is told
    /// before another begins, under a lock; what it returns is dropped without one.
    pub(crate) fn join<T>(&self, sync: impl FnOnce() -> bool, durable: impl FnOnce() -> T) -> bool {
        let mut state = self.state.lock();
        let late = state.running && mutant("join-a-sync-that-runs");
        let mine = state.begun + u64::from(!late);
        loop {
            let ended = state.begun - u64::from(state.running);
            if ended >= mine {
                return state.failed < mine || mutant("join-forgets-the-failure");
            }
            if !state.running {
                break;
            }
            self.ended.wait(&mut state);
        }
        state.begun += 1;
        (state.running, state.told) = (true, false);
        let (number, losses) = (state.begun, state.losses);
        drop(state);
        let told_well = sync();
        let mut state = self.state.lock();
        state.told = true;
        let writes = state.writes;
        if told_well && state.writes_before(writes) {
            self.ended.notify_all();
            while state.losses == losses && state.writes_before(writes) {
                self.ended.wait(&mut state);
            }
        }
        let succeeded = told_well && state.losses == losses;
        let forgotten = succeeded.then(durable);
        state.running = false;
        if !succeeded {
            state.failed = number;
        }
        drop(state);
        self.ended.notify_all();
        drop(forgotten);
        succeeded
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
        self.ended.notify_all();
    }
}

impl Writing<'_> {
    /// Whether nobody was told of a loss since it began, who may have been told instead of this one.
    /// Waits for those that run.
    pub(crate) fn end(self) -> bool {
        let Self { of, losses, .. } = self;
        drop(self); // or it would wait for itself, and others for it
        let mut state = of.state.lock();
        let (sync, writes) = (state.begun, state.writes);
        let asked = |state: &State| state.running && !state.told && state.begun == sync;
        while state.losses == losses && (asked(&state) || state.writes_before(writes)) {
            of.ended.wait(&mut state);
        }
        state.losses == losses
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock();
        state.writing.retain(|write| *write != self.number);
        drop(state);
        self.of.ended.notify_all();
    }
}
