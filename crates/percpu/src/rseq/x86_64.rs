//! The sections in x86_64 assembly.
//!
//! Each is the same sequence around another few instructions. In words, ending at the one store:
//!
//! ```text
//!      rseq_cs = descriptor                arms the section for this thread
//!  start:
//!      cpu = area.cpu_id                   not below `limit`: refused, no CPU
//!      *gate != 0?                         refused, closed; `add_while`: not `open`?
//!      word = base + cpu * STRIDE
//!      ...                                 loads and arithmetic only; may be refused, busy
//!      *word = new                         <- commit, the last instruction
//!  end:
//!      rseq_cs = 0                         disarms it: every way out comes by here
//!
//!  abort:  the kernel comes here if the thread left its CPU, or took a signal, between `start`
//!          and `end`; arms the section again and starts over
//! ```
//!
//! What a numeric label is:
//!
//! | 77 | descriptor, in `__rseq_cs` | 22 | start | 44 | end |
//! |---|---|---|---|---|---|
//! | 88 | abort, in `__rseq_failure` | 33 | arm | 55, 66, 99 | refused: no CPU, closed, busy |
//!
//! Traps, each of which cost somebody a day: labels of the digits 0 and 1 only are read as binary
//! numbers; scratch registers are `out` and not `lateout`, because the inputs are needed again
//! after an abort; the abort address must follow the signature that libc registered; and the
//! descriptor holds addresses, so it must be writable for a position-independent program's loader.
//!
//! # Invariants
//!
//! 1. `LIMIT` is 0 until `OFFSET` is written and the self-test has passed, and for ever where there
//!    are no sections.

use crate::cpu::{CpuId, RseqState, backend};
use crate::fence;
use crate::rseq::operations::{Operations, Refused};
use crate::rseq::self_test::decide;
use crate::rseq::state::Sections;
use crate::rseq::{Offset, find};
use crate::starting::starting;
use crate::sync::atomic::AtomicU64;
use crate::sync::cpu;
use crate::sync::native::OnceLock;
use crate::sync::native::atomic::{AtomicIsize, AtomicU32, Ordering};
use crate::words::{STRIDE, Words};

const _: () = assert!(STRIDE == 1 << 16, "the sections shift by 16");

/// The number of slots, or 0 where no section may run. Invariant 1.
static LIMIT: AtomicU32 = AtomicU32::new(0);
static OFFSET: AtomicIsize = AtomicIsize::new(0);

/// What a section leaves in the CPU's register when it is refused: above every limit.
const NO_CPU: u32 = -1_i32 as u32;
const CLOSED: u32 = -2_i32 as u32;

#[inline(always)]
pub(super) fn available() -> bool {
    // Ordering: Relaxed; `armed` loads it again before it uses what it publishes.
    LIMIT.load(Ordering::Relaxed) != 0 || *state() == Sections::InUse
}

/// Whether sections run in this process, and why not; decides on the first call.
pub(super) fn state() -> &'static Sections {
    static STATE: OnceLock<Sections> = OnceLock::new();
    let arm = |armed: Armed| {
        // Ordering: Relaxed; the store of `LIMIT` publishes it.
        OFFSET.store(armed.area, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `armed`; it carries `OFFSET`.
        LIMIT.store(armed.limit, Ordering::Release);
    };
    let decide = || decide(usable(), arm);
    STATE.get().unwrap_or_else(|| starting(|| STATE.get_or_init(decide)))
}

/// What sections need, if all of it is there: an area, and a barrier that restarts them.
fn usable() -> Result<Armed, Sections> {
    let rseq = backend().rseq();
    if rseq != RseqState::InUse {
        return Err(Sections::NoId(rseq));
    }
    if !fence::rseq_fence_works() {
        return Err(Sections::NoBarrier);
    }
    let area: Offset = find().map_err(|_| Sections::NoId(rseq))?;
    Ok(Armed { area: area.to_raw(), limit: cpu::possible() as u32 })
}

/// What a section needs to know about this process.
#[derive(Clone, Copy)]
struct Armed {
    area: isize,
    limit: u32,
}

#[inline(always)]
fn armed() -> Option<Armed> {
    // Ordering: Acquire pairs with the Release in `state`; it carries `OFFSET`.
    let limit = LIMIT.load(Ordering::Acquire);
    // Ordering: Relaxed; ordered by the load of `LIMIT`.
    (limit != 0).then(|| Armed { area: OFFSET.load(Ordering::Relaxed), limit })
}

/// One section: the gate is open while it reads `$open`, a number or an operand; `$body` works on
/// `{word}`, this CPU's word, and ends in its one store.
///
/// Evaluates to what is in the CPU's register at the end.
macro_rules! section {
    ($armed:expr, $gate:expr => $open:literal, $words:expr, [$($body:literal),+ $(,)?], $($operands:tt)*) => {{
        let Armed { area, limit } = $armed;
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

/// What the register says.
#[inline(always)]
fn outcome(cpu: u32, armed: Armed) -> Result<CpuId, Refused> {
    if cpu < armed.limit {
        return Ok(CpuId::new(cpu));
    }
    Err(refusal(cpu))
}

/// Out of line, or the compiler works it out before it asks whether there was one.
#[cold]
#[inline(never)]
fn refusal(cpu: u32) -> Refused {
    match cpu {
        NO_CPU => Refused::NoCpu,
        CLOSED => Refused::Closed,
        _ => Refused::Busy,
    }
}

impl Operations for Armed {
    #[inline(always)]
    fn add(&self, gate: &AtomicU64, words: &Words, delta: u64) -> Result<CpuId, Refused> {
        // SAFETY: `area` is the offset of an rseq area that `find` saw. The one store goes to the
        // word of a CPU below `limit`, an atomic of `words`; the gate is only read. Plain accesses
        // are as good as atomic ones here: aligned, of 8 bytes, and asm.
        let cpu = unsafe {
            section!(*self, gate => "0", words, ["add qword ptr [{word}], {delta}"],
                delta = in(reg) delta,)
        };
        outcome(cpu, *self)
    }

    #[inline(always)]
    fn add_while(
        &self,
        gate: &AtomicU64,
        open: u64,
        words: &Words,
        delta: u64,
    ) -> Result<CpuId, Refused> {
        // SAFETY: as in `add`.
        let cpu = unsafe {
            section!(*self, gate => "{open}", words, ["add qword ptr [{word}], {delta}"],
                open = in(reg) open,
                delta = in(reg) delta,)
        };
        outcome(cpu, *self)
    }

    #[inline(always)]
    fn add_within(
        &self,
        gate: &AtomicU64,
        words: &Words,
        delta: i64,
        bound: i64,
    ) -> Result<CpuId, Refused> {
        // -bound < sum < bound is 0 <= sum + (bound - 1) <= 2 * (bound - 1), in one compare.
        let (lift, span) = (bound - 1, 2 * (bound - 1));
        // SAFETY: as in `add`.
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
        // SAFETY: as in `add`. `old` is written before every way out but the refusals.
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

#[inline(always)]
pub(super) fn add(gate: &AtomicU64, words: &Words, delta: u64) -> Result<CpuId, Refused> {
    armed().ok_or(Refused::NoCpu)?.add(gate, words, delta)
}

#[inline(always)]
pub(super) fn add_while(
    gate: &AtomicU64,
    open: u64,
    words: &Words,
    delta: u64,
) -> Result<CpuId, Refused> {
    armed().ok_or(Refused::NoCpu)?.add_while(gate, open, words, delta)
}

#[inline(always)]
pub(super) fn add_within(
    gate: &AtomicU64,
    words: &Words,
    delta: i64,
    bound: i64,
) -> Result<CpuId, Refused> {
    armed().ok_or(Refused::NoCpu)?.add_within(gate, words, delta, bound)
}

pub(super) fn swap(gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
    armed().ok_or(Refused::NoCpu)?.swap(gate, words, new)
}
