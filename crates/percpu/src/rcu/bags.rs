//! The bags of retired objects of all CPUs, and the overflow list.
//!
//! # Invariants
//!
//! 1. The objects of `overflow` move into a bag under that bag's lock, before the lock is released.

use std::ptr::{self, NonNull};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::bag::{Bag, Lists, RetireHead, Segment, next_of, set_next};
use super::bounds::Bounds;
use super::in_flight::InFlight;
use crate::cpu::CpuId;
use crate::fence;
use crate::sync::atomic::{AtomicPtr, Ordering};
use crate::sync::const_fn;
use crate::sync::native::atomic::{AtomicBool, AtomicU64 as Statistic, Ordering::Relaxed};
use crate::sync::{coarse_clock, cpu, order};

/// The number of objects at which a bag is closed.
///
/// Measured in ns per replaced and dropped 144-byte node, with one thread and with two threads,
/// each of which interrupts the other with its `heavy`: 64: 52 and 213, 128: 52 and 174, 512: 52
/// and 95, 1,024: 52 and 80, 2,048: 53 and 66.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const BATCH: usize = 1024;
#[cfg(any(offlock_loom, offlock_shuttle))]
const BATCH: usize = 2;

/// Up to this many objects in a bag, each retired object reads the clock, because objects may
/// arrive rarely. A guess.
const CLOCK_DENSE_LIMIT: usize = 64;
/// Above [`CLOCK_DENSE_LIMIT`], one in this many objects reads the clock. A guess.
const CLOCK_INTERVAL: usize = 16;

/// The value of `overflow_since` while no age is known.
const UNKNOWN_AGE: u64 = u64::MAX;

/// The bags of all CPUs, the bounds, and the statistics.
#[derive(Debug)]
pub(super) struct Bags {
    /// Null until the first retire, then an array with one bag per possible CPU, never freed.
    per_cpu: AtomicPtr<CachePadded<Bag>>,
    /// The bag of all CPUs while there is no memory for `per_cpu`.
    spare: CachePadded<Bag>,
    /// Set when the first object goes into `spare`.
    spare_used: AtomicBool,
    /// A stack of the objects that were retired while the lock of their bag was taken.
    overflow: AtomicPtr<RetireHead>,
    /// Objects of `overflow`, counted before they are pushed.
    overflow_objects: Statistic,
    /// Bytes of `overflow`.
    overflow_bytes: Statistic,
    /// When the oldest object of `overflow` was retired, or [`UNKNOWN_AGE`].
    overflow_since: Statistic,
    pub(super) in_flight: InFlight,
    /// The bound of the bytes that wait on one CPU.
    pub(super) bytes_bound: Statistic,
    /// The bound of an object's age, in nanoseconds.
    pub(super) age_bound: Statistic,
    pub(super) reclaimed: Statistic,
    pub(super) reclaimed_bytes: Statistic,
    pub(super) panics: Statistic,
}

impl Bags {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                per_cpu: AtomicPtr::new(ptr::null_mut()),
                spare: CachePadded::new(Bag::new()),
                spare_used: AtomicBool::new(false),
                overflow: AtomicPtr::new(ptr::null_mut()),
                overflow_objects: Statistic::new(0),
                overflow_bytes: Statistic::new(0),
                overflow_since: Statistic::new(UNKNOWN_AGE),
                in_flight: InFlight::new(),
                bytes_bound: Statistic::new(Bounds::DEFAULT.bytes as u64),
                age_bound: Statistic::new(Bounds::DEFAULT.age.as_nanos() as u64),
                reclaimed: Statistic::new(0),
                reclaimed_bytes: Statistic::new(0),
                panics: Statistic::new(0),
            }
        }
    }

    /// Returns the bag of `cpu`, or `None` if the bags are not allocated.
    #[inline(always)]
    pub(super) fn bag(&self, cpu: CpuId) -> Option<&'static Bag> {
        // Ordering: Acquire pairs with the Release in `allocate_bags`; it carries the bags.
        let bags = NonNull::new(self.per_cpu.load(Ordering::Acquire))?;
        // SAFETY: the array has `cpu::possible()` bags, and every CPU id is below that.
        let bag = unsafe { bags.add(cpu.index()) };
        // SAFETY: the pointer is inside the array, which is initialised and never freed.
        Some(unsafe { bag.as_ref() })
    }

    /// Returns the bag of this CPU, or the spare bag if the bags cannot be allocated.
    #[cold]
    pub(super) fn bag_or_spare(&self) -> &Bag {
        if let Some(bag) = self.bag(cpu::current()) {
            return bag;
        }
        self.allocate_bags();
        self.bag(cpu::current()).unwrap_or_else(|| {
            // Ordering: Relaxed; a thread that must free the objects retired into `spare` has
            // synchronised with the thread that retired them, so it sees this store.
            self.spare_used.store(true, Relaxed);
            &self.spare
        })
    }

    /// Iterates over the bags that may contain objects.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Bag> {
        // Ordering: Acquire pairs with the Release in `allocate_bags`; it carries the bags.
        let first = self.per_cpu.load(Ordering::Acquire);
        let own: &[CachePadded<Bag>] = if first.is_null() {
            &[]
        } else {
            // SAFETY: the array has `cpu::possible()` bags and is never freed. The pointer is that
            // of the whole allocation; a pointer derived from a `&Bag` would be valid for that bag
            // only.
            unsafe { std::slice::from_raw_parts(first, cpu::possible()) }
        };
        // Ordering: Relaxed; the store in `bag_or_spare` says why it is seen.
        let spare = self.spare_used.load(Relaxed).then_some(&self.spare);
        own.iter().chain(spare).map(|bag| &**bag)
    }

    /// Allocates a bag for each CPU. Does nothing if there is no memory.
    #[cold]
    #[inline(never)]
    fn allocate_bags(&self) {
        // Chosen before the first reader, so that `light` costs readers nothing.
        let _ = fence::strategy();
        let mut bags = Vec::new();
        if bags.try_reserve_exact(cpu::possible()).is_err() {
            return;
        }
        bags.resize_with(cpu::possible(), || CachePadded::new(Bag::new()));
        let new = Box::into_raw(bags.into_boxed_slice());
        // Ordering: Release on success pairs with the Acquire in `bag` and `iter`; it carries the
        // bags. Relaxed on failure: the bags of the other thread are not accessed here.
        let first = self.per_cpu.compare_exchange(
            ptr::null_mut(),
            new.cast::<CachePadded<Bag>>(),
            Ordering::Release,
            Ordering::Relaxed,
        );
        if first.is_err() {
            // SAFETY: `new` is from `into_raw` and was not published.
            drop(unsafe { Box::from_raw(new) });
        }
    }

    /// Pushes all of `list` onto the overflow list. Lock-free.
    #[cold]
    #[inline(never)]
    pub(super) fn push_overflow(&self, list: &mut Segment) {
        let list = std::mem::replace(list, Segment::EMPTY);
        let Some(last) = NonNull::new(list.last) else { return };
        // Ordering: Relaxed, all; statistics.
        self.overflow_objects.fetch_add(list.objects as u64, Relaxed);
        add_saturating(&self.overflow_bytes, list.bytes);
        self.overflow_since.fetch_min(list.since, Relaxed);
        // Ordering: Relaxed; the head found is not followed.
        let mut found = self.overflow.load(Ordering::Relaxed);
        let release = order!(Release, "overflow: the retired list is complete");
        loop {
            set_next(last, found);
            // Ordering: Release pairs with the Acquire in `take_overflow`; it carries the list and
            // the unlinks of the thread that retired it. Relaxed on failure: the head found is not
            // followed.
            match self.overflow.compare_exchange(found, list.first, release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => found = other,
            }
        }
    }

    /// Returns whether the overflow list may contain objects.
    pub(super) fn has_overflow(&self) -> bool {
        // Ordering: Relaxed; a hint, because the head found is not followed.
        !self.overflow.load(Ordering::Relaxed).is_null()
    }

    /// Adds a batch to the statistics: its objects, their bytes, and the drops that panicked.
    pub(super) fn count_reclaimed(&self, objects: usize, bytes: usize, panics: u64) {
        // Ordering: Relaxed, all; statistics.
        self.reclaimed.fetch_add(objects as u64, Relaxed);
        add_saturating(&self.reclaimed_bytes, bytes);
        self.panics.fetch_add(panics, Relaxed);
    }

    /// Moves the overflow list into `lists`. The caller holds the lock of that bag.
    pub(super) fn take_overflow(&self, lists: &mut Lists) {
        // The exchange below decides; this avoids it in the common case.
        if !self.has_overflow() {
            return;
        }
        // Ordering: Acquire pairs with the Release in `push_overflow`; it carries the list and the
        // unlinks of the threads that retired it.
        let mut at = self.overflow.swap(ptr::null_mut(), Ordering::Acquire);
        // The whole sums are taken, so the bytes and the age of a concurrent push may go with this
        // list. `pending` counts the age of such a push from its next call.
        // Ordering: Relaxed, all; statistics.
        let bytes = self.overflow_bytes.swap(0, Relaxed) as usize;
        let since = self.overflow_since.swap(UNKNOWN_AGE, Relaxed);
        let mut list = Segment::EMPTY;
        while let Some(head) = NonNull::new(at) {
            at = next_of(head);
            list.push(head, 0);
        }
        self.overflow_objects.fetch_sub(list.objects as u64, Relaxed);
        list.bytes = bytes;
        list.since = list.since.min(since);
        lists.filling.splice(&mut list);
    }

    /// Returns whether the open segment of a bag must be closed.
    #[inline(always)]
    pub(super) fn is_full(&self, filling: &Segment) -> bool {
        filling.objects >= BATCH
            || filling.bytes as u64 >= self.bytes_share()
            || (filling.objects <= CLOCK_DENSE_LIMIT
                || filling.objects.is_multiple_of(CLOCK_INTERVAL))
                && self.is_old(filling)
    }

    /// Returns whether the oldest object of `filling` is over the age bound.
    #[cold]
    fn is_old(&self, filling: &Segment) -> bool {
        // Ordering: Relaxed; a bound, which publishes no other data.
        coarse_clock().saturating_sub(filling.since) > self.age_bound.load(Relaxed)
    }

    /// Returns the number of bytes at which a bag is closed: half the bound, because as many bytes
    /// may wait in the closed segments.
    #[inline(always)]
    fn bytes_share(&self) -> u64 {
        // Ordering: Relaxed; a bound, which publishes no other data.
        self.bytes_bound.load(Relaxed) / 2
    }
}

/// Adds a byte count to a statistic. Saturates, because callers pass any number.
fn add_saturating(sum: &Statistic, bytes: usize) {
    let add = |sum: u64| Some(sum.saturating_add(bytes as u64));
    // Ordering: Relaxed, both; a statistic.
    let _ = sum.fetch_update(Relaxed, Relaxed, add);
}

/// The objects that wait: their number, their bytes, and the age of the oldest.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) objects: u64,
    pub(super) bytes: u64,
    pub(super) oldest: Option<Duration>,
}

impl Bags {
    /// Counts the objects that wait in the bags and in the overflow list.
    pub(super) fn pending(&self) -> Pending {
        let now = coarse_clock();
        let mut pending = Pending::default();
        let mut add = |objects, bytes, since| {
            pending.objects += objects;
            pending.bytes = pending.bytes.saturating_add(bytes);
            let age = Duration::from_nanos(now.saturating_sub(since));
            pending.oldest = pending.oldest.max(Some(age));
        };
        // Ordering: Relaxed, all; statistics.
        let objects = self.overflow_objects.load(Relaxed);
        if objects != 0 {
            // If `take_overflow` took the age with earlier objects, the age counts from now on.
            let since = self.overflow_since.fetch_min(now, Relaxed).min(now);
            add(objects, self.overflow_bytes.load(Relaxed), since);
        }
        for bag in self.iter() {
            bag.with(|lists| {
                for segment in lists.all() {
                    add(segment.objects as u64, segment.bytes as u64, segment.since);
                }
            });
        }
        pending
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
