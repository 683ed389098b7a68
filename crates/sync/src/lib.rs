//! Atomics, locks, cells and threads: those of `std`, or those of a model checker.
//!
//! Every crate of the workspace imports these types from here, so that one `--cfg` switches all of
//! them together. Modules outside this one do not name a model checker.
//!
//! | | default | `--cfg offlock_loom` | `--cfg offlock_shuttle` |
//! |---|---|---|---|
//! | `atomic`, `Arc`, `thread`, `hint` | `std` | `loom` | `shuttle` |
//! | `Mutex`, `Condvar` | `parking_lot` | wrap `loom`'s | wrap `shuttle`'s |
//! | `std_lock` | wraps `std`'s `Mutex` and `Condvar` | as above | as above |
//! | `Futex` | a word and the futex system call | a word, `Mutex` and `Condvar` | as loom |
//! | `WordLock`, `WaitSet` | a word and a parker; a list under it | as default | as default |
//! | `cell::UnsafeCell` | `std`'s, transparent | `loom`'s, checks each access | as default |
//! | `global!` | a `static` | a `lazy_static`, new in each run | as loom |
//! | `thread_local!` | `std`'s | `loom`'s, new in each run | `shuttle`'s, new in each run |
//! | `thread_id()` | address of a thread-local variable | a number from a counter | as loom |
//! | `quarantine` | drops and frees | checks a canary, keeps the memory | as loom |
//! | `virtual_cpu::current()` | - | the CPU that the test sets | as loom |
//! | `fence::light`, `fence::heavy` | compiler fence, `membarrier` | `virtual_fence` | full fences |
//! | `fence!`, `order!`, `step!`, `check!` | plain | weakened by `OFFLOCK_MUTANT` | as loom |
//! | `is_planted()` | `false` | reads `OFFLOCK_MUTANT` | as loom |
//!
//! The locks have the interface of `parking_lot` in all three builds: `lock()` returns the guard,
//! there is no poisoning, and `Condvar::wait` borrows the guard. Only the default build has `const`
//! constructors. `global!` declares a `static` that a model checks. A `static` that no model checks
//! takes its types from [`native`].
//!
//! Not covered by semantic versioning.

#[cfg(not(any(
    not(any(offlock_loom, offlock_shuttle, offlock_model)),
    all(offlock_model, offlock_virtual_cpu, offlock_loom, not(offlock_shuttle), feature = "loom"),
    all(
        offlock_model,
        offlock_virtual_cpu,
        offlock_shuttle,
        not(offlock_loom),
        feature = "shuttle"
    ),
)))]
compile_error!("a model needs three cfgs and a feature: see crates/xtask/src/workspace.rs");

pub use self::imp::*;

pub mod alloc;
pub mod asymmetric;
pub mod quarantine;

#[cfg(offlock_model)]
mod checker;
mod cpu;
mod futex;
mod label;
mod lock;
mod macros;
mod park;
mod thread_waker;
mod wait_set;
mod word_lock;

pub use self::alloc::AllocError;
#[cfg(offlock_model)]
pub use self::asymmetric::virtual_fence;
#[cfg(offlock_model)]
pub use self::checker::{beside, model, thoroughly, with_preemptions, yield_often};
pub use self::cpu::CpuId;
#[cfg(any(offlock_model, offlock_virtual_cpu))]
pub use self::cpu::virtual_cpu;
pub use self::futex::Futex;
#[doc(hidden)]
pub use self::label::is_planted;
pub use self::label::{check, fence, order, step};
pub use self::macros::{const_fn, const_thread_local, global, impl_error};
pub use self::thread_waker::block_on;
pub use self::wait_set::{WaitSet, Waiter, Wakers};
pub use self::word_lock::{WordGuard, WordLock};
#[doc(hidden)]
pub use libc;

/// [`Mutex`] and [`Condvar`] without allocation: for locks that a memory allocator may reach.
pub mod std_lock {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
}

/// The types of `std` in all three builds.
///
/// For process-wide facts that are set once and that no model checks, such as which CPUs exist and
/// whether rseq works, and for statistics.
pub mod native {
    pub use std::sync::{OnceLock, atomic};
}

/// Loads an atomic to which only the calling thread may store at this time. Relaxed.
///
/// For a load whose value the caller changes and stores back. loom tries two accesses in both orders
/// only if no other access of the same object is between them. This load would be between the store
/// that follows it and an earlier load of another thread, so loom's scheduler must not see it.
#[inline(always)]
pub fn load_own<A: OwnLoad>(atomic: &A) -> A::Value {
    atomic.load_own()
}

/// Returns the nanoseconds of a coarse monotonic clock, which moves every few milliseconds and takes a
/// fifth of the time of a fine one. It stands still in models.
pub fn coarse_clock() -> u64 {
    if cfg!(offlock_model) {
        return 0;
    }
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a local variable, valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An atomic that [`load_own`] can load.
pub trait OwnLoad {
    /// The type of the value.
    type Value;

    /// Loads the value; [`load_own`] says when.
    fn load_own(&self) -> Self::Value;
}

macro_rules! own_load {
    ($($atomic:ident $value:ty),*) => {$(
        impl OwnLoad for imp::atomic::$atomic {
            type Value = $value;

            #[inline(always)]
            fn load_own(&self) -> $value {
                #[cfg(offlock_loom)]
                // SAFETY: only the calling thread stores at this time; loom fails the model if
                // another thread does.
                return unsafe { self.unsync_load() };
                // Ordering: Relaxed; the value is from this thread, or a lock ordered its store
                // before this load.
                #[cfg(not(offlock_loom))]
                self.load(imp::atomic::Ordering::Relaxed)
            }
        }
    )*};
}

own_load!(AtomicU32 u32, AtomicU64 u64);

#[cfg(not(offlock_model))]
mod imp {
    pub use parking_lot::{Condvar, Mutex, MutexGuard};
    pub use std::sync::{Arc, atomic};
    pub use std::{hint, thread, thread_local};

    /// Returns the id of the calling thread: unique among living threads, and never 0. Wait-free, a
    /// few instructions.
    ///
    /// The id is the address of a thread-local variable, so a later thread may get the id of a
    /// thread that has ended. If a forgotten guard left that id in a word, the word then seems to
    /// belong to the later thread.
    #[inline(always)]
    pub fn thread_id() -> u64 {
        thread_local! {
            static HERE: u8 = const { 0 };
        }
        // It has no destructor, so it can be read at any point of the thread's exit.
        HERE.with(|here| std::ptr::from_ref(here).addr() as u64)
    }

    /// The module whose locks [`super::lock`] wraps.
    pub(super) use std::sync as std_shaped;
}

/// Returns the id of the calling thread: unique in the process, and never 0.
#[cfg(offlock_model)]
pub fn thread_id() -> u64 {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    static NEXT: AtomicU64 = AtomicU64::new(1);
    self::imp::thread_local! {
        // `std`'s atomic, not the checker's: no model depends on which thread gets which number.
        // Ordering: Relaxed; the numbers must differ, and publish no other data.
        static MINE: Cell<u64> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    MINE.with(Cell::get)
}

#[cfg(offlock_loom)]
mod imp {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
    pub use loom::sync::{Arc, atomic};
    pub use loom::{cell, hint, thread};
    pub use loom::{lazy_static, thread_local};

    /// The module whose locks [`super::lock`] wraps.
    pub(super) use loom::sync as std_shaped;
}

#[cfg(offlock_shuttle)]
mod imp {
    pub use super::lock::{Condvar, Mutex, MutexGuard};
    pub use shuttle::sync::{Arc, atomic};
    pub use shuttle::{hint, thread};
    pub use shuttle::{lazy_static, thread_local};

    /// The module whose locks [`super::lock`] wraps.
    pub(super) use shuttle::sync as std_shaped;
}

/// `UnsafeCell` with the closure interface of loom's cell, at no cost.
#[cfg(not(offlock_loom))]
pub mod cell {
    /// A [`std::cell::UnsafeCell`] that passes the pointer to its value to a closure.
    ///
    /// Under `--cfg offlock_loom` this name is loom's cell, which fails the model if two accesses race.
    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub struct UnsafeCell<T: ?Sized>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Creates a cell that contains `value`.
        #[inline(always)]
        pub const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Takes the value out.
        #[inline(always)]
        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    impl<T: ?Sized> UnsafeCell<T> {
        /// Calls `f` with a pointer for reads. `f` must not write through the pointer, nor keep it.
        #[inline(always)]
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        /// Calls `f` with a pointer for reads and writes. `f` must not keep the pointer.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

/// What goes on after a panic of foreign code.
pub mod panics {
    use std::any::Any;
    use std::mem;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Drops the payload of a caught panic, and never panics.
    ///
    /// The drop of the payload is code of the user and may panic too. The payload of that panic is
    /// leaked, because its drop may panic again.
    pub fn drop_payload(payload: Box<dyn Any + Send>) {
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            mem::forget(another);
        }
    }

    /// Calls `step` until it returns false, also after a panic of `step`, which then goes on to the caller.
    /// If `step` panics again meanwhile, the process aborts.
    pub fn exhaust(mut step: impl FnMut() -> bool) {
        struct Rest<'a, F: FnMut() -> bool>(&'a mut F);

        impl<F: FnMut() -> bool> Drop for Rest<'_, F> {
            fn drop(&mut self) {
                while (self.0)() {}
            }
        }

        let rest = Rest(&mut step);
        while (rest.0)() {}
        mem::forget(rest);
    }
}

/// Starts a thread of the given name.
///
/// Allocates. Blocks for the system calls that make a thread.
///
/// # Errors
///
/// The error of the system if it makes no thread, and `ENOMEM` if the process may not map the stack
/// of a thread and 256 KiB beside it. std returns an error for a missing stack only: a new thread
/// that cannot map its signal stack, or allocate its thread-local variables, aborts the process.
/// The check is not exact: other threads may map memory between the check and the start.
pub fn spawn<T, F>(name: String, run: F) -> std::io::Result<thread::JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    #[cfg(not(offlock_model))]
    check_memory()?;
    thread::Builder::new().name(name).spawn(run)
}

/// Returns `ENOMEM` if the process may not map what the start of a thread takes.
#[cfg(not(offlock_model))]
fn check_memory() -> std::io::Result<()> {
    /// The default stack of std, and room for what else a start maps.
    const LEN: usize = (2 << 20) + (256 << 10);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a mapping that the kernel places replaces none.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and no reference leads into it.
    unsafe { libc::munmap(at, LEN) };
    Ok(())
}
