//! The list of threads that read: one slot per thread, which writers scan without a lock.
//!
//! ```text
//!  Registry -> | slot: entered_gp, nesting, owner | -> | slot ... | -> ...     128-byte aligned
//!                 ^
//!  thread-local --+        Guard: a pointer to the same slot
//! ```
//!
//! A thread claims a slot at its first [`pin`](super::pin) and releases it when it ends. A thread
//! that ends while a guard lives (in a thread-local variable) leaves the release to the last unpin.
//! A `pin` after the release claims a slot until its unpin. Both cases add [`RELEASE_ON_UNPIN`] to
//! the nesting, so the count never returns to 0, and the fast path does not test for them.
//!
//! # Invariants
//!
//! 1. Slots are added and never removed or freed: a `&Slot` is `'static`.
//! 2. Only the thread that owns the slot accesses `nesting`: from its successful exchange on
//!    `owner` until it stores 0 there.
//! 3. `entered_gp` is 0 only while the owner holds no reference. Only the owner writes it.

use std::ptr;

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::const_fn;
use offlock_sync::{order, step, thread_id};

use crate::fence;

/// Added to the nesting of a slot that the last unpin must release.
pub(super) const RELEASE_ON_UNPIN: u64 = 1 << 62;

/// The state of one reading thread.
#[derive(Debug)]
pub(super) struct Slot {
    /// The grace period that was current when this thread pinned; 0 while it is not pinned.
    entered_gp: AtomicU64,
    /// The number of live guards, plus [`RELEASE_ON_UNPIN`] if the last unpin releases the slot.
    nesting: UnsafeCell<u64>,
    /// The id of the thread that owns the slot, or 0.
    owner: AtomicU64,
    /// Not written after the slot is published.
    next: *const CachePadded<Slot>,
}

impl Slot {
    #[inline(always)]
    pub(super) fn nesting(&self) -> u64 {
        // SAFETY: the calling thread owns the slot: it reached it through its own thread-local
        // variable or its own guard (invariant 2).
        self.nesting.with(|nesting| unsafe { *nesting })
    }

    #[inline(always)]
    pub(super) fn set_nesting(&self, value: u64) {
        // SAFETY: the calling thread owns the slot: it reached it through its own thread-local
        // variable or its own guard (invariant 2).
        self.nesting.with_mut(|nesting| unsafe { *nesting = value });
    }

    /// Marks the owner as a reader since grace period `now`: every later grace period waits for it.
    #[inline(always)]
    pub(super) fn enter(&self, now: u64) {
        // Ordering: Release pairs with the Acquire in `Registry::oldest`; it carries the reads of
        // this thread under its earlier guards, in case the writer never sees the 0 in between.
        self.entered_gp.store(now, order!(Release, "pin: the reads of earlier guards are done"));
        // Against the `heavy` of `GpGuard::bump`: either the writer sees `entered_gp`, or this thread
        // sees the unlink.
        step!("pin: before the reads", fence::light());
    }

    /// Marks the owner as not reading.
    #[inline(always)]
    pub(super) fn leave(&self) {
        // Ordering: Release pairs with the Acquire in `Registry::oldest`; it carries the reads of
        // this thread under the guard.
        self.entered_gp.store(0, order!(Release, "unpin: the reads are done"));
    }

    /// Releases the slot. The calling thread owns it and does not read.
    pub(super) fn release(&self) {
        self.set_nesting(0);
        // Ordering: Release pairs with the Acquire in `Registry::claim`; it carries `nesting`, and,
        // through the `entered_gp` that the next owner stores, the reads of this thread.
        self.owner.store(0, order!(Release, "thread exit: the slot is reset"));
    }
}

/// The list of slots.
#[derive(Debug)]
pub(super) struct Registry {
    head: AtomicPtr<CachePadded<Slot>>,
}

// SAFETY: `entered_gp` and `owner` are atomics, `next` does not change after publication, and only
// the owning thread accesses `nesting` (invariant 2).
unsafe impl Send for Slot {}
// SAFETY: through `&Slot`, threads share only atomics and the unchanging `next`; `nesting` is left
// to the owning thread (invariant 2).
unsafe impl Sync for Slot {}

impl Registry {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self { head: AtomicPtr::new(ptr::null_mut()) }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &'static Slot> + use<> {
        // Ordering: Acquire pairs with the Release in `claim`; it carries the slots.
        let mut at: *const CachePadded<Slot> = self.head.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: null, or published by `claim` and never freed (invariant 1).
            let slot: &Slot = unsafe { at.as_ref() }?;
            at = slot.next;
            Some(slot)
        })
    }

    /// Returns the oldest grace period that a reader entered in, or `None` if there is no reader.
    pub(super) fn oldest(&self) -> Option<u64> {
        let acquire = order!(Acquire, "scan: the readers have left");
        // Ordering: Acquire pairs with the Release in `Slot::enter` and `Slot::leave`; it carries
        // the reads of a thread that has left since.
        self.iter().map(|slot| slot.entered_gp.load(acquire)).filter(|&entered| entered != 0).min()
    }

    /// Returns how many threads have been reading since before the grace period `now` began.
    pub(super) fn stalled(&self, now: u64) -> usize {
        // Ordering: Relaxed; a statistic.
        let entered = self.iter().map(|slot| slot.entered_gp.load(Ordering::Relaxed));
        entered.filter(|&entered| entered != 0 && entered < now).count()
    }

    /// Claims a slot for the calling thread: a released one, or a new one.
    pub(super) fn claim(&self) -> &'static Slot {
        let me = thread_id();
        // Ordering: Acquire on success pairs with the Release in `Slot::release`; it carries
        // `nesting`. Relaxed on failure and in the load before: no other field is accessed then.
        let free = |slot: &&Slot| {
            slot.owner.load(Ordering::Relaxed) == 0
                && slot.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if let Some(slot) = self.iter().find(free) {
            return slot;
        }
        let mut slot = Box::new(CachePadded::new(Slot {
            entered_gp: AtomicU64::new(0),
            nesting: UnsafeCell::new(0),
            owner: AtomicU64::new(me),
            next: ptr::null(),
        }));
        // Ordering: Relaxed; the slot found is not accessed here. A thread that follows `next` to
        // it acquires it through the release sequence that the exchange below continues.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            slot.next = head;
            let new = Box::into_raw(slot);
            // Ordering: Release pairs with the Acquire in `iter`; it carries the slot. The exchange
            // is a read-modify-write, so it continues the release sequences of the exchanges before
            // it. Relaxed on failure: the head found is not followed.
            match self.head.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
                // SAFETY: published by this exchange, and never freed (invariant 1).
                Ok(_) => return unsafe { &*new },
                Err(found) => {
                    head = found;
                    // SAFETY: `new` is from `into_raw` and was not published.
                    slot = unsafe { Box::from_raw(new) };
                }
            }
        }
    }
}
