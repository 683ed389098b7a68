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

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::bag::{RetireHead, Segment, next_of};
use super::bags::Bags;
use super::domain::{Domain, GpGuard, domain};
use crate::cpu::CpuId;
use crate::sync::{cpu, mutant, thread_local};

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
    let bags = &domain.bags;
    let pushed = bags.bag(cpu::current()).and_then(|bag| {
        bag.try_with(|lists| {
            lists.filling.push(head, bytes);
            bags.is_full(&lists.filling)
        })
    });
    match pushed {
        Some(false) => {}
        Some(true) => reclaim_step(domain),
        None => retire_slow(domain, head, bytes),
    }
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
    let bags = &domain.bags;
    let full = bags.bag_or_spare().try_with(|lists| {
        lists.filling.splice(list);
        bags.is_full(&lists.filling)
    });
    match full {
        None => bags.push_overflow(list),
        Some(true) => reclaim_step(domain),
        Some(false) => {}
    }
}

/// A bag is full: closes it, moves grace periods on once, frees what is due in it.
#[cold]
#[inline(never)]
fn reclaim_step(domain: &'static Domain) {
    let bags = &domain.bags;
    let bag = bags.bag_or_spare();
    let gp = domain.try_lock_gp();
    let early = mutant("rcu-target-before-the-lock").then(|| domain.target());
    let closed = bag.try_with(|lists| {
        bags.take_overflow(lists);
        lists.close(early.unwrap_or_else(|| target(domain, gp.as_ref())));
    });
    if let Some(gp) = gp {
        if closed.is_some() {
            gp.bump();
        }
        gp.scan();
    }
    if !is_freeing() {
        let _counted = bags.in_flight.begin();
        let completed = domain.completed();
        let mut due = Segment::EMPTY;
        bag.try_with(|lists| lists.take_due(completed, &mut due));
        free_batch(bags, due);
    }
}

/// What those wait for whose retirement this thread knows of; with a turn, its next bump.
fn target(domain: &Domain, gp: Option<&GpGuard>) -> u64 {
    gp.map_or_else(|| domain.target(), GpGuard::next_gp)
}

/// Closes all bags, and returns the highest target that is waited for.
fn close_all(domain: &'static Domain, gp: Option<&GpGuard>) -> u64 {
    let bags = &domain.bags;
    if bags.bag(CpuId::new(0)).is_none() && bags.has_overflow() {
        let _ = bags.bag_or_spare();
    }
    let mut highest = 0;
    for bag in bags.iter() {
        bag.with(|lists| {
            bags.take_overflow(lists);
            lists.close(target(domain, gp)); // taken here, under the lock
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
    if let Some(gp) = domain.try_lock_gp() {
        gp.advance_to(close_all(domain, Some(&gp)));
    }
    if is_freeing() { 0 } else { free_due(domain).0 }
}

/// Frees what is due in all bags. Returns how many objects that were, and the highest target that
/// others wait for, 0 if none wait.
fn free_due(domain: &'static Domain) -> (usize, u64) {
    let bags = &domain.bags;
    let late = mutant("rcu-barrier-counts-late");
    let counted = (!late).then(|| bags.in_flight.begin());
    let completed = domain.completed();
    let mut due = Segment::EMPTY;
    let mut highest = 0;
    for bag in bags.iter() {
        bag.with(|lists| {
            lists.take_due(completed, &mut due);
            highest = lists.highest().max(highest);
        });
    }
    let _counted = counted.unwrap_or_else(|| bags.in_flight.begin());
    (free_batch(bags, due), highest)
}

/// Frees the objects of `batch`, and returns how many there were.
fn free_batch(bags: &Bags, batch: Segment) -> usize {
    if batch.objects != 0 {
        let panics = free_list(batch.first);
        bags.count_reclaimed(batch.objects, batch.bytes, panics);
    }
    batch.objects
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
    let bags = &domain.bags;
    // What was retired before is in a bag, in the overflow or in flight. The first two are closed...
    let mut target = close_all(domain, domain.try_lock_gp().as_ref());
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
    bags.in_flight.wait();
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    /// Drops of retired objects are running on this thread. It has no destructor, so that it can be
    /// read at any point of the thread's exit.
    static FREEING: Cell<bool> = const { Cell::new(false) };
}

// The checkers' macro knows no `const`.
#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static FREEING: Cell<bool> = Cell::new(false);
}

/// True while drops of retired objects run on this thread.
pub(super) fn is_freeing() -> bool {
    FREEING.try_with(Cell::get).unwrap_or(false)
}

/// Records whether drops of retired objects run on this thread.
fn set_freeing(freeing: bool) {
    let _ = FREEING.try_with(|flag| flag.set(freeing));
}
