//! The guard of a thread, and the thread's slot.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use super::domain::{domain, init_domain};
use super::registry::{RELEASE_ON_UNPIN, Slot};
use crate::error::AllocError;
use crate::sync::{mutant, thread_local};

struct Local {
    /// This thread's slot. Null before the first pin, and after the end.
    slot: Cell<*const Slot>,
}

/// Runs [`ThreadExit::drop`] at the end of the thread.
struct ThreadExit {
    slot: Cell<*const Slot>,
}

impl Local {
    const fn new() -> Self {
        Self { slot: Cell::new(ptr::null()) }
    }
}

impl ThreadExit {
    const fn new() -> Self {
        Self { slot: Cell::new(ptr::null()) }
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    // Nothing to drop, so that it can be read at any point of the thread's exit.
    static LOCAL: Local = const { Local::new() };
    static EXIT: ThreadExit = const { ThreadExit::new() };
}

// The checkers' macro knows no `const`.
#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static LOCAL: Local = Local::new();
    static EXIT: ThreadExit = ThreadExit::new();
}

impl ThreadExit {
    fn run(&self) {
        // SAFETY: null, or this thread's slot, never freed.
        let Some(slot) = (unsafe { self.slot.replace(ptr::null()).as_ref() }) else { return };
        let nesting = slot.nesting();
        if nesting != 0 && !mutant("rcu-exit-unpins") {
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
    // In a model this variable may be gone before the other; nothing reads it then.
    let _ = LOCAL.try_with(|local| local.slot.set(ptr::null()));
}

/// Keeps what this thread reads from being reclaimed; bound to the thread. From [`pin`].
///
/// [`mem::forget`](std::mem::forget) of a guard is safe and leaves the thread reading for ever, also
/// after its end: nothing that is retired from then on is reclaimed ([`stats`](super::stats) shows
/// a stalled reader).
///
/// ```compile_fail
/// fn sends<T: Send>(_: T) {}
/// sends(percpu::rcu::pin());
/// ```
#[must_use = "what was loaded under a guard is gone when the guard is"]
#[derive(Debug)]
pub struct Guard {
    slot: NonNull<Slot>,
    /// `!Send` and `!Sync`: the slot is this thread's.
    _here: PhantomData<*mut ()>,
}

// A guard that unwinding drops counts down like any other; nothing of it can be seen half done.
impl UnwindSafe for Guard {}
impl RefUnwindSafe for Guard {}

const _: () = assert!(size_of::<Option<Guard>>() == size_of::<usize>());

/// Starts to read: what is loaded while the guard lives stays alive as long.
///
/// Nests: a pin inside another only counts. Wait-free, no atomic read-modify-write, no fence where
/// membarrier works. The first pin of a thread takes a slot of 128 bytes: it walks a list as long
/// as the most threads that ever read at once, and may allocate. A guard may live in a thread-local
/// variable and be dropped while the thread ends. Not to be called from a signal handler.
///
/// # Aborts
///
/// Aborts if there is no memory for the slot. [`try_pin`] returns that instead; a thread that has
/// pinned once does not need any.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
///
/// let shared = rcu::Atomic::new(7);
/// let guard = rcu::pin();
/// assert_eq!(shared.load(&guard), &7);
/// ```
#[inline]
pub fn pin() -> Guard {
    match try_pin() {
        Ok(guard) => guard,
        Err(_) => abort_without_slot(),
    }
}

#[cold]
#[inline(never)]
fn abort_without_slot() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<Slot>())
}

/// [`pin`], where lack of memory is an error.
///
/// # Errors
///
/// [`AllocError`]: this thread has no slot yet, and there was no memory for one.
#[inline]
pub fn try_pin() -> Result<Guard, AllocError> {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or this thread's slot, never freed.
    let Some(slot) = (unsafe { slot.as_ref() }) else { return pin_without_slot() };
    let nesting = slot.nesting();
    if nesting == 0 {
        slot.enter(domain().current_gp());
    }
    slot.set_nesting(nesting + 1);
    Ok(Guard { slot: NonNull::from(slot), _here: PhantomData })
}

/// The first pin of this thread, or one of its destructors'.
#[cold]
#[inline(never)]
fn pin_without_slot() -> Result<Guard, AllocError> {
    let domain = init_domain();
    let slot = domain.registry.claim()?;
    let ends = EXIT.try_with(|exit| exit.slot.set(slot)).is_err();
    LOCAL.with(|local| local.slot.set(slot));
    slot.enter(domain.current_gp());
    slot.set_nesting(if ends { RELEASE_ON_UNPIN + 1 } else { 1 });
    Ok(Guard { slot: NonNull::from(slot), _here: PhantomData })
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: slots are never freed; this thread has it until its last unpin.
        let slot = unsafe { self.slot.as_ref() };
        let nesting = slot.nesting() - 1;
        slot.set_nesting(nesting);
        if nesting == 0 {
            slot.leave();
        } else if nesting == RELEASE_ON_UNPIN {
            last_unpin(slot);
        }
    }
}

/// The thread has ended around its guards: the slot goes with the last.
#[cold]
#[inline(never)]
fn last_unpin(slot: &Slot) {
    slot.leave();
    clear_local_slot();
    slot.release();
}

/// Tells whether this thread holds a [`Guard`]. Wait-free.
///
/// A [`SendGuard`](super::SendGuard) belongs to no thread and is not seen.
#[inline]
#[must_use]
pub fn is_pinned() -> bool {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or this thread's slot, never freed.
    unsafe { slot.as_ref() }.is_some_and(|slot| slot.nesting() != 0)
}

/// Runs what the end of a thread runs, where a model wants it.
#[cfg(any(offlock_loom, offlock_shuttle))]
pub fn end_thread() {
    EXIT.with(ThreadExit::run);
}
