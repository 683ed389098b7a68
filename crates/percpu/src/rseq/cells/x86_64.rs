//! The sections in x86_64 assembly. The frame, its labels and its traps are those of
//! `rseq::x86_64`; each section ends in its one store.
//!
//! The removals on the CPU of the block and on other CPUs are two sections, because a jump over the
//! commit of the other would leave instructions behind a commit: an abort there would commit twice.

use super::{Block, Cell, FREE, Head, Refused, SHARD};
use crate::cpu::possible_cpus;
use crate::rseq::{area, state};

const _: () = assert!(SHARD == 1 << 7, "the sections shift by 7");

/// The sections of this process: the offset of the rseq area, and the number of possible CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Sections {
    area: isize,
    limit: u32,
}

/// One section. `$body` ends in its one store. Evaluates to 0, or to the number of a refusal.
macro_rules! section {
    ($sections:expr, [$($body:literal),+ $(,)?], $($operands:tt)*) => {{
        let code: u64;
        std::arch::asm!(
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "77:",
            ".long 0, 0", // version, flags
            ".quad 22f, 44f - 22f, 88f",
            ".popsection",
            "33:",
            "lea {t}, [rip + 77b]",
            "mov qword ptr fs:[{area} + 8], {t}",
            "22:",
            "mov {t:e}, dword ptr fs:[{area} + 4]",
            $($body,)+
            "44:",
            "mov qword ptr fs:[{area} + 8], 0",
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d", // disassembles as ud1 with the signature as its operand
            ".long 0x53053053",
            "88:",
            "jmp 33b",
            "55:",
            "mov {code:e}, 1",
            "jmp 44b",
            "66:",
            "mov {code:e}, 2",
            "jmp 44b",
            "99:",
            "mov {code:e}, 3",
            "jmp 44b",
            ".popsection",
            area = in(reg) $sections.area,
            t = out(reg) _,
            code = inout(reg) 0_u64 => code,
            $($operands)*
            options(nostack),
        );
        code
    }};
}

#[inline(always)]
fn outcome(code: u64) -> Result<(), Refused> {
    match code {
        0 => Ok(()),
        1 => Err(Refused::OtherCpu),
        2 => Err(Refused::Closed),
        _ => Err(Refused::NoRoom),
    }
}

/// How a cell is copied: words of 16 and of 8 bytes.
struct Copy<T>(T);

impl<T> Copy<T> {
    const STRIDE: usize = size_of::<Cell<T>>();
    const IN_16: usize = Self::STRIDE / 16;
    const IN_8: usize = Self::STRIDE % 16 / 8;
    /// A value without a drop is not copied out.
    const OUT_16: usize = if std::mem::needs_drop::<T>() { Self::IN_16 } else { 0 };
    const OUT_8: usize = if std::mem::needs_drop::<T>() { Self::IN_8 } else { 0 };
}

impl Sections {
    /// Returns the sections, if they run in this process.
    pub fn find() -> Option<Self> {
        state().ok()?;
        Some(Self { area: area::offset(), limit: possible_cpus() as u32 })
    }

    /// Copies the value at `source` into a free cell of this CPU's current block,
    /// and returns the block and the cell. Refused if the list is closed or the block seems full.
    ///
    /// # Safety
    ///
    /// `head.shards` are the shards of all possible CPUs, and a current block is null or a block of
    /// its CPU with cells of `T`. They live during the call. If the result is not an error, the
    /// value has moved.
    #[inline(always)]
    pub unsafe fn insert<T>(
        self,
        head: *const Head,
        source: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused> {
        let (block, index): (*const Block, u64);
        // SAFETY: the section stores to `rseq_cs` in this thread's area, whose offset and size were
        // checked. It reads `head` and the shard of a CPU below `limit`, and writes a free cell of
        // the current block and its first two words, all alive by the contract of this function.
        // Only sections of this CPU write these, so the 16-byte store needs to be atomic only
        // towards an abort.
        let code = unsafe {
            section!(self, [
                    "cmp {t:e}, {limit:e}",
                    "jae 55f",
                    "cmp qword ptr [{head} + 8], 0",
                    "jne 66f",
                    "shl {t}, 7",
                    "add {t}, qword ptr [{head} + 16]",
                    "mov {blk}, qword ptr [{t}]",
                    "test {blk}, {blk}",
                    "jz 99f",
                    "mov {h}, qword ptr [{blk}]",
                    "mov {d}, qword ptr [{blk} + 16]",
                    "xor {d}, {h}",
                    "cmp {d}, -1",
                    "je 99f",
                    "not {d}",
                    "tzcnt {i}, {d}",
                    "imul {d}, {i}, {stride}",
                    "lea {d}, [{blk} + {d} + 384]",
                    "mov {s}, {src}",
                    ".rept {n16}",
                    "movups {x}, xmmword ptr [{s}]",
                    "movups xmmword ptr [{d}], {x}",
                    "add {s}, 16",
                    "add {d}, 16",
                    ".endr",
                    ".rept {n8}",
                    "mov {s}, qword ptr [{s}]",
                    "mov qword ptr [{d}], {s}",
                    ".endr",
                    "btc {h}, {i}",
                    "mov {t}, qword ptr [{blk} + 8]",
                    "inc {t}",
                    "movq {x}, {h}",
                    "movq {y}, {t}",
                    "punpcklqdq {x}, {y}",
                    "movdqa xmmword ptr [{blk}], {x}",
                ],
                limit = in(reg) self.limit,
                head = in(reg) head,
                src = in(reg) source,
                blk = out(reg) block,
                i = out(reg) index,
                h = out(reg) _,
                d = out(reg) _,
                s = out(reg) _,
                x = out(xmm_reg) _,
                y = out(xmm_reg) _,
                stride = const Copy::<T>::STRIDE,
                n16 = const Copy::<T>::IN_16,
                n8 = const Copy::<T>::IN_8,)
        };
        outcome(code).map(|()| (block, index as u32))
    }

    /// Learns which cells of a block were freed through `remote`, counts them as misses, and makes
    /// the block the current one. Refused on another CPU than that of the block.
    ///
    /// # Safety
    ///
    /// The block and its shard live during the call, and no other block of this CPU has other types
    /// of cells in that shard.
    pub unsafe fn refill(self, block: *const Block) -> Result<(), Refused> {
        // SAFETY: the area is that of `insert`. The section reads and writes the header of the block,
        // and writes the first word of its shard, which are alive.
        let code = unsafe {
            section!(self, [
                    "cmp {t:e}, dword ptr [{blk} + 56]",
                    "jne 55f",
                    "mov {r}, qword ptr [{blk} + 320]", // before `held`, which a removal stores first
                    "mov {h}, qword ptr [{blk}]",
                    "xor {r}, {h}",
                    "or {r}, qword ptr [{blk} + 328]",
                    "mov {n}, qword ptr [{blk} + 40]",
                    "not {n}",
                    "or {r}, {n}", // the taken cells
                    "mov {n}, {r}",
                    "not {n}",
                    "mov {k}, qword ptr [{blk} + 16]",
                    "xor {k}, {h}",
                    "and {n}, {k}", // those that are free since the last refill
                    "mov {c}, qword ptr [{blk} + 24]",
                    "24:",
                    "test {n}, {n}",
                    "jz 25f",
                    "tzcnt {k}, {n}",
                    "btr {n}, {k}",
                    "inc {c}",
                    // Only FREE is replaced: another state has the pins of a walk with a stale word.
                    "cmp dword ptr [{blk} + {k}*4 + 64], {free}",
                    "jne 24b",
                    "mov dword ptr [{blk} + {k}*4 + 64], 0",
                    "jmp 24b",
                    "25:",
                    "xor {r}, {h}",
                    "mov {t}, qword ptr [{blk} + 48]",
                    "mov qword ptr [{t}], {blk}", // a hint: an abort may leave it
                    "movq {x}, {r}",
                    "movq {y}, {c}",
                    "punpcklqdq {x}, {y}",
                    "movdqa xmmword ptr [{blk} + 16], {x}",
                ],
                blk = in(reg) block,
                r = out(reg) _,
                h = out(reg) _,
                n = out(reg) _,
                k = out(reg) _,
                c = out(reg) _,
                x = out(xmm_reg) _,
                y = out(xmm_reg) _,
                free = const FREE as i32,)
        };
        outcome(code)
    }

    /// Frees an occupied cell on the CPU of its block. Copies the value out, if it needs a drop.
    /// Refused on another CPU, during a snapshot, and if a walk has marked the entry.
    ///
    /// # Safety
    ///
    /// The cell is in a block of the list of `head` with cells of `T`, which lives during the call,
    /// and the caller has its entry. If the result is not an error, the entry has ended, and the
    /// value has moved to `target`.
    #[inline(always)]
    pub unsafe fn remove<T>(
        self,
        head: *const Head,
        block: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused> {
        // SAFETY: by the contract of this function the block has the cell.
        let source = unsafe { Block::cell::<T>(block, index) };
        // SAFETY: the area is that of `insert`. The section reads `head`, the block and the cell, and
        // writes the target, the first word of the shard and `home`, which are alive. Only sections
        // of the CPU of the block write `home`.
        let code = unsafe {
            section!(self, [
                    "cmp {t:e}, dword ptr [{blk} + 56]",
                    "jne 55f",
                    "cmp qword ptr [{head}], 0",
                    "jne 66f",
                    "test qword ptr [{blk} + 32], {mask}",
                    "jnz 66f",
                    ".if {n16} + {n8}",
                    "mov {t}, {src}",
                    "mov {d}, {dst}",
                    ".rept {n16}",
                    "movups {x}, xmmword ptr [{t}]",
                    "movups xmmword ptr [{d}], {x}",
                    "add {t}, 16",
                    "add {d}, 16",
                    ".endr",
                    ".rept {n8}",
                    "mov {t}, qword ptr [{t}]",
                    "mov qword ptr [{d}], {t}",
                    ".endr",
                    ".endif",
                    "mov {t}, qword ptr [{blk} + 48]",
                    "mov qword ptr [{t}], {blk}", // a hint: an abort may leave it
                    "xor qword ptr [{blk}], {mask}",
                ],
                head = in(reg) head,
                blk = in(reg) block,
                mask = in(reg) 1_u64 << index,
                src = in(reg) source,
                dst = in(reg) target,
                d = out(reg) _,
                x = out(xmm_reg) _,
                n16 = const Copy::<T>::OUT_16,
                n8 = const Copy::<T>::OUT_8,)
        };
        outcome(code)
    }

    /// Frees an occupied cell on any CPU, by one locked instruction. Otherwise like
    /// [`remove`](Self::remove).
    ///
    /// # Safety
    ///
    /// That of [`remove`](Self::remove).
    #[inline(always)]
    pub unsafe fn remove_remote<T>(
        self,
        head: *const Head,
        block: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused> {
        // SAFETY: by the contract of this function the block has the cell.
        let source = unsafe { Block::cell::<T>(block, index) };
        // SAFETY: the area is that of `insert`. The section reads `head`, the block and the cell, and
        // writes the target and, by an atomic operation, `remote`, which are alive.
        let code = unsafe {
            section!(self, [
                    "cmp {t:e}, {limit:e}",
                    "jae 55f",
                    "cmp qword ptr [{head}], 0",
                    "jne 66f",
                    "test qword ptr [{blk} + 336], {mask}",
                    "jnz 66f",
                    ".if {n16} + {n8}",
                    "mov {t}, {src}",
                    "mov {d}, {dst}",
                    ".rept {n16}",
                    "movups {x}, xmmword ptr [{t}]",
                    "movups xmmword ptr [{d}], {x}",
                    "add {t}, 16",
                    "add {d}, 16",
                    ".endr",
                    ".rept {n8}",
                    "mov {t}, qword ptr [{t}]",
                    "mov qword ptr [{d}], {t}",
                    ".endr",
                    ".endif",
                    "lock xor qword ptr [{blk} + 320], {mask}",
                ],
                limit = in(reg) self.limit,
                head = in(reg) head,
                blk = in(reg) block,
                mask = in(reg) 1_u64 << index,
                src = in(reg) source,
                dst = in(reg) target,
                d = out(reg) _,
                x = out(xmm_reg) _,
                n16 = const Copy::<T>::OUT_16,
                n8 = const Copy::<T>::OUT_8,)
        };
        outcome(code)
    }
}

#[cfg(test)]
#[path = "stress.rs"]
mod stress;
