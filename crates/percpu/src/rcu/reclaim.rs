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
//! whose target moves on; it starts over as the first as soon as that is done.
//!
//! Who excludes whom: a bag's lock is held for a few instructions and never while anything of the
//! user's runs; `turn` may be held when a bag's lock is taken, not the other way round.
//!
//! # Invariants
//!
//! 1. `in_flight[p]` counts the batches that are taken out and not yet freed, of parity `p`:
//!    counted before they are taken, under the bag's lock or the exchange that takes them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::time::Duration;

use super::bag::{Bag, Lists, RetireHead, Segment, clock, next_of, set_next};
use super::domain::{self, Domain, Lock, domain};
use super::patience::Patience;
use super::registry::{freeing_parity, is_freeing, set_freeing};
use super::stats::Bounds;
use super::{Forked, Line, const_fn, fork};
use crate::cpu::CpuId;
use crate::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sync::native::atomic::{AtomicU64 as Statistic, Ordering::Relaxed};
use crate::sync::{cpu, mutant};

/// Objects in a bag when it is closed. Measured, ns per replaced and dropped 144-byte node at one
/// thread and at two, of which each interrupts the other with its `heavy`: 64: 52 and 213, 128: 52
/// and 174, 512: 52 and 95, 1,024: 52 and 80, 2,048: 53 and 66.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const BATCH: usize = 1024;
#[cfg(any(offlock_loom, offlock_shuttle))]
const BATCH: usize = 2;

/// How often a bag's clock is looked at, in objects. A power of two; a guess.
const CLOCK: usize = 16;

/// The bags, and what is counted about them.
#[derive(Debug)]
pub(super) struct Reclaim {
    /// Null until the first retire; then one for every CPU, for ever.
    bags: AtomicPtr<Bag>,
    /// What found its bag's lock taken, and what was retired without memory for bags.
    overflow: AtomicPtr<RetireHead>,
    overflow_bytes: Statistic,
    overflow_objects: Statistic,
    /// Taken out by barriers that wait for readers.
    held_bytes: Statistic,
    held_objects: Statistic,
    /// Invariant 1.
    in_flight: Line<[AtomicU64; 2]>,
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
                overflow: AtomicPtr::new(ptr::null_mut()),
                overflow_bytes: Statistic::new(0),
                overflow_objects: Statistic::new(0),
                held_bytes: Statistic::new(0),
                held_objects: Statistic::new(0),
                in_flight: Line([AtomicU64::new(0), AtomicU64::new(0)]),
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

    fn bags(&self) -> &'static [Bag] {
        let Some(first) = self.bag(CpuId::new(0)) else { return &[] };
        // SAFETY: as in `bag`.
        unsafe { std::slice::from_raw_parts(first, cpu::possible()) }
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
        // Ordering: Relaxed, both; statistics.
        self.overflow_objects.fetch_add(list.objects as u64, Relaxed);
        self.overflow_bytes.fetch_add(list.bytes as u64, Relaxed);
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
        // Counted by bytes all at once: a push between the exchange and these is counted late.
        let bytes = self.overflow_bytes.swap(0, Relaxed) as usize;
        self.overflow_objects.store(0, Relaxed);
        let mut list = Segment::EMPTY;
        while let Some(head) = NonNull::new(at) {
            at = next_of(head);
            list.push(head, 0);
        }
        list.bytes = bytes;
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
        || (filling.objects & (CLOCK - 1) == 0 && is_old(reclaim, filling))
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
    if reclaim.bag(CpuId::new(0)).is_none() {
        reclaim.make_bags();
    }
    let full = reclaim.bag(cpu::current()).and_then(|bag| {
        bag.try_with(|lists| {
            lists.filling.take_over(list);
            is_full(reclaim, &lists.filling)
        })
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
    let Some(bag) = reclaim.bag(cpu::current()) else { return };
    let turn = domain.try_turn();
    let target = turn.as_ref().map_or_else(|| domain.target(), |turn| turn.next());
    let closed = bag.try_with(|lists| {
        reclaim.take_overflow(lists);
        lists.close(target);
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
/// use percpu::rcu::{self, Atomic};
///
/// let shared = Atomic::new(7);
/// shared.store(None); // retires the 7
/// rcu::poll(); // drops it, if no thread is pinned since before
/// ```
pub fn poll() -> usize {
    let domain = domain();
    let reclaim = &domain.reclaim;
    let mut unfinished = 0; // the highest target that is waited for
    if let Some(turn) = domain.try_turn() {
        let next = turn.next();
        if reclaim.bags().is_empty() && !reclaim.overflow.load(Ordering::Relaxed).is_null() {
            reclaim.make_bags();
        }
        for bag in reclaim.bags() {
            let _ = bag.with(|lists| {
                reclaim.take_overflow(lists);
                lists.close(next);
                unfinished = lists.waiting.iter().fold(unfinished, |max, s| max.max(s.target));
            });
        }
        let mut done = turn.scan();
        while done < unfinished && turn.now() < unfinished {
            turn.bump();
            done = turn.scan();
        }
    }
    free_due(domain)
}

/// Frees what is due in all bags.
fn free_due(domain: &'static Domain) -> usize {
    if is_freeing() {
        return 0;
    }
    let reclaim = &domain.reclaim;
    let batch = InFlight::begin(reclaim);
    let completed = domain.completed();
    let mut due = Segment::EMPTY;
    for bag in reclaim.bags() {
        let _ = bag.with(|lists| lists.take_due(completed, &mut due));
    }
    batch.free(due)
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
        reclaim.in_flight.0[parity].fetch_add(1, Ordering::Relaxed);
        Self { reclaim, parity }
    }

    /// Frees the list, and returns how many there were.
    fn free(self, list: Segment) -> usize {
        let objects = list.objects;
        if objects != 0 {
            let panics = free_list(list.first, self.parity);
            // Ordering: Relaxed, all; statistics.
            self.reclaim.reclaimed.fetch_add(objects as u64, Relaxed);
            self.reclaim.reclaimed_bytes.fetch_add(list.bytes as u64, Relaxed);
            self.reclaim.panics.fetch_add(panics, Relaxed);
        }
        objects
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `barrier`; it carries what the drops did.
        self.reclaim.in_flight.0[self.parity].fetch_sub(1, Ordering::Release);
    }
}

/// Frees a list, one by one, and returns how many drops panicked.
fn free_list(first: *mut RetireHead, parity: usize) -> u64 {
    let mut at = first;
    let mut panics = 0;
    set_freeing(Some(parity));
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
    set_freeing(None);
    panics
}

/// Runs everything that was retired before, also what other threads are about to run.
///
/// [`poll`] repeated until it is all done: see [`barrier`](super::barrier).
pub(super) fn drain(domain: &'static Domain) -> Result<(), Forked> {
    let reclaim = &domain.reclaim;
    if reclaim.bags().is_empty() {
        reclaim.make_bags();
    }
    // What was retired before is in a bag, in the overflow or in flight; take the first two.
    let mut mine = Segment::EMPTY;
    let mut stuck = Ok(());
    for bag in reclaim.bags() {
        let taken = bag.with(|lists| {
            reclaim.take_overflow(lists);
            lists.close(0);
            for segment in &mut lists.waiting {
                mine.take_over(segment);
            }
        });
        stuck = stuck.and(taken);
    }
    let (objects, bytes) = (mine.objects as u64, mine.bytes as u64);
    // Ordering: Relaxed, all; statistics.
    reclaim.held_objects.fetch_add(objects, Relaxed);
    reclaim.held_bytes.fetch_add(bytes, Relaxed);
    let waited = stuck.and_then(|()| domain.wait());
    reclaim.held_objects.fetch_sub(objects, Relaxed);
    reclaim.held_bytes.fetch_sub(bytes, Relaxed);
    if let Err(stuck) = waited {
        retire_list(domain, &mut mine);
        return Err(stuck);
    }
    InFlight::begin(reclaim).free(mine);
    if mutant("rcu-barrier-ignores-others") {
        return Ok(());
    }
    // The batches of others: each parity empty at some time from now on.
    let mut patience = Patience::new();
    while !reclaim.barrier.try_lock() {
        patience.wait()?;
    }
    // Ordering: Relaxed; changed under the lock just taken, and for others a hint.
    let active = reclaim.parity.load(Ordering::Relaxed);
    for parity in [1 - active, active] {
        reclaim.parity.store(1 - parity, Ordering::Relaxed);
        // Ordering: Acquire pairs with the Release in `InFlight::drop`; it carries what the drops
        // did.
        while reclaim.in_flight.0[parity].load(Ordering::Acquire) != 0 {
            if let Err(forked) = patience.wait() {
                reclaim.barrier.unlock();
                return Err(forked);
            }
        }
    }
    reclaim.barrier.unlock();
    Ok(())
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
        // Ordering: Relaxed, both; statistics.
        let mut pending = Pending {
            objects: self.overflow_objects.load(Relaxed) + self.held_objects.load(Relaxed),
            bytes: self.overflow_bytes.load(Relaxed) + self.held_bytes.load(Relaxed),
            oldest: None,
        };
        let now = clock();
        for bag in self.bags() {
            let _ = bag.with(|lists| {
                for segment in lists.all() {
                    pending.objects += segment.objects as u64;
                    pending.bytes = pending.bytes.saturating_add(segment.bytes as u64);
                    let age = Duration::from_nanos(now.saturating_sub(segment.since));
                    pending.oldest = pending.oldest.max(Some(age));
                }
            });
        }
        pending
    }

    /// Takes every lock that it can for a thread that is about to fork.
    pub(super) fn lock_all(&self, who: u64) {
        for bag in self.bags() {
            fork::lock_patiently(&bag.lock, who);
        }
    }

    /// Gives back what [`Reclaim::lock_all`] took.
    pub(super) fn unlock_all(&self, who: u64) {
        for bag in self.bags() {
            bag.lock.unlock_as(who);
        }
    }

    /// In a fork child's only thread: batches of other threads are gone.
    pub(super) fn forget_other_batches(&self) {
        self.barrier.unlock();
        for count in &self.in_flight.0 {
            // Ordering: Relaxed; there is one thread.
            count.store(0, Ordering::Relaxed);
        }
        if let Some(parity) = freeing_parity() {
            self.in_flight.0[parity].store(1, Ordering::Relaxed);
        }
    }
}
