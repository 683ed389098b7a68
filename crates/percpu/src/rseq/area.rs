//! The restartable-sequences area that libc registers for every thread (x86_64).
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
//! This module only reads the area; the sections store to `rseq_cs`. No module registers an area: a
//! thread can have one, and libc has registered it.

use std::arch::asm;

/// End of the field `rseq_cs`, in bytes from the start of the area (ABI: `linux/rseq.h`).
const RSEQ_CS_END: u32 = 16;

/// The distance in bytes from the thread pointer to the calling thread's area.
///
/// Made by [`find`], which checks that the area contains `cpu_id` and `rseq_cs`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offset(isize);

impl Offset {
    /// Returns the offset as a number, for storage in an atomic.
    pub(crate) fn to_raw(self) -> isize {
        self.0
    }

    /// Makes an offset of a result of [`Offset::to_raw`].
    ///
    /// # Safety
    ///
    /// `raw` is a result of `to_raw` in this process. Or `raw` is 0, the offset is passed to
    /// [`cpu_id`] only, and the answer is discarded. The thread control block begins at 0, with a
    /// pointer to itself (x86_64 ABI), so these bytes can be read.
    #[cfg(any(test, not(offlock_virtual_cpu)))]
    #[inline(always)]
    pub(crate) unsafe fn from_raw(raw: isize) -> Self {
        Self(raw)
    }
}

/// Returns the offset of the area that libc registered, or the reason why there is none.
pub(crate) fn find() -> Result<Offset, &'static str> {
    let offset: *const isize;
    let size: *const u32;
    // SAFETY: reads two entries of the global offset table, which the loader filled before any code
    // of this crate ran. The symbols are weak: an entry is null if libc lacks the symbol.
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
    // SAFETY: null, or the address of libc's `const unsigned int`, written before `main` and never
    // after.
    let size = unsafe { size.as_ref() };
    // SAFETY: null, or the address of libc's `const ptrdiff_t`, written before `main` and never
    // after.
    let offset = unsafe { offset.as_ref() };
    let (Some(&offset), Some(&size)) = (offset, size) else {
        return Err("not offered by libc: glibc before 2.35, or another libc");
    };
    match size {
        0 => Err("not registered by libc: switched off, or refused by the kernel"),
        1..RSEQ_CS_END => Err("the area that libc registered is too small"),
        _ => Ok(Offset(offset)),
    }
}

/// Returns the CPU id that the kernel keeps for the calling thread.
///
/// The id is above `i32::MAX` if the thread has none: -1 (never registered) or -2 (refused), as
/// `u32`.
#[cfg(any(test, not(offlock_virtual_cpu)))]
#[inline(always)]
pub(crate) fn cpu_id(area: Offset) -> u32 {
    let id: u32;
    // SAFETY: either `find` made the offset and checked that the area contains `cpu_id`. libc keeps
    // an area at this distance in the static TLS block of every thread, registered or not. Or the
    // offset is 0, where the thread control block can be read: see `from_raw`. Not `pure`: the
    // kernel may change the field between any two instructions.
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
mod tests;
