//! One value for every CPU, each on cache lines of its own.
//!
//! ```text
//!  slots -> | cpu 0: T ......| cpu 1: T ......| cpu 2: T ......|     128-byte aligned and spaced
//!             ^ current_cpu() says which one is near; any thread may reach any slot
//! ```
//!
//! There is a slot for every number below [`Topology::capacity`](crate::Topology::capacity): also
//! for CPUs that are offline now, and for the holes between the numbers, since a thread without a
//! CPU id is dealt any of them. Nothing here excludes anybody: two threads may hold `&T` of one
//! slot at the same time, so a `T` that changes brings its own lock or atomics.
//!
//! # Invariants
//!
//! 1. `slots` has `cpu::possible()` entries, which is above the index of every CPU id that
//!    `cpu::current` gives.
//! 2. Two slots never share a 128-byte line (a pair of 64-byte lines, which the prefetcher of
//!    x86_64 fetches together).

use std::fmt;
use std::io;
use std::iter::{Enumerate, FusedIterator};
use std::marker::PhantomData;
use std::ops::Index;
use std::slice;
use std::vec;

use crossbeam_utils::CachePadded;

use crate::cpu::CpuId;
use crate::error::{AllocError, out_of_memory};
use crate::fence;
use crate::sync::cpu;
use crate::topology::online;

/// One value, alone on its cache lines.
type Slot<T> = CachePadded<T>;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(align_of::<Slot<u8>>() == 128 && size_of::<Slot<u8>>() == 128);

/// One `T` for every CPU, each on its own cache lines: on x86_64 at least 128 bytes apart.
///
/// [`local`](Self::local) is wait-free and allocates nothing. Memory is allocated once, by the
/// constructor: the size of `T` rounded up to 128 bytes (x86_64) for each possible CPU. For one 64-bit
/// count, [`PerCpuCounter`](crate::PerCpuCounter) takes 8 bytes per CPU instead.
///
/// A `PerCpu<T>` that threads share gives `&T` of the same slot to all of them, so it is `Sync`
/// only if `T: Send + Sync`.
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>(_: &T) {}
/// // Two threads on one CPU would have the same cell.
/// shared(&percpu::PerCpu::new(|_| std::cell::Cell::new(0)));
/// ```
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>() {}
/// // A guard is of its thread, and a slot is not.
/// shared::<percpu::PerCpu<std::sync::MutexGuard<'static, u8>>>();
/// ```
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use percpu::PerCpu;
///
/// let hits = PerCpu::new(|_cpu| AtomicU64::new(0));
/// hits.local().fetch_add(1, Ordering::Relaxed); // an atomic: we may be moved in between
/// let sum: u64 = hits.iter().map(|(_, hits)| hits.load(Ordering::Relaxed)).sum();
/// assert_eq!(sum, 1);
/// ```
pub struct PerCpu<T> {
    slots: Box<[Slot<T>]>,
    /// Which threads may have it is said below.
    _threads: PhantomData<*const ()>,
}

// SAFETY: the values move with it, and nothing else is in it.
unsafe impl<T: Send> Send for PerCpu<T> {}
// SAFETY: all that `&PerCpu<T>` gives is `&T`. Two threads on one CPU share it, so `T: Sync`; and a
// value made on one thread is used, as the slot of a CPU, by whichever thread comes there, so
// `T: Send`, although nothing is moved.
unsafe impl<T: Send + Sync> Sync for PerCpu<T> {}

impl<T> PerCpu<T> {
    /// Makes a slot for every CPU, in ascending order, `init` giving what is in it.
    ///
    /// If `init` panics, the values made so far are dropped and the panic goes on.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory; [`try_new`](Self::try_new) returns that.
    pub fn new(init: impl FnMut(CpuId) -> T) -> Self {
        Self::try_new(init).unwrap_or_else(|_| out_of_memory::<Slot<T>>(cpu::possible()))
    }

    /// Makes a slot for every CPU, in ascending order, `init` giving what is in it.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the slots; `init` was not called then.
    pub fn try_new(mut init: impl FnMut(CpuId) -> T) -> Result<Self, AllocError> {
        let count = cpu::possible();
        let mut slots = Vec::new();
        slots.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        slots.extend((0..count).map(|index| CachePadded::new(init(id(index)))));
        Ok(Self { slots: slots.into_boxed_slice(), _threads: PhantomData })
    }

    /// The slot of the CPU that the calling thread is on.
    ///
    /// A hint: the thread may be moved at once, and others may be using the slot. Wait-free.
    #[inline]
    #[must_use]
    pub fn local(&self) -> &T {
        &self.slots[cpu::current().index()] // invariant 1
    }

    /// The slot of `cpu`, or `None` if there is no such CPU. Wait-free.
    #[inline]
    #[must_use]
    pub fn get(&self, cpu: CpuId) -> Option<&T> {
        self.slots.get(cpu.index()).map(|slot| &**slot)
    }

    /// The slot of `cpu` for the only owner, or `None` if there is no such CPU.
    #[inline]
    #[must_use]
    pub fn get_mut(&mut self, cpu: CpuId) -> Option<&mut T> {
        self.slots.get_mut(cpu.index()).map(|slot| &mut **slot)
    }

    /// How many slots there are: at least 1, and above the index of every CPU id.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// All slots, ascending; those of offline CPUs and of holes too.
    ///
    /// Not a snapshot: others may use a slot while it is visited.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, T> {
        Iter(self.slots.iter().enumerate())
    }

    /// All slots, ascending, for the only owner.
    pub fn iter_mut(&mut self) -> IterMut<'_, T> {
        IterMut(self.slots.iter_mut().enumerate())
    }

    /// Folds `fold` over the slots of CPUs that are not online now, ascending.
    ///
    /// What such a slot holds is used by nobody near it, so it is worth moving to a slot that is.
    /// It may still be in use: its CPU may come back at any moment, and a thread without a CPU id
    /// may have been dealt the slot. So `fold` gets `&T`, and must move the content as it would
    /// from any slot.
    ///
    /// Reads `/sys`, so it allocates and may block. A panic of `fold` passes through.
    ///
    /// # Errors
    ///
    /// If `/sys/devices/system/cpu/online` cannot be read; no slot was visited.
    pub fn fold_offline<A>(
        &self,
        init: A,
        mut fold: impl FnMut(A, CpuId, &T) -> A,
    ) -> io::Result<A> {
        let online = online()?;
        let offline = self.iter().filter(|&(cpu, _)| !online.contains(cpu));
        Ok(offline.fold(init, |acc, (cpu, slot)| fold(acc, cpu, slot)))
    }

    /// Waits until every rseq section of this process that ran on `cpu` is over or has started
    /// again.
    ///
    /// Whatever the caller stored before is seen by every section that commits afterwards. Where
    /// there are no sections (see [`backend`](crate::backend)) it is [`fence::heavy`], which it
    /// costs in any case. A thread that uses atomics is not held up and not waited for.
    pub fn revoke(&self, cpu: CpuId) {
        // One command reaches every CPU of the process; there is none yet for a single one.
        let _ = cpu;
        fence::heavy_rseq();
    }
}

/// The slot of a CPU that is known to exist: see [`PerCpu::get`].
///
/// # Panics
///
/// If there is no such CPU: its index is not below [`PerCpu::capacity`].
impl<T> Index<CpuId> for PerCpu<T> {
    type Output = T;

    #[inline]
    fn index(&self, cpu: CpuId) -> &T {
        &self.slots[cpu.index()]
    }
}

/// The CPU of a slot. There are at most 65,536 (see `cpulist::MAX_CPUS`).
fn id(index: usize) -> CpuId {
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

/// Makes the three iterators: each walks the slots, ascending, and knows how many are left.
macro_rules! iterator {
    ($(#[$meta:meta])* $name:ident $(<$lifetime:lifetime>)?, $inner:ty, $item:ty, $value:expr) => {
        $(#[$meta])*
        pub struct $name<$($lifetime,)? T>(Enumerate<$inner>);

        impl<$($lifetime,)? T> Iterator for $name<$($lifetime,)? T> {
            type Item = (CpuId, $item);

            #[inline]
            fn next(&mut self) -> Option<Self::Item> {
                self.0.next().map(|(index, slot)| (id(index), $value(slot)))
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                self.0.size_hint()
            }
        }

        impl<$($lifetime,)? T> DoubleEndedIterator for $name<$($lifetime,)? T> {
            #[inline]
            fn next_back(&mut self) -> Option<Self::Item> {
                self.0.next_back().map(|(index, slot)| (id(index), $value(slot)))
            }
        }

        impl<$($lifetime,)? T> ExactSizeIterator for $name<$($lifetime,)? T> {}
        impl<$($lifetime,)? T> FusedIterator for $name<$($lifetime,)? T> {}

        impl<$($lifetime,)? T> fmt::Debug for $name<$($lifetime,)? T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("left", &self.0.len()).finish()
            }
        }
    };
}

iterator! {
    /// The slots of a [`PerCpu`], a moving target: see [`PerCpu::iter`].
    Iter<'a>, slice::Iter<'a, Slot<T>>, &'a T, |slot: &'a Slot<T>| &**slot
}
impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

iterator! {
    /// The slots of a [`PerCpu`] that nobody else can reach: see [`PerCpu::iter_mut`].
    IterMut<'a>, slice::IterMut<'a, Slot<T>>, &'a mut T, |slot: &'a mut Slot<T>| &mut **slot
}
iterator! {
    /// The values of a [`PerCpu`] that is taken apart.
    IntoIter, vec::IntoIter<Slot<T>>, T, CachePadded::into_inner
}

impl<'a, T> IntoIterator for &'a PerCpu<T> {
    type Item = (CpuId, &'a T);
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut PerCpu<T> {
    type Item = (CpuId, &'a mut T);
    type IntoIter = IterMut<'a, T>;

    fn into_iter(self) -> IterMut<'a, T> {
        self.iter_mut()
    }
}

impl<T> IntoIterator for PerCpu<T> {
    type Item = (CpuId, T);
    type IntoIter = IntoIter<T>;

    fn into_iter(self) -> IntoIter<T> {
        IntoIter(self.slots.into_vec().into_iter().enumerate())
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
