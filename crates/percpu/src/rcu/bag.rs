//! Lists of retired objects, through the objects themselves.
//!
//! # Invariants
//!
//! 1. A head is in one list, from `retire` until it is taken out to be freed.
//! 2. A segment's target is no less than that of each head in it.

use std::ptr::{self, NonNull};

use super::backoff::Backoff;
use super::const_fn::const_fn;
use super::spin_lock::SpinLock;
use crate::sync::cell::UnsafeCell;
use crate::sync::mutant;

/// What an object needs to be retired: 16 bytes, written by [`retire_raw`](super::retire_raw).
#[derive(Debug)]
#[repr(C)]
pub struct RetireHead {
    next: UnsafeCell<*mut RetireHead>,
    pub(super) free: unsafe fn(NonNull<RetireHead>),
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<RetireHead>() == 16);

// SAFETY: `next` is touched by who retires it and then under a lock or by the one who took it out
// (invariant 1); whether the object may change threads is what `retire_raw` asks its caller.
unsafe impl Send for RetireHead {}
// SAFETY: as above; readers of the object do not touch the head.
unsafe impl Sync for RetireHead {}

impl RetireHead {
    const_fn! {
        /// The head of an object that `free` frees. Not `const` in a build for a model checker.
        ///
        /// # Safety
        ///
        /// `free` may be called once with the head's address, on any thread, after the head was given
        /// to [`retire_raw`](super::retire_raw) or [`Batch::push`](super::Batch::push) and a grace
        /// period has passed.
        #[must_use]
        pub const unsafe fn new(free: unsafe fn(NonNull<RetireHead>)) -> Self {
            Self { next: UnsafeCell::new(ptr::null_mut()), free }
        }
    }
}

pub(super) fn next_of(head: NonNull<RetireHead>) -> *mut RetireHead {
    // SAFETY: the caller has the list that the head is in (invariant 1).
    let head = unsafe { head.as_ref() };
    // SAFETY: as above.
    head.next.with(|next| unsafe { *next })
}

pub(super) fn set_next(head: NonNull<RetireHead>, to: *mut RetireHead) {
    // SAFETY: the caller has the list that the head is in (invariant 1).
    let head = unsafe { head.as_ref() };
    // SAFETY: as above.
    head.next.with_mut(|next| unsafe { *next = to });
}

/// A list of heads.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) first: *mut RetireHead,
    pub(super) last: *mut RetireHead,
    pub(super) objects: usize,
    pub(super) bytes: usize,
    /// When the first was retired, in nanoseconds of [`clock`].
    pub(super) since: u64,
    pub(super) target: u64,
}

impl Segment {
    pub(super) const EMPTY: Self = Self {
        first: ptr::null_mut(),
        last: ptr::null_mut(),
        objects: 0,
        bytes: 0,
        since: 0,
        target: 0,
    };

    #[inline(always)]
    pub(super) fn push(&mut self, head: NonNull<RetireHead>, bytes: usize) {
        set_next(head, self.first);
        if self.first.is_null() {
            self.last = head.as_ptr();
            self.since = clock();
        }
        self.first = head.as_ptr();
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Puts all of `other` in front, and leaves it empty.
    pub(super) fn splice(&mut self, other: &mut Segment) {
        let other = std::mem::replace(other, Self::EMPTY);
        let Some(last) = NonNull::new(other.last) else { return };
        if self.first.is_null() {
            *self = Self { target: other.target.max(self.target), ..other };
            return;
        }
        set_next(last, self.first);
        self.first = other.first;
        self.objects += other.objects;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.since = self.since.min(other.since);
        self.target = self.target.max(other.target);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_null()
    }
}

#[derive(Debug)]
pub(super) struct Lists {
    pub(super) filling: Segment,
    pub(super) waiting: [Segment; 2],
}

impl Lists {
    /// Closes `filling`: it waits for `target` from now on.
    pub(super) fn close(&mut self, target: u64) {
        if self.filling.is_empty() {
            return;
        }
        self.filling.target = target;
        let into = usize::from(!self.waiting[0].is_empty());
        self.waiting[into].splice(&mut self.filling);
    }

    /// Moves what is due into `due`.
    pub(super) fn take_due(&mut self, completed: u64, due: &mut Segment) {
        let completed = if mutant("rcu-free-early") { u64::MAX } else { completed };
        for segment in &mut self.waiting {
            if segment.target <= completed {
                due.splice(segment);
            }
        }
        if self.waiting[0].is_empty() {
            self.waiting.swap(0, 1);
        }
    }

    /// The highest target that is waited for, 0 if nothing waits.
    pub(super) fn highest(&self) -> u64 {
        self.waiting.iter().map(|segment| segment.target).fold(0, u64::max)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Segment> {
        self.waiting.iter().chain([&self.filling]).filter(|segment| !segment.is_empty())
    }
}

/// One CPU's retired objects. Any thread may come to any bag.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Bag {
    pub(super) lock: SpinLock,
    pub(super) lists: UnsafeCell<Lists>,
}

// SAFETY: `lists` is touched under `lock`; the heads in it may go to any thread (`retire_raw`).
unsafe impl Send for Bag {}
// SAFETY: as above.
unsafe impl Sync for Bag {}

impl Bag {
    const_fn! {
        pub(super) const fn new() -> Self {
            let waiting = [Segment::EMPTY, Segment::EMPTY];
            let lists = UnsafeCell::new(Lists { filling: Segment::EMPTY, waiting });
            Self { lock: SpinLock::new(), lists }
        }
    }

    /// Runs `f` on the lists if the lock is free; hands `f` back otherwise.
    #[inline(always)]
    pub(super) fn try_with<R>(&self, f: impl FnOnce(&mut Lists) -> R) -> Option<R> {
        if !mutant("rcu-bag-unlocked") && !self.lock.try_lock() {
            return None;
        }
        // SAFETY: the lock is ours until `unlock`. (No `f` in this file panics.)
        let result = self.lists.with_mut(|lists| f(unsafe { &mut *lists }));
        self.lock.unlock();
        Some(result)
    }

    /// Runs `f` on the lists. Waits, shortly, for the holder of the lock.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Lists) -> R) -> R {
        let mut backoff = Backoff::new();
        while !self.lock.try_lock() {
            backoff.wait();
        }
        // SAFETY: the lock is ours until `unlock`.
        let result = self.lists.with_mut(|lists| f(unsafe { &mut *lists }));
        self.lock.unlock();
        result
    }
}

/// Nanoseconds of a coarse clock that stands still in models.
pub(super) fn clock() -> u64 {
    if cfg!(any(offlock_loom, offlock_shuttle)) {
        return 0;
    }
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
