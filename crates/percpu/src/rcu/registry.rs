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
//! that comes after the slot is gone borrows one until its unpin: both add [`RELEASE_ON_UNPIN`] to the
//! nesting, so that the count never comes back to 0 and the fast path needs no test for it.
//!
//! # Invariants
//!
//! 1. Slots are pushed and never removed or freed: a `&Slot` is `'static`.
//! 2. `nesting` is touched only by the thread that owns the slot: the winner of the exchange on
//!    `owner`, until it stores 0 there.
//! 3. `word` is 0 exactly while its thread may hold no reference: only the owner writes it.

use std::ptr;

use super::const_fn::const_fn;
use crate::error::AllocError;
use crate::fence;
use crate::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::{mutant, thread_id};

/// Added to the nesting of a slot that its last unpin must give back.
pub(super) const RELEASE_ON_UNPIN: u64 = 1 << 62;

/// One thread's place in the list.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Slot {
    /// The grace period that was current when this thread began to read; 0 while it does not.
    entered_gp: AtomicU64,
    /// Guards alive, and [`RELEASE_ON_UNPIN`].
    nesting: UnsafeCell<u64>,
    /// The thread that has the slot, or 0.
    owner: AtomicU64,
    /// Never written after the slot was published.
    next: *const Slot,
}

impl Slot {
    #[inline(always)]
    pub(super) fn nesting(&self) -> u64 {
        // SAFETY: invariant 2; every caller is the owner.
        self.nesting.with(|nesting| unsafe { *nesting })
    }

    #[inline(always)]
    pub(super) fn set_nesting(&self, value: u64) {
        // SAFETY: as in `nesting`.
        self.nesting.with_mut(|nesting| unsafe { *nesting = value });
    }

    /// Begins to read: from here on every grace period that starts waits for this thread.
    #[inline(always)]
    pub(super) fn enter(&self, now: u64) {
        let order = if mutant("rcu-word-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `oldest`; it carries what this thread read
        // under its guards before this one, should the writer never see the 0 in between.
        self.entered_gp.store(now, order);
        if !mutant("rcu-pin-without-light") {
            // Against the `heavy` of `GpGuard::bump`: either it sees the word, or we see the unlink.
            fence::light();
        }
    }

    /// Reads no more.
    #[inline(always)]
    pub(super) fn leave(&self) {
        let order = if mutant("rcu-unpin-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `oldest`; it carries what was read.
        self.entered_gp.store(0, order);
    }

    /// Gives the slot back. The caller owned it, and reads no more.
    pub(super) fn release(&self) {
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
        self.iter()
            .map(|slot| slot.entered_gp.load(order))
            .filter(|&entered_gp| entered_gp != 0)
            .min()
    }

    /// Threads that have been reading since before the grace period `now` began.
    pub(super) fn stalled(&self, now: u64) -> usize {
        // Ordering: Relaxed; a statistic.
        let words = self.iter().map(|slot| slot.entered_gp.load(Ordering::Relaxed));
        words.filter(|&entered_gp| entered_gp != 0 && entered_gp < now).count()
    }

    /// A slot of this thread's own: one that a thread gave back, or a new one.
    pub(super) fn claim(&self) -> Result<&'static Slot, AllocError> {
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
            entered_gp: AtomicU64::new(0),
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
