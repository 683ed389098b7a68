//! One sync of the device for all who ask at the same time.
//!
//! A sync makes durable what was written before it *began*. So who asks while one runs waits for the
//! next, which one of those who wait begins for all of them.

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
    /// The latest that failed.
    failed: u64,
}

impl Group {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::default()), ended: Condvar::new() }
    }

    /// Returns whether a sync that began after this call has succeeded, or may have: false also if a
    /// later one failed. Blocks; `sync` must not panic.
    pub(crate) fn join(&self, sync: impl FnOnce() -> bool) -> bool {
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
        state.running = true;
        let number = state.begun;
        drop(state);
        let succeeded = sync();
        let mut state = self.state.lock();
        state.running = false;
        if !succeeded {
            state.failed = number;
        }
        drop(state);
        self.ended.notify_all();
        succeeded
    }
}
