//! Local-global locks: one value per CPU, each under its own lock; a thread can lock the value of
//! its CPU cheaply, and also that of another CPU or of all.
//!
//! ```text
//!  LgLock  slots -> | cpu 0: word, owner, waiters, value | cpu 1: word, owner, ... | ...
//! ```
//!
//! ```
//! use offlock_percpu::lglock::{LgLock, LockError};
//!
//! let queues = LgLock::new(|_cpu| Vec::new());
//! queues.local()?.push("job"); // the queue of this CPU
//! let jobs: usize = queues.global()?.iter().map(|(_cpu, queue)| queue.len()).sum();
//! assert_eq!(jobs, 1);
//! # Ok::<(), LockError>(())
//! ```
//!
//! A slot stores the id of the thread that locked it. A thread that asks for a slot that it holds
//! gets [`LockError::Deadlock`] instead of waiting for itself, so the methods that wait return a
//! `Result` too. Only living threads have an id of their own: a thread that starts after another
//! forgot its guard and exited may have the same id, and then gets `Deadlock` too. No thread
//! unlocks that slot, so the wait would last for ever.
//!
//! Locks are neither fair nor recursive. A waiter makes a few attempts, then sleeps until an
//! unlock. A panic inside a guard unlocks. There is no poisoning, so the code that changes a value
//! must keep it consistent. A guard in a thread-local variable unlocks when the variable is
//! destroyed. A forgotten guard keeps its slot locked for ever.
//!
//! A signal handler must not use a lock.
//!
//! The local-global split is that of Linux's `lglock` (`fs: scale files_lock`, 2010). The word with
//! an owner is new here.
//!
//! # Invariants
//!
//! 1. Only the thread that changed a slot's word from 0 uses the slot's value, until it releases
//!    the word.
//! 2. A guard keeps the word that it locked. An unlock never asks for the CPU again.
//! 3. A thread waits for a slot only if it holds neither that slot nor a later one. So threads do
//!    not wait in a circle inside one lock.
//! 4. No wake-up is lost: see `offlock_sync::Parker`.

mod error;
mod guard;
mod lock;
mod slot;

pub use self::error::LockError;
pub use self::guard::{GlobalGuard, LocalGuard};
pub use self::lock::LgLock;
