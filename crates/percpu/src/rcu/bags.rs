//! The retired objects of all CPUs.

use std::ptr::{self, NonNull};
use std::time::Duration;

use super::bag::{Bag, Lists, RetireHead, Segment, clock, next_of, set_next};
use super::bounds::Bounds;
use super::const_fn::const_fn;
use super::in_flight::InFlight;
use crate::cpu::CpuId;
use crate::fence;
use crate::sync::atomic::{AtomicPtr, Ordering};
use crate::sync::native::atomic::{AtomicBool, AtomicU64 as Statistic, Ordering::Relaxed};
use crate::sync::{cpu, mutant};

/// Objects in a bag when it is closed. Measured, ns per replaced and dropped 144-byte node at one
/// thread and at two, of which each interrupts the other with its `heavy`: 64: 52 and 213, 128: 52
/// and 174, 512: 52 and 95, 1,024: 52 and 80, 2,048: 53 and 66.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const BATCH: usize = 1024;
#[cfg(any(offlock_loom, offlock_shuttle))]
const BATCH: usize = 2;

/// A bag's clock is looked at with each of so many objects, as they may come seldom; and then, as they
/// come fast, with every sixteenth. Guesses.
const CLOCK_DENSE_LIMIT: usize = 64;
const CLOCK_INTERVAL: usize = 16;

/// Nothing is known of its age.
const UNKNOWN_AGE: u64 = u64::MAX;

/// The bags, and what is counted about them.
#[derive(Debug)]
pub(super) struct Bags {
    /// Null until the first retire; then one for every CPU, for ever.
    bags: AtomicPtr<Bag>,
    /// The bag of all CPUs while there is no memory for theirs.
    spare: Bag,
    spare_used: AtomicBool,
    /// What found its bag's lock taken.
    overflow: AtomicPtr<RetireHead>,
    /// Counted before it is pushed.
    overflow_objects: Statistic,
    overflow_bytes: Statistic,
    /// When the first was retired, or [`UNKNOWN_AGE`].
    overflow_since: Statistic,
    pub(super) in_flight: InFlight,
    /// Of one CPU.
    pub(super) bytes_bound: Statistic,
    pub(super) age_bound: Statistic,
    pub(super) reclaimed: Statistic,
    pub(super) reclaimed_bytes: Statistic,
    pub(super) panics: Statistic,
}

impl Bags {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                bags: AtomicPtr::new(ptr::null_mut()),
                spare: Bag::new(),
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

    #[inline(always)]
    pub(super) fn bag(&self, cpu: CpuId) -> Option<&'static Bag> {
        // Ordering: Acquire pairs with the Release in `allocate_bags`; it carries the bags.
        let bags = NonNull::new(self.bags.load(Ordering::Acquire))?;
        // SAFETY: `allocate_bags` made `cpu::possible()` of them, and every id is below that.
        let bag = unsafe { bags.add(cpu.index()) };
        // SAFETY: as above; they are never freed.
        Some(unsafe { bag.as_ref() })
    }

    /// A bag for this thread, if need be that of all CPUs.
    #[cold]
    pub(super) fn bag_or_spare(&self) -> &Bag {
        if let Some(bag) = self.bag(cpu::current()) {
            return bag;
        }
        self.allocate_bags();
        self.bag(cpu::current()).unwrap_or_else(|| {
            // Ordering: Relaxed; who must see what is retired here has seen that it was retired.
            self.spare_used.store(true, Relaxed);
            &self.spare
        })
    }

    /// All bags that there is something in, or may be.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Bag> {
        // Ordering: Acquire pairs with the Release in `allocate_bags`; it carries the bags.
        let first = self.bags.load(Ordering::Acquire);
        let own: &[Bag] = if first.is_null() {
            &[]
        } else {
            // SAFETY: `allocate_bags` made `cpu::possible()` of them, which are never freed. The pointer is
            // that of the whole allocation: one made from a `&Bag` would be good for that bag only.
            unsafe { std::slice::from_raw_parts(first, cpu::possible()) }
        };
        // Ordering: Relaxed; see `bag_or_spare`.
        let spare = self.spare_used.load(Relaxed).then_some(&self.spare);
        own.iter().chain(spare)
    }

    #[cold]
    #[inline(never)]
    fn allocate_bags(&self) {
        // The strategy is chosen before the first reader, so that its `light` costs nothing.
        let _ = fence::strategy();
        let mut bags = Vec::new();
        if bags.try_reserve_exact(cpu::possible()).is_err() {
            return;
        }
        bags.resize_with(cpu::possible(), Bag::new);
        let new = Box::into_raw(bags.into_boxed_slice());
        // Ordering: Release pairs with the Acquire in `bag`; it carries the bags. Relaxed on
        // failure: those of another thread are not touched here.
        let first = self.bags.compare_exchange(
            ptr::null_mut(),
            new.cast::<Bag>(),
            Ordering::Release,
            Ordering::Relaxed,
        );
        if first.is_err() {
            // SAFETY: from `into_raw` above, and not published.
            drop(unsafe { Box::from_raw(new) });
        }
    }

    /// Puts a list where no lock is needed.
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
        let order =
            if mutant("rcu-overflow-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        loop {
            set_next(last, found);
            // Ordering: Release pairs with the Acquire in `take_overflow`; it carries the list and
            // what its owner unlinked. Relaxed on failure, as the load above.
            match self.overflow.compare_exchange(found, list.first, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => found = other,
            }
        }
    }

    pub(super) fn has_overflow(&self) -> bool {
        // Ordering: Relaxed; a hint.
        !self.overflow.load(Ordering::Relaxed).is_null()
    }

    /// Adds a batch to the statistics: its objects, their bytes, and the drops that panicked.
    pub(super) fn count_reclaimed(&self, objects: usize, bytes: usize, panics: u64) {
        // Ordering: Relaxed, all; statistics.
        self.reclaimed.fetch_add(objects as u64, Relaxed);
        add_saturating(&self.reclaimed_bytes, bytes);
        self.panics.fetch_add(panics, Relaxed);
    }

    /// Moves the overflow into a bag.
    pub(super) fn take_overflow(&self, lists: &mut Lists) {
        // A hint: the exchange below decides.
        if !self.has_overflow() {
            return;
        }
        // Ordering: Acquire pairs with the Release in `push_overflow`.
        let mut at = self.overflow.swap(ptr::null_mut(), Ordering::Acquire);
        // All at once: the bytes and the age of a push that comes between go with these.
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

    #[inline(always)]
    pub(super) fn is_full(&self, filling: &Segment) -> bool {
        filling.objects >= BATCH
            || filling.bytes as u64 >= self.bytes_share()
            || (filling.objects <= CLOCK_DENSE_LIMIT
                || filling.objects.is_multiple_of(CLOCK_INTERVAL))
                && self.is_old(filling)
    }

    #[cold]
    fn is_old(&self, filling: &Segment) -> bool {
        // Ordering: Relaxed; a number on its own.
        clock().saturating_sub(filling.since) > self.age_bound.load(Relaxed)
    }

    /// A bag is closed when it has this many bytes: half the bound, as many may be waiting.
    #[inline(always)]
    fn bytes_share(&self) -> u64 {
        // Ordering: Relaxed; a number on its own.
        self.bytes_bound.load(Relaxed) / 2
    }
}

/// For numbers of the user's, whose sum may be too large.
fn add_saturating(sum: &Statistic, bytes: usize) {
    let add = |sum: u64| Some(sum.saturating_add(bytes as u64));
    // Ordering: Relaxed, both; a statistic.
    let _ = sum.fetch_update(Relaxed, Relaxed, add);
}

/// What waits: objects, bytes, and the age of the oldest.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) objects: u64,
    pub(super) bytes: u64,
    pub(super) oldest: Option<Duration>,
}

impl Bags {
    pub(super) fn pending(&self) -> Pending {
        let now = clock();
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
            // An age that went with the objects before: it is counted from now on.
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
mod tests {
    use super::*;

    /// What waits in the overflow has an age, and takes it into a bag; so has what lost its own.
    #[test]
    fn the_overflow_has_an_age() {
        // SAFETY: it is never called; the heads are not freed here.
        let head = || unsafe { RetireHead::new(|_| ()) };
        let heads = [head(), head()];
        let bags = Bags::new();
        let mut list = Segment::EMPTY;
        list.push(NonNull::from(&heads[0]), usize::MAX / 2);
        list.since -= 1_000_000_000;
        bags.push_overflow(&mut list);
        list.push(NonNull::from(&heads[1]), usize::MAX);
        bags.push_overflow(&mut list);
        let pending = bags.pending();
        assert_eq!((pending.objects, pending.bytes), (2, u64::MAX));
        assert!(pending.oldest >= Some(Duration::from_secs(1)), "{pending:?}");
        bags.overflow_since.store(UNKNOWN_AGE, Relaxed);
        assert!(bags.pending().oldest.is_some()); // by now
        let taken = Bag::new().try_with(|lists| {
            bags.take_overflow(lists);
            (lists.filling.objects, lists.filling.since <= clock())
        });
        assert_eq!((taken, bags.pending().oldest), (Some((2, true)), None));
    }
}
