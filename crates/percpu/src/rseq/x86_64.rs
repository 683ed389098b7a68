//! The sections in x86_64 assembly. The frame and its labels: `sections.rs`.

use offlock_sync::atomic::AtomicU64;

use super::Refused;
use super::sections::{Copy, Sections, outcome};
use crate::rseq::cells::{Block, Cell, CellSections, FREE, Head, SHARD};
use crate::words::{STRIDE, Words};

const _: () = assert!(STRIDE == 1 << 16, "the sections shift by 16");
const _: () = assert!(SHARD == 1 << 7, "the sections shift by 7");

/// One section. `$body` gets the id of this CPU in `{cpu}`, which it keeps. It may change `{t}`. It jumps to 55,
/// 66 or 99 if the section is refused, and ends in its one store.
macro_rules! section {
    ($sections:expr, [$($body:expr),+ $(,)?], $($operands:tt)*) => {{
        let cpu: u32;
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
            "mov {cpu:e}, dword ptr fs:[{area} + 4]",
            $($body,)+
            "44:",
            "mov qword ptr fs:[{area} + 8], 0",
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d", // disassembles as ud1 with the signature as its operand
            ".long 0x53053053",
            "88:",
            "jmp 33b",
            "55:",
            "mov {cpu:e}, -1",
            "jmp 44b",
            "66:",
            "mov {cpu:e}, -2",
            "jmp 44b",
            "99:",
            "mov {cpu:e}, -3",
            "jmp 44b",
            ".popsection",
            area = in(reg) $sections.area,
            cpu = out(reg) cpu,
            t = out(reg) _,
            $($operands)*
            options(nostack),
        );
        outcome(cpu)
    }};
}

/// A section on this CPU's word, which is at `[{base} + {t}]` in `$body`.
macro_rules! word_section {
    ($sections:expr, $words:expr, [$($test:literal),*], [$($body:literal),+ $(,)?], $($operands:tt)*) => {
        section!($sections, [
                "cmp {cpu:e}, {limit:e}",
                "jae 55f",
                $($test,)*
                "mov {t:e}, {cpu:e}",
                "shl {t}, 16",
                $($body,)+
            ],
            limit = in(reg) $sections.limit,
            base = in(reg) $words.base(),
            $($operands)*)
    };
}

/// A section that ends an entry of a list and copies its value out. `$mark_test` looks for the mark of a walk, and
/// `$commit` frees the cell.
macro_rules! removal {
    (
        $sections:expr, $head:ident, $block:ident, $index:ident, $source:ident, $target:ident,
        [$($cpu_test:literal),+], $mark_test:literal, [$($commit:literal),+ $(,)?], $($operands:tt)*
    ) => {
        section!($sections, [
                $($cpu_test,)+
                "cmp qword ptr [{head}], 0",
                "jne 66f",
                $mark_test,
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
                $($commit,)+
            ],
            head = in(reg) $head,
            blk = in(reg) $block,
            mask = in(reg) 1_u64 << $index,
            src = in(reg) $source,
            dst = in(reg) $target,
            d = out(reg) _,
            x = out(xmm_reg) _,
            n16 = const Copy::<T>::OUT_16,
            n8 = const Copy::<T>::OUT_8,
            $($operands)*)
    };
}

impl Sections {
    #[inline(always)]
    pub(super) fn add(
        self,
        gate: Option<(&AtomicU64, u64)>,
        words: &Words,
        delta: u64,
    ) -> Result<(), Refused> {
        match gate {
            // SAFETY: the section stores to `rseq_cs` in this thread's area, whose offset `find` returned
            // after it checked that the area contains the field. It stores once more, to the word of a
            // CPU below `limit`, an atomic of `words`. The gate is only read, and neither the gate nor
            // the word is accessed after that store, so both may be freed then. Plain accesses in
            // assembly are atomic here, because they are aligned and of 8 bytes.
            Some((gate, open)) => unsafe {
                word_section!(self, words,
                    ["cmp qword ptr [{gate}], {open}", "jne 66f"],
                    ["add qword ptr [{base} + {t}], {delta}"],
                    gate = in(reg) std::ptr::from_ref::<AtomicU64>(gate),
                    open = in(reg) open,
                    delta = in(reg) delta,)
            },
            // SAFETY: the area and the word are those of a section with a gate.
            None => unsafe {
                word_section!(self, words, [], ["add qword ptr [{base} + {t}], {delta}"],
                    delta = in(reg) delta,)
            },
        }
    }

    /// Adds `delta` to this CPU's word, with `rounds` of a spin between the load and the store. Returns
    /// the number of starts of the section.
    #[cfg(test)]
    #[inline(never)]
    pub(super) fn long_add(
        self,
        gate: &AtomicU64,
        words: &Words,
        delta: u64,
        rounds: u32,
    ) -> Result<u64, Refused> {
        let mut starts = 0_u64;
        // SAFETY: the area, the word and the gate are those of `add`, or the area is the calling
        // thread's fake one. The other registers are scratch.
        let done = unsafe {
            word_section!(self, words, ["cmp qword ptr [{gate}], 0", "jne 66f"], [
                    "inc {starts}",
                    "mov {sum}, qword ptr [{base} + {t}]",
                    "mov {spin:e}, {rounds:e}",
                    "24:",
                    "dec {spin:e}",
                    "jnz 24b",
                    "add {sum}, {delta}",
                    "mov qword ptr [{base} + {t}], {sum}",
                ],
                gate = in(reg) std::ptr::from_ref(gate),
                delta = in(reg) delta,
                rounds = in(reg) rounds,
                spin = out(reg) _,
                sum = out(reg) _,
                starts = inout(reg) starts,)
        };
        done.map(|()| starts)
    }
}

impl CellSections for Sections {
    #[inline(always)]
    unsafe fn insert<T>(
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
        let done = unsafe {
            section!(self, [
                    "cmp {cpu:e}, {limit:e}",
                    "jae 55f",
                    "cmp qword ptr [{head} + 8], 0",
                    "jne 66f",
                    "mov {t:e}, {cpu:e}",
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
        done.map(|()| (block, index as u32))
    }

    unsafe fn refill(self, block: *const Block) -> Result<(), Refused> {
        // SAFETY: the area is that of `insert`. The section reads and writes the header of the block,
        // and writes the first word of its shard, which are alive.
        unsafe {
            section!(self, [
                    "cmp {cpu:e}, dword ptr [{blk} + 56]",
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
        }
    }

    #[inline(always)]
    unsafe fn remove<T>(
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
        unsafe {
            removal!(
                self,
                head,
                block,
                index,
                source,
                target,
                ["cmp {cpu:e}, dword ptr [{blk} + 56]", "jne 55f"],
                "test qword ptr [{blk} + 32], {mask}",
                [
                    "mov {t}, qword ptr [{blk} + 48]",
                    "mov qword ptr [{t}], {blk}", // a hint: an abort may leave it
                    "xor qword ptr [{blk}], {mask}",
                ],
            )
        }
    }

    #[inline(always)]
    unsafe fn remove_remote<T>(
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
        unsafe {
            removal!(self, head, block, index, source, target,
                ["cmp {cpu:e}, {limit:e}", "jae 55f"],
                "test qword ptr [{blk} + 336], {mask}",
                ["lock xor qword ptr [{blk} + 320], {mask}"],
                limit = in(reg) self.limit,)
        }
    }
}

/// Returns the addresses of libc's `__rseq_offset` and `__rseq_size`, or null if libc lacks them.
pub(super) fn libc_symbols() -> (*const isize, *const u32) {
    let (offset, size);
    // SAFETY: reads two entries of the global offset table, which the loader filled before any code
    // of this crate ran. The symbols are weak: an entry is null if libc lacks the symbol.
    unsafe {
        std::arch::asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, readonly, preserves_flags),
        );
    }
    (offset, size)
}

/// Returns the CPU id that the kernel keeps for the calling thread.
///
/// The id is above `i32::MAX` if the thread has none: -1 (never registered) or -2 (refused), as
/// `u32`.
///
/// # Safety
///
/// `area` is a result of `area::find`. Or it is 0, and the answer is discarded.
#[inline(always)]
pub(super) unsafe fn cpu_id(area: isize) -> u32 {
    let id: u32;
    // SAFETY: `find` checked that the area contains `cpu_id`. libc keeps an area at this distance in
    // the static TLS block of every thread, registered or not. At 0 the thread control block begins,
    // with a pointer to itself (x86_64 ABI), so these bytes can be read. Not `pure`: the kernel may
    // change the field between any two instructions.
    unsafe {
        std::arch::asm!(
            "mov {id:e}, dword ptr fs:[{area} + 4]",
            id = lateout(reg) id,
            area = in(reg) area,
            options(nostack, readonly, preserves_flags),
        );
    }
    id
}

/// Returns the address from which the offset of an area counts.
#[cfg(test)]
pub(super) fn thread_pointer() -> usize {
    let address: usize;
    // SAFETY: the first word of the thread control block points to itself (x86_64 ABI).
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) address, options(nostack, readonly)) };
    address
}
