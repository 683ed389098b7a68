//! There is one RCU domain per process, so its tests take turns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use offlock_percpu::rcu::{self, Bounds};

/// Nobody else retires or reads meanwhile, and nothing is left from before.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    rcu::set_bounds(Bounds::default());
    rcu::barrier().expect("no guard is left on this thread");
    turn
}
