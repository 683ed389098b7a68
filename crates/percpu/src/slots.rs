//! [`PerCpu`]: one value for every CPU, each on cache lines of its own.
//!
//! ```text
//!  slots -> | cpu 0: T ......| cpu 1: T ......| cpu 2: T ......|     128-byte aligned and spaced
//!             ^ current_cpu() gives the near slot; any thread may reach any slot
//! ```
//!
//! There is a slot for every number below [`Topology::capacity`](crate::Topology::capacity).
//! Offline CPUs and the holes between the numbers have slots too, because a thread without a CPU id
//! may use any of them. A slot has no lock: two threads may hold `&T` of one slot at the same time,
//! so a `T` that changes needs its own lock or atomics.
//!
//! # Invariants
//!
//! 1. `slots` has `cpu::possible()` entries. The index of every CPU id that `cpu::current_cpu` returns
//!    is below this number.
//! 2. Two slots never share a 128-byte line: a pair of 64-byte lines that the prefetcher of x86_64
//!    fetches together.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Index;

use crossbeam_utils::CachePadded;

use crate::cpu::{self, CpuId};
use crate::error::{AllocError, out_of_memory};

/// One value, alone on its cache lines.
type Slot<T> = CachePadded<T>;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(align_of::<Slot<u8>>() == 128 && size_of::<Slot<u8>>() == 128);

/// One `T` for every CPU, each on cache lines of its own: on x86_64 at least 128 bytes apart.
///
/// [`local`](Self::local) is wait-free and allocates nothing. The constructor allocates all memory:
/// the size of `T` rounded up to 128 bytes (x86_64) for each possible CPU. A 64-bit
/// [`PerCpuCounter`](crate::PerCpuCounter) takes 8 bytes per CPU instead.
///
/// A shared `PerCpu<T>` gives `&T` of one slot to every thread that asks, so it is `Sync` only if
/// `T: Send + Sync`.
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>(_: &T) {}
/// // Two threads on one CPU would share the cell.
/// shared(&offlock_percpu::PerCpu::new(|_| std::cell::Cell::new(0)));
/// ```
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>() {}
/// // A guard belongs to its thread, and a slot does not.
/// shared::<offlock_percpu::PerCpu<std::sync::MutexGuard<'static, u8>>>();
/// ```
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use offlock_percpu::PerCpu;
///
/// let hits = PerCpu::new(|_cpu| AtomicU64::new(0));
/// hits.local().fetch_add(1, Ordering::Relaxed); // atomic: the thread may migrate in between
/// let sum: u64 = hits.iter().map(|(_, hits)| hits.load(Ordering::Relaxed)).sum();
/// assert_eq!(sum, 1);
/// ```
pub struct PerCpu<T> {
    slots: Box<[Slot<T>]>,
    /// Removes the automatic `Send` and `Sync`; the impls below define both.
    _threads: PhantomData<*const ()>,
}

// SAFETY: a `PerCpu` contains values of `T` and nothing else, so sending it sends these values.
unsafe impl<T: Send> Send for PerCpu<T> {}
// SAFETY: `&PerCpu<T>` gives `&T` only. Two threads on one CPU share it, so `T: Sync`. `T: Send` is
// required too, because a value made by one thread serves every thread that runs on its CPU.
unsafe impl<T: Send + Sync> Sync for PerCpu<T> {}

impl<T> PerCpu<T> {
    /// Makes a slot for every CPU, in ascending order. `init` makes the value of each slot.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    ///
    /// # Aborts
    ///
    /// Aborts like `Box::new` if there is no memory. [`try_new`](Self::try_new) returns an error
    /// instead.
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self::try_new(init).unwrap_or_else(|_| out_of_memory::<Slot<T>>(cpu::possible()))
    }

    /// Makes the slots like [`new`](Self::new), and returns an error if there is no memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the slots. In this case `init` is not called.
    pub fn try_new(mut init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        let count = cpu::possible();
        let mut slots = Vec::new();
        slots.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        slots.extend((0..count).map(|index| CachePadded::new(init(cpu_of(index)))));
        Ok(Self { slots: slots.into_boxed_slice(), _threads: PhantomData })
    }

    /// Returns the slot of the CPU that the calling thread runs on.
    ///
    /// The answer is a hint: the thread may migrate at once, and other threads may use the slot.
    /// Wait-free.
    #[inline]
    #[must_use]
    pub fn local(&self) -> &T {
        &self.slots[cpu::current_cpu().index()] // invariant 1
    }

    /// Returns the slot of `cpu`, or `None` if there is no such CPU. Wait-free.
    #[inline]
    #[must_use]
    pub fn get(&self, cpu: CpuId) -> Option<&T> {
        self.slots.get(cpu.index()).map(|slot| &**slot)
    }

    /// Returns the slot of `cpu` for exclusive use, or `None` if there is no such CPU.
    #[inline]
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        self.slots.get_mut(cpu.index()).map(|slot| &mut **slot)
    }

    /// Returns the number of slots: at least 1, and above the index of every CPU id.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Iterates over all slots, ascending, including those of offline CPUs and of holes.
    ///
    /// This is not a snapshot: other threads may use a slot while it is visited.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (CpuId, &T)> + ExactSizeIterator + Clone {
        self.slots.iter().enumerate().map(|(index, slot)| (cpu_of(index), &**slot))
    }
}

/// Returns the slot of a CPU that is known to exist. [`PerCpu::get`] is the checked form.
///
/// # Panics
///
/// Panics if there is no such CPU: its index is not below [`PerCpu::capacity`].
impl<T> Index<CpuId> for PerCpu<T> {
    type Output = T;

    #[inline]
    fn index(&self, cpu: CpuId) -> &T {
        &self.slots[cpu.index()]
    }
}

/// Returns the CPU of a slot. There are at most 65,536 (see `cpulist::MAX_CPUS`).
fn cpu_of(index: usize) -> CpuId {
    CpuId::new(index as u32)
}

impl<T: Default> Default for PerCpu<T> {
    fn default() -> Self {
        Self::new(|_| T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for PerCpu<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(cpu, slot)| (cpu.get(), slot))).finish()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests;
