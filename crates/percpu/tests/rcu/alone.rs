//! The lock with which the tests of RCU take turns, because a process has one domain.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use offlock_percpu::rcu;

/// Waits for the other tests of this process. No retired object of theirs is left then.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    drain();
    turn
}

/// Drops every retired object. No thread holds a guard, and no other thread polls.
pub(crate) fn drain() {
    while rcu::stats().pending != 0 {
        rcu::poll();
        thread::yield_now();
    }
}
