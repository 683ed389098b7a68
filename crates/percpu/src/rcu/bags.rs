//! The bags of retired objects of all CPUs.

use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicPtr, Ordering};
use offlock_sync::const_fn;
use offlock_sync::native::atomic::{AtomicU64 as Statistic, Ordering::Relaxed};

use super::bag::{Bag, Lists, Segment};
use super::in_flight::InFlight;
use crate::cpu::{self, CpuId};
use crate::fence;

/// The number of objects at which a bag is closed.
///
/// Measured in ns per replaced and dropped 144-byte node, with one thread and with two threads,
/// each of which interrupts the other with its `heavy`: 64: 52 and 213, 128: 52 and 174, 512: 52
/// and 95, 1,024: 52 and 80, 2,048: 53 and 66.
#[cfg(not(offlock_model))]
const BATCH: usize = 1024;
#[cfg(offlock_model)]
const BATCH: usize = 2;

/// The number of bytes at which a bag is closed. A guess.
const BATCH_BYTES: usize = 2 << 20;

/// The bags of all CPUs, and the statistics.
#[derive(Debug)]
pub(super) struct Bags {
    /// Null until the first retire, then an array with one bag per possible CPU, never freed.
    per_cpu: AtomicPtr<CachePadded<Bag>>,
    pub(super) in_flight: InFlight,
    pub(super) reclaimed: Statistic,
}

impl Bags {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                per_cpu: AtomicPtr::new(ptr::null_mut()),
                in_flight: InFlight::new(),
                reclaimed: Statistic::new(0),
            }
        }
    }

    /// Returns the bag of `cpu`, or `None` if the bags are not allocated.
    #[inline(always)]
    pub(super) fn bag(&self, cpu: CpuId) -> Option<&'static Bag> {
        // Ordering: Acquire pairs with the Release in `allocate`; it carries the bags.
        let bags = NonNull::new(self.per_cpu.load(Ordering::Acquire))?;
        // SAFETY: the array has `cpu::possible()` bags, and every CPU id is below that.
        let bag = unsafe { bags.add(cpu.index()) };
        // SAFETY: the pointer is inside the array, which is initialised and never freed.
        Some(unsafe { bag.as_ref() })
    }

    /// Returns the bags; none before the first retire.
    pub(super) fn all(&self) -> &'static [CachePadded<Bag>] {
        // Ordering: Acquire pairs with the Release in `allocate`; it carries the bags.
        let first = self.per_cpu.load(Ordering::Acquire);
        if first.is_null() {
            return &[];
        }
        // SAFETY: the array has `cpu::possible()` bags and is never freed. The pointer is that of
        // the whole allocation; a pointer derived from a `&Bag` would be valid for that bag only.
        unsafe { std::slice::from_raw_parts(first, cpu::possible()) }
    }

    /// Runs `f` on the lists of a bag, and returns the bag too: that of this CPU, or if its lock is
    /// taken that of the next CPU whose lock is free.
    ///
    /// The lock of a bag is held for a few instructions. The call waits if the locks of all bags are
    /// taken, which takes as many preempted threads as there are CPUs.
    ///
    /// `f` must not panic, because the lock would stay taken.
    pub(super) fn with_any<R>(&self, mut f: impl FnMut(&mut Lists) -> R) -> (&'static Bag, R) {
        if self.all().is_empty() {
            self.allocate();
        }
        let bags = self.all();
        let own = cpu::current_cpu().index();
        let mut in_turn = bags[own..].iter().chain(&bags[..own]);
        let found = in_turn.find_map(|bag| Some((&**bag, bag.try_with(&mut f)?)));
        found.unwrap_or_else(|| (&bags[own], bags[own].with(f)))
    }

    /// Allocates a bag for each CPU.
    #[cold]
    #[inline(never)]
    fn allocate(&self) {
        // Chosen before the first reader, so that `light` costs readers nothing.
        let _ = fence::strategy();
        let bags: Box<[CachePadded<Bag>]> =
            (0..cpu::possible()).map(|_| CachePadded::new(Bag::new())).collect();
        let new = Box::into_raw(bags);
        // Ordering: Release on success pairs with the Acquire in `bag` and `all`; it carries the
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

    /// Counts the objects that wait in the bags, and their bytes.
    pub(super) fn pending(&self) -> (u64, u64) {
        let (mut objects, mut bytes) = (0, 0_u64);
        for bag in self.all() {
            bag.with(|lists| {
                for segment in lists.all() {
                    objects += segment.objects as u64;
                    bytes = bytes.saturating_add(segment.bytes as u64);
                }
            });
        }
        (objects, bytes)
    }

    /// Adds a number of freed objects to the statistics.
    pub(super) fn count_reclaimed(&self, objects: usize) {
        // Ordering: Relaxed; a statistic.
        self.reclaimed.fetch_add(objects as u64, Relaxed);
    }
}

/// Returns whether the open segment of a bag must be closed.
#[inline(always)]
pub(super) fn is_full(filling: &Segment) -> bool {
    filling.objects >= BATCH || filling.bytes >= BATCH_BYTES
}
