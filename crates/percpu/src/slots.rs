//! [`PerCpu`]: one value for every CPU, each on cache lines of its own.
//!
//! ```text
//!  slots -> | cpu 0: T ......| cpu 1: T ......| cpu 2: T ......|     128-byte aligned and spaced
//!             ^ current_cpu() gives the near slot; any thread may reach any slot
//! ```
//!
//! There is a slot for every number below [`possible_cpus`](crate::possible_cpus).
//! Offline CPUs and the holes between the numbers have slots too, because a thread without a CPU id
//! may use any of them. A slot has no lock: two threads may hold `&T` of one slot at the same time,
//! so a `T` that changes needs its own lock or atomics.
//!
//! # Invariants
//!
//! 1. `slots` has `cpu::possible_cpus()` entries. The index of every CPU id that `cpu::current_cpu` returns
//!    is below this number.
//! 2. Two slots never share a 128-byte line: a pair of 64-byte lines that the prefetcher of x86_64
//!    fetches together.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Index;

use crossbeam_utils::CachePadded;
use offlock_sync::alloc::{AllocError, out_of_memory};

use crate::cpu::{self, CpuId};

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
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self::try_new(init).unwrap_or_else(|_| out_of_memory::<Slot<T>>(cpu::possible_cpus()))
    }

    /// Makes the slots like [`new`](Self::new), for a structure that reports a lack of memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the slots. In this case `init` is not called.
    pub fn try_new(mut init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        let count = cpu::possible_cpus();
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

/// Returns the slot of a CPU. Wait-free.
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

/// Returns the CPU of a slot. There are at most 65,536 (`MAX_CPUS` in `cpu.rs`).
fn cpu_of(index: usize) -> CpuId {
    CpuId::new(index as u32)
}

impl<T: fmt::Debug> fmt::Debug for PerCpu<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(cpu, slot)| (cpu.get(), slot))).finish()
    }
}
