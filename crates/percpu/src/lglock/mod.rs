//! Local-global locks: a value per CPU that is cheap to lock on its own CPU, and a way to lock
//! another CPU's, two, or all.
//!
//! ```text
//!  LgLock  slots -> | cpu 0: word, owner, waiters, value | cpu 1: word, owner, ... | ...
//! ```
//!
//! A slot holds the id of the thread that locked it, so a thread that asks for a slot that it holds
//! already gets [`LockError::Deadlock`] instead of waiting for itself. That is why also the methods
//! that wait return a `Result`; it takes no room and no time beside the lock itself. An id is that of
//! a living thread: after a thread forgot its guard and ended, a later thread may have its id, and
//! gets `Deadlock` too. No thread unlocks that slot, so it would have waited for ever.
//!
//! Locks are neither fair nor recursive. Waiting means a few attempts, then sleeping until an
//! unlock. A panic inside a guard unlocks: there is no poison, and what the value looks like is up
//! to the code that changed it. A thread that ends with a guard in a thread-local unlocks when that is
//! destroyed; a forgotten guard keeps its slot locked for ever.
//!
//! A signal handler may use the `try_` methods of [`LgLock`], and drop their guards, if the lock was
//! used before (in a library loaded at run time, by the interrupted thread). For a slot that the
//! interrupted code holds they return [`LockError::Deadlock`], or [`LockError::WouldBlock`] if it was
//! just about to lock or unlock it; they never wait, and leave `errno` alone. The methods that wait
//! are not for handlers.
//!
//! The local-global split is that of Linux's `lglock` (`fs: scale files_lock`, 2010); the word with
//! an owner is ours.
//!
//! # Invariants
//!
//! 1. A value is used only by the thread that took its slot's word from 0.
//! 2. A guard keeps the word it locked; unlocking never asks for the CPU again.
//! 3. A thread waits for a slot only if it holds no slot from that one on. So no threads wait in a
//!    circle inside one lock.
//! 4. A release and a wait do not miss each other: see `crate::park`.

mod error;
mod guard;
mod iter;
mod lock;
mod slot;

pub use self::error::LockError;
pub use self::guard::{GlobalGuard, LocalGuard, PairGuard};
pub use self::iter::{IntoIter, Iter, IterMut};
pub use self::lock::LgLock;
