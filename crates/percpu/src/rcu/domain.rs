//! Grace periods: when is every reader gone that may still see what was unlinked?
//!
//! ```text
//!   reader                                writer
//!   word = gp        (Acquire, Release)   unlink
//!   light()                               t = ++gp     (AcqRel)         \
//!   load(pointer)                         heavy()                        | one turn
//!   ...                                   completed = min(t, all words) /
//!   word = 0         (Release)            free what has a target <= completed
//! ```
//!
//! A reader whose word is `t` or more saw the unlink (it loaded `gp` after the bump). One whose word
//! is less is waited for. One whose word the scan missed entered after the `heavy`, and sees the
//! unlink. The numbers only grow; nobody who reads ever writes `gp`.
//!
//! What is unlinked gets a *target*, the value of `completed` it waits for:
//!
//! - by the thread that takes the turn: the `t` it is about to make;
//! - by anybody else: `light(); gp + 2`, without any shared write. The bump to `gp + 1` may have been
//!   made before the unlink could be seen, and a reader may have taken that number and the old
//!   pointer (two `light` order nothing: our store may still be in our CPU's buffer when both look).
//!   But the `heavy` of that bump pairs with our `light`, so the next bump comes after the unlink.
//!
//! One bump and one `heavy` serve everything unlinked before. `Send` readers are counted, not
//! listed ([`send_guard`](super::send_guard)); their half of the answer is `drained` below.
//!
//! # Invariants
//!
//! 1. Only the holder of `turn` bumps `gp`, stores `completed` and touches `drained`; it runs
//!    `heavy` after a bump before it gives the turn back.
//! 2. Everything with a target of `completed` or less is out of reach of every reader.

use crossbeam_utils::CachePadded;

use super::backoff::Backoff;
use super::bags::Bags;
use super::const_fn::const_fn;
use super::registry::Registry;
use super::send_readers::SendReaders;
use super::spin_lock::SpinLock;
use crate::fence;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::native::atomic::AtomicU64 as Statistic;
use crate::sync::{global, mutant};

global! {
    static DOMAIN: Domain = Domain::new();
}

/// The one domain of the process, and of each run of a model.
#[inline(always)]
pub(super) fn domain() -> &'static Domain {
    &DOMAIN
}

/// [`domain`], after the fence strategy of the process was decided. For slow paths.
pub(super) fn init_domain() -> &'static Domain {
    // Decided before the first reader, so that its `light` costs nothing.
    let _ = fence::strategy();
    domain()
}

/// Everything of RCU that threads share.
#[derive(Debug)]
pub(super) struct Domain {
    /// The number of the current grace period, from 1. A line of its own: every reader loads it.
    gp: CachePadded<AtomicU64>,
    /// Invariant 2.
    completed: CachePadded<AtomicU64>,
    pub(super) gp_lock: SpinLock,
    /// Of each parity of `Send` readers: the last grace period it was seen empty in.
    drained: UnsafeCell<[u64; 2]>,
    pub(super) registry: Registry,
    pub(super) send: SendReaders,
    pub(super) bags: Bags,
    heavies: Statistic,
}

// SAFETY: `drained` is touched by the holder of `turn` only (invariant 1); all else is `Sync`.
unsafe impl Sync for Domain {}

impl Domain {
    const_fn! {
        const fn new() -> Self {
            Self {
                gp: CachePadded::new(AtomicU64::new(1)),
                completed: CachePadded::new(AtomicU64::new(1)),
                gp_lock: SpinLock::new(),
                drained: UnsafeCell::new([1, 1]),
                registry: Registry::new(),
                send: SendReaders::new(),
                bags: Bags::new(),
                heavies: Statistic::new(0),
            }
        }
    }

    /// The number of the current grace period, for a reader to be listed under.
    #[inline(always)]
    pub(super) fn current_gp(&self) -> u64 {
        // Ordering: Acquire pairs with the AcqRel in `GpGuard::bump`; it carries the unlinks before
        // that bump: who is listed under this number does not see what they unlinked.
        self.gp.load(Ordering::Acquire)
    }

    /// What is unlinked before this call may be freed once `completed` has the returned value.
    pub(super) fn target(&self) -> u64 {
        if !mutant("rcu-target-without-light") {
            // Against the `heavy` of `GpGuard::bump`: either we see the bump, or those who come after
            // the bump see the unlink.
            fence::light();
        }
        // Ordering: Relaxed; the fence above is all the order it needs.
        self.gp.load(Ordering::Relaxed) + 2
    }

    /// Invariant 2.
    #[inline]
    pub(super) fn completed(&self) -> u64 {
        // Ordering: Acquire pairs with the Release in `GpGuard::scan`; it carries what the readers
        // that are gone have read.
        self.completed.load(Ordering::Acquire)
    }

    /// The right to move grace periods on, if nobody has it. Never blocks.
    pub(super) fn try_lock_gp(&'static self) -> Option<GpGuard> {
        // Not `then_some`: that would make, and drop, a turn we do not have.
        self.gp_lock.try_lock().then(|| GpGuard { domain: self })
    }

    /// Moves grace periods on until `target` is completed, a reader is in the way, or another
    /// thread is at it. Never blocks.
    pub(super) fn advance(&'static self, target: u64) -> bool {
        if self.completed() >= target {
            return true;
        }
        let Some(gp) = self.try_lock_gp() else { return false };
        gp.advance_to(target) >= target
    }

    /// Waits until everything that this thread knows to be unlinked is out of reach.
    pub(super) fn wait(&'static self) {
        let target = self.target();
        let mut exact = None;
        wait_until(|| match exact {
            Some(exact) => self.advance(exact),
            None if self.completed() >= target => true, // by the bumps of others
            None => self.try_lock_gp().is_some_and(|gp| {
                // Our own bump is enough: the unlinks are known to this thread.
                let bumped = *exact.insert(gp.bump());
                gp.scan() >= bumped
            }),
        });
    }

    /// Waits until `target` is completed.
    pub(super) fn wait_for(&'static self, target: u64) {
        wait_until(|| self.advance(target));
    }

    pub(super) fn grace_periods(&self) -> u64 {
        self.completed() - 1
    }

    pub(super) fn heavies(&self) -> u64 {
        // Ordering: Relaxed; a statistic.
        self.heavies.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// Calls `done` until it returns true, with growing pauses.
fn wait_until(mut done: impl FnMut() -> bool) {
    let mut backoff = Backoff::new();
    while !done() {
        backoff.wait();
    }
}

/// The right to move grace periods on; gives it back on drop.
#[derive(Debug)]
pub(super) struct GpGuard {
    domain: &'static Domain,
}

impl GpGuard {
    pub(super) fn current_gp(&self) -> u64 {
        // Ordering: Relaxed; written by holders of the turn only.
        self.domain.gp.load(Ordering::Relaxed)
    }

    /// What the next [`GpGuard::bump`] will return.
    pub(super) fn next_gp(&self) -> u64 {
        self.current_gp() + 1
    }

    /// Begins a grace period. Whatever this thread knows to be unlinked before has it for a target.
    pub(super) fn bump(&self) -> u64 {
        // Ordering: AcqRel pairs with the Acquire in `Domain::now`; it carries the unlinks that
        // this thread knows of, and as part of one chain those of the bumps before.
        let now = self.domain.gp.fetch_add(1, Ordering::AcqRel) + 1;
        if !mutant("rcu-no-heavy") {
            // Against the `light` of `Slot::enter`, of `pin_send` and of `Domain::target`.
            fence::heavy();
        }
        // Ordering: Relaxed; a statistic.
        self.domain.heavies.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        now
    }

    /// Bumps until `target` is completed, or a reader is in the way. Returns what is completed.
    pub(super) fn advance_to(&self, target: u64) -> u64 {
        // A reader that was in the way may have gone: that needs no fence.
        let mut done = self.scan();
        while done < target && self.current_gp() < target {
            self.bump();
            done = self.scan();
        }
        done
    }

    /// Looks which readers are left, and returns the new `completed`.
    pub(super) fn scan(&self) -> u64 {
        let domain = self.domain;
        let now = self.current_gp();
        // The bump to `now` was followed by its `heavy` (invariant 1), so nobody is overlooked.
        let listed = domain.registry.oldest().map_or(now, |oldest| oldest.min(now));
        // SAFETY: invariant 1; this is the holder of the turn.
        let counted =
            domain.drained.with_mut(|drained| domain.send.scan(now, unsafe { &mut *drained }));
        // Ordering: Relaxed; written by holders of the turn only.
        let before = domain.completed.load(Ordering::Relaxed);
        let done = before.max(listed.min(counted));
        if done > before {
            // Ordering: Release pairs with the Acquire in `Domain::completed`; it carries what the
            // readers have read, which the scans above acquired.
            domain.completed.store(done, Ordering::Release);
        }
        done
    }
}

impl Drop for GpGuard {
    fn drop(&mut self) {
        self.domain.gp_lock.unlock();
    }
}
