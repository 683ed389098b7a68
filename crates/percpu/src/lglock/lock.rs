//! The lock: a word per slot, taken by one exchange from any CPU.

use std::fmt;

use crate::cpu::CpuId;
use crate::error::{AllocError, out_of_memory};
use crate::park::{self, SpinLimit};
use crate::sync::atomic::Ordering;
use crate::sync::{cpu, mutant, thread_id};

use super::error::LockError;
use super::guard::{GlobalGuard, LocalGuard, PairGuard};
use super::iter::{IntoIter, IterMut};
use super::slot::{HELD, RawGuard, Slot};

/// A value per CPU, each under a lock of its own; any thread may lock any of them, or all.
///
/// For data that one CPU uses nearly always and others sometimes: a slot costs one
/// exchange on a line that no other CPU has, wherever the caller runs, and
/// [`global`](Self::global) one per slot (`cargo bench --bench percpu`, rows P4).
///
/// ```
/// use percpu::lglock::{LgLock, LockError};
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
/// A thread that locks more than one slot by separate calls takes them in ascending order;
/// [`pair`](Self::pair) and [`global`](Self::global) do so themselves. A call that would have to
/// wait for a slot that this thread holds, or for one before a slot that it holds, returns
/// [`LockError::Deadlock`] instead.
///
/// `LgLock<T>` is `Sync` if `T` is `Send`, like a mutex. It is invariant in `T`:
///
/// ```compile_fail
/// fn shorten<'a>(lock: percpu::lglock::LgLock<&'static str>) -> percpu::lglock::LgLock<&'a str> {
///     lock
/// }
/// ```
pub struct LgLock<T> {
    /// One for every CPU below `cpu::possible()`, unless made by `try_with_slots`.
    slots: Box<[Slot<T>]>,
}

/// What a call does when a slot is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Waits, unless it could wait for ever.
    Wait,
    /// Returns [`LockError::WouldBlock`] where the other waits.
    Try,
}

impl<T> LgLock<T> {
    /// Makes a slot for every CPU that may ever exist, with the value that `init` gives for it.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory; [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self::try_new(init).unwrap_or_else(|_| out_of_memory::<Slot<T>>(cpu::possible()))
    }

    /// Makes a slot for every CPU that may ever exist, with the value that `init` gives for it.
    ///
    /// Allocates at least 128 bytes per slot, once; no other method allocates.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new(init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        Self::try_with_slots(cpu::possible(), init)
    }

    /// Makes `count` slots, whatever CPUs there are, with the value that `init` gives for each.
    ///
    /// Such a lock is for [`local_on`](Self::local_on), [`pair`](Self::pair) and
    /// [`global`](Self::global), where [`CpuId::new`] of an index below `count` names a slot. Only
    /// here do [`local`](Self::local) and [`try_local`](Self::try_local) return
    /// [`LockError::NoSuchCpu`]: on a CPU that has no slot. Otherwise as [`try_new`](Self::try_new).
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out, or `count` is more than a `u32` holds.
    #[doc(hidden)] // for the other crates of the workspace
    pub fn try_with_slots(count: usize, init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        Ok(Self { slots: Slot::boxed_slice(count, init)? })
    }

    /// How many slots there are: one for every CPU that may ever exist.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Locks the slot of the CPU that the caller runs on. Blocks while another thread holds it.
    ///
    /// The guard keeps that slot if the thread moves; [`LocalGuard::cpu`] tells which it is.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] where it would otherwise wait for ever.
    #[inline]
    pub fn local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu::current())?, Mode::Wait)
    }

    /// Locks the slot of the CPU that the caller runs on, if it is free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local), and [`LockError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_local(&self) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu::current())?, Mode::Try)
    }

    /// Locks the slot of `cpu`. Blocks while another thread holds it.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local), and [`LockError::NoSuchCpu`].
    #[inline]
    pub fn local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu)?, Mode::Wait)
    }

    /// [`local_on`](Self::local_on), and whether it found the slot locked.
    ///
    /// Not covered by semantic versioning: for the other crates of the workspace.
    ///
    /// # Errors
    ///
    /// As [`local_on`](Self::local_on).
    #[doc(hidden)]
    #[inline(always)]
    pub fn local_on_counted(&self, cpu: CpuId) -> Result<(LocalGuard<'_, T>, bool), LockError> {
        let (slot, me) = (self.slot(cpu)?, thread_id());
        let contended = !try_acquire(slot, me);
        if contended {
            self.acquire_slow(slot, me, Mode::Wait)?;
        }
        // SAFETY: one of the two took the word.
        Ok((unsafe { self.guard(slot) }, contended))
    }

    /// Locks the slot of `cpu`, if it is free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`local_on`](Self::local_on), and [`LockError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        self.lock(self.slot(cpu)?, Mode::Try)
    }

    /// Locks the slots of two CPUs, in ascending order whichever is named first. Blocks while
    /// another thread holds one of them.
    ///
    /// ```
    /// use percpu::{CpuId, lglock::{LgLock, LockError}};
    ///
    /// let lists = LgLock::new(|_cpu| vec![1]);
    /// let (from, to) = (CpuId::new(1), CpuId::new(0));
    /// match lists.pair(from, to) {
    ///     Ok(mut both) => {
    ///         let (from, to) = both.get_mut();
    ///         to.append(from);
    ///     }
    ///     Err(error) => assert_eq!(error, LockError::NoSuchCpu(from)), // a single CPU
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`local_on`](Self::local_on), and [`LockError::SameSlot`].
    pub fn pair(&self, a: CpuId, b: CpuId) -> Result<PairGuard<'_, T>, LockError> {
        self.lock_pair(a, b, Mode::Wait)
    }

    /// Locks the slots of two CPUs, if both are free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`pair`](Self::pair), and [`LockError::WouldBlock`] where that waits.
    pub fn try_pair(&self, a: CpuId, b: CpuId) -> Result<PairGuard<'_, T>, LockError> {
        self.lock_pair(a, b, Mode::Try)
    }

    fn lock_pair(&self, a: CpuId, b: CpuId, mode: Mode) -> Result<PairGuard<'_, T>, LockError> {
        let (a, b) = self.distinct_slots(a, b)?;
        let ascending = a.cpu < b.cpu || mutant("lglock-pair-in-argument-order");
        let (low, high) = if ascending { (a, b) } else { (b, a) };
        let low = self.lock(low, mode)?;
        let high = self.lock(high, mode)?;
        // SAFETY: `lock` took both, and `distinct_slots` made sure that they are two.
        Ok(unsafe { PairGuard::new((a, b), (low.into_raw(), high.into_raw())) })
    }

    /// Locks every slot, in ascending order. Blocks while another thread holds one of them.
    ///
    /// # Errors
    ///
    /// As [`local`](Self::local).
    pub fn global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        self.lock_all(Mode::Wait)
    }

    /// Locks every slot, if all are free. Never blocks.
    ///
    /// # Errors
    ///
    /// As [`global`](Self::global), and [`LockError::WouldBlock`] where that waits.
    pub fn try_global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        self.lock_all(Mode::Try)
    }

    /// The value of `cpu`, if it has a slot. Locks nothing: nobody else has the lock.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        self.slots.get_mut(cpu.index()).map(Slot::get_mut)
    }

    /// Goes over all slots, ascending. Locks nothing: nobody else has the lock.
    pub fn iter_mut(&mut self) -> IterMut<'_, T> {
        // SAFETY: `&mut self` says that nobody else can reach the values.
        unsafe { IterMut::new(&self.slots) }
    }

    #[inline(always)]
    fn slot(&self, cpu: CpuId) -> Result<&Slot<T>, LockError> {
        self.slots.get(cpu.index()).ok_or(LockError::NoSuchCpu(cpu))
    }

    /// The slots of two different CPUs.
    fn distinct_slots(&self, a: CpuId, b: CpuId) -> Result<(&Slot<T>, &Slot<T>), LockError> {
        let slots = (self.slot(a)?, self.slot(b)?);
        if a == b { Err(LockError::SameSlot(a)) } else { Ok(slots) }
    }

    #[inline(always)]
    fn lock<'a>(&'a self, slot: &'a Slot<T>, mode: Mode) -> Result<LocalGuard<'a, T>, LockError> {
        self.acquire(slot, mode)?;
        // SAFETY: `acquire` took the word.
        Ok(unsafe { self.guard(slot) })
    }

    /// # Safety
    ///
    /// The calling thread took the slot's word, and makes no other guard of it.
    #[inline(always)]
    unsafe fn guard<'a>(&'a self, slot: &'a Slot<T>) -> LocalGuard<'a, T> {
        // SAFETY: the caller's: there is no other `RawGuard`.
        let raw = unsafe { RawGuard::new(slot) };
        #[cfg(any(offlock_loom, offlock_shuttle))]
        let raw = match self.slots.get(slot.cpu.index() ^ 1) {
            Some(other) => raw.with_other_word(slot.cpu, &other.word),
            None => raw,
        };
        // SAFETY: the word is the slot's, and whoever holds that has the value.
        unsafe { LocalGuard::new(slot, raw) }
    }

    fn lock_all(&self, mode: Mode) -> Result<GlobalGuard<'_, T>, LockError> {
        // SAFETY: a guard of no slots.
        let mut guard = unsafe { GlobalGuard::new(&self.slots[..0]) };
        for (index, slot) in self.slots.iter().enumerate() {
            self.acquire(slot, mode)?; // else the guard releases those before
            std::mem::forget(guard);
            // SAFETY: `acquire` took this slot, and a turn before it each of the others; the guard
            // that had those is gone without releasing them.
            guard = unsafe { GlobalGuard::new(&self.slots[..=index]) };
        }
        Ok(guard)
    }

    /// Takes the slot's word once that is 0.
    #[inline(always)]
    fn acquire(&self, slot: &Slot<T>, mode: Mode) -> Result<(), LockError> {
        let me = thread_id();
        if try_acquire(slot, me) { Ok(()) } else { self.acquire_slow(slot, me, mode) }
    }

    #[cold]
    #[inline(never)]
    fn acquire_slow(&self, slot: &Slot<T>, me: u64, mode: Mode) -> Result<(), LockError> {
        // Ordering: Relaxed; only this thread stores its id, so it is there or not for sure. Or a
        // thread stored it that forgot its guard and ended: the slot is lost either way.
        let owned_by_me = |slot: &Slot<T>| slot.owner.load(Ordering::Relaxed) == me;
        if owned_by_me(slot) {
            return Err(LockError::Deadlock);
        }
        let attempt = || {
            // Ordering: Relaxed; only spares the holder an exchange of its line.
            let free = slot.word.load(Ordering::Relaxed) == 0;
            (free && try_acquire(slot, me)).then_some(())
        };
        if mode == Mode::Wait {
            // Before the question below, which reads a line of every CPU from this one on.
            if park::spin(SpinLimit::SHORT, attempt).is_some() {
                return Ok(());
            }
            // Slots are waited for in ascending order: else two threads might wait for each other.
            if self.slots[slot.cpu.index()..].iter().any(owned_by_me) {
                return Err(LockError::Deadlock);
            }
        }
        // Whoever only tries waits for nobody, and so needs no order.
        if mode == Mode::Try {
            return Err(LockError::WouldBlock);
        }
        slot.parker.park(attempt);
        Ok(())
    }
}

#[inline(always)]
fn try_acquire<T>(slot: &Slot<T>, me: u64) -> bool {
    let acquire =
        if mutant("lglock-lock-is-relaxed") { Ordering::Relaxed } else { Ordering::Acquire };
    // Ordering: Acquire pairs with the Release in `RawGuard::drop`; it carries the value.
    let taken = if cfg!(any(offlock_loom, offlock_shuttle)) {
        // The same for a word of two values; loom lets an exchange that read HELD undo a release.
        slot.word.compare_exchange(0, HELD, acquire, Ordering::Relaxed).is_ok()
    } else {
        slot.word.swap(HELD, acquire) == 0
    };
    if taken {
        // Ordering: Relaxed; only this thread looks for its id.
        slot.owner.store(me, Ordering::Relaxed);
    }
    taken
}

impl<T: Default> Default for LgLock<T> {
    fn default() -> Self {
        Self::new(|_| T::default())
    }
}

impl<T> IntoIterator for LgLock<T> {
    type Item = (CpuId, T);
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter::new(self.slots)
    }
}

impl<'a, T> IntoIterator for &'a mut LgLock<T> {
    type Item = (CpuId, &'a mut T);
    type IntoIter = IterMut<'a, T>;

    fn into_iter(self) -> IterMut<'a, T> {
        self.iter_mut()
    }
}

impl<T> fmt::Debug for LgLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LgLock").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}
