//! Tracks grace periods. A grace period is completed when no reader can still hold a reference to
//! an object that was unlinked before it.
//!
//! ```text
//!   reader                                writer
//!   entered_gp = gp  (Acquire, Release)   unlink
//!   light()                               t = ++gp     (Release)              \
//!   load(pointer)                         heavy()                              | under gp_lock
//!   ...                                   completed = min(t, all entered_gp)  /
//!   entered_gp = 0   (Release)            free objects with target <= completed
//! ```
//!
//! A reader whose `entered_gp` is `t` or more sees the unlink, because it loaded `gp` after the
//! bump. The writer waits for each reader whose `entered_gp` is less than `t`. If the scan does not
//! see a reader, the reader's store came after the `heavy`. Its loads then see the unlink. `gp` and
//! `completed` only grow. Readers never write `gp`.
//!
//! Each unlinked object gets a *target*, the value of `completed` that it waits for:
//!
//! - A thread that holds `gp_lock` uses the `t` of its next bump.
//! - Any other thread calls `light`, loads `gp`, and uses the loaded number plus 2. It writes nothing
//!   that threads share.
//!
//! ```text
//!   unlinking thread            holder of gp_lock        reader
//!   unlink (in a store buffer)
//!   light(); load gp: 7
//!                               gp = 8
//!                                                        load gp: 8; load the old pointer
//!                               heavy(): all CPUs see the unlink
//!                               completed = 8            still reads: 8 does not wait for it
//!                               gp = 9                   a reader that loads 9 sees the unlink
//! ```
//!
//! Here 7 + 1 would be too low. The `heavy` of the bump to 8 pairs with the `light` of the unlinking
//! thread, so the unlink comes before the bump to 9.
//!
//! One bump and one `heavy` serve every object that was unlinked before the bump.
//!
//! # Invariants
//!
//! 1. Only the holder of `gp_lock` bumps `gp` and stores `completed`. It runs `heavy` after each bump, before it releases the lock.
//! 2. No reader holds or can load a reference to an object whose target is `completed` or less.

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::const_fn;
use offlock_sync::{global, order, step};

use super::backoff::Backoff;
use super::bags::Bags;
use super::registry::Registry;
use super::spin_lock::SpinLock;
use crate::fence;

global! {
    static DOMAIN: Domain = Domain::new();
}

/// Returns the RCU domain of the process. Each run of a model has a domain of its own.
#[inline(always)]
pub(super) fn domain() -> &'static Domain {
    &DOMAIN
}

/// Chooses the fence strategy of the process, and returns the domain. For slow paths.
pub(super) fn init_domain() -> &'static Domain {
    // Chosen before the first reader, because `light` is a full fence until then.
    let _ = fence::strategy();
    domain()
}

/// The state that all threads share.
#[derive(Debug)]
pub(super) struct Domain {
    /// The number of the grace period that was started last. 1 stands for the time before the first
    /// one and counts as completed. A cache line of its own, because every reader loads it.
    gp: CachePadded<AtomicU64>,
    /// The last completed grace period (invariant 2).
    completed: CachePadded<AtomicU64>,
    /// Taken to start and to complete grace periods (invariant 1).
    gp_lock: SpinLock,
    pub(super) registry: Registry,
    pub(super) bags: Bags,
}

impl Domain {
    const_fn! {
        const fn new() -> Self {
            Self {
                gp: CachePadded::new(AtomicU64::new(1)),
                completed: CachePadded::new(AtomicU64::new(1)),
                gp_lock: SpinLock::new(),
                registry: Registry::new(),
                bags: Bags::new(),
            }
        }
    }

    /// Returns the number of the current grace period, which an entering reader stores in its slot.
    #[inline(always)]
    pub(super) fn current_gp(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `GpGuard::bump`; it carries the unlinks before
        // that bump, so a reader that stores this number cannot find those objects.
        self.gp.load(order!(Acquire, "pin: the unlinks before the grace period"))
    }

    /// Returns the target of the objects that were unlinked before this call.
    pub(super) fn target(&self) -> u64 {
        // Pairs with the `heavy` in `GpGuard::bump`: either this thread loads the new `gp`, and its
        // target is higher, or the unlink is visible after that `heavy`, and so before the next
        // bump.
        step!("target: after the unlink", fence::light());
        // Ordering: Relaxed; the fence above provides all the order that the load needs.
        let mut target = self.gp.load(Ordering::Relaxed) + 1;
        // One more: a bump whose `heavy` has not run may not cover the unlink.
        step!("target: one more, for a bump under way", target += 1);
        target
    }

    /// Returns the last completed grace period (invariant 2).
    #[inline]
    pub(super) fn completed(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `GpGuard::scan`; it puts the reads of the
        // readers that have left before the frees of the calling thread.
        self.completed.load(order!(Acquire, "free: the reads are done"))
    }

    /// Takes the right to advance grace periods, if no thread holds it. Never blocks.
    pub(super) fn try_lock_gp(&'static self) -> Option<GpGuard> {
        // Not `then_some`: it would create a guard even without the lock, and the guard's drop
        // would release the lock of another thread.
        self.gp_lock.try_lock().then(|| GpGuard { domain: self })
    }

    /// Advances grace periods until `target` is completed. Returns whether it is.
    ///
    /// Never blocks: returns false if a reader has not left, or if another thread holds the lock.
    pub(super) fn advance(&'static self, target: u64) -> bool {
        if self.completed() >= target {
            return true;
        }
        let Some(mut gp) = self.try_lock_gp() else { return false };
        gp.advance_to(target) >= target
    }

    /// Waits for a grace period: every reader that could hold an object unlinked before this call
    /// has left.
    pub(super) fn wait(&'static self) {
        let target = self.target();
        let mut exact = None;
        wait_until(|| match exact {
            Some(exact) => self.advance(exact),
            None if self.completed() >= target => true, // another thread completed it
            None => self.try_lock_gp().is_some_and(|mut gp| {
                // One bump by this thread is enough, because this thread knows of the unlinks.
                let bumped = *exact.insert(gp.bump());
                gp.scan() >= bumped
            }),
        });
    }

    /// Waits until `target` is completed.
    pub(super) fn wait_for(&'static self, target: u64) {
        wait_until(|| self.advance(target));
    }
}

/// Calls `done` until it returns true, with growing pauses.
fn wait_until(mut done: impl FnMut() -> bool) {
    let mut backoff = Backoff::default();
    while !done() {
        backoff.wait();
    }
}

/// The right to advance grace periods. Releases `gp_lock` on drop.
#[derive(Debug)]
pub(super) struct GpGuard {
    domain: &'static Domain,
}

impl GpGuard {
    fn current_gp(&self) -> u64 {
        // Ordering: Relaxed; only the holder of `gp_lock` writes it.
        self.domain.gp.load(Ordering::Relaxed)
    }

    /// Returns the number that the next [`GpGuard::bump`] will return.
    pub(super) fn next_gp(&self) -> u64 {
        self.current_gp() + 1
    }

    /// Starts a grace period and returns its number.
    ///
    /// The number is a valid target for every object that this thread knows to be unlinked.
    pub(super) fn bump(&mut self) -> u64 {
        // Ordering: Release pairs with the Acquire in `Domain::current_gp`; it carries the unlinks
        // that this thread knows of. The earlier bumps happen before this one by `gp_lock`.
        let now = self.domain.gp.fetch_add(1, order!(Release, "bump: the unlinks")) + 1;
        // Pairs with the `light` of a reader (`Slot::enter`): either the scan
        // sees the reader, or the reader sees every unlink before the bump. Pairs with the `light`
        // in `Domain::target`: either its unlink is visible after this fence, or it loads the new
        // `gp`.
        step!("bump: before the scan", fence::heavy());
        now
    }

    /// Bumps `gp` up to `target` if necessary, and scans after each bump. Returns the last completed
    /// grace period, which is below `target` if a reader has not left.
    pub(super) fn advance_to(&mut self, target: u64) -> u64 {
        // The readers may have left since the last scan. A new scan needs no fence, because a
        // `heavy` followed the last bump (invariant 1).
        let mut done = self.scan();
        while done < target && self.current_gp() < target {
            self.bump();
            done = self.scan();
        }
        done
    }

    /// Scans the readers and returns the new value of `completed`.
    pub(super) fn scan(&mut self) -> u64 {
        let domain = self.domain;
        let now = self.current_gp();
        // A `heavy` followed the bump to `now` (invariant 1). If the scan does not see a reader,
        // the reader's store came after the `heavy`. Its loads then see every unlink before the
        // bump.
        let listed = domain.registry.oldest().map_or(now, |oldest| oldest.min(now));
        // Ordering: Relaxed; only the holder of `gp_lock` writes it.
        let before = domain.completed.load(Ordering::Relaxed);
        let done = before.max(listed);
        if done > before {
            // Ordering: Release pairs with the Acquire in `Domain::completed`; it puts the reads of
            // the readers that left, which the scans above acquired, before later frees.
            domain.completed.store(done, order!(Release, "scan: the reads are done"));
        }
        done
    }
}

impl Drop for GpGuard {
    fn drop(&mut self) {
        self.domain.gp_lock.unlock();
    }
}
