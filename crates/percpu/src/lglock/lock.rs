//! The lock: one word per slot, which a thread on any CPU acquires by one exchange.

use std::fmt;

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::Ordering;
use offlock_sync::{SpinLimit, order, spin, thread_id};

use crate::cpu::{self, CpuId};

use super::error::LockError;
use super::guard::{GlobalGuard, LocalGuard};
use super::slot::{HELD, RawGuard, Slot};

/// One value per CPU, each under its own lock; a thread may lock any of them, or all.
///
/// For data that one CPU uses nearly always and other CPUs use sometimes. Locking a slot costs one
/// exchange, on a cache line that the slot's CPU usually owns.
///
/// ```
/// use offlock_percpu::lglock::{LgLock, LockError};
///
/// # fn main() -> Result<(), LockError> {
/// let lists = LgLock::new(|_cpu| Vec::new());
/// lists.local()?.push(7); // this CPU's list
///
/// let mut all = lists.global()?;
/// let total: usize = all.iter().map(|(_cpu, list)| list.len()).sum();
/// assert_eq!(total, 1);
/// all.iter_mut().for_each(|(_cpu, list)| list.clear());
/// # Ok(())
/// # }
/// ```
///
/// A thread that locks more than one slot by separate calls must lock them in ascending order, as
/// [`global`](Self::global) does. A call that would wait for a
/// slot that its thread holds, or for a slot before one that its thread holds, returns
/// [`LockError::Deadlock`] instead.
///
/// `LgLock<T>` is `Sync` if `T` is `Send`, like a mutex. It is invariant in `T`:
///
/// ```compile_fail
/// fn shorten<'a>(lock: offlock_percpu::lglock::LgLock<&'static str>) -> offlock_percpu::lglock::LgLock<&'a str> {
///     lock
/// }
/// ```
pub struct LgLock<T> {
    /// One slot for every CPU below `cpu::possible()`.
    slots: Box<[CachePadded<Slot<T>>]>,
}

/// What a call does if a slot is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Waits, or returns [`LockError::Deadlock`] if the wait could last for ever.
    Wait,
    /// Returns [`LockError::WouldBlock`] where `Wait` waits.
    Try,
}

impl<T> LgLock<T> {
    /// Creates a lock with a slot for every possible CPU, whose value is `init(cpu)`.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    ///
    /// # Aborts
    ///
    /// If memory is out, like `Box::new`. No other method allocates.
    #[must_use]
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self { slots: Slot::boxed_slice(cpu::possible(), init) }
    }

    /// Returns the number of slots: one for every possible CPU.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Locks the slot of the current CPU. Blocks while another thread holds it.
    ///
    /// The guard keeps that slot if the thread moves to another CPU; [`LocalGuard::cpu`] returns
    /// the slot's CPU.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] where the call could wait for ever.
    #[inline]
    pub fn local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu::current_cpu())?, Mode::Wait)
    }

    /// Locks the slot of the current CPU, if it is free. Never blocks.
    ///
    /// # Errors
    ///
    /// The errors of [`local`](Self::local), and [`LockError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu::current_cpu())?, Mode::Try)
    }

    /// Locks the slot of `cpu`. Blocks while another thread holds it.
    ///
    /// # Errors
    ///
    /// The errors of [`local`](Self::local), and [`LockError::NoSuchCpu`].
    #[inline]
    pub fn local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu)?, Mode::Wait)
    }

    /// Locks like [`local_on`](Self::local_on), and also returns whether the slot was held.
    ///
    /// # Errors
    ///
    /// The errors of [`local_on`](Self::local_on).
    #[doc(hidden)] // for the other crates of the workspace
    #[inline(always)]
    pub fn local_on_counted(&self, cpu: CpuId) -> Result<(LocalGuard<'_, T>, bool), LockError> {
        let (slot, me) = (self.slot(cpu)?, thread_id());
        let contended = !try_acquire(slot, me);
        if contended {
            self.acquire_slow(slot, me, Mode::Wait)?;
        }
        // SAFETY: `try_acquire` or `acquire_slow` acquired the word, and this is its only guard.
        Ok((unsafe { self.guard(slot) }, contended))
    }

    /// Locks the slot of `cpu`, if it is free. Never blocks.
    ///
    /// # Errors
    ///
    /// The errors of [`local_on`](Self::local_on), and [`LockError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu)?, Mode::Try)
    }

    /// Locks every slot, in ascending order. Blocks while another thread holds one of them.
    ///
    /// # Errors
    ///
    /// The errors of [`local`](Self::local).
    pub fn global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        // SAFETY: the guard has no slots.
        let mut guard = unsafe { GlobalGuard::new(&self.slots[..0]) };
        for (index, slot) in self.slots.iter().enumerate() {
            self.acquire(slot, Mode::Wait)?; // on an error, `guard` releases the slots before this one
            std::mem::forget(guard);
            // SAFETY: the rounds acquired these slots; the guard of the earlier ones was forgotten.
            guard = unsafe { GlobalGuard::new(&self.slots[..=index]) };
        }
        Ok(guard)
    }

    /// Returns the value of `cpu`, or `None` if it has no slot. Locks nothing: `&mut self` proves
    /// that no guard exists.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        self.slots.get_mut(cpu.index()).map(|slot| slot.get_mut())
    }

    #[inline(always)]
    fn slot(&self, cpu: CpuId) -> Result<&Slot<T>, LockError> {
        self.slots.get(cpu.index()).map(|slot| &**slot).ok_or(LockError::NoSuchCpu(cpu))
    }

    #[inline(always)]
    fn lock<'a>(&'a self, slot: &'a Slot<T>, mode: Mode) -> Result<LocalGuard<'a, T>, LockError> {
        self.acquire(slot, mode)?;
        // SAFETY: `acquire` acquired the word, and this is its only guard.
        Ok(unsafe { self.guard(slot) })
    }

    /// # Safety
    ///
    /// The calling thread has acquired the slot's word, and makes no other guard for it.
    #[inline(always)]
    unsafe fn guard<'a>(&'a self, slot: &'a Slot<T>) -> LocalGuard<'a, T> {
        // SAFETY: the contract of this function; `LocalGuard` is `!Send`.
        let raw = unsafe { RawGuard::new(slot) };
        // SAFETY: `raw` holds the word of `slot`, so by invariant 1 only this thread uses the
        // value.
        unsafe { LocalGuard::new(slot, raw) }
    }

    /// Acquires the slot's word once it is 0.
    #[inline(always)]
    fn acquire(&self, slot: &Slot<T>, mode: Mode) -> Result<(), LockError> {
        let me = thread_id();
        if try_acquire(slot, me) { Ok(()) } else { self.acquire_slow(slot, me, mode) }
    }

    #[cold]
    #[inline(never)]
    fn acquire_slow(&self, slot: &Slot<T>, me: u64, mode: Mode) -> Result<(), LockError> {
        // Ordering: Relaxed; among living threads only the calling thread stores its id, so it sees
        // its own store. An exited thread with the same id that forgot its guard may have stored it
        // too; then the slot stays locked for ever.
        let owned_by_me = |slot: &Slot<T>| slot.owner.load(Ordering::Relaxed) == me;
        if owned_by_me(slot) {
            return Err(LockError::Deadlock);
        }
        let attempt = || {
            // Ordering: Relaxed; this load only avoids an exchange on the holder's cache line.
            let free = slot.word.load(Ordering::Relaxed) == 0;
            (free && try_acquire(slot, me)).then_some(())
        };
        // A `try_` method does not wait, so it may lock in any order.
        if mode == Mode::Try {
            return Err(LockError::WouldBlock);
        }
        // The thread spins first, because the check below reads a cache line of every CPU from this
        // one on.
        if spin(SpinLimit::SHORT, attempt).is_some() {
            return Ok(());
        }
        // A thread waits for slots in ascending order only (invariant 3).
        if self.slots[slot.cpu.index()..].iter().any(|slot| owned_by_me(slot)) {
            return Err(LockError::Deadlock);
        }
        slot.parker.park(attempt);
        Ok(())
    }
}

#[inline(always)]
fn try_acquire<T>(slot: &Slot<T>, me: u64) -> bool {
    let acquire = order!(Acquire, "lock a slot: the value");
    // Ordering: Acquire pairs with the Release in `RawGuard::drop`; it carries the value. Relaxed
    // on failure: the value is not used then.
    let taken = if cfg!(offlock_model) {
        // Equivalent, because the word has two values. loom lets a swap that read HELD undo a
        // release.
        slot.word.compare_exchange(0, HELD, acquire, Ordering::Relaxed).is_ok()
    } else {
        slot.word.swap(HELD, acquire) == 0
    };
    if taken {
        // Ordering: Relaxed; only the calling thread looks for its own id.
        slot.owner.store(me, Ordering::Relaxed);
    }
    taken
}

impl<T: Default> Default for LgLock<T> {
    fn default() -> Self {
        Self::new(|_| T::default())
    }
}

impl<T> fmt::Debug for LgLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LgLock").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}
