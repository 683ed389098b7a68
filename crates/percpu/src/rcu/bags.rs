//! The bags of retired objects: lists that are linked through the objects themselves, one for each CPU,
//! under a spin lock.
//!
//! # Invariants
//!
//! 1. A head is in one list, from `retire` until it is taken out to be freed.
//! 2. A segment's target is at least the target of each head in it.

use std::ptr::{self, NonNull};
use std::time::Duration;

use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::native::OnceLock;
use offlock_sync::native::atomic::AtomicU64 as Statistic;
use offlock_sync::{check, const_fn, order, thread};

use crate::cpu;
use crate::slots::PerCpu;

/// The 16 bytes that an object contains so that it can be retired by
/// [`retire_raw`](super::retire_raw).
///
/// ```
/// use offlock_percpu::rcu::{self, RetireHead};
/// use std::ptr::NonNull;
///
/// #[repr(C)]
/// struct Entry {
///     head: RetireHead,
///     name: String,
/// }
///
/// unsafe fn free(head: NonNull<RetireHead>) {
///     // SAFETY: the head is the first field of a boxed `Entry`, and `free` is called once.
///     drop(unsafe { Box::from_raw(head.cast::<Entry>().as_ptr()) });
/// }
///
/// // SAFETY: `free` is called once, after the entry is retired and a grace period has passed.
/// let head = unsafe { RetireHead::new(free) };
/// let entry = NonNull::from(Box::leak(Box::new(Entry { head, name: "eth0".into() })));
/// // SAFETY: no reader can find the entry, it is retired once, and a `String` may be dropped on
/// // any thread.
/// unsafe { rcu::retire_raw(entry.cast(), size_of::<Entry>()) };
/// ```
#[derive(Debug)]
#[repr(C)]
pub struct RetireHead {
    next: UnsafeCell<*mut RetireHead>,
    pub(super) free: unsafe fn(NonNull<RetireHead>),
}

#[cfg(not(offlock_model))]
const _: () = assert!(size_of::<RetireHead>() == 16);

// SAFETY: one thread at a time accesses `next`: the thread that retires the object, then the holder
// of a bag's lock, then the thread that took the list out (invariant 1). The caller of `retire_raw`
// promises that the object may change threads.
unsafe impl Send for RetireHead {}
// SAFETY: `next` is accessed only by the thread that has the list (invariant 1), and readers of the
// object do not access the head.
unsafe impl Sync for RetireHead {}

impl RetireHead {
    const_fn! {
        /// Returns the head of an object that `free` frees. Not `const` in a build for a model
        /// checker.
        ///
        /// # Safety
        ///
        /// `free` may be called once with the head's address, on any thread, after the head was
        /// given to [`retire_raw`](super::retire_raw) or [`Batch::push`](super::Batch::push) and a
        /// grace period has passed.
        #[must_use]
        pub const unsafe fn new(free: unsafe fn(NonNull<RetireHead>)) -> Self {
            Self { next: UnsafeCell::new(ptr::null_mut()), free }
        }
    }
}

/// Returns the head after `head`. The caller has the list that `head` is in.
pub(super) fn next_of(head: NonNull<RetireHead>) -> *mut RetireHead {
    // SAFETY: an object in a list is not freed before it is taken out (invariant 1).
    let head = unsafe { head.as_ref() };
    // SAFETY: the calling thread has the list, so no other thread accesses `next` (invariant 1).
    head.next.with(|next| unsafe { *next })
}

/// Links `head` to `to`. The caller has the list that `head` is in.
pub(super) fn set_next(head: NonNull<RetireHead>, to: *mut RetireHead) {
    // SAFETY: an object in a list is not freed before it is taken out (invariant 1).
    let head = unsafe { head.as_ref() };
    // SAFETY: the calling thread has the list, so no other thread accesses `next` (invariant 1).
    head.next.with_mut(|next| unsafe { *next = to });
}

/// A list of heads that wait for the same target.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) first: *mut RetireHead,
    pub(super) last: *mut RetireHead,
    pub(super) objects: usize,
    pub(super) bytes: usize,
    /// The value of `completed` that the objects wait for; 0 while the segment is not closed.
    pub(super) target: u64,
}

impl Segment {
    pub(super) const EMPTY: Self =
        Self { first: ptr::null_mut(), last: ptr::null_mut(), objects: 0, bytes: 0, target: 0 };

    #[inline(always)]
    pub(super) fn push(&mut self, head: NonNull<RetireHead>, bytes: usize) {
        set_next(head, self.first);
        if self.first.is_null() {
            self.last = head.as_ptr();
        }
        self.first = head.as_ptr();
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Moves all of `other` to the front of this list.
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
        self.target = self.target.max(other.target);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_null()
    }
}

/// The lists of one bag.
#[derive(Debug)]
pub(super) struct Lists {
    /// The open segment: newly retired objects go here.
    pub(super) filling: Segment,
    /// The closed segments, the one with the lower target first.
    pub(super) waiting: [Segment; 2],
}

impl Lists {
    /// Closes `filling`: its objects wait for `target` from now on.
    pub(super) fn close(&mut self, target: u64) {
        if self.filling.is_empty() {
            return;
        }
        self.filling.target = target;
        let into = usize::from(!self.waiting[0].is_empty());
        self.waiting[into].splice(&mut self.filling);
    }

    /// Moves the closed segments whose target is completed into `due`.
    pub(super) fn take_due(&mut self, completed: u64, due: &mut Segment) {
        for segment in &mut self.waiting {
            if check!("reclaim: the target is completed", segment.target <= completed) {
                due.splice(segment);
            }
        }
        if self.waiting[0].is_empty() {
            self.waiting.swap(0, 1);
        }
    }

    /// Returns the highest target of the closed segments, 0 if they are empty.
    pub(super) fn highest(&self) -> u64 {
        self.waiting.iter().map(|segment| segment.target).fold(0, u64::max)
    }

    /// Iterates over the segments that are not empty.
    pub(super) fn all(&self) -> impl Iterator<Item = &Segment> {
        self.waiting.iter().chain([&self.filling]).filter(|segment| !segment.is_empty())
    }
}

/// The objects that threads of one CPU retired, or of another CPU whose bag was locked.
#[derive(Debug)]
pub(super) struct Bag {
    lock: SpinLock,
    lists: UnsafeCell<Lists>,
}

// SAFETY: the heads in the lists may go to any thread, as the caller of `retire_raw` promises.
unsafe impl Send for Bag {}
// SAFETY: `lists` is accessed only by the holder of `lock`, and the heads in it may go to any
// thread, as the caller of `retire_raw` promises.
unsafe impl Sync for Bag {}

impl Bag {
    const_fn! {
        pub(super) const fn new() -> Self {
            let waiting = [Segment::EMPTY, Segment::EMPTY];
            let lists = UnsafeCell::new(Lists { filling: Segment::EMPTY, waiting });
            Self { lock: SpinLock::new(), lists }
        }
    }

    /// Runs `f` on the lists and returns its result. Returns `None` if the lock is taken.
    ///
    /// `f` must not panic, because the lock would stay taken.
    #[inline(always)]
    pub(super) fn try_with<R>(&self, f: impl FnOnce(&mut Lists) -> R) -> Option<R> {
        if !check!("bag: take its lock", self.lock.try_lock()) {
            return None;
        }
        // SAFETY: this thread holds the lock until `unlock`.
        let result = self.lists.with_mut(|lists| f(unsafe { &mut *lists }));
        self.lock.unlock();
        Some(result)
    }

    /// Runs `f` on the lists. Waits for the holder of the lock, which keeps it for a few
    /// instructions.
    ///
    /// `f` must not panic, because the lock would stay taken.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Lists) -> R) -> R {
        let mut backoff = Backoff::default();
        while !self.lock.try_lock() {
            backoff.wait();
        }
        // SAFETY: this thread holds the lock until `unlock`.
        let result = self.lists.with_mut(|lists| f(unsafe { &mut *lists }));
        self.lock.unlock();
        result
    }
}

/// The number of objects at which a bag is closed.
///
/// Measured in ns per replaced and dropped 144-byte node, with one thread and with two threads,
/// each of which interrupts the other with its `heavy`: 64: 52 and 213, 128: 52 and 174, 512: 52
/// and 95, 1,024: 52 and 80, 2,048: 53 and 66.
#[cfg(not(offlock_model))]
const BATCH: usize = 1024;
#[cfg(offlock_model)]
const BATCH: usize = 2;

/// The number of bytes at which a bag is closed.
const BATCH_BYTES: usize = 2 << 20;

/// The bags of all CPUs, and the statistics.
#[derive(Debug)]
pub(super) struct Bags {
    /// Made by the first use.
    per_cpu: OnceLock<PerCpu<Bag>>,
    pub(super) reclaimed: Statistic,
}

impl Bags {
    const_fn! {
        pub(super) const fn new() -> Self {
            #[cfg(not(offlock_model))]
            let per_cpu = OnceLock::new();
            // A checker does not see that a `OnceLock` orders its value.
            #[cfg(offlock_model)]
            let per_cpu = OnceLock::from(PerCpu::new(|_| Bag::new()));
            Self { per_cpu, reclaimed: Statistic::new(0) }
        }
    }

    /// Returns the bags. The first call allocates them.
    #[inline(always)]
    pub(super) fn all(&self) -> &PerCpu<Bag> {
        self.per_cpu.get_or_init(|| PerCpu::new(|_| Bag::new()))
    }

    /// Runs `f` on the lists of a bag, and returns the bag too: that of this CPU, or if its lock is
    /// taken that of the next CPU whose lock is free.
    ///
    /// The lock of a bag is held for a few instructions. The call waits if the locks of all bags are
    /// taken, which takes as many preempted threads as there are CPUs.
    ///
    /// `f` must not panic, because the lock would stay taken.
    pub(super) fn with_any<R>(&self, mut f: impl FnMut(&mut Lists) -> R) -> (&Bag, R) {
        let (bags, own) = (self.all(), cpu::current_cpu());
        let mut in_turn = bags.iter().skip(own.index()).chain(bags.iter().take(own.index()));
        let found = in_turn.find_map(|(_, bag)| Some((bag, bag.try_with(&mut f)?)));
        found.unwrap_or_else(|| (&bags[own], bags[own].with(f)))
    }

    /// Counts the objects that wait in the bags, and their bytes.
    pub(super) fn pending(&self) -> (u64, u64) {
        let (mut objects, mut bytes) = (0, 0_u64);
        for (_, bag) in self.all().iter() {
            bag.with(|lists| {
                for segment in lists.all() {
                    objects += segment.objects as u64;
                    bytes = bytes.saturating_add(segment.bytes as u64);
                }
            });
        }
        (objects, bytes)
    }
}

/// Returns whether the open segment of a bag must be closed.
#[inline(always)]
pub(super) fn is_full(filling: &Segment) -> bool {
    filling.objects >= BATCH || filling.bytes >= BATCH_BYTES
}

// A reader that leaves and a thread that unlocks a bag wake no waiter, so waiters poll.

/// The state of one wait: spins and yields first, then sleeps for growing times.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    spins: crossbeam_utils::Backoff,
    sleeps: u32,
}

impl Backoff {
    /// Pauses the calling thread, longer with each call, for at most 1 ms.
    pub(super) fn wait(&mut self) {
        if cfg!(offlock_model) {
            return thread::yield_now(); // another thread of the model runs
        }
        if !self.spins.is_completed() {
            return self.spins.snooze();
        }
        self.sleeps = self.sleeps.saturating_add(1);
        // From 1 us to 1 ms.
        std::thread::sleep(Duration::from_micros(1 << (self.sleeps / 4).min(10)));
    }
}

/// A spin lock without a guard. Most callers only call [`try_lock`](SpinLock::try_lock).
#[derive(Debug)]
pub(super) struct SpinLock {
    held: AtomicBool,
}

impl SpinLock {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self { held: AtomicBool::new(false) }
        }
    }

    /// Takes the lock if it is free. Never blocks.
    #[inline(always)]
    pub(super) fn try_lock(&self) -> bool {
        // Ordering: Acquire on success pairs with the Release in `unlock`; it carries the data that
        // the lock protects. Relaxed on failure: the data is not accessed.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases the lock, which the caller holds.
    #[inline(always)]
    pub(super) fn unlock(&self) {
        // Ordering: Release pairs with the Acquire in `try_lock`; it carries the data that the lock
        // protects.
        self.held.store(false, order!(Release, "bag: the lists are consistent"));
    }
}
