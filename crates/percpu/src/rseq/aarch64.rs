//! The sections in aarch64 assembly. The frame and its labels: `sections.rs`.
//!
//! Two words, and a word that other CPUs change, are committed by a store-exclusive: the one instruction
//! that stores 16 bytes at once on every such CPU. It may fail without a reason. Then nothing has been
//! committed, and the section starts over from behind its end.
//!
//! Loads and stores that the x86_64 sections rely on as acquire and release are `ldar` and `stlr`. `model.rs`,
//! and that of percpu-list, have the same orderings.

use offlock_sync::atomic::AtomicU64;

use super::Refused;
use super::sections::{Copy, Sections, outcome};
use crate::rseq::cells::{Block, Cell, CellSections, FREE, Head, SHARD};
use crate::words::{STRIDE, Words};

const _: () = assert!(STRIDE == 1 << 16, "the sections shift by 16");
const _: () = assert!(SHARD == 1 << 7, "the sections shift by 7");

/// One section. `$body` gets the id of this CPU in `{cpu}`, which it keeps. It may change `{t}`. It jumps to 55,
/// 66 or 99 if the section is refused, and ends in its one store. A store-exclusive has `{failed}` as its status.
macro_rules! section {
    ($sections:expr, [$($body:expr),+ $(,)?], $($operands:tt)*) => {{
        let cpu: u64;
        std::arch::asm!(
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "77:",
            ".long 0, 0", // version, flags
            ".quad 22f, 44f - 22f, 88f",
            ".popsection",
            "mrs {tp}, tpidr_el0",
            "add {tp}, {tp}, {area}",
            "33:",
            "adrp {t}, 77b",
            "add {t}, {t}, :lo12:77b",
            "mov {failed:w}, 0",
            "str {t}, [{tp}, 8]",
            "22:",
            "ldr {cpu:w}, [{tp}, 4]",
            $($body,)+
            "44:",
            "str xzr, [{tp}, 8]",
            "cbnz {failed:w}, 33b",
            "b 98f",
            // Not in `__rseq_failure`, which may be further away than a conditional branch reaches.
            "55:",
            "mov {cpu:w}, -1",
            "b 44b",
            "66:",
            "mov {cpu:w}, -2",
            "b 44b",
            "99:",
            "mov {cpu:w}, -3",
            "b 44b",
            "98:",
            ".pushsection __rseq_failure, \"ax\"",
            ".inst 0xd428bc00", // brk, the signature
            "88:",
            "b 33b",
            ".popsection",
            area = in(reg) $sections.area,
            tp = out(reg) _,
            cpu = out(reg) cpu,
            failed = out(reg) _,
            t = out(reg) _,
            $($operands)*
            options(nostack),
        );
        outcome(cpu as u32)
    }};
}

/// A section on this CPU's word, whose address is in `{t}` in `$body`.
macro_rules! word_section {
    ($sections:expr, $words:expr, [$($test:literal),*], [$($body:literal),+ $(,)?], $($operands:tt)*) => {
        section!($sections, [
                "cmp {cpu:w}, {limit:w}",
                "b.hs 55f",
                $($test,)*
                "add {t}, {base}, {cpu}, lsl 16",
                $($body,)+
            ],
            limit = in(reg) u64::from($sections.limit),
            base = in(reg) $words.base(),
            $($operands)*)
    };
}

/// A section that ends an entry of a list and copies its value out. `$mark` is the place in the block of the mark
/// of a walk, and `$commit` frees the cell.
macro_rules! removal {
    (
        $sections:expr, $head:ident, $block:ident, $index:ident, $target:ident,
        [$($cpu_test:literal),+], $mark:literal, [$($commit:literal),+ $(,)?], $($operands:tt)*
    ) => {
        section!($sections, [
                $($cpu_test,)+
                "ldar {t}, [{head}]",
                "cbnz {t}, 66f",
                concat!("add {t}, {blk}, ", $mark),
                "ldar {t}, [{t}]",
                "tst {t}, {mask}",
                "b.ne 66f",
                "mov {s}, {src}",
                "mov {d}, {dst}",
                ".rept {n16}",
                "ldp {x}, {y}, [{s}], 16",
                "stp {x}, {y}, [{d}], 16",
                ".endr",
                ".rept {n8}",
                "ldr {x}, [{s}]",
                "str {x}, [{d}]",
                ".endr",
                $($commit,)+
            ],
            head = in(reg) $head,
            blk = in(reg) $block,
            mask = in(reg) 1_u64 << $index,
            src = in(reg) Block::cell::<T>($block, $index),
            dst = in(reg) $target,
            s = out(reg) _,
            d = out(reg) _,
            x = out(reg) _,
            y = out(reg) _,
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
        // SAFETY: the section stores to `rseq_cs` in this thread's area, whose offset `find` returned
        // after it checked that the area contains the field. It stores once more, to the word of a
        // CPU below `limit`, an atomic of `words`. The gate is only read, and neither the gate nor
        // the word is accessed after that store, so both may be freed then. Plain accesses in
        // assembly are atomic here, because they are aligned and of 8 bytes.
        unsafe {
            match gate {
                Some((gate, open)) => word_section!(self, words,
                    ["ldar {v}, [{gate}]", "cmp {v}, {open}", "b.ne 66f"],
                    ["ldr {v}, [{t}]", "add {v}, {v}, {delta}", "stlr {v}, [{t}]"],
                    gate = in(reg) std::ptr::from_ref::<AtomicU64>(gate),
                    open = in(reg) open,
                    delta = in(reg) delta,
                    v = out(reg) _,),
                // Nothing is ordered by a counter, so its sections need no release.
                None => word_section!(self, words, [],
                    ["ldr {v}, [{t}]", "add {v}, {v}, {delta}", "str {v}, [{t}]"],
                    delta = in(reg) delta,
                    v = out(reg) _,),
            }
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
            word_section!(self, words, ["ldar {sum}, [{gate}]", "cbnz {sum}, 66f"], [
                    "add {starts}, {starts}, 1",
                    "ldr {sum}, [{t}]",
                    "mov {spin:w}, {rounds:w}",
                    "24:",
                    "subs {spin:w}, {spin:w}, 1",
                    "b.ne 24b",
                    "add {sum}, {sum}, {delta}",
                    "stlr {sum}, [{t}]",
                ],
                gate = in(reg) std::ptr::from_ref(gate),
                delta = in(reg) delta,
                rounds = in(reg) u64::from(rounds),
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
        // Only sections of this CPU write these.
        let done = unsafe {
            section!(self, [
                    "cmp {cpu:w}, {limit:w}",
                    "b.hs 55f",
                    "add {t}, {head}, 8",
                    "ldar {t}, [{t}]",
                    "cbnz {t}, 66f",
                    "ldr {t}, [{head}, 16]",
                    "add {t}, {t}, {cpu}, lsl 7",
                    "ldar {blk}, [{t}]",
                    "cbz {blk}, 99f",
                    "ldr {x}, [{blk}]",
                    "ldr {d}, [{blk}, 16]",
                    "eon {d}, {d}, {x}", // the free cells
                    "cbz {d}, 99f",
                    "rbit {i}, {d}",
                    "clz {i}, {i}",
                    "madd {d}, {i}, {stride}, {blk}",
                    "add {d}, {d}, 384",
                    "mov {t}, {src}",
                    ".rept {n16}",
                    "ldp {x}, {y}, [{t}], 16",
                    "stp {x}, {y}, [{d}], 16",
                    ".endr",
                    ".rept {n8}",
                    "ldr {x}, [{t}]",
                    "str {x}, [{d}]",
                    ".endr",
                    "mov {t}, 1",
                    "lsl {t}, {t}, {i}",
                    "ldxp {x}, {y}, [{blk}]",
                    "eor {x}, {x}, {t}",
                    "add {y}, {y}, 1",
                    "stlxp {failed:w}, {x}, {y}, [{blk}]",
                ],
                limit = in(reg) u64::from(self.limit),
                head = in(reg) head,
                src = in(reg) source,
                stride = in(reg) Copy::<T>::STRIDE,
                blk = out(reg) block,
                i = out(reg) index,
                d = out(reg) _,
                x = out(reg) _,
                y = out(reg) _,
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
                    "ldr {t:w}, [{blk}, 56]",
                    "cmp {cpu:w}, {t:w}",
                    "b.ne 55f",
                    "add {t}, {blk}, 320",
                    "ldar {r}, [{t}]", // before `held`, which a removal stores first
                    "ldr {h}, [{blk}]",
                    "eor {r}, {r}, {h}",
                    "add {t}, {blk}, 328",
                    "ldar {n}, [{t}]",
                    "orr {r}, {r}, {n}",
                    "ldr {n}, [{blk}, 40]",
                    "orn {r}, {r}, {n}", // the taken cells
                    "ldp {k}, {c}, [{blk}, 16]",
                    "eor {k}, {k}, {h}",
                    "bic {n}, {k}, {r}", // those that are free since the last refill
                    "24:",
                    "cbz {n}, 25f",
                    "rbit {k}, {n}",
                    "clz {k}, {k}",
                    "sub {t}, {n}, 1",
                    "and {n}, {n}, {t}",
                    "add {c}, {c}, 1",
                    "add {k}, {blk}, {k}, lsl 2",
                    "add {k}, {k}, 64",
                    // Only FREE is replaced: another state has the pins of a walk with a stale word.
                    "ldar {t:w}, [{k}]",
                    "cmp {t:w}, {free:w}",
                    "b.ne 24b",
                    "stlr wzr, [{k}]",
                    "b 24b",
                    "25:",
                    "eor {r}, {r}, {h}",
                    "ldr {t}, [{blk}, 48]",
                    "stlr {blk}, [{t}]", // a hint: an abort may leave it
                    "add {t}, {blk}, 16",
                    "ldxp {n}, {k}, [{t}]",
                    "stlxp {failed:w}, {r}, {c}, [{t}]",
                ],
                blk = in(reg) block,
                r = out(reg) _,
                h = out(reg) _,
                n = out(reg) _,
                k = out(reg) _,
                c = out(reg) _,
                free = in(reg) u64::from(FREE),)
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
        // SAFETY: the area is that of `insert`. The section reads `head`, the block and the cell, and
        // writes the target, the first word of the shard and `home`, which are alive. Only sections
        // of the CPU of the block write `home`.
        unsafe {
            removal!(
                self,
                head,
                block,
                index,
                target,
                ["ldr {t:w}, [{blk}, 56]", "cmp {cpu:w}, {t:w}", "b.ne 55f"],
                "32",
                [
                    "ldr {t}, [{blk}, 48]",
                    "stlr {blk}, [{t}]", // a hint: an abort may leave it
                    "ldr {t}, [{blk}]",
                    "eor {t}, {t}, {mask}",
                    "stlr {t}, [{blk}]",
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
        // SAFETY: the area is that of `insert`. The section reads `head`, the block and the cell, and
        // writes the target and, by an atomic operation, `remote`, which are alive.
        unsafe {
            removal!(self, head, block, index, target,
                ["cmp {cpu:w}, {limit:w}", "b.hs 55f"],
                "336",
                [
                    "add {d}, {blk}, 320",
                    "ldaxr {t}, [{d}]",
                    "eor {t}, {t}, {mask}",
                    "stlxr {failed:w}, {t}, [{d}]",
                ],
                limit = in(reg) u64::from(self.limit),)
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
            "adrp {offset}, :got:__rseq_offset",
            "ldr {offset}, [{offset}, :got_lo12:__rseq_offset]",
            "adrp {size}, :got:__rseq_size",
            "ldr {size}, [{size}, :got_lo12:__rseq_size]",
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
    let id: u64;
    // SAFETY: `find` checked that the area contains `cpu_id`. libc keeps an area at this distance in
    // the static TLS block of every thread, registered or not. At 0 the thread control block begins,
    // with the pointer to the table of TLS blocks (aarch64 ABI), so these bytes can be read. Not `pure`: the kernel may
    // change the field between any two instructions.
    unsafe {
        std::arch::asm!(
            "mrs {id}, tpidr_el0",
            "add {id}, {id}, {area}",
            "ldr {id:w}, [{id}, 4]",
            id = out(reg) id,
            area = in(reg) area,
            options(nostack, readonly, preserves_flags),
        );
    }
    id as u32
}

/// Returns the address from which the offset of an area counts.
#[cfg(test)]
pub(super) fn thread_pointer() -> usize {
    let address: usize;
    // SAFETY: reads a register that each thread has.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) address, options(nostack, readonly)) };
    address
}
