//! Local-global locks: one value per CPU, each under its own lock; a thread can lock the value of
//! its CPU cheaply, and also that of another CPU or of all.
//!
//! ```text
//!  LgLock -> | cpu 0: WordLock<T>, owner | cpu 1: WordLock<T>, owner | ...
//! ```
//!
//! A slot has the id of the thread that holds it. A call that would wait for a slot that its thread
//! holds, or for a slot before one that its thread holds, returns [`LockError::Deadlock`] instead, so
//! the calls return a `Result`. Only living threads have an id of their own: a thread that starts after
//! another forgot its guard and exited may have the same id, and then gets `Deadlock` too. No thread
//! unlocks that slot, so the wait would last for ever.
//!
//! Locks are neither fair nor recursive. A waiter makes attempts for some microseconds, then sleeps
//! until an unlock. A panic inside a guard unlocks. There is no poisoning, so the code that changes a
//! value must keep it consistent. A signal handler must not use a lock.
//!
//! The local-global split is that of Linux's `lglock` (`fs: scale files_lock`, 2010). The owner is new
//! here.
//!
//! # Invariants
//!
//! 1. A guard keeps the slot that it locked. An unlock never asks for the CPU again.
//! 2. A thread waits for a slot only if it holds neither that slot nor a later one. So threads do
//!    not wait in a circle inside one lock.

use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ops::{Deref, DerefMut};

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{WordGuard, WordLock, check, impl_error, thread_id};

use crate::cpu::{self, CpuId};
use crate::slots::PerCpu;

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
/// [`global`](Self::global) does.
///
/// `LgLock<T>` is `Sync` if `T` is `Send`, like a mutex.
pub struct LgLock<T>(PerCpu<Slot<T>>);

/// The value of a CPU under its lock.
struct Slot<T> {
    lock: WordLock<T>,
    /// The id of the thread that holds the lock. Set after the lock is taken, and cleared before it is
    /// released.
    owner: AtomicU64,
}

impl<T> LgLock<T> {
    /// Creates a lock with a slot for every possible CPU, whose value is `init(cpu)`.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    #[must_use]
    pub fn new(mut init: impl FnMut(CpuId) -> T) -> Self {
        let slot = |cpu| Slot { lock: WordLock::new(init(cpu)), owner: AtomicU64::new(0) };
        Self(PerCpu::new(slot))
    }

    /// Returns the number of slots: one for every possible CPU.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
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
        self.local_on(cpu::current_cpu())
    }

    /// Locks the slot of `cpu`. Blocks while another thread holds it.
    ///
    /// # Errors
    ///
    /// Those of [`local`](Self::local).
    ///
    /// # Panics
    ///
    /// Panics if `cpu` has no slot: its index is not below the `capacity`.
    #[inline]
    pub fn local_on(&self, cpu: CpuId) -> Result<LocalGuard<'_, T>, LockError> {
        let (slot, me) = (&self.0[cpu], thread_id());
        let guard = match slot.lock.try_lock() {
            Some(guard) => guard,
            None => self.wait(cpu, me)?,
        };
        // Ordering: Relaxed; only the calling thread looks for its own id.
        slot.owner.store(me, Ordering::Relaxed);
        Ok(LocalGuard { cpu, owner: &slot.owner, guard })
    }

    /// Locks a slot that is held.
    #[cold]
    #[inline(never)]
    fn wait(&self, cpu: CpuId, me: u64) -> Result<WordGuard<'_, T>, LockError> {
        // Ordering: Relaxed; among living threads only the calling thread stores its id, so it sees
        // its own store. An exited thread with the same id that forgot its guard may have stored it
        // too; then the slot stays locked for ever.
        let mine = |slot: &Slot<T>| slot.owner.load(Ordering::Relaxed) == me;
        let from_here = self.0.iter().skip(cpu.index());
        let free = from_here.map(|(_, slot)| slot).all(|slot| !mine(slot));
        if !check!("lock a slot: none from it on is held", free) {
            return Err(LockError::Deadlock);
        }
        Ok(self.0[cpu].lock.lock())
    }

    /// Locks every slot, in ascending order. Blocks while another thread holds one of them.
    ///
    /// # Errors
    ///
    /// Those of [`local`](Self::local).
    pub fn global(&self) -> Result<GlobalGuard<'_, T>, LockError> {
        let mut all = GlobalGuard { lock: self, held: 0, _guards: PhantomData };
        while all.held < self.capacity() {
            mem::forget(self.local_on(CpuId::new(all.held as u32))?); // on an error `all` unlocks
            all.held += 1;
        }
        Ok(all)
    }
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

/// Exclusive access to one slot; unlocks on drop.
///
/// The guard keeps the slot that it locked, even if the thread moves to another CPU. A forgotten
/// guard leaves the slot locked for ever.
///
/// ```
/// use offlock_percpu::lglock::{LgLock, LocalGuard, LockError};
///
/// fn push(mut list: LocalGuard<'_, Vec<u32>>) {
///     println!("one more on {}", list.cpu());
///     list.push(7);
/// }
///
/// let lists = LgLock::new(|_cpu| Vec::new());
/// push(lists.local()?);
/// # Ok::<(), LockError>(())
/// ```
#[must_use = "the slot is unlocked when the guard drops"]
pub struct LocalGuard<'a, T> {
    cpu: CpuId,
    owner: &'a AtomicU64,
    guard: WordGuard<'a, T>,
}

impl<T> LocalGuard<'_, T> {
    /// Returns the CPU of the slot.
    #[inline]
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.cpu
    }
}

impl<T> Deref for LocalGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for LocalGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for LocalGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // Ordering: Relaxed; only the calling thread looks for its own id.
        self.owner.store(0, Ordering::Relaxed);
    }
}

impl<T: fmt::Debug> fmt::Debug for LocalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalGuard").field("cpu", &self.cpu()).field("value", &**self).finish()
    }
}

/// Exclusive access to every slot; unlocks them on drop. Otherwise like [`LocalGuard`].
///
/// ```
/// use offlock_percpu::lglock::{GlobalGuard, LgLock, LockError};
///
/// fn drain(all: &mut GlobalGuard<'_, Vec<u32>>) -> Vec<u32> {
///     all.iter_mut().flat_map(|(_cpu, list)| list.drain(..)).collect()
/// }
///
/// let lists = LgLock::new(|cpu| vec![cpu.get()]);
/// assert_eq!(drain(&mut lists.global()?).len(), lists.capacity());
/// # Ok::<(), LockError>(())
/// ```
#[must_use = "the slots are unlocked when the guard drops"]
pub struct GlobalGuard<'a, T> {
    lock: &'a LgLock<T>,
    /// The first slots, which this thread holds by guards that it has forgotten.
    held: usize,
    /// What the guard stands for: it is `!Send`, as they are.
    _guards: PhantomData<WordGuard<'a, T>>,
}

impl<T> GlobalGuard<'_, T> {
    /// Returns the number of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.lock.capacity()
    }

    /// Iterates over all slots in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (CpuId, &T)> + ExactSizeIterator + Clone {
        self.lock.0.iter().map(move |(cpu, slot)| {
            // The closure has the guard, which makes the iterator `Send` only if the guard is `Sync`, so `T`.
            let _guard: &Self = self;
            // SAFETY: the borrowed guard holds the lock, on whatever thread this runs. `&self` excludes `iter_mut`.
            (cpu, unsafe { &*slot.lock.as_ptr() })
        })
    }

    /// Iterates over all slots in ascending order.
    pub fn iter_mut(
        &mut self,
    ) -> impl DoubleEndedIterator<Item = (CpuId, &mut T)> + ExactSizeIterator {
        self.lock.0.iter().map(|(cpu, slot)| {
            // SAFETY: the borrowed guard holds the lock, on whatever thread this runs. `&mut self` excludes every
            // other use, and each slot is visited once.
            (cpu, unsafe { &mut *slot.lock.as_mut_ptr() })
        })
    }
}

impl<T> Drop for GlobalGuard<'_, T> {
    fn drop(&mut self) {
        for (_, slot) in self.lock.0.iter().take(self.held) {
            // Ordering: Relaxed; only the calling thread looks for its own id.
            slot.owner.store(0, Ordering::Relaxed);
            // SAFETY: this thread has forgotten the guard of the slot, in `global`.
            unsafe { slot.lock.unlock() };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for GlobalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The error of a refused lock. The call leaves no slot locked that it has locked itself.
///
/// ```
/// use offlock_percpu::{CpuId, LgLock, LockError};
///
/// let lock = LgLock::new(|_cpu| 0);
/// let cpu = CpuId::new(0);
/// let guard = lock.local_on(cpu)?;
/// assert_eq!(lock.local_on(cpu).err(), Some(LockError::Deadlock)); // this thread holds the slot
/// drop(guard);
/// # Ok::<(), LockError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// The wait could last for ever, because the calling thread holds the slot itself, or holds a
    /// slot that must be locked after it. Maps to `EDEADLK`. A forgotten guard counts as held.
    Deadlock,
}

impl_error! {
    LockError {
        Self::Deadlock => EDEADLK, "this thread holds the slot, or one that must be locked after it";
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    /// A slot with a small value takes 128 bytes.
    #[test]
    fn a_small_value_fits_in_the_lines_of_its_slot() {
        assert_eq!(size_of::<Slot<[u64; 3]>>(), 128);
        assert!(size_of::<LgLock<u8>>() <= 32);
    }
}
