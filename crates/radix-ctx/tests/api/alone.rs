//! The lock with which the tests take turns, because a process has one RCU domain: a test would reclaim the
//! contexts that another one has removed.

use std::panic::catch_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use offlock_percpu::rcu;

/// Waits for the other tests of this process, and drops the contexts that they have left.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    drain();
    turn
}

/// Drops every retired object. No thread holds a guard, and no other thread polls.
pub(crate) fn drain() {
    while rcu::stats().pending != 0 {
        let _panic = catch_unwind(rcu::poll); // of the drop of a context
        thread::yield_now();
    }
}
