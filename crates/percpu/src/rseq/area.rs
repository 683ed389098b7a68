//! The area that libc registers for every thread, and the CPU id in it.
//!
//! glibc 2.35 and later place a `struct rseq` at a fixed distance from the thread pointer, the same
//! in every thread, and export that distance. The areas of two threads never overlap. The kernel
//! updates the ids below whenever it returns to the thread on another CPU:
//!
//! ```text
//!  thread pointer + __rseq_offset -> | 0: cpu_id_start | 4: cpu_id | 8: rseq_cs | 16: flags | ...
//!                                      <------- __rseq_size bytes are in use; 0: none ------->
//! ```
//!
//! This module stores to `rseq_cs` and to no other field. No module registers an area: a thread can
//! have one, and libc has registered it.
//!
//! # Invariant
//!
//! `ID_LIMIT` is 0 until `AREA` is written. It stays 0 if libc registered no area.

use offlock_sync::CpuId;
use offlock_sync::native::atomic::{AtomicIsize, AtomicU32, Ordering};

use super::arch;

/// End of the field `rseq_cs`, in bytes from the start of the area (ABI: `linux/rseq.h`).
const RSEQ_CS_END: u32 = 16;

/// The distance in bytes from the thread pointer to the calling thread's area.
static AREA: AtomicIsize = AtomicIsize::new(0);
/// The number of possible CPUs, or 0 if there is no area to read. The invariant.
static ID_LIMIT: AtomicU32 = AtomicU32::new(0);

/// Returns the offset of the area that libc registered, or the reason why there is none.
pub(super) fn find() -> Result<isize, &'static str> {
    let (offset, size) = arch::libc_symbols();
    // SAFETY: null, or the address of libc's `const ptrdiff_t`, written before `main` and never
    // after.
    let offset = unsafe { offset.as_ref() };
    // SAFETY: null, or the address of libc's `const unsigned int`, written before `main` and never
    // after.
    let size = unsafe { size.as_ref() };
    let (Some(&offset), Some(&size)) = (offset, size) else {
        return Err("not offered by libc: glibc before 2.35, or another libc");
    };
    match size {
        0 => Err("not registered by libc: switched off, or refused by the kernel"),
        1..RSEQ_CS_END => Err("the area that libc registered is too small"),
        _ => Ok(offset),
    }
}

/// Lets [`current`] read the area from now on, if libc registered one.
///
/// `possible` is the number of possible CPUs.
pub(crate) fn start_ids(possible: u32) -> Result<(), &'static str> {
    // Ordering: Relaxed; the store of `ID_LIMIT` publishes it.
    AREA.store(find()?, Ordering::Relaxed);
    // Ordering: Release pairs with the Acquire load in `current`; it carries `AREA`. No test checks
    // the pair: the tests run on x86-64, which orders it anyway, and a model has no area.
    ID_LIMIT.store(possible, Ordering::Release);
    Ok(())
}

/// Returns the result of [`find`], for a thread that knows that `start_ids` has succeeded.
#[inline(always)]
pub(super) fn offset() -> isize {
    // Ordering: Relaxed; the caller has acquired it.
    AREA.load(Ordering::Relaxed)
}

/// Returns the id in the calling thread's rseq area, if there is one.
///
/// One branch: a limit of 0 refuses every id, so the id is read even before `start_ids`.
#[inline(always)]
pub(crate) fn current() -> Option<CpuId> {
    // Ordering: Acquire pairs with the Release in `start_ids`; it carries `AREA`.
    let limit = ID_LIMIT.load(Ordering::Acquire);
    // Ordering: Relaxed; ordered by the load of `ID_LIMIT`.
    let area = AREA.load(Ordering::Relaxed);
    // SAFETY: a result of `find`, or still 0. In the second case `ID_LIMIT` was read as 0 (the
    // invariant), so `below` discards the id.
    below(unsafe { arch::cpu_id(area) }, limit)
}

/// Returns `id` if it is below `limit`. The ids -1 and -2 (as `u32`) never are.
#[inline(always)]
fn below(id: u32, limit: u32) -> Option<CpuId> {
    (id < limit).then_some(CpuId::new(id))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn inv01_any_rseq_id_is_a_slot_below_the_limit_or_none(
            id in prop_oneof![Just(-1), Just(-2), 0..200, any::<i32>()],
            limit in prop_oneof![1_u32..200, 1_u32..=65_536],
        ) {
            let want = (0..limit as i32).contains(&id).then_some(id as u32);
            prop_assert_eq!(below(id as u32, limit).map(CpuId::get), want);
        }
    }

    #[test]
    fn ids_are_read_exactly_if_they_are_in_use() {
        assert_eq!(
            current().is_some(),
            crate::cpu::rseq_ids().is_ok(),
            "{:?}",
            crate::cpu::rseq_ids()
        );
    }

    /// The area is at the same distance from the thread pointer in every thread.
    #[test]
    fn area_is_near_the_thread_pointer_in_every_thread() {
        let Ok(area) = find() else { return assert!(crate::cpu::rseq_ids().is_err()) };
        assert_eq!(area % 4, 0);
        // SAFETY: `area` is a result of `find`.
        let id = move || unsafe { arch::cpu_id(area) };
        for id in [id(), std::thread::spawn(id).join().unwrap()] {
            assert!((id as usize) < crate::possible_cpus(), "id {}", id as i32);
        }
    }
}
