//! Retires objects into per-CPU bags and frees them after their grace period.
//!
//! ```text
//!                     close(target)        completed >= target
//!  retire -> filling ---------------> waiting[0], waiting[1] -----------> free, outside all locks
//!            one bag per CPU, under its lock; while the lock is taken, objects go to another bag
//! ```
//!
//! The list of a bag is linked through the retired objects (`bags.rs`), so retiring does
//! not allocate. The filling segment of a bag is full when it has `BATCH` objects or
//! `BATCH_BYTES` bytes. The thread that fills the segment closes it. If no
//! other thread advances grace periods, it advances them by one bump and one `heavy`. Then it drops
//! the objects that are due. It never waits, so bags grow while a reader is stalled.
//!
//! Two closed segments are enough. While the first one waits, newly closed objects are merged into
//! the second one, and the target of the second one rises. When the first one is freed, the second
//! one takes its place, and its target no longer rises. So a closed object leaves its bag after at
//! most two waits.
//!
//! The target of a segment is computed under the bag's lock, after the last object is added. A
//! target computed earlier would be too low for an object that another thread adds in between, and
//! that object would be freed while readers still see it.
//!
//! Lock order: `gp_lock` before a bag's lock. A bag's lock is held for a few instructions. No
//! destructor of the user runs under either lock.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use offlock_sync::const_thread_local;
use offlock_sync::native::atomic::Ordering::Relaxed;
use offlock_sync::panics::drop_payload;

use crate::cpu;

use super::bags::{Bag, Bags, RetireHead, Segment, is_full, next_of};
use super::domain::{Domain, GpGuard, domain};

/// Frees an object once no reader can hold a reference to it.
///
/// `bytes` is the size of the object and of the memory it owns, which counts
/// towards a full batch and in the statistics. The rest is as for [`Unlinked::retire`](super::Unlinked::retire). [`RetireHead`] has
/// an example.
///
/// # Safety
///
/// - `head` is from [`RetireHead::new`], its pointer is valid for the whole object that `free`
///   frees, and it is retired once.
/// - No reader that begins after this call can find the object.
/// - The object may be freed on any thread, at any later time.
#[inline]
pub unsafe fn retire_raw(head: NonNull<RetireHead>, bytes: usize) {
    let domain = domain();
    let bag = &domain.bags.all()[cpu::current_cpu()];
    let full = bag.try_with(|lists| {
        lists.filling.push(head, bytes);
        is_full(&lists.filling)
    });
    match full {
        Some(false) => {}
        Some(true) => reclaim_step(domain, bag),
        None => retire_slow(domain, head, bytes),
    }
}

/// Retires an object whose bag is locked.
#[cold]
#[inline(never)]
fn retire_slow(domain: &'static Domain, head: NonNull<RetireHead>, bytes: usize) {
    let mut list = Segment::EMPTY;
    list.push(head, bytes);
    retire_list(domain, &mut list);
}

/// Retires the objects of `list`, and leaves it empty.
pub(super) fn retire_list(domain: &'static Domain, list: &mut Segment) {
    let (bag, full) = domain.bags.with_any(|lists| {
        lists.filling.splice(list);
        is_full(&lists.filling)
    });
    if full {
        reclaim_step(domain, bag);
    }
}

/// Closes a bag, then advances grace periods once if no other thread holds `gp_lock`, then frees the
/// due objects of the bag.
#[cold]
#[inline(never)]
fn reclaim_step(domain: &'static Domain, bag: &Bag) {
    let bags = &domain.bags;
    let gp = domain.try_lock_gp();
    let closed = bag.try_with(|lists| {
        // Computed under the lock. The next bump is that of the holder of `gp_lock`.
        lists.close(gp.as_ref().map_or_else(|| domain.target(), GpGuard::next_gp));
    });
    if let Some(mut gp) = gp {
        if closed.is_some() {
            gp.bump();
        }
        gp.scan();
    }
    if !is_freeing() {
        let completed = domain.completed();
        let mut due = Segment::EMPTY;
        bag.try_with(|lists| lists.take_due(completed, &mut due));
        free_batch(bags, due);
    }
}

/// Closes all bags, advances grace periods, and drops the objects that no reader can reach.
///
/// Returns how many objects this call dropped. Never waits for readers. It waits for the locks of
/// bags, which are held for a few instructions. It drops fewer objects, or none, if a reader has
/// not left or if another thread advances grace periods. Costs one [`heavy`](crate::fence::heavy),
/// rarely two, and none if no object waits. The drops run on this thread, after all other work of
/// the call. A call from inside such a drop drops nothing.
pub fn poll() -> usize {
    let domain = domain();
    let bags = &domain.bags;
    if let Some(mut gp) = domain.try_lock_gp() {
        let mut highest = 0;
        for (_, bag) in bags.all().iter() {
            bag.with(|lists| {
                lists.close(gp.next_gp()); // computed under the lock
                highest = lists.highest().max(highest);
            });
        }
        gp.advance_to(highest);
    }
    if is_freeing() {
        return 0;
    }
    let completed = domain.completed();
    let mut due = Segment::EMPTY;
    for (_, bag) in bags.all().iter() {
        bag.with(|lists| lists.take_due(completed, &mut due));
    }
    free_batch(bags, due)
}

/// Frees the objects of `batch`, and returns their number.
fn free_batch(bags: &Bags, batch: Segment) -> usize {
    if batch.objects != 0 {
        free_list(batch.first);
        // Ordering: Relaxed; a statistic.
        bags.reclaimed.fetch_add(batch.objects as u64, Relaxed);
    }
    batch.objects
}

/// Frees the objects of a list one by one. If a drop panics, the others are freed all the same.
fn free_list(first: *mut RetireHead) {
    let mut at = first;
    set_freeing(true);
    let mut run = || {
        while let Some(head) = NonNull::new(at) {
            at = next_of(head);
            // SAFETY: the object left its bag after its grace period, and is not freed yet.
            let free = unsafe { head.as_ref() }.free;
            // SAFETY: `free` is called once, after `retire_raw` and a grace period, as
            // `RetireHead::new` promises.
            unsafe { free(head) };
        }
    };
    if cfg!(offlock_model) {
        run(); // a panic is a finding of the model checker
    } else {
        while let Err(payload) = catch_unwind(AssertUnwindSafe(&mut run)) {
            drop_payload(payload);
        }
    }
    set_freeing(false);
}

const_thread_local! {
    // Set while drops of retired objects run on this thread. It has no destructor, so it can be
    // read at any point of the thread's exit.
    static FREEING: Cell<bool> = Cell::new(false);
}

/// Returns whether drops of retired objects run on this thread.
pub(super) fn is_freeing() -> bool {
    FREEING.try_with(Cell::get).unwrap_or(false)
}

/// Records whether drops of retired objects run on this thread.
fn set_freeing(freeing: bool) {
    let _ = FREEING.try_with(|flag| flag.set(freeing));
}

/// A list of objects that are retired together, under one lock.
///
/// Dropping the batch retires its objects.
///
/// For the other crates of the workspace; semantic versioning does not cover it.
#[doc(hidden)]
#[derive(Debug)]
pub struct Batch {
    list: Segment,
}

// SAFETY: the objects in the list may go to any thread, as the caller of `push` promises.
unsafe impl Send for Batch {}
// SAFETY: a `&Batch` gives access to the number of objects only.
unsafe impl Sync for Batch {}

impl Batch {
    /// Returns an empty batch. Does not allocate.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Segment::EMPTY }
    }

    /// Adds an object. No object of the batch is freed before the batch is retired. Wait-free.
    ///
    /// # Safety
    ///
    /// - `head` is from [`RetireHead::new`], its pointer is valid for the whole object that `free`
    ///   frees, and it is retired once.
    /// - No reader that begins after the batch is retired can find the object.
    /// - The object may be freed on any thread, at any time after the batch is retired.
    pub unsafe fn push(&mut self, head: NonNull<RetireHead>, bytes: usize) {
        self.list.push(head, bytes);
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.list.is_empty() {
            retire_list(domain(), &mut self.list);
        }
    }
}

/// The numbers of retired and freed objects since the process started. Returned by [`stats`].
///
/// The fields are read one by one while other threads run, so they need not match each other
/// exactly.
///
/// ```
/// use offlock_percpu::rcu::{self, Stats};
///
/// let stats: Stats = rcu::stats();
/// if stats.stalled_readers != 0 {
///     println!("{} bytes wait for readers", stats.pending_bytes);
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Retired objects that no thread has begun to drop.
    pub pending: u64,
    /// The bytes of the pending objects, without what a value owns on the heap.
    pub pending_bytes: u64,
    /// Objects dropped after their grace period.
    pub reclaimed: u64,
    /// Threads that have held a [`Guard`](super::Guard) since before the current grace period
    /// began.
    pub stalled_readers: usize,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects ({} bytes) pending, {} reclaimed; {} stalled readers",
            self.pending, self.pending_bytes, self.reclaimed, self.stalled_readers,
        )
    }
}

/// Returns the statistics of the process.
///
/// Waits for bag locks, which are held for a few instructions. It takes time in proportion to the
/// number of CPUs and of threads.
#[must_use]
pub fn stats() -> Stats {
    let domain = domain();
    let bags = &domain.bags;
    let (pending, pending_bytes) = bags.pending();
    Stats {
        pending,
        pending_bytes,
        // Ordering: Relaxed; a statistic.
        reclaimed: bags.reclaimed.load(Relaxed),
        stalled_readers: domain.registry.stalled(domain.current_gp()),
    }
}
