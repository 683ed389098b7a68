//! The guard of a reading thread, and the slot that a thread keeps between two guards.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use offlock_sync::{check, const_thread_local};

use super::domain::{domain, init_domain};
use super::registry::{RELEASE_ON_UNPIN, Slot};

/// The slot of the calling thread.
struct Local {
    /// Null before the first pin, and after the thread released its slot.
    slot: Cell<*const Slot>,
}

/// Releases the slot of a thread when the thread ends.
struct ThreadExit {
    slot: Cell<*const Slot>,
}

const_thread_local! {
    // It has no destructor, so it can be read at any point of the thread's exit.
    static LOCAL: Local = Local { slot: Cell::new(ptr::null()) };
    static EXIT: ThreadExit = ThreadExit { slot: Cell::new(ptr::null()) };
}

impl ThreadExit {
    fn run(&self) {
        // SAFETY: null, or the slot of this thread, which is never freed.
        let Some(slot) = (unsafe { self.slot.replace(ptr::null()).as_ref() }) else { return };
        let nesting = slot.nesting();
        if !check!("thread exit: no guard is left", nesting == 0) {
            slot.set_nesting(nesting | RELEASE_ON_UNPIN);
            return;
        }
        slot.leave();
        clear_local_slot();
        slot.release();
    }
}

impl Drop for ThreadExit {
    fn drop(&mut self) {
        self.run();
    }
}

fn clear_local_slot() {
    // A model checker may have destroyed `LOCAL` before `EXIT`; no code reads `LOCAL` after that.
    let _ = LOCAL.try_with(|local| local.slot.set(ptr::null()));
}

/// Protects the values that this thread loads from being freed. Returned by [`pin`].
///
/// The guard belongs to the thread that called [`pin`].
///
/// [`mem::forget`](std::mem::forget) of a guard is safe. It leaves the thread a reader for ever,
/// also after the thread ends: no object that is retired from then on is freed
/// ([`stats`](super::stats) shows a stalled reader).
///
/// ```
/// use offlock_percpu::rcu;
///
/// let guard: rcu::Guard = rcu::pin();
/// assert!(rcu::is_pinned());
/// drop(guard);
/// assert!(!rcu::is_pinned());
/// ```
///
/// A guard cannot move to another thread:
///
/// ```compile_fail
/// fn sends<T: Send>(_: T) {}
/// sends(offlock_percpu::rcu::pin());
/// ```
#[must_use = "values loaded under a guard are valid only while the guard lives"]
#[derive(Debug)]
pub struct Guard {
    slot: NonNull<Slot>,
    /// Makes the guard `!Send` and `!Sync`: only the owning thread may access the slot's nesting.
    _not_send: PhantomData<*mut ()>,
}

// Unwinding drops a guard like any other value.
impl UnwindSafe for Guard {}
impl RefUnwindSafe for Guard {}

const _: () = assert!(size_of::<Option<Guard>>() == size_of::<usize>());

/// Pins the calling thread: a value that it loads stays alive as long as the returned guard.
///
/// Pins nest; an inner pin only counts. Wait-free, without an atomic read-modify-write, and without
/// a fence where membarrier works. The first pin of a thread claims a slot of 128 bytes: it walks a
/// list as long as the largest number of threads that ever read at the same time, and may allocate.
/// A guard may live in a thread-local variable and drop while the thread ends. Must not be called
/// from a signal handler.
///
/// ```
/// use offlock_percpu::rcu;
///
/// let shared = rcu::Atomic::new(7);
/// let guard = rcu::pin();
/// assert_eq!(shared.load(&guard), &7);
/// ```
///
/// # Aborts
///
/// Aborts if there is no memory for the slot. A thread that has pinned once needs no more memory.
#[inline]
pub fn pin() -> Guard {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or the slot of this thread, which is never freed.
    let Some(slot) = (unsafe { slot.as_ref() }) else { return pin_without_slot() };
    let nesting = slot.nesting();
    if nesting == 0 {
        slot.enter(domain().current_gp());
    }
    slot.set_nesting(nesting + 1);
    Guard { slot: NonNull::from(slot), _not_send: PhantomData }
}

/// Pins a thread without a slot: at its first pin, or in a destructor at its exit.
#[cold]
#[inline(never)]
fn pin_without_slot() -> Guard {
    let domain = init_domain();
    let slot = domain.registry.claim();
    let exiting = EXIT.try_with(|exit| exit.slot.set(slot)).is_err();
    LOCAL.with(|local| local.slot.set(slot));
    slot.enter(domain.current_gp());
    slot.set_nesting(if exiting { RELEASE_ON_UNPIN + 1 } else { 1 });
    Guard { slot: NonNull::from(slot), _not_send: PhantomData }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: slots are never freed, and this thread owns its slot until its last unpin.
        let slot = unsafe { self.slot.as_ref() };
        let nesting = slot.nesting() - 1;
        slot.set_nesting(nesting);
        if nesting == 0 {
            slot.leave();
        } else if nesting == RELEASE_ON_UNPIN {
            unpin_and_release(slot);
        }
    }
}

/// Drops the last guard of a thread that has ended: releases the slot too.
#[cold]
#[inline(never)]
fn unpin_and_release(slot: &Slot) {
    slot.leave();
    clear_local_slot();
    slot.release();
}

/// Returns whether the calling thread holds a [`Guard`]. Wait-free.
///
/// ```
/// use offlock_percpu::rcu;
///
/// assert!(!rcu::is_pinned());
/// let _guard = rcu::pin();
/// assert!(rcu::is_pinned());
/// ```
#[inline]
#[must_use]
pub fn is_pinned() -> bool {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or the slot of this thread, which is never freed.
    unsafe { slot.as_ref() }.is_some_and(|slot| slot.nesting() != 0)
}

/// Runs what a thread runs at its end, for models.
#[cfg(offlock_model)]
pub fn end_thread() {
    EXIT.with(ThreadExit::run);
}
