//! The sections in x86_64 assembly.
//!
//! All sections are the same sequence around a few instructions of their own. In words, ending at
//! the one store:
//!
//! ```text
//!      rseq_cs = descriptor                arms the section for this thread
//!  start:
//!      cpu = area.cpu_id                   not below `limit`: refused, no CPU
//!      *gate != open_value?                 refused, closed
//!      word = base + cpu * STRIDE
//!      ...                                 loads and arithmetic only; may be refused, out of range
//!      *word = new                         <- commit, the last instruction
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
//! | 88 | abort, in `__rseq_failure` | 33 | arm | 55, 66, 99 | refused: no CPU, closed, out of range |
//!
//! Traps:
//!
//! - The assembler reads labels made of the digits 0 and 1 as binary numbers.
//! - Scratch registers are `out` and not `lateout`, because an abort needs the inputs again.
//! - The abort address must follow the signature that libc registered.
//! - The descriptor contains addresses, so it must be writable for the loader of a
//!   position-independent program.
//!
//! # Invariants
//!
//! 1. `LIMIT` is 0 until `OFFSET` is written and the self-test has passed. It stays 0 if no
//!    sections run.

use crate::cpu::{CpuId, rseq_ids};
use crate::fence;
use crate::rseq::operations::{Added, Operations, Refused};
use crate::rseq::self_test::decide;
use crate::rseq::{Offset, find};
use crate::starting::starting;
use crate::sync::atomic::AtomicU64;
use crate::sync::cpu;
use crate::sync::native::OnceLock;
use crate::sync::native::atomic::{AtomicIsize, AtomicU32, Ordering};
use crate::words::{STRIDE, Words};

const _: () = assert!(STRIDE == 1 << 16, "the sections shift by 16");

/// The number of possible CPUs, or 0 if no section may run. Invariant 1.
static LIMIT: AtomicU32 = AtomicU32::new(0);
static OFFSET: AtomicIsize = AtomicIsize::new(0);

/// Values of the operand `cpu` after a refused section. No CPU has so high a number.
const REFUSED_NO_CPU: u32 = -1_i32 as u32;
const REFUSED_CLOSED: u32 = -2_i32 as u32;

#[inline(always)]
pub(super) fn available() -> bool {
    // Ordering: Relaxed; `operations` loads `LIMIT` again, with Acquire, before it uses `OFFSET`.
    LIMIT.load(Ordering::Relaxed) != 0 || state().is_ok()
}

/// Returns whether sections run in this process, and if not, why. The first call decides.
pub(super) fn state() -> Result<(), &'static str> {
    static STATE: OnceLock<Result<(), &'static str>> = OnceLock::new();
    let enable = |params: RseqOperations| {
        // Ordering: Relaxed; the store of `LIMIT` publishes it.
        OFFSET.store(params.area, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `operations`; it carries `OFFSET`. No test checks
        // the pair: x86-64 orders two stores and two loads anyway, and a model has no area.
        LIMIT.store(params.limit, Ordering::Release);
    };
    let decide = || decide(usable(), enable);
    *STATE.get().unwrap_or_else(|| starting(|| STATE.get_or_init(decide)))
}

/// Returns the operations if the process has an rseq area and a barrier that restarts sections.
fn usable() -> Result<RseqOperations, &'static str> {
    rseq_ids()?;
    if !fence::rseq_fence_works() {
        return Err("membarrier cannot restart them");
    }
    let area: Offset = find()?;
    Ok(RseqOperations { area: area.to_raw(), limit: cpu::possible() as u32 })
}

/// The operations. Holds the offset of the rseq area and the number of possible CPUs.
#[derive(Clone, Copy)]
pub(super) struct RseqOperations {
    area: isize,
    limit: u32,
}

impl RseqOperations {
    /// Returns the offset of the area and the number of possible CPUs.
    pub(super) fn area(self) -> (isize, u32) {
        (self.area, self.limit)
    }
}

/// Returns the operations if sections run in this process.
#[inline(always)]
pub(super) fn operations() -> Option<RseqOperations> {
    // Ordering: Acquire pairs with the Release in `state`; it carries `OFFSET`.
    let limit = LIMIT.load(Ordering::Acquire);
    // Ordering: Relaxed; ordered by the load of `LIMIT`.
    (limit != 0).then(|| RseqOperations { area: OFFSET.load(Ordering::Relaxed), limit })
}

/// One section. It commits only if the value of the gate is `$open`, a number or an operand. `$body` works on
/// `{word}`, this CPU's word, and ends in its one store.
///
/// Evaluates to the contents of the CPU's register at the end.
macro_rules! section {
    ($params:expr, $gate:expr => $open:literal, $words:expr, [$($body:literal),+ $(,)?], $($operands:tt)*) => {{
        let RseqOperations { area, limit } = $params;
        let mut cpu: u32;
        std::arch::asm!(
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "77:",
            ".long 0, 0", // version, flags
            ".quad 22f, 44f - 22f, 88f",
            ".popsection",
            "33:",
            "lea {word}, [rip + 77b]",
            "mov qword ptr fs:[{area} + 8], {word}",
            "22:",
            "mov {cpu:e}, dword ptr fs:[{area} + 4]",
            "cmp {cpu:e}, {limit:e}",
            "jae 55f",
            concat!("cmp qword ptr [{gate}], ", $open),
            "jne 66f",
            "mov {word:e}, {cpu:e}",
            "shl {word}, 16",
            "add {word}, {base}",
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
            area = in(reg) area,
            limit = in(reg) limit,
            gate = in(reg) std::ptr::from_ref::<AtomicU64>($gate),
            base = in(reg) $words.base(),
            cpu = out(reg) cpu,
            word = out(reg) _,
            $($operands)*
            options(nostack),
        );
        cpu
    }};
}

/// Returns the CPU or the refusal that the register contains.
#[inline(always)]
fn outcome(cpu: u32, params: RseqOperations) -> Added {
    if cpu < params.limit {
        return Ok(CpuId::new(cpu));
    }
    Err(refusal(cpu))
}

/// Out of line, because the compiler would compute it even for a section that committed.
#[cold]
#[inline(never)]
fn refusal(cpu: u32) -> Refused {
    match cpu {
        REFUSED_NO_CPU => Refused::NoCpu,
        REFUSED_CLOSED => Refused::Closed,
        _ => Refused::OutOfRange,
    }
}

impl Operations for RseqOperations {
    #[inline(always)]
    fn add(&self, gate: &AtomicU64, open_value: u64, words: &Words, delta: u64) -> Added {
        // SAFETY: the section stores to `rseq_cs` in this thread's area, whose offset `find` returned
        // after it checked that the area contains the field. It stores once more, to the word of a
        // CPU below `limit`, an atomic of `words`. The gate is only read, and neither the gate nor
        // the word is accessed after that store, so both may be freed then. Plain accesses in
        // assembly are atomic here, because they are aligned and of 8 bytes.
        let cpu = unsafe {
            section!(*self, gate => "{open}", words, ["add qword ptr [{word}], {delta}"],
                open = in(reg) open_value,
                delta = in(reg) delta,)
        };
        outcome(cpu, *self)
    }

    #[inline(always)]
    fn add_within(&self, gate: &AtomicU64, words: &Words, delta: i64, bound: i64) -> Added {
        // -bound < sum < bound is 0 <= sum + (bound - 1) <= 2 * (bound - 1), in one unsigned compare.
        let (lift, span) = (bound - 1, 2 * (bound - 1));
        // SAFETY: the area, the word and the gate are those of `add`. The other registers are
        // scratch.
        let cpu = unsafe {
            section!(*self, gate => "0", words, [
                    "mov {sum}, qword ptr [{word}]",
                    "add {sum}, {delta}",
                    "lea {lifted}, [{sum} + {lift}]",
                    "cmp {lifted}, {span}",
                    "ja 99f",
                    "mov qword ptr [{word}], {sum}",
                ],
                delta = in(reg) delta,
                lift = in(reg) lift,
                span = in(reg) span,
                sum = out(reg) _,
                lifted = out(reg) _,)
        };
        outcome(cpu, *self)
    }

    #[inline(always)]
    fn swap(&self, gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
        let mut old: u64;
        // SAFETY: the area, the word and the gate are those of `add`. `old` has a value on every
        // way out: the operand initialises it for a refusal.
        let cpu = unsafe {
            section!(*self, gate => "0", words, [
                    "mov {old}, qword ptr [{word}]",
                    "mov qword ptr [{word}], {new}",
                ],
                new = in(reg) new,
                old = inout(reg) 0_u64 => old,)
        };
        outcome(cpu, *self).map(|cpu| (cpu, old))
    }
}

#[cfg(test)]
#[path = "stress.rs"]
mod stress;
