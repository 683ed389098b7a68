//! What is retired waits here, per CPU, for its grace period; then it is dropped.
//!
//! ```text
//!                     close(target)        completed >= target
//!  retire -> filling ---------------> waiting[0], waiting[1] -----------> free, outside all locks
//!            one bag per CPU, under the bag's lock; whoever finds the lock taken pushes to `overflow`
//! ```
//!
//! A bag's list goes through the retired objects themselves ([`bag`](super::bag)), so that retiring
//! allocates nothing. When a bag has [`BATCH`] objects, or its share of the byte bound, or the oldest
//! in it is over the age bound, the thread that retires closes it, moves grace periods on by one bump
//! and one `heavy`, and drops what is due. Nobody waits for anybody here: with a reader stalled, bags
//! grow. Two closed segments are enough: while the first waits, later ones are merged into the second,
//! whose target moves on; it starts over as the first, whose target does not, as soon as that is done.
//! So what a bag has closed is out of it after two waits, and that is what `barrier` does.
//!
//! A segment's target is taken under the bag's lock, after the last object went in: one taken before
//! would be too low for what another thread pushes in between, and that would be freed under readers.
//!
//! Who excludes whom: a bag's lock is held for a few instructions and never while anything of the
//! user's runs; `turn` may be held when a bag's lock is taken, not the other way round.
//!
//! # Invariants
//!
//! 1. `in_flight[p]` counts the batches that are taken out of bags and not yet freed, of parity `p`:
//!    counted before the first bag's lock that they are taken under. Nothing else is ever taken out:
//!    while a thread waits for readers, what it waits for stays in the bags.
//! 2. What is in `overflow` goes into a bag under that bag's lock, before the lock is given back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::bag::{Bag, Lists, RetireHead, Segment, clock, next_of, set_next};
use super::const_fn;
use super::domain::{self, Domain, Lock, Turn, domain};
use super::patience::Patience;
use super::registry::{is_freeing, set_freeing};
use super::stats::Bounds;
use crate::cpu::CpuId;
use crate::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
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
const CLOCK_EACH: usize = 64;
const CLOCK_EVERY: usize = 16;

/// Nothing is known of its age.
const NEVER: u64 = u64::MAX;

/// The bags, and what is counted about them.
#[derive(Debug)]
pub(super) struct Reclaim {
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
    /// When the first was retired, or [`NEVER`].
    overflow_since: Statistic,
    /// Invariant 1.
    in_flight: CachePadded<[AtomicU64; 2]>,
    parity: AtomicUsize,
    barrier: Lock,
    /// Of one CPU.
    pub(super) bytes_bound: Statistic,
    pub(super) age_bound: Statistic,
    pub(super) reclaimed: Statistic,
    pub(super) reclaimed_bytes: Statistic,
    pub(super) panics: Statistic,
}

impl Reclaim {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self {
                bags: AtomicPtr::new(ptr::null_mut()),
                spare: Bag::new(),
                spare_used: AtomicBool::new(false),
                overflow: AtomicPtr::new(ptr::null_mut()),
                overflow_objects: Statistic::new(0),
                overflow_bytes: Statistic::new(0),
                overflow_since: Statistic::new(NEVER),
                in_flight: CachePadded::new([AtomicU64::new(0), AtomicU64::new(0)]),
                parity: AtomicUsize::new(0),
                barrier: Lock::new(),
                bytes_bound: Statistic::new(Bounds::DEFAULT.bytes as u64),
                age_bound: Statistic::new(Bounds::DEFAULT.age.as_nanos() as u64),
                reclaimed: Statistic::new(0),
                reclaimed_bytes: Statistic::new(0),
                panics: Statistic::new(0),
            }
        }
    }

    #[inline(always)]
    fn bag(&self, cpu: CpuId) -> Option<&'static Bag> {
        // Ordering: Acquire pairs with the Release in `make_bags`; it carries the bags.
        let bags = NonNull::new(self.bags.load(Ordering::Acquire))?;
        // SAFETY: `make_bags` made `cpu::possible()` of them, and every id is below that.
        let bag = unsafe { bags.add(cpu.index()) };
        // SAFETY: as above; they are never freed.
        Some(unsafe { bag.as_ref() })
    }

    /// A bag for this thread, if need be that of all CPUs.
    #[cold]
    fn some_bag(&self) -> &Bag {
        if let Some(bag) = self.bag(cpu::current()) {
            return bag;
        }
        self.make_bags();
        self.bag(cpu::current()).unwrap_or_else(|| {
            // Ordering: Relaxed; who must see what is retired here has seen that it was retired.
            self.spare_used.store(true, Relaxed);
            &self.spare
        })
    }

    /// All bags that there is something in, or may be.
    fn bags(&self) -> impl Iterator<Item = &Bag> {
        // Ordering: Acquire pairs with the Release in `make_bags`; it carries the bags.
        let first = self.bags.load(Ordering::Acquire);
        let own: &[Bag] = if first.is_null() {
            &[]
        } else {
            // SAFETY: `make_bags` made `cpu::possible()` of them, which are never freed. The pointer is
            // that of the whole allocation: one made from a `&Bag` would be good for that bag only.
            unsafe { std::slice::from_raw_parts(first, cpu::possible()) }
        };
        // Ordering: Relaxed; see `some_bag`.
        let spare = self.spare_used.load(Relaxed).then_some(&self.spare);
        own.iter().chain(spare)
    }

    #[cold]
    #[inline(never)]
    fn make_bags(&self) {
        domain::started();
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
    fn push_overflow(&self, list: &mut Segment) {
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

    /// Moves the overflow into a bag.
    fn take_overflow(&self, lists: &mut Lists) {
        // Ordering: Relaxed; a hint, the exchange below decides.
        if self.overflow.load(Ordering::Relaxed).is_null() {
            return;
        }
        // Ordering: Acquire pairs with the Release in `push_overflow`.
        let mut at = self.overflow.swap(ptr::null_mut(), Ordering::Acquire);
        // All at once: the bytes and the age of a push that comes between go with these.
        let bytes = self.overflow_bytes.swap(0, Relaxed) as usize;
        let since = self.overflow_since.swap(NEVER, Relaxed);
        let mut list = Segment::EMPTY;
        while let Some(head) = NonNull::new(at) {
            at = next_of(head);
            list.push(head, 0);
        }
        self.overflow_objects.fetch_sub(list.objects as u64, Relaxed);
        list.bytes = bytes;
        list.since = list.since.min(since);
        lists.filling.take_over(&mut list);
    }

    /// A bag is closed when it has this many bytes: half the bound, as many may be waiting.
    #[inline(always)]
    fn bytes_share(&self) -> u64 {
        // Ordering: Relaxed; a number on its own.
        self.bytes_bound.load(Relaxed) / 2
    }
}

/// Has an object freed once no reader is left that may see it.
///
/// `bytes` is what it holds, for the byte bound and the statistics. Lock-free, never allocates (but
/// for the first call in the process); see [`Unlinked::retire`](super::Unlinked::retire) for what
/// it may run.
///
/// # Safety
///
/// - `head` was made by [`RetireHead::new`], is valid for all of the object that its `free` frees,
///   and is retired once.
/// - No reader that begins after this call can find the object.
/// - The object may be freed on any thread, at any later time.
#[inline]
pub unsafe fn retire_raw(head: NonNull<RetireHead>, bytes: usize) {
    let domain = domain();
    let reclaim = &domain.reclaim;
    let pushed = reclaim.bag(cpu::current()).and_then(|bag| {
        bag.try_with(|lists| {
            lists.filling.push(head, bytes);
            is_full(reclaim, &lists.filling)
        })
    });
    match pushed {
        Some(false) => {}
        Some(true) => step(domain),
        None => retire_slow(domain, head, bytes),
    }
}

#[inline(always)]
fn is_full(reclaim: &Reclaim, filling: &Segment) -> bool {
    filling.objects >= BATCH
        || filling.bytes as u64 >= reclaim.bytes_share()
        || (filling.objects <= CLOCK_EACH || filling.objects.is_multiple_of(CLOCK_EVERY))
            && is_old(reclaim, filling)
}

#[cold]
fn is_old(reclaim: &Reclaim, filling: &Segment) -> bool {
    // Ordering: Relaxed; a number on its own.
    clock().saturating_sub(filling.since) > reclaim.age_bound.load(Relaxed)
}

#[cold]
#[inline(never)]
fn retire_slow(domain: &'static Domain, head: NonNull<RetireHead>, bytes: usize) {
    let mut list = Segment::EMPTY;
    list.push(head, bytes);
    retire_list(domain, &mut list);
}

/// Retires a list.
pub(super) fn retire_list(domain: &'static Domain, list: &mut Segment) {
    let reclaim = &domain.reclaim;
    let full = reclaim.some_bag().try_with(|lists| {
        lists.filling.take_over(list);
        is_full(reclaim, &lists.filling)
    });
    match full {
        None => reclaim.push_overflow(list),
        Some(true) => step(domain),
        Some(false) => {}
    }
}

/// A bag is full: closes it, moves grace periods on once, frees what is due in it.
#[cold]
#[inline(never)]
fn step(domain: &'static Domain) {
    let reclaim = &domain.reclaim;
    let bag = reclaim.some_bag();
    let turn = domain.try_turn();
    let early = mutant("rcu-target-before-the-lock").then(|| domain.target());
    let closed = bag.try_with(|lists| {
        reclaim.take_overflow(lists);
        lists.close(early.unwrap_or_else(|| target(domain, turn.as_ref())));
    });
    if let Some(turn) = turn {
        if closed.is_some() {
            turn.bump();
        }
        turn.scan();
    }
    if !is_freeing() {
        let batch = InFlight::begin(reclaim);
        let completed = domain.completed();
        let mut due = Segment::EMPTY;
        bag.try_with(|lists| lists.take_due(completed, &mut due));
        batch.free(due);
    }
}

/// What those wait for whose retirement this thread knows of; with a turn, its next bump.
fn target(domain: &Domain, turn: Option<&Turn>) -> u64 {
    turn.map_or_else(|| domain.target(), Turn::next)
}

/// Closes all bags, and returns the highest target that is waited for.
fn close_all(domain: &'static Domain, turn: Option<&Turn>) -> u64 {
    let reclaim = &domain.reclaim;
    if reclaim.bag(CpuId::new(0)).is_none() && !reclaim.overflow.load(Ordering::Relaxed).is_null() {
        let _ = reclaim.some_bag();
    }
    let mut highest = 0;
    for bag in reclaim.bags() {
        bag.with(|lists| {
            reclaim.take_overflow(lists);
            lists.close(target(domain, turn)); // taken here, under the lock
            highest = lists.highest().max(highest);
        });
    }
    highest
}

/// Closes all bags, moves grace periods on once, and drops what is due, if readers allow it.
///
/// Returns how many objects this call dropped. Never blocks (a bag's lock is held for a few
/// instructions): with a reader in the way, or another thread at it, less is dropped, or nothing.
/// Costs one [`heavy`](crate::fence::heavy), seldom two, and none if nothing is waiting. Runs the
/// drops on this thread, after all of its own work; called from such a drop, it drops nothing.
///
/// # Examples
///
/// ```
/// use percpu::rcu::{self, Atomic, Owned};
///
/// let shared = Atomic::new(7);
/// shared.store(Owned::new(8)); // retires the 7
/// rcu::poll(); // drops it, if no thread is pinned since before
/// ```
pub fn poll() -> usize {
    let domain = domain();
    if let Some(turn) = domain.try_turn() {
        turn.move_on(close_all(domain, Some(&turn)));
    }
    if is_freeing() { 0 } else { free_due(domain).0 }
}

/// Frees what is due in all bags. Returns how many objects that were, and the highest target that
/// others wait for, 0 if none wait.
fn free_due(domain: &'static Domain) -> (usize, u64) {
    let reclaim = &domain.reclaim;
    let late = mutant("rcu-barrier-counts-late");
    let batch = (!late).then(|| InFlight::begin(reclaim));
    let completed = domain.completed();
    let mut due = Segment::EMPTY;
    let mut highest = 0;
    for bag in reclaim.bags() {
        bag.with(|lists| {
            lists.take_due(completed, &mut due);
            highest = lists.highest().max(highest);
        });
    }
    (batch.unwrap_or_else(|| InFlight::begin(reclaim)).free(due), highest)
}

/// A batch that is about to be taken out and freed.
#[derive(Debug)]
struct InFlight<'a> {
    reclaim: &'a Reclaim,
    parity: usize,
}

impl<'a> InFlight<'a> {
    fn begin(reclaim: &'a Reclaim) -> Self {
        // Ordering: Relaxed; a hint: both parities are waited for.
        let parity = reclaim.parity.load(Ordering::Relaxed);
        // Ordering: Relaxed; a barrier that must see it has taken the bag's lock after us.
        reclaim.in_flight[parity].fetch_add(1, Ordering::Relaxed);
        Self { reclaim, parity }
    }

    /// Frees the list, and returns how many there were.
    fn free(self, list: Segment) -> usize {
        let objects = list.objects;
        if objects != 0 {
            let panics = free_list(list.first);
            // Ordering: Relaxed, all; statistics.
            self.reclaim.reclaimed.fetch_add(objects as u64, Relaxed);
            add_saturating(&self.reclaim.reclaimed_bytes, list.bytes);
            self.reclaim.panics.fetch_add(panics, Relaxed);
        }
        objects
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `drain`; it carries what the drops did.
        self.reclaim.in_flight[self.parity].fetch_sub(1, Ordering::Release);
    }
}

/// Frees a list, one by one, and returns how many drops panicked.
fn free_list(first: *mut RetireHead) -> u64 {
    let mut at = first;
    let mut panics = 0;
    set_freeing(true);
    let mut run = || {
        while let Some(head) = NonNull::new(at) {
            at = next_of(head);
            // SAFETY: taken out of the lists after its grace period, and freed once.
            let free = unsafe { head.as_ref() }.free;
            // SAFETY: as above, which is what `RetireHead::new` was promised.
            unsafe { free(head) };
        }
    };
    if cfg!(any(offlock_loom, offlock_shuttle)) {
        run(); // a checker's panic is a finding
    } else {
        while let Err(payload) = catch_unwind(AssertUnwindSafe(&mut run)) {
            panics += 1;
            // The payload's own drop may panic; that one's payload is let go of.
            if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(another);
            }
        }
    }
    set_freeing(false);
    panics
}

/// Runs everything that was retired before, also what other threads are about to run.
///
/// [`poll`] repeated until it is all done: see [`barrier`](super::barrier).
pub(super) fn drain(domain: &'static Domain) {
    let reclaim = &domain.reclaim;
    // What was retired before is in a bag, in the overflow or in flight. The first two are closed...
    let mut target = close_all(domain, domain.try_turn().as_ref());
    // ... and gone after two waits (see the module): what is merged with them may cost the second.
    for _ in 0..2 {
        if target != 0 {
            domain.wait_for(target);
            target = free_due(domain).1;
        }
    }
    if mutant("rcu-barrier-ignores-others") {
        return;
    }
    // The batches of others: each parity empty at some time from now on.
    let mut patience = Patience::new();
    while !reclaim.barrier.try_lock() {
        patience.wait();
    }
    // Ordering: Relaxed; changed under the lock just taken, and for others a hint.
    let active = reclaim.parity.load(Ordering::Relaxed);
    for parity in [1 - active, active] {
        reclaim.parity.store(1 - parity, Ordering::Relaxed);
        // Ordering: Acquire pairs with the Release in `InFlight::drop`; it carries what the drops
        // did.
        while reclaim.in_flight[parity].load(Ordering::Acquire) != 0 {
            patience.wait();
        }
    }
    reclaim.barrier.unlock();
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

impl Reclaim {
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
        for bag in self.bags() {
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
        let reclaim = Reclaim::new();
        let mut list = Segment::EMPTY;
        list.push(NonNull::from(&heads[0]), usize::MAX / 2);
        list.since -= 1_000_000_000;
        reclaim.push_overflow(&mut list);
        list.push(NonNull::from(&heads[1]), usize::MAX);
        reclaim.push_overflow(&mut list);
        let pending = reclaim.pending();
        assert_eq!((pending.objects, pending.bytes), (2, u64::MAX));
        assert!(pending.oldest >= Some(Duration::from_secs(1)), "{pending:?}");
        reclaim.overflow_since.store(NEVER, Relaxed);
        assert!(reclaim.pending().oldest.is_some()); // by now
        let taken = Bag::new().try_with(|lists| {
            reclaim.take_overflow(lists);
            (lists.filling.objects, lists.filling.since <= clock())
        });
        assert_eq!((taken, reclaim.pending().oldest), (Some((2, true)), None));
    }
}
