//! The restartable-sequences area that libc registers for every thread (x86_64).
//!
//! glibc 2.35 and later place a `struct rseq` at a fixed distance from the thread pointer, the
//! same in every thread, and export that distance. Two threads' areas never overlap; the kernel
//! writes the fields below whenever it returns to the thread on another CPU:
//!
//! ```text
//!  thread pointer + __rseq_offset -> | 0: cpu_id_start | 4: cpu_id | 8: rseq_cs | 16: flags | ...
//!                                      <------- __rseq_size bytes are in use; 0: none ------->
//! ```
//!
//! We only read. We never register an area: a thread can have one, and it is libc's.

use std::arch::asm;

/// End of the field `cpu_id`, in bytes from the start of the area (ABI: `linux/rseq.h`).
const CPU_ID_END: u32 = 8;

/// The distance in bytes from the thread pointer to the calling thread's area.
///
/// Made by [`find`], which has checked that the area holds `cpu_id`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offset(isize);

/// Why there is no usable area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// libc does not export the symbols: glibc before 2.35, or another libc.
    NoSymbols,
    /// libc has them, and says that it registered no area, or one too small: this many bytes.
    Size(u32),
}

impl Offset {
    /// The offset as a number, to be kept in an atomic.
    pub(crate) fn to_raw(self) -> isize {
        self.0
    }

    /// Makes an offset out of what [`Offset::to_raw`] gave.
    ///
    /// # Safety
    ///
    /// `raw` came from `to_raw` in this process; or it is 0, and only [`cpu_id`] is called with it,
    /// whose answer is discarded: there the thread control block begins, with a pointer to itself
    /// (x86_64 ABI), so the bytes can be read.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(crate) unsafe fn from_raw(raw: isize) -> Self {
        Self(raw)
    }
}

/// Asks libc where the area is.
pub(crate) fn find() -> Result<Offset, Absent> {
    let offset: *const isize;
    let size: *const u32;
    // SAFETY: reads two entries of the global offset table, which the loader filled before any
    // code of ours ran. The symbols are weak: an entry is null where libc lacks the symbol.
    unsafe {
        asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, readonly, preserves_flags),
        );
    }
    // SAFETY: null, or libc's `const unsigned int`, written before `main` and never after.
    let size = unsafe { size.as_ref() };
    // SAFETY: null, or libc's `const ptrdiff_t`, likewise.
    let offset = unsafe { offset.as_ref() };
    let (Some(&offset), Some(&size)) = (offset, size) else { return Err(Absent::NoSymbols) };
    if size < CPU_ID_END {
        return Err(Absent::Size(size));
    }
    Ok(Offset(offset))
}

/// The id that the kernel keeps for the calling thread.
///
/// Above `i32::MAX` where the thread has none: -1 (never registered) and -2 (refused), as `u32`.
#[cfg(any(test, not(offlock_virtual_cpu)))]
#[inline(always)]
pub(crate) fn cpu_id(area: Offset) -> u32 {
    let id: u32;
    // SAFETY: `find` made the offset and saw that the area reaches past `cpu_id`; libc keeps an
    // area at this distance in the static TLS block of every thread, registered or not. Or it is 0,
    // which may be read: see `from_raw`. Not `pure`: the kernel may change the field between any
    // two instructions.
    unsafe {
        asm!(
            "mov {id:e}, dword ptr fs:[{area} + 4]",
            id = lateout(reg) id,
            area = in(reg) area.0,
            options(nostack, readonly, preserves_flags),
        );
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_area_lies_near_the_thread_pointer_in_every_thread() {
        let Ok(area) = find() else {
            return assert_ne!(crate::backend().rseq(), crate::RseqState::InUse);
        };
        assert_eq!(area.0 % 4, 0);
        let here = cpu_id(area);
        let there = std::thread::spawn(move || cpu_id(area)).join().unwrap();
        for id in [here, there] {
            assert!((id as usize) < crate::topology().capacity(), "id {}", id as i32);
        }
    }
}
