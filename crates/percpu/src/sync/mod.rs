//! The one place that names `std` atomics, threads or a model checker.
//!
//! Every crate of the workspace imports its atomics, locks, cells and threads from here, so that
//! one `--cfg` switches all of them together:
//!
//! | | default | `--cfg offlock_loom` | `--cfg offlock_shuttle` |
//! |---|---|---|---|
//! | `atomic`, `Arc`, `thread`, `hint` | `std` | `loom` | `shuttle` |
//! | `Mutex`, `Condvar` | a wrapper over `std`'s | the same, over `loom`'s | the same, over `shuttle`'s |
//! | `Futex` | a word, and the kernel's call | a word, `Mutex` and `Condvar` | the same |
//! | `WordLock` | a word, and a parker that is cold | the same | the same |
//! | `cell::UnsafeCell` | `std`'s, transparent | `loom`'s: checks every access | `std`'s |
//! | `global!`, `thread_local!` | `static`, `std`'s | one per run of the model | the same |
//! | `thread_id()` | the address of a thread-local | counted per run | counted per run |
//! | `quarantine` | a plain drop | canary, memory kept | canary, memory kept |
//! | `cpu::current()` | this CPU | set by the test | set by the test |
//! | `fence!`, `order!`, `step!`, `check!` | the plain operation | weakened if `OFFLOCK_MUTANT` names its label | the same |
//! | `mutant()` | `false` | reads `OFFLOCK_MUTANT` | reads `OFFLOCK_MUTANT` |
//!
//! Locks have `parking_lot`'s shape in all three: `lock()` returns the guard, there is no
//! poisoning, and `Condvar::wait` borrows the guard. Only the default half has `const`
//! constructors; a `static` that must not be modelled takes its types from [`native`], one that must
//! is made by `global!`.
//!
//! Not covered by semantic versioning.

#[cfg(all(offlock_loom, offlock_shuttle))]
compile_error!("`--cfg offlock_loom` and `--cfg offlock_shuttle` exclude each other");

pub use self::imp::*;

#[cfg(not(offlock_loom))]
pub mod cell;
pub mod quarantine;

mod futex;
mod label;
mod lock;
mod mutant;
#[cfg(any(offlock_loom, offlock_shuttle))]
pub mod planted;
#[cfg(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu))]
pub mod virtual_cpu;

pub use self::futex::Futex;
#[cfg(any(offlock_loom, offlock_shuttle))]
#[doc(hidden)]
pub use self::label::is_planted;
pub use self::label::{check, fence, order, step};
pub use self::mutant::mutant;
pub use crate::word_lock::{WordGuard, WordLock};

/// The real types, in all three halves: for process-wide facts that are set once and that no
/// model is about (which CPUs exist, whether rseq works).
pub mod native {
    pub use std::sync::{OnceLock, atomic};
}

/// The value of an atomic that nobody changes but the caller, who has the right to: a relaxed load.
///
/// For what is loaded to be stored again. loom remembers the last access of an object only; were that
/// the storer's own load, it would not see that the store concerns who loaded before, and leave out
/// the runs in which those come in between.
#[inline(always)]
pub fn load_own<A: OwnLoad>(atomic: &A) -> A::Value {
    atomic.load_own()
}

/// For [`load_own`].
pub trait OwnLoad {
    /// What it holds.
    type Value;

    /// See [`load_own`].
    fn load_own(&self) -> Self::Value;
}

macro_rules! own_load {
    ($($atomic:ident $value:ty),*) => {$(
        impl OwnLoad for imp::atomic::$atomic {
            type Value = $value;

            #[inline(always)]
            fn load_own(&self) -> $value {
                #[cfg(offlock_loom)]
                // SAFETY: whoever calls is the only one that stores; loom fails the model if not.
                return unsafe { self.unsync_load() };
                // Ordering: Relaxed; the caller's own value, or one that a lock has carried here.
                #[cfg(not(offlock_loom))]
                self.load(imp::atomic::Ordering::Relaxed)
            }
        }
    )*};
}

own_load!(AtomicU32 u32, AtomicU64 u64);

/// Whether this thread is unwinding; the model checkers unwind real threads too.
pub fn panicking() -> bool {
    std::thread::panicking()
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
    pub use std::sync::{Arc, atomic};
    pub use std::{hint, thread, thread_local};

    /// Tells this thread from every other that lives: never 0. Wait-free, a few instructions.
    ///
    /// It is an address in the thread's own memory, so it may be that of a later thread once this
    /// one has ended. An id left in a word by a guard that was forgotten then names a stranger.
    #[inline(always)]
    pub fn thread_id() -> u64 {
        thread_local! {
            static HERE: u8 = const { 0 };
        }
        // Nothing to drop, so it can be read at any point of a thread's exit.
        HERE.with(|here| std::ptr::from_ref(here).addr() as u64)
    }

    /// What [`super::lock`] is written over.
    pub(super) use std::sync as std_shaped;

    /// The real CPUs; with `--cfg offlock_virtual_cpu`, those that the program made up.
    pub mod cpu {
        pub use crate::cpu::current_cpu as current;
        #[cfg(not(offlock_virtual_cpu))]
        pub(crate) use crate::cpu::recent_cpu as recent;
        /// The number of slots: one for every CPU that may ever exist, and for the holes.
        pub use crate::topology::capacity as possible;
        #[cfg(offlock_virtual_cpu)]
        pub(crate) use current as recent;
    }
}

/// `global! { static NAME: T = value; }`: a static that a model has one of in every run.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_global {
    ($(#[$meta:meta])* $vis:vis static $name:ident: $type:ty = $value:expr;) => {
        $(#[$meta])* $vis static $name: $type = $value;
    };
}

#[cfg(any(offlock_loom, offlock_shuttle))]
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_global {
    // An empty `vis` would not match the checkers' macro.
    ($(#[$meta:meta])* static $name:ident: $type:ty = $value:expr;) => {
        $crate::sync::lazy_static! { $(#[$meta])* static ref $name: $type = $value; }
    };
    ($(#[$meta:meta])* $vis:vis static $name:ident: $type:ty = $value:expr;) => {
        $crate::sync::lazy_static! { $(#[$meta])* $vis static ref $name: $type = $value; }
    };
}

pub use crate::offlock_global as global;

/// Tells this thread of the model from every other: never 0.
#[cfg(any(offlock_loom, offlock_shuttle))]
pub fn thread_id() -> u64 {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    static NEXT: AtomicU64 = AtomicU64::new(1);
    self::imp::thread_local! {
        // Ordering: Relaxed; only the values must differ. Not the checker's atomic: which thread
        // gets which number is no part of any model.
        static MINE: Cell<u64> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    MINE.with(Cell::get)
}

#[cfg(offlock_loom)]
mod imp {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
    pub use super::virtual_cpu as cpu;
    pub use loom::sync::{Arc, atomic};
    pub use loom::{cell, hint, thread};
    pub use loom::{lazy_static, thread_local};

    /// What [`super::lock`] is written over.
    pub(super) use loom::sync as std_shaped;

    /// Runs `f` once per interleaving that loom finds within its limits (`LOOM_MAX_PREEMPTIONS`).
    ///
    /// # Panics
    ///
    /// Panics if one of them panics. A deadlock may abort the process instead.
    pub fn model(f: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.max_branches = builder.max_branches.max(BRANCHES);
        builder.check(move || {
            super::quarantine::begin_run();
            f();
        });
    }

    /// Steps in one run before it counts as endless. A guess: the longest models take 1,500.
    const BRANCHES: usize = 5_000;
}

#[cfg(offlock_shuttle)]
mod imp {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
    pub use super::virtual_cpu as cpu;
    pub use shuttle::sync::{Arc, atomic};
    pub use shuttle::{hint, thread};
    pub use shuttle::{lazy_static, thread_local};

    /// What [`super::lock`] is written over.
    pub(super) use shuttle::sync as std_shaped;

    /// Schedules tried by [`model`] when `OFFLOCK_SHUTTLE_ITERATIONS` does not say. A guess: the
    /// planted mutants of this crate fall within the first hundred.
    const ITERATIONS: usize = 1_000;

    /// Runs `f` under random schedules, `OFFLOCK_SHUTTLE_ITERATIONS` of them.
    ///
    /// # Panics
    ///
    /// Panics if one of them panics or deadlocks.
    pub fn model(f: impl Fn() + Send + Sync + 'static) {
        let asked = std::env::var("OFFLOCK_SHUTTLE_ITERATIONS").ok();
        let iterations = asked.map_or(ITERATIONS, |n| n.parse().expect("a number of schedules"));
        shuttle::check_random(
            move || {
                super::quarantine::begin_run();
                f();
            },
            iterations,
        );
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::quarantine::{Watched, free};
    use super::*;

    #[test]
    fn locks_are_const_and_wait_borrows_the_guard() {
        static STATE: Mutex<u32> = Mutex::new(0);
        static CHANGED: Condvar = Condvar::new();

        let mut state = STATE.lock();
        assert!(STATE.try_lock().is_none());
        let other = thread::spawn(|| {
            *STATE.lock() = 1;
            CHANGED.notify_one();
        });
        while *state == 0 {
            CHANGED.wait(&mut state);
        }
        *state += 1;
        drop(state);
        other.join().unwrap();
        assert_eq!(*STATE.try_lock().unwrap(), 2);
    }

    #[test]
    fn a_cell_gives_its_content_to_both_closures() {
        let cell = cell::UnsafeCell::new(7);
        // SAFETY: nobody else has the cell, and the pointer is not kept.
        cell.with_mut(|value| unsafe { *value += 1 });
        // SAFETY: as above.
        assert_eq!(cell.with(|value| unsafe { *value }), 8);
        assert_eq!(cell.into_inner(), 8);
    }

    #[test]
    fn free_drops_the_value_at_once() {
        let value = Arc::new(());
        let mut node = Box::new(Watched::new(Some(Arc::clone(&value))));
        assert!(node.is_some());
        assert_eq!(Arc::strong_count(&value), 2);
        free(std::mem::replace(&mut node, Box::new(Watched::new(None))));
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
