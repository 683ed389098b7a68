//! The sections in x86_64 assembly.
//!
//! All sections are the same sequence around a few instructions of their own. In words, ending at
//! the one store:
//!
//! ```text
//!      rseq_cs = descriptor                arms the section for this thread
//!  start:
//!      cpu = area.cpu_id                   not below `limit`: refused, no CPU
//!      *gate != open_value?                 refused, closed: only in a section with a gate
//!      word = base + cpu * STRIDE
//!      *word += delta                      <- commit, the last instruction
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
//! | 88 | abort, in `__rseq_failure` | 33 | arm | 55, 66 | refused: no CPU, closed |
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
//! 1. `LIMIT` is 0 until the offset of the area is known and the self-test has passed. It stays 0 if no
//!    sections run.

use offlock_sync::asymmetric::rseq_fence_works;
use offlock_sync::atomic::AtomicU64;
use offlock_sync::native::OnceLock;
use offlock_sync::native::atomic::{AtomicU32, Ordering};

use self::self_test::self_test;
use super::{Refused, area};
use crate::cpu::{possible_cpus, rseq_ids};
use crate::words::{STRIDE, Words};

#[path = "self_test.rs"]
mod self_test;

const _: () = assert!(STRIDE == 1 << 16, "the sections shift by 16");

/// The number of possible CPUs, or 0 if no section may run. Invariant 1.
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// The value of the operand `cpu` after a section whose gate was closed; -1 without a CPU. No CPU has
/// so high a number.
const REFUSED_CLOSED: u32 = -2_i32 as u32;

/// Returns whether this process runs sections. The first call decides. Later calls cost a load and a
/// branch where sections run, and one more load elsewhere.
#[inline(always)]
pub(crate) fn available() -> bool {
    // Ordering: Relaxed; `operations` loads `LIMIT` again, with Acquire, before it uses the offset.
    LIMIT.load(Ordering::Relaxed) != 0 || state().is_ok()
}

/// Returns whether this process runs sections, and if not, why. The first call decides.
///
/// Sections also run if the first call is on a thread that cannot test them. A thread without a CPU id
/// is none of libc's, and its sections all refuse. A helper thread would have no id either: glibc gives
/// a thread an id only if its parent has one.
pub(crate) fn state() -> Result<(), &'static str> {
    static STATE: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *STATE.get_or_init(|| {
        let found = usable()?;
        self_test(|gate, words, delta| found.run(gate, words, delta)).unwrap_or(Ok(()))?;
        // Ordering: Release pairs with the Acquire in `operations`; it carries the offset. No test
        // checks the pair: x86-64 orders two stores and two loads anyway, and a model has no area.
        LIMIT.store(found.limit, Ordering::Release);
        Ok(())
    })
}

/// Adds `delta` (wrapping) to this CPU's word. Commits only if the value of `gate` is `open_value`.
#[inline(always)]
pub(crate) fn add(
    gate: &AtomicU64,
    open_value: u64,
    words: &Words,
    delta: u64,
) -> Result<(), Refused> {
    operations().ok_or(Refused::NoCpu)?.add(gate, open_value, words, delta)
}

/// Adds `delta` (wrapping) to this CPU's word, which has no gate.
#[inline(always)]
pub(crate) fn count(words: &Words, delta: u64) -> Result<(), Refused> {
    operations().ok_or(Refused::NoCpu)?.count(words, delta)
}

/// Returns the operations if the process has an rseq area and a barrier that restarts sections.
fn usable() -> Result<RseqOperations, &'static str> {
    rseq_ids()?;
    if !rseq_fence_works() {
        return Err("membarrier cannot restart them");
    }
    Ok(RseqOperations { area: area::find()?, limit: possible_cpus() as u32 })
}

/// The operations. Holds the offset of the rseq area and the number of possible CPUs.
#[derive(Clone, Copy)]
struct RseqOperations {
    area: isize,
    limit: u32,
}

/// Returns the operations if sections run in this process.
#[inline(always)]
fn operations() -> Option<RseqOperations> {
    // Ordering: Acquire pairs with the Release in `state`; it carries the offset.
    let limit = LIMIT.load(Ordering::Acquire);
    (limit != 0).then(|| RseqOperations { area: area::offset(), limit })
}

/// One section. `$test` jumps to 66 if the section is refused. `$body` works on `{word}`, this CPU's
/// word, and ends in its one store.
///
/// Evaluates to the contents of the CPU's register at the end.
macro_rules! section {
    ($params:expr, $words:expr, [$($test:literal),*], [$($body:literal),+ $(,)?], $($operands:tt)*) => {{
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
            $($test,)*
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
            ".popsection",
            area = in(reg) area,
            limit = in(reg) limit,
            base = in(reg) $words.base(),
            cpu = out(reg) cpu,
            word = out(reg) _,
            $($operands)*
            options(nostack),
        );
        cpu
    }};
}

/// Returns the refusal that the register contains, if any.
#[inline(always)]
fn outcome(cpu: u32, params: RseqOperations) -> Result<(), Refused> {
    if cpu < params.limit { Ok(()) } else { Err(refusal(cpu)) }
}

/// Out of line, because the compiler would compute it even for a section that committed.
#[cold]
#[inline(never)]
fn refusal(cpu: u32) -> Refused {
    if cpu == REFUSED_CLOSED { Refused::Closed } else { Refused::NoCpu }
}

impl RseqOperations {
    #[inline(always)]
    fn add(
        self,
        gate: &AtomicU64,
        open_value: u64,
        words: &Words,
        delta: u64,
    ) -> Result<(), Refused> {
        // SAFETY: the section stores to `rseq_cs` in this thread's area, whose offset `find` returned
        // after it checked that the area contains the field. It stores once more, to the word of a
        // CPU below `limit`, an atomic of `words`. The gate is only read, and neither the gate nor
        // the word is accessed after that store, so both may be freed then. Plain accesses in
        // assembly are atomic here, because they are aligned and of 8 bytes.
        let cpu = unsafe {
            section!(self, words, ["cmp qword ptr [{gate}], {open}", "jne 66f"],
                ["add qword ptr [{word}], {delta}"],
                gate = in(reg) std::ptr::from_ref::<AtomicU64>(gate),
                open = in(reg) open_value,
                delta = in(reg) delta,)
        };
        outcome(cpu, self)
    }

    #[inline(always)]
    fn count(self, words: &Words, delta: u64) -> Result<(), Refused> {
        // SAFETY: the area and the word are those of `add`. There is no gate.
        let cpu = unsafe {
            section!(self, words, [], ["add qword ptr [{word}], {delta}"], delta = in(reg) delta,)
        };
        outcome(cpu, self)
    }

    /// Adds `delta`, with a gate and the value that opens it, or without.
    fn run(
        self,
        gate: Option<(&AtomicU64, u64)>,
        words: &Words,
        delta: u64,
    ) -> Result<(), Refused> {
        match gate {
            Some((gate, open_value)) => self.add(gate, open_value, words, delta),
            None => self.count(words, delta),
        }
    }
}

#[cfg(test)]
#[path = "stress.rs"]
pub(super) mod stress;
