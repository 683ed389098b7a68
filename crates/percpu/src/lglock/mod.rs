//! Local-global locks: a value per CPU that is cheap to lock on its own CPU, and a way to lock
//! another CPU's, two, or all.
//!
//! | | own CPU's slot | another slot | all slots |
//! |---|---|---|---|
//! | [`LgLock`] | an exchange | the same | one for each |
//! | [`BiasedLgLock`] | a load and a store | interrupts every CPU | the same |
//!
//! ```text
//!  LgLock        slots -> | cpu 0: word, owner, waiters, value | cpu 1: word, owner, ... | ...
//!
//!  BiasedLgLock  gate, waiters                  read by all, written only by who closes the gate
//!                words -> | cpu 0: owner ... | cpu 1: owner ... | ...            8 bytes per CPU
//!                slots -> | cpu 0: value | cpu 1: value | ...
//! ```
//!
//! A slot has the id of the thread that holds it, so a thread that asks for what it holds
//! already is told [`LockError::Deadlock`] instead of waiting for itself. That is why also the
//! methods that wait return a `Result`; it takes no room and no time beside the lock itself. An id
//! is that of a living thread: of one that forgot its guard and ended, a later thread may have it,
//! and is then told `Deadlock` too. Nobody unlocks that slot, so it would have waited for ever.
//!
//! Who excludes whom, by what:
//!
//! | | `local` | `local_on`, `pair`, `global` |
//! |---|---|---|
//! | `LgLock`: both | the slot's word | the slot's word |
//! | `BiasedLgLock`: `local` | the slot's word, in a section of its CPU | the gate, then the word |
//! | `BiasedLgLock`: others | the gate, then the word | the gate |
//!
//! Locks are neither fair nor recursive. Waiting means a few attempts, then sleeping until an
//! unlock. A panic inside a guard unlocks: there is no poison, and what the value looks like is up
//! to whoever changed it. A thread that ends with a guard in a thread-local unlocks when that is
//! destroyed; a forgotten guard keeps its slot locked for ever. In a `fork` child, whoever would wait for a
//! lock made before the fork is told [`LockError::Forked`], and what is free can be locked;
//! guards of the thread that forked are good in the child as well.
//!
//! A signal handler may use the `try_` methods of [`LgLock`], and drop their guards, if the lock was
//! used before (in a library loaded at run time, by the interrupted thread). For a slot that the
//! interrupted code holds they return [`LockError::Deadlock`], or [`LockError::WouldBlock`] if it was
//! just about to lock or unlock it; they never wait, and leave `errno` alone. The methods that wait,
//! and [`BiasedLgLock`], are not for handlers.
//!
//! The local-global split is that of Linux's `lglock` (`fs: scale files_lock`, 2010); the word with
//! an owner, the gate and the section are ours.
//!
//! # Invariants
//!
//! 1. A value is used only by the thread that took its slot's word from 0, or that closed the gate
//!    and found the word to be 0 behind it.
//! 2. A guard keeps the word it locked; unlocking never asks for the CPU again.
//! 3. While the gate is closed no word changes but from an id to 0.
//! 4. Whoever waits was asked first whether it may: `LgLock`, it holds no slot from the wanted one
//!    on; `BiasedLgLock`, no slot at all, and the gate only to wait for a slot. So nobody waits in
//!    a circle inside one lock.
//! 5. A release and a wait do not miss each other: see `crate::park`.

mod biased;
mod error;
mod guard;
mod iter;
mod plain;
mod slot;

pub use self::biased::BiasedLgLock;
pub use self::error::LockError;
pub use self::guard::{GlobalGuard, LocalGuard, PairGuard};
pub use self::iter::{IntoIter, Iter, IterMut};
pub use self::plain::LgLock;
