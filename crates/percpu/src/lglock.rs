//! Local-global locks: one value per CPU, each under its own lock; a thread can lock the value of
//! its CPU cheaply, and also that of another CPU or of all.
//!
//! ```text
//!  LgLock  slots -> | cpu 0: word, owner, waiters, value | cpu 1: word, owner, ... | ...
//! ```
//!
//! ```
//! use offlock_percpu::lglock::{LgLock, LockError};
//!
//! let queues = LgLock::new(|_cpu| Vec::new());
//! queues.local()?.push("job"); // the queue of this CPU
//! let jobs: usize = queues.global()?.iter().map(|(_cpu, queue)| queue.len()).sum();
//! assert_eq!(jobs, 1);
//! # Ok::<(), LockError>(())
//! ```
//!
//! A slot stores the id of the thread that locked it. A thread that asks for a slot that it holds
//! gets [`LockError::Deadlock`] instead of waiting for itself, so the methods that wait return a
//! `Result` too. Only living threads have an id of their own: a thread that starts after another
//! forgot its guard and exited may have the same id, and then gets `Deadlock` too. No thread
//! unlocks that slot, so the wait would last for ever.
//!
//! Locks are neither fair nor recursive. A waiter makes a few attempts, then sleeps until an
//! unlock. A panic inside a guard unlocks. There is no poisoning, so the code that changes a value
//! must keep it consistent. A guard in a thread-local variable unlocks when the variable is
//! destroyed. A forgotten guard keeps its slot locked for ever.
//!
//! A signal handler must not use a lock.
//!
//! The local-global split is that of Linux's `lglock` (`fs: scale files_lock`, 2010). The word with
//! an owner is new here.
//!
//! # Invariants
//!
//! 1. Only the thread that changed a slot's word from 0 uses the slot's value, until it releases
//!    the word.
//! 2. A guard keeps the word that it locked. An unlock never asks for the CPU again.
//! 3. A thread waits for a slot only if it holds neither that slot nor a later one. So threads do
//!    not wait in a circle inside one lock.
//! 4. No wake-up is lost: see `offlock_sync::Parker`.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{Parker, SpinLimit, impl_error, order, spin, thread_id};

use crate::cpu::{self, CpuId};

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
    /// One slot for every CPU below `cpu::possible_cpus()`.
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
    #[must_use]
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self { slots: Slot::boxed_slice(cpu::possible_cpus(), init) }
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

/// Makes a guard `!Send` and `!Sync`; an `impl` for each guard restores `Sync` for `T: Sync`.
type NotSend = PhantomData<*mut ()>;

/// Exclusive access to one slot; unlocks on drop.
///
/// The guard keeps the slot that it locked, even if the thread moves to another CPU. A forgotten
/// guard leaves the slot locked for ever: see the [module](super).
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
    slot: &'a Slot<T>,
    _raw: RawGuard<'a>,
    _not_send: NotSend,
}

// SAFETY: a shared guard only gives out `&T`, for which `T: Sync` suffices; unlocking consumes it.
unsafe impl<T: Sync> Sync for LocalGuard<'_, T> {}

impl<'a, T> LocalGuard<'a, T> {
    /// # Safety
    ///
    /// While `raw` lives, its thread may use the slot's value, and no other code may.
    #[inline(always)]
    unsafe fn new(slot: &'a Slot<T>, raw: RawGuard<'a>) -> Self {
        Self { slot, _raw: raw, _not_send: PhantomData }
    }

    /// Returns the CPU of the slot.
    #[inline]
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.slot.cpu
    }
}

impl<T> Deref for LocalGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: by the contract of `new` this thread may use the value while `raw` lives; `&self`
        // excludes `deref_mut`.
        unsafe { &*self.slot.as_ptr() }
    }
}

impl<T> DerefMut for LocalGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: by the contract of `new` this thread may use the value while `raw` lives; `&mut
        // self` excludes other references.
        unsafe { &mut *self.slot.as_mut_ptr() }
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
    slots: &'a [CachePadded<Slot<T>>],
    _not_send: NotSend,
}

// SAFETY: a shared guard only gives out `&T`, for which `T: Sync` suffices; unlocking consumes it.
unsafe impl<T: Sync> Sync for GlobalGuard<'_, T> {}

impl<'a, T> GlobalGuard<'a, T> {
    /// # Safety
    ///
    /// The calling thread has acquired the words of all `slots`, and only the guard releases them.
    unsafe fn new(slots: &'a [CachePadded<Slot<T>>]) -> Self {
        Self { slots, _not_send: PhantomData }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Returns the value of `cpu`, or `None` if it has no slot.
    #[must_use]
    pub fn get(&self, cpu: CpuId) -> Option<&T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: by the contract of `new` this thread holds the slot; `&self` excludes `get_mut`.
        Some(unsafe { &*slot.as_ptr() })
    }

    /// Returns the value of `cpu`, or `None` if it has no slot.
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        let slot = self.slots.get(cpu.index())?;
        // SAFETY: by the contract of `new` this thread holds the slot; `&mut self` excludes other
        // references.
        Some(unsafe { &mut *slot.as_mut_ptr() })
    }

    /// Iterates over all slots in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (CpuId, &T)> + ExactSizeIterator + Clone {
        // The `&self` in the closure makes the iterator `Send` only if `T` is `Sync`.
        let value = move |cpu| (cpu, self.get(cpu).expect("below the capacity"));
        (0..self.slots.len() as u32).map(CpuId::new).map(value)
    }

    /// Iterates over all slots in ascending order.
    pub fn iter_mut(
        &mut self,
    ) -> impl DoubleEndedIterator<Item = (CpuId, &mut T)> + ExactSizeIterator {
        self.slots.iter().map(|slot| {
            // SAFETY: by the contract of `new` this thread holds the slot. The mutable borrow of the
            // guard excludes every other use, and each slot is visited once.
            (slot.cpu, unsafe { &mut *slot.as_mut_ptr() })
        })
    }
}

impl<T> Drop for GlobalGuard<'_, T> {
    fn drop(&mut self) {
        for slot in self.slots {
            // SAFETY: by the contract of `new` this thread holds the word, and only this drop
            // releases it.
            drop(unsafe { RawGuard::new(slot) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for GlobalGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The word of a held slot.
///
/// It is not the id of the owner, because an exchange with a constant acquires a free word and
/// leaves a held word unchanged, and is a tenth faster than a compare-exchange.
const HELD: u64 = 1;

/// The value of a CPU and its lock. Each is alone on its cache lines (`CachePadded`).
///
/// The fields that an unlock reads share the cache line of the word that it writes.
#[derive(Debug)]
#[repr(C)]
struct Slot<T> {
    /// [`HELD`], or 0.
    word: AtomicU64,
    /// The id of the thread that holds the slot. Set after the word is acquired, and cleared before
    /// the word is released.
    owner: AtomicU64,
    parker: Parker,
    cpu: CpuId,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through guards only, and those give `&mut T` to one thread at a time
// (invariant 1 of the module), which is a move as far as `T` can tell, so `T: Send` suffices. A
// shared guard, which gives out `&T`, requires `T: Sync` itself. The rest is atomics and locks.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// Creates `count` free slots, for the CPUs from 0 on.
    fn boxed_slice(count: usize, mut init: impl FnMut(CpuId) -> T) -> Box<[CachePadded<Self>]> {
        let slot = |index| {
            let cpu = CpuId::new(index as u32);
            CachePadded::new(Self {
                word: AtomicU64::new(0),
                owner: AtomicU64::new(0),
                parker: Parker::new(),
                cpu,
                value: UnsafeCell::new(init(cpu)),
            })
        };
        (0..count).map(slot).collect()
    }

    /// Returns a pointer for a thread that holds the slot and only reads the value.
    #[inline(always)]
    fn as_ptr(&self) -> *const T {
        self.value.with(|value| value)
    }

    /// Returns a pointer for a thread that holds the slot.
    #[inline(always)]
    fn as_mut_ptr(&self) -> *mut T {
        self.value.with_mut(|value| value)
    }

    /// Returns the value without locking.
    fn get_mut(&mut self) -> &mut T {
        let value = self.as_mut_ptr();
        // SAFETY: a guard borrows the slot, so `&mut self` excludes every guard.
        unsafe { &mut *value }
    }
}

/// The lock on a slot, without access to the value; unlocks on drop.
#[derive(Debug)]
struct RawGuard<'a> {
    word: &'a AtomicU64,
    owner: &'a AtomicU64,
    parker: &'a Parker,
}

impl<'a> RawGuard<'a> {
    /// # Safety
    ///
    /// The calling thread has acquired the slot's word and stored its id as the owner. No other
    /// `RawGuard` of the slot exists, and this one stays on the calling thread.
    #[inline(always)]
    unsafe fn new<T>(slot: &'a Slot<T>) -> Self {
        Self { word: &slot.word, owner: &slot.owner, parker: &slot.parker }
    }
}

impl Drop for RawGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Ordering: Relaxed; only the calling thread looks for its own id.
        self.owner.store(0, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `try_acquire`, by which the next holder takes
        // the word. It carries the slot's value.
        self.word.store(0, order!(Release, "unlock a slot: the value"));
        self.parker.unpark_one();
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
/// std::thread::scope(|scope| {
///     scope.spawn(|| assert_eq!(lock.try_local_on(cpu).err(), Some(LockError::WouldBlock)));
/// });
/// drop(guard);
/// # Ok::<(), LockError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread holds a slot that the call needs. Only the `try_` methods return this; the
    /// other methods wait. Maps to `EAGAIN`.
    WouldBlock,
    /// The wait could last for ever, because the calling thread holds the slot itself, or holds a
    /// slot that must be locked after it. Maps to `EDEADLK`.
    ///
    /// A forgotten guard counts as held. The kernel reuses thread ids, so a later thread with the
    /// id of the exited holder gets this error too.
    Deadlock,
    /// The CPU has no slot: its index is not below the lock's `capacity`. Maps to `EINVAL`.
    NoSuchCpu(CpuId),
}

impl_error! {
    [] LockError {
        Self::WouldBlock => EAGAIN, "another thread holds the slot";
        Self::Deadlock => EDEADLK, "this thread holds the slot, or one that must be locked after it";
        Self::NoSuchCpu(cpu) => EINVAL, "no slot for {cpu}";
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;
    use std::io;

    use crate::cpu;

    /// This holds for any size of the value. The parker, which an unlock reads, is on the cache
    /// line of the word.
    #[test]
    fn inv18_slots_of_different_cpus_never_share_a_line() {
        fn check<T: Default>() {
            let slots = Slot::<T>::boxed_slice(cpu::possible_cpus(), |_| T::default());
            for slot in &slots {
                assert_eq!(std::ptr::from_ref::<Slot<T>>(slot).addr() % 128, 0);
            }
            assert_eq!(size_of::<CachePadded<Slot<T>>>() % 128, 0);
            assert!(std::mem::offset_of!(Slot<T>, parker) + size_of::<Parker>() <= 64);
        }
        check::<()>();
        check::<u8>();
        check::<[u64; 12]>();
        check::<Vec<u8>>();
    }

    /// A slot with a small value takes 128 bytes.
    #[test]
    fn a_small_value_fits_in_the_line_of_its_lock() {
        assert_eq!(size_of::<CachePadded<Slot<[u64; 9]>>>(), 128);
        assert!(size_of::<LgLock<u8>>() <= 32);
    }

    #[test]
    fn every_error_has_an_errno_and_a_message() {
        let cpu = CpuId::new(9);
        for (error, errno, message) in [
            (LockError::WouldBlock, libc::EAGAIN, "another thread holds the slot"),
            (
                LockError::Deadlock,
                libc::EDEADLK,
                "this thread holds the slot, or one that must be locked after it",
            ),
            (LockError::NoSuchCpu(cpu), libc::EINVAL, "no slot for cpu 9"),
        ] {
            assert_eq!((error.errno(), error.to_string().as_str()), (errno, message));
            assert_eq!(io::Error::from(error).raw_os_error(), Some(errno));
        }
    }
}
