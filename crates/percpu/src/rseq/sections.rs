//! What a section is on every architecture: its parameters, its frame and its outcome. The assembly of an
//! architecture, in a file of its own, is `impl Sections`.
//!
//! All sections are one frame around a few instructions of their own. In words, for a word with a gate:
//!
//! ```text
//!      rseq_cs = descriptor                arms the section for this thread
//!  start:
//!      cpu = area.cpu_id                   not below `limit`: refused, wrong CPU
//!      *gate != open?                      refused, closed
//!      *(base + cpu * STRIDE) += delta     <- commit, the one store, the last instruction
//!  end:
//!      rseq_cs = 0                         disarms it: every way out passes here
//!
//!  abort:  the kernel jumps here if the thread was preempted, migrated, took a signal or was hit
//!          by `heavy_rseq` between `start` and `end`; arms the section again and starts over
//! ```
//!
//! The numeric labels:
//!
//! | 77 | descriptor, in `__rseq_cs` | 22 | start | 44 | end |
//! |---|---|---|---|---|---|
//! | 88 | abort, in `__rseq_failure` | 33 | arm | 55, 66, 99 | refused: wrong CPU, closed, no room |
//!
//! Traps:
//!
//! - The assembler reads labels made of the digits 0 and 1 as binary numbers.
//! - Scratch registers are `out` and not `lateout`, because an abort needs the inputs again.
//! - The abort address must follow the signature that libc registered.
//! - The descriptor contains addresses, so it must be writable for the loader of a
//!   position-independent program.
//! - A jump over the commit of another section would leave instructions behind a commit: an abort there
//!   would commit twice. So the removals on the CPU of a block and on other CPUs are two sections.

use super::Refused;
use crate::rseq::cells::Cell;

/// The sections of this process, by their parameters.
#[derive(Clone, Copy, Debug)]
pub struct Sections {
    /// The distance of a thread's rseq area from its thread pointer.
    pub(super) area: isize,
    /// The number of possible CPUs.
    pub(super) limit: u32,
}

/// Returns the refusal that the register of the CPU contains at the end of a section, if any.
#[inline(always)]
pub(super) fn outcome(cpu: u32) -> Result<(), Refused> {
    if cpu.cast_signed() >= 0 { Ok(()) } else { Err(refusal(cpu)) }
}

/// Out of line, because the compiler would compute it even for a section that committed.
#[cold]
#[inline(never)]
fn refusal(cpu: u32) -> Refused {
    match cpu.cast_signed() {
        -1 => Refused::WrongCpu,
        -2 => Refused::Closed,
        _ => Refused::NoRoom,
    }
}

/// How a cell is copied: words of 16 and of 8 bytes.
pub(super) struct Copy<T>(T);

impl<T> Copy<T> {
    pub(super) const STRIDE: usize = size_of::<Cell<T>>();
    pub(super) const IN_16: usize = Self::STRIDE / 16;
    pub(super) const IN_8: usize = Self::STRIDE % 16 / 8;
    /// A value without a drop is not copied out.
    pub(super) const OUT_16: usize = if std::mem::needs_drop::<T>() { Self::IN_16 } else { 0 };
    pub(super) const OUT_8: usize = if std::mem::needs_drop::<T>() { Self::IN_8 } else { 0 };
}
