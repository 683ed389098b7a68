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

/// Returns the CPU of a slot. There are at most 65,536 (`MAX_CPUS` in `cpu.rs`).
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
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::rc::Rc;

    use proptest::prelude::*;

    use crate::possible_cpus;

    /// Checks the addresses of the slots against invariant 2.
    fn check_spacing<T: Default>() {
        let slots = PerCpu::<T>::default();
        let at: Vec<usize> =
            slots.iter().map(|(_, slot)| std::ptr::from_ref(slot).addr()).collect();
        assert_eq!(at.len(), slots.capacity());
        assert!(at.iter().all(|at| at % 128 == 0), "{at:?}");
        let apart = size_of::<T>().max(1).next_multiple_of(128);
        assert!(at.windows(2).all(|pair| pair[1] - pair[0] == apart), "{at:?}");
    }

    #[test]
    fn inv18_slots_of_any_size_are_on_lines_of_their_own() {
        check_spacing::<u8>();
        check_spacing::<[u64; 16]>();
        check_spacing::<[u64; 17]>();
        for (size, align) in [
            (size_of::<Slot<u8>>(), align_of::<Slot<u8>>()),
            (size_of::<Slot<[u8; 128]>>(), align_of::<Slot<[u8; 128]>>()),
            (size_of::<Slot<[u8; 129]>>(), align_of::<Slot<[u8; 129]>>()),
        ] {
            assert_eq!((size % 128, align), (0, 128));
        }
    }

    proptest! {
        /// Two values have no line in common, wherever in a line they start.
        #[test]
        fn inv18_no_line_holds_two_values(count in 1_usize..40) {
            let slots: Vec<Slot<[u8; 72]>> = (0..count).map(|_| CachePadded::new([0; 72])).collect();
            let lines = slots.iter().map(|slot| {
                let at = std::ptr::from_ref::<[u8; 72]>(slot).addr();
                (at / 128, (at + size_of_val(&**slot) - 1) / 128)
            });
            let lines: Vec<_> = lines.collect();
            prop_assert!(lines.windows(2).all(|pair| pair[0].1 < pair[1].0), "{lines:?}");
        }
    }

    #[test]
    fn every_cpu_has_a_slot_and_no_slot_is_beyond_capacity() {
        let mut slots = PerCpu::new(CpuId::get);
        assert_eq!(slots.capacity(), possible_cpus());
        assert!((0..slots.capacity() as u32).all(|cpu| slots.get(CpuId::new(cpu)) == Some(&cpu)));
        assert!((*slots.local() as usize) < slots.capacity());
        let beyond = CpuId::new(slots.capacity() as u32);
        assert_eq!(slots.get(beyond), None);
        assert_eq!(slots.get_mut(beyond), None);
        assert_eq!(slots.get(CpuId::new(u32::MAX)), None);

        *slots.get_mut(CpuId::new(0)).unwrap() = 5;
        let want = |cpu: CpuId| if cpu.get() == 0 { 5 } else { cpu.get() };
        assert!(slots.iter().all(|(cpu, &slot)| slot == want(cpu)));
        assert_eq!(slots.iter().len(), slots.capacity());
        assert_eq!((&slots[CpuId::new(0)], slots.iter().clone().count()), (&5, slots.capacity()));
        let backwards: Vec<CpuId> = slots.iter().rev().map(|(cpu, _)| cpu).collect();
        assert!(backwards.is_sorted_by(|a, b| a > b) && backwards.len() == slots.capacity());
        assert!(format!("{slots:?}").starts_with("{0: 5"));
    }

    #[test]
    fn panic_of_init_drops_the_values_made_so_far() {
        let alive = Rc::new(());
        let last = possible_cpus() - 1;
        let made = catch_unwind(AssertUnwindSafe(|| {
            PerCpu::new(|cpu| {
                assert_ne!(cpu.index(), last, "the last one fails");
                Rc::clone(&alive)
            })
        }));
        assert!(made.is_err());
        assert_eq!(Rc::strong_count(&alive), 1);
    }

    /// `Send`, `Sync` and covariance.
    #[expect(dead_code, reason = "compiling is the test")]
    mod marker {
        use super::*;

        fn send<T: Send>() {}
        fn sync<T: Sync>() {}

        fn threads() {
            send::<PerCpu<Cell<u8>>>();
            sync::<PerCpu<offlock_sync::atomic::AtomicU64>>();
        }

        fn covariant<'a>(slots: PerCpu<&'static u8>) -> PerCpu<&'a u8> {
            slots
        }
    }
}
