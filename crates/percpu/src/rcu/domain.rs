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
//! 1. Only the holder of `gp_lock` bumps `gp` and stores `completed`. It runs `heavy` after each bump,
//!    before it releases the lock.
//! 2. No reader holds or can load a reference to an object whose target is `completed` or less.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{
    check, const_fn, const_thread_local, global, impl_error, load_own, order, step, thread_id,
};

use crate::fence;

use super::bags::{Backoff, Bags, SpinLock};

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
    let _ = fence::has_membarrier();
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
        let mut is_over = || match exact {
            Some(exact) => self.advance(exact),
            None if self.completed() >= target => true, // another thread completed it
            None => self.try_lock_gp().is_some_and(|mut gp| {
                // One bump by this thread is enough, because this thread knows of the unlinks.
                let bumped = *exact.insert(gp.bump());
                gp.scan() >= bumped
            }),
        };
        let mut backoff = Backoff::default();
        while !is_over() {
            backoff.wait();
        }
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

// The threads that read: a list with one slot per thread, which writers scan without a lock.
//
//  Registry -> | slot: entered_gp, nesting, owner | -> | slot ... | -> ...     128-byte aligned
//                 ^
//  thread-local --+        Guard: a pointer to the same slot
//
// A thread claims a slot at its first `pin` and releases it when it ends. A thread
// that ends while a guard lives (in a thread-local variable) leaves the release to the last unpin.
// A `pin` after the release claims a slot until its unpin. Both cases add `RELEASE_ON_UNPIN` to
// the nesting, which is then never 0, so the fast path does not test for them.
//
// Invariants, after those of the file:
//
// 3. Slots are added and never removed or freed: a `&Slot` is `'static`.
// 4. Only the thread that owns the slot accesses `nesting`: from its successful exchange on
//    `owner` until it stores 0 there.
// 5. `entered_gp` is 0 only while the owner holds no reference. Only the owner writes it.

/// Added to the nesting of a slot that the last unpin must release.
pub(super) const RELEASE_ON_UNPIN: u64 = 1 << 62;

/// The state of one reading thread.
#[derive(Debug)]
pub(super) struct Slot {
    /// The grace period that was current when this thread pinned; 0 while it is not pinned.
    entered_gp: AtomicU64,
    /// The number of live guards without the outermost, plus [`RELEASE_ON_UNPIN`] if the last unpin releases the slot.
    nesting: UnsafeCell<u64>,
    /// The id of the thread that owns the slot, or 0.
    owner: AtomicU64,
    /// Not written after the slot is published.
    next: *const CachePadded<Slot>,
}

impl Slot {
    #[inline(always)]
    pub(super) fn nesting(&self) -> u64 {
        // SAFETY: the calling thread owns the slot: it reached it through its own thread-local
        // variable or its own guard (invariant 4).
        self.nesting.with(|nesting| unsafe { *nesting })
    }

    #[inline(always)]
    pub(super) fn set_nesting(&self, value: u64) {
        // SAFETY: the calling thread owns the slot: it reached it through its own thread-local
        // variable or its own guard (invariant 4).
        self.nesting.with_mut(|nesting| unsafe { *nesting = value });
    }

    /// Marks the owner as a reader since grace period `now`: every later grace period waits for it.
    #[inline(always)]
    fn enter(&self, now: u64, light: impl FnOnce()) {
        // Ordering: Release pairs with the Acquire in `Registry::oldest`; it carries the reads of
        // this thread under its earlier guards, in case the writer never sees the 0 in between.
        self.entered_gp.store(now, order!(Release, "pin: the reads of earlier guards are done"));
        // Against the `heavy` of `GpGuard::bump`: either the writer sees `entered_gp`, or this thread
        // sees the unlink.
        step!("pin: before the reads", light());
    }

    /// Makes a guard of the owner. `light` does what [`fence::light`] does in this process.
    #[inline(always)]
    fn pin(&self, light: impl FnOnce()) -> Guard {
        if self.is_reading() {
            self.nest();
        } else {
            self.enter(domain().current_gp(), light);
        }
        Guard { slot: NonNull::from(self), _not_send: PhantomData }
    }

    /// Returns whether the owner has a guard.
    #[inline(always)]
    fn is_reading(&self) -> bool {
        load_own(&self.entered_gp) != 0 // only the owner stores it (invariant 5)
    }

    /// Makes an inner guard. `cold` keeps the code of the outermost guard short and in a line.
    #[cold]
    #[inline]
    fn nest(&self) {
        self.set_nesting(self.nesting() + 1);
    }

    /// Drops an inner guard, or the last guard of a thread that has ended.
    #[cold]
    #[inline]
    fn unnest(&self, nesting: u64) {
        if nesting == RELEASE_ON_UNPIN {
            unpin_and_release(self);
        } else {
            self.set_nesting(nesting - 1);
        }
    }

    /// Marks the owner as not reading.
    #[inline(always)]
    pub(super) fn leave(&self) {
        // Ordering: Release pairs with the Acquire in `Registry::oldest`; it carries the reads of
        // this thread under the guard.
        self.entered_gp.store(0, order!(Release, "unpin: the reads are done"));
    }

    /// Releases the slot. The calling thread owns it and does not read.
    pub(super) fn release(&self) {
        self.set_nesting(0);
        // Ordering: Release pairs with the Acquire in `Registry::claim`; it carries `nesting`, and,
        // through the `entered_gp` that the next owner stores, the reads of this thread.
        self.owner.store(0, order!(Release, "thread exit: the slot is reset"));
    }
}

/// The list of slots.
#[derive(Debug)]
pub(super) struct Registry {
    head: AtomicPtr<CachePadded<Slot>>,
}

// SAFETY: `entered_gp` and `owner` are atomics, `next` does not change after publication, and only
// the owning thread accesses `nesting` (invariant 4).
unsafe impl Send for Slot {}
// SAFETY: through `&Slot`, threads share only atomics and the unchanging `next`; `nesting` is left
// to the owning thread (invariant 4).
unsafe impl Sync for Slot {}

impl Registry {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self { head: AtomicPtr::new(ptr::null_mut()) }
        }
    }

    fn iter(&self) -> impl Iterator<Item = &'static Slot> + use<> {
        // Ordering: Acquire pairs with the Release in `claim`; it carries the slots.
        let mut at: *const CachePadded<Slot> = self.head.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: null, or published by `claim` and never freed (invariant 3).
            let slot: &Slot = unsafe { at.as_ref() }?;
            at = slot.next;
            Some(slot)
        })
    }

    /// Returns the oldest grace period that a reader entered in, or `None` if there is no reader.
    pub(super) fn oldest(&self) -> Option<u64> {
        let acquire = order!(Acquire, "scan: the readers have left");
        // Ordering: Acquire pairs with the Release in `Slot::enter` and `Slot::leave`; it carries
        // the reads of a thread that has left since.
        self.iter().map(|slot| slot.entered_gp.load(acquire)).filter(|&entered| entered != 0).min()
    }

    /// Returns how many threads have been reading since before the grace period `now` began.
    pub(super) fn stalled(&self, now: u64) -> usize {
        // Ordering: Relaxed; a statistic.
        let entered = self.iter().map(|slot| slot.entered_gp.load(Ordering::Relaxed));
        entered.filter(|&entered| entered != 0 && entered < now).count()
    }

    /// Claims a slot for the calling thread: a released one, or a new one.
    pub(super) fn claim(&self) -> &'static Slot {
        let me = thread_id();
        // Ordering: Acquire on success pairs with the Release in `Slot::release`; it carries
        // `nesting`. Relaxed on failure and in the load before: no other field is accessed then.
        let free = |slot: &&Slot| {
            slot.owner.load(Ordering::Relaxed) == 0
                && slot.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if let Some(slot) = self.iter().find(free) {
            return slot;
        }
        let mut slot = Box::new(CachePadded::new(Slot {
            entered_gp: AtomicU64::new(0),
            nesting: UnsafeCell::new(0),
            owner: AtomicU64::new(me),
            next: ptr::null(),
        }));
        // Ordering: Relaxed; the slot found is not accessed here. A thread that follows `next` to
        // it acquires it through the release sequence that the exchange below continues.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            slot.next = head;
            let new = Box::into_raw(slot);
            // Ordering: Release pairs with the Acquire in `iter`; it carries the slot. The exchange
            // is a read-modify-write, so it continues the release sequences of the exchanges before
            // it. Relaxed on failure: the head found is not followed.
            match self.head.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
                // SAFETY: published by this exchange, and never freed (invariant 3).
                Ok(_) => return unsafe { &*new },
                Err(found) => {
                    head = found;
                    // SAFETY: `new` is from `into_raw` and was not published.
                    slot = unsafe { Box::from_raw(new) };
                }
            }
        }
    }
}

// The guard of a reading thread, and the slot that a thread keeps between two guards.

/// The slot of the calling thread.
struct Local {
    /// Null before the first pin, and after the thread released its slot.
    slot: Cell<*const Slot>,
    /// The same slot if [`fence::light`] is a compiler fence, and null if it is a fence: so `pin` tests both at once.
    unfenced: Cell<*const Slot>,
}

impl Local {
    fn set(&self, slot: *const Slot) {
        self.slot.set(slot);
        self.unfenced.set(if fence::has_membarrier() { slot } else { ptr::null() });
    }
}

/// Releases the slot of a thread when the thread ends.
struct ThreadExit {
    slot: Cell<*const Slot>,
}

const_thread_local! {
    // It has no destructor, so it can be read at any point of the thread's exit.
    static LOCAL: Local = Local { slot: Cell::new(ptr::null()), unfenced: Cell::new(ptr::null()) };
    static EXIT: ThreadExit = ThreadExit { slot: Cell::new(ptr::null()) };
}

impl ThreadExit {
    fn run(&self) {
        // SAFETY: null, or the slot of this thread, which is never freed.
        let Some(slot) = (unsafe { self.slot.replace(ptr::null()).as_ref() }) else { return };
        if !check!("thread exit: no guard is left", !slot.is_reading()) {
            slot.set_nesting(slot.nesting() | RELEASE_ON_UNPIN);
            return;
        }
        slot.leave();
        clear_local_slot();
        slot.release();
    }
}

impl Drop for ThreadExit {
    fn drop(&mut self) {
        self.run();
    }
}

fn clear_local_slot() {
    // A model checker may have destroyed `LOCAL` before `EXIT`; no code reads `LOCAL` after that.
    let _ = LOCAL.try_with(|local| local.set(ptr::null()));
}

/// Protects the values that this thread loads from being freed. Returned by [`pin`].
///
/// The guard belongs to the thread that called [`pin`].
///
/// [`mem::forget`](std::mem::forget) of a guard is safe. It leaves the thread a reader for ever,
/// also after the thread ends: no object that is retired from then on is freed
/// ([`stats`](super::stats) shows a stalled reader).
///
/// ```
/// use offlock_percpu::rcu;
///
/// let guard: rcu::Guard = rcu::pin();
/// assert!(rcu::is_pinned());
/// drop(guard);
/// assert!(!rcu::is_pinned());
/// ```
///
/// A guard cannot move to another thread:
///
/// ```compile_fail
/// fn sends<T: Send>(_: T) {}
/// sends(offlock_percpu::rcu::pin());
/// ```
#[must_use = "values loaded under a guard are valid only while the guard lives"]
#[derive(Debug)]
pub struct Guard {
    slot: NonNull<Slot>,
    /// Makes the guard `!Send` and `!Sync`: only the owning thread may access the slot's nesting.
    _not_send: PhantomData<*mut ()>,
}

const _: () = assert!(size_of::<Option<Guard>>() == size_of::<usize>());

/// Pins the calling thread: a value that it loads stays alive as long as the returned guard.
///
/// Pins nest; an inner pin only counts. Wait-free, without an atomic read-modify-write, and without
/// a fence where membarrier works. The first pin of a thread claims a slot of 128 bytes: it walks a
/// list as long as the largest number of threads that ever read at the same time, and may allocate.
/// A guard may live in a thread-local variable and drop while the thread ends. Must not be called
/// from a signal handler.
#[inline]
pub fn pin() -> Guard {
    let slot = LOCAL.with(|local| local.unfenced.get());
    // SAFETY: null, or the slot of this thread, which is never freed.
    let Some(slot) = (unsafe { slot.as_ref() }) else { return pin_slow() };
    slot.pin(fence::compiler_fence)
}

/// Pins a thread whose `light` is a fence, or that has no slot: at its first pin, or in a destructor at its
/// exit.
#[cold]
#[inline(never)]
fn pin_slow() -> Guard {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or the slot of this thread, which is never freed.
    if let Some(slot) = unsafe { slot.as_ref() } {
        return slot.pin(fence::light);
    }
    let domain = init_domain();
    let slot = domain.registry.claim();
    let exiting = EXIT.try_with(|exit| exit.slot.set(slot)).is_err();
    LOCAL.with(|local| local.set(slot));
    slot.enter(domain.current_gp(), fence::light);
    slot.set_nesting(if exiting { RELEASE_ON_UNPIN } else { 0 });
    Guard { slot: NonNull::from(slot), _not_send: PhantomData }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: slots are never freed, and this thread owns its slot until its last unpin.
        let slot = unsafe { self.slot.as_ref() };
        match slot.nesting() {
            0 => slot.leave(),
            nesting => slot.unnest(nesting),
        }
    }
}

/// Drops the last guard of a thread that has ended: releases the slot too.
#[cold]
#[inline(never)]
fn unpin_and_release(slot: &Slot) {
    slot.leave();
    clear_local_slot();
    slot.release();
}

/// Returns whether the calling thread holds a [`Guard`]. Wait-free.
#[inline]
#[must_use]
pub fn is_pinned() -> bool {
    let slot = LOCAL.with(|local| local.slot.get());
    // SAFETY: null, or the slot of this thread, which is never freed.
    unsafe { slot.as_ref() }.is_some_and(Slot::is_reading)
}

/// Runs what a thread runs at its end, for models.
#[cfg(offlock_model)]
pub fn end_thread() {
    EXIT.with(ThreadExit::run);
}

// The functions that wait for readers, and the cookies that poll for the end of a grace period.

/// Waits until every current reader has left, which is until each [`Guard`](super::Guard) of now has
/// been dropped.
///
/// When it returns, no reader can reach an object that was unlinked before the call. Blocks: spins,
/// yields, then sleeps for up to a millisecond at a time, because readers do not wake waiters.
/// Never allocates.
///
/// # Errors
///
/// [`SynchronizeError::WouldDeadlock`]: the calling thread holds a [`Guard`](super::Guard).
pub fn synchronize() -> Result<(), SynchronizeError> {
    if is_pinned() {
        return Err(SynchronizeError::WouldDeadlock);
    }
    init_domain().wait();
    Ok(())
}

/// A cookie that tells whether a grace period is over. Returned by [`start_grace_period`].
///
/// ```
/// use offlock_percpu::rcu::{self, GracePeriod};
///
/// let period: GracePeriod = rcu::start_grace_period();
/// while !period.poll() {
///     std::thread::yield_now();
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "call `poll` to learn whether it is over"]
pub struct GracePeriod {
    target: u64,
}

/// Returns a cookie for the grace period of the objects that were unlinked before this call.
///
/// Once [`poll`](GracePeriod::poll) of the cookie returns true, no reader can reach those objects.
/// Wait-free, without a shared write or a system call. The grace period advances only when a thread
/// polls, retires objects or waits.
pub fn start_grace_period() -> GracePeriod {
    GracePeriod { target: domain().target() }
}

impl GracePeriod {
    /// Returns whether the grace period is over; advances it if it is not.
    ///
    /// Never blocks. Costs up to two [`heavy`](crate::fence::heavy) the first time, none while it
    /// waits for a reader, and a load once it is over. Returns `false` while another thread
    /// advances grace periods.
    pub fn poll(self) -> bool {
        domain().advance(self.target)
    }
}

/// The reason why [`synchronize`](super::synchronize) did not wait.
///
/// ```
/// use offlock_percpu::rcu::{self, SynchronizeError};
///
/// let _guard = rcu::pin();
/// assert_eq!(rcu::synchronize(), Err(SynchronizeError::WouldDeadlock));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SynchronizeError {
    /// The wait would never end, because the calling thread holds a [`Guard`](super::Guard). Maps to
    /// `EDEADLK`.
    WouldDeadlock,
}

impl_error! {
    SynchronizeError {
        Self::WouldDeadlock => EDEADLK, "the calling thread would wait for itself";
    }
}
