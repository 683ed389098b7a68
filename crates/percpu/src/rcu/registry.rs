//! Who reads: one slot per thread, found by writers without a lock.
//!
//! ```text
//!  registry -> | slot: word, nesting, owner | -> | slot ... | -> ...     128-byte aligned, never freed
//!                 ^
//!  thread-local --+        Guard: a pointer to the same slot
//! ```
//!
//! A thread takes a slot at its first [`pin`] and gives it back when it ends. One that ends inside a
//! guard (a guard kept in a thread-local variable) leaves the slot to the last unpin, and a `pin`
//! that comes after the slot is gone borrows one until its unpin: both add [`EXITING`] to the
//! nesting, so that the count never comes back to 0 and the fast path needs no test for it.
//!
//! # Invariants
//!
//! 1. Slots are pushed and never removed or freed: a `&Slot` is `'static`.
//! 2. `nesting` is touched only by the thread that owns the slot: the winner of the exchange on
//!    `owner`, until it stores 0 there.
//! 3. `word` is 0 exactly while its thread may hold no reference: only the owner writes it.

use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::{self, NonNull};

use super::domain::{self, Domain, domain};
use super::{AllocError, const_fn};
use crate::fence;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::{mutant, thread_id, thread_local};
use std::cell::Cell;

/// Added to the nesting of a slot that its last unpin must give back.
const EXITING: u64 = 1 << 62;

/// One thread's place in the list.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot {
    /// The grace period that was current when this thread began to read; 0 while it does not.
    word: AtomicU64,
    /// Guards alive, and [`EXITING`].
    nesting: UnsafeCell<u64>,
    /// The thread that has the slot, or 0.
    owner: AtomicU64,
    /// Never written after the slot was published.
    next: *const Slot,
}

impl Slot {
    #[inline(always)]
    fn nesting(&self) -> u64 {
        // SAFETY: invariant 2; every caller is the owner.
        self.nesting.with(|nesting| unsafe { *nesting })
    }

    #[inline(always)]
    fn set_nesting(&self, value: u64) {
        // SAFETY: as in `nesting`.
        self.nesting.with_mut(|nesting| unsafe { *nesting = value });
    }

    /// Begins to read: from here on every grace period that starts waits for this thread.
    #[inline(always)]
    fn enter(&self, domain: &Domain) {
        let now = domain.now();
        let order = if mutant("rcu-word-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `oldest`; it carries what this thread read
        // under its guards before this one, should the writer never see the 0 in between.
        self.word.store(now, order);
        if !mutant("rcu-pin-without-light") {
            // Against the `heavy` of `Turn::bump`: either it sees the word, or we see the unlink.
            fence::light();
        }
    }

    /// Reads no more.
    #[inline(always)]
    fn leave(&self) {
        let order = if mutant("rcu-unpin-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `oldest`; it carries what was read.
        self.word.store(0, order);
    }

    /// Gives the slot back. The caller owned it, and reads no more.
    fn release(&self) {
        self.set_nesting(0);
        let order =
            if mutant("rcu-release-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `Registry::claim`; it carries `nesting`, and
        // by way of the next owner's word what this thread read.
        self.owner.store(0, order);
    }
}

/// The list of slots.
#[derive(Debug)]
pub(super) struct Registry {
    head: AtomicPtr<Slot>,
}

// SAFETY: what the list leads to is atomics, and `nesting`, of which invariant 2 tells who may.
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

impl Registry {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self { head: AtomicPtr::new(ptr::null_mut()) }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &'static Slot> + use<> {
        // Ordering: Acquire pairs with the Release in `claim`; it carries the slots.
        let mut at: *const Slot = self.head.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: null, or published by `claim` and never freed (invariant 1).
            let slot = unsafe { at.as_ref() }?;
            at = slot.next;
            Some(slot)
        })
    }

    /// The oldest grace period that a reader is in, if there is a reader.
    pub(super) fn oldest(&self) -> Option<u64> {
        let order = if mutant("rcu-scan-relaxed") { Ordering::Relaxed } else { Ordering::Acquire };
        // Ordering: Acquire pairs with the Release in `Slot::enter` and `Slot::leave`; it carries
        // the reads of a thread that has left since.
        self.iter().map(|slot| slot.word.load(order)).filter(|&word| word != 0).min()
    }

    /// Threads that have been reading since before the grace period `now` began.
    pub(super) fn stalled(&self, now: u64) -> usize {
        // Ordering: Relaxed; a statistic.
        let words = self.iter().map(|slot| slot.word.load(Ordering::Relaxed));
        words.filter(|&word| word != 0 && word < now).count()
    }

    /// A slot of this thread's own: one that a thread gave back, or a new one.
    fn claim(&self) -> Result<&'static Slot, AllocError> {
        let me = thread_id();
        // Ordering: Acquire pairs with the Release in `Slot::release`; it carries `nesting`.
        // Relaxed on failure, and before it: the slot is another's, and nothing of it is touched.
        let free = |slot: &&Slot| {
            slot.owner.load(Ordering::Relaxed) == 0
                && slot.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if let Some(slot) = self.iter().find(free) {
            return Ok(slot);
        }
        let slot = Slot {
            word: AtomicU64::new(0),
            nesting: UnsafeCell::new(0),
            owner: AtomicU64::new(me),
            next: ptr::null(),
        };
        let mut slot = crate::alloc::try_box(slot).map_err(|_| AllocError::new())?;
        // Ordering: Relaxed; the exchange below tells whether it is still the head, and the slot
        // that it names was published to those who follow `next` by a Release in the same chain.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            slot.next = head;
            let new = Box::into_raw(slot);
            // Ordering: Release pairs with the Acquire in `iter`; it carries the slot. As a
            // read-modify-write it continues the chain of those before. Relaxed on failure: the
            // head found is not followed.
            match self.head.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
                // SAFETY: just published, and never freed (invariant 1).
                Ok(_) => return Ok(unsafe { &*new }),
                Err(found) => {
                    head = found;
                    // SAFETY: from `into_raw` just above, and not published.
                    slot = unsafe { Box::from_raw(new) };
                }
            }
        }
    }
}

struct Local {
    /// This thread's slot. Null before the first pin, and after the end.
    slot: Cell<*const Slot>,
    /// Drops of retired objects are running on this thread.
    freeing: Cell<bool>,
}

/// Runs [`Exit::drop`] at the end of the thread.
struct Exit {
    slot: Cell<*const Slot>,
}

impl Local {
    const fn new() -> Self {
        Self { slot: Cell::new(ptr::null()), freeing: Cell::new(false) }
    }
}

impl Exit {
    const fn new() -> Self {
        Self { slot: Cell::new(ptr::null()) }
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    // Nothing to drop, so that it can be read at any point of the thread's exit.
    static LOCAL: Local = const { Local::new() };
    static EXIT: Exit = const { Exit::new() };
}

// The checkers' macro knows no `const`.
#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static LOCAL: Local = Local::new();
    static EXIT: Exit = Exit::new();
}

impl Exit {
    fn run(&self) {
        // SAFETY: null, or this thread's slot, never freed.
        let Some(slot) = (unsafe { self.slot.replace(ptr::null()).as_ref() }) else { return };
        let nesting = slot.nesting();
        if nesting != 0 && !mutant("rcu-exit-unpins") {
            slot.set_nesting(nesting | EXITING);
            return;
        }
        slot.leave();
        forget_slot();
        slot.release();
    }
}

impl Drop for Exit {
    fn drop(&mut self) {
        self.run();
    }
}

fn forget_slot() {
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
        Err(_) => no_slot(),
    }
}

#[cold]
#[inline(never)]
fn no_slot() -> ! {
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
        slot.enter(domain());
    }
    slot.set_nesting(nesting + 1);
    Ok(Guard { slot: NonNull::from(slot), _here: PhantomData })
}

/// The first pin of this thread, or one of its destructors'.
#[cold]
#[inline(never)]
fn pin_without_slot() -> Result<Guard, AllocError> {
    let domain = domain::started();
    let slot = domain.registry.claim()?;
    let ends = EXIT.try_with(|exit| exit.slot.set(slot)).is_err();
    LOCAL.with(|local| local.slot.set(slot));
    slot.enter(domain);
    slot.set_nesting(if ends { EXITING + 1 } else { 1 });
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
        } else if nesting == EXITING {
            last_unpin(slot);
        }
    }
}

/// The thread has ended around its guards: the slot goes with the last.
#[cold]
#[inline(never)]
fn last_unpin(slot: &Slot) {
    slot.leave();
    forget_slot();
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

/// True while drops of retired objects run on this thread.
pub(super) fn is_freeing() -> bool {
    LOCAL.try_with(|local| local.freeing.get()).unwrap_or(false)
}

/// Records whether drops of retired objects run on this thread.
pub(super) fn set_freeing(freeing: bool) {
    let _ = LOCAL.try_with(|local| local.freeing.set(freeing));
}

/// Runs what the end of a thread runs, where a model wants it.
#[cfg(any(offlock_loom, offlock_shuttle))]
pub fn end_thread() {
    EXIT.with(Exit::run);
}
