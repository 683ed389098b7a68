//! The start-up self-test: sections stay off if the kernel, an emulator or libc gets them wrong.
//!
//! The test checks sections that are not interrupted. The id is a CPU that `sched_getcpu` confirms.
//! A section that commits changes its word and no other. A refused section changes nothing.
//!
//! The stress tests check that an interrupted section restarts. Here a signal or a migration would
//! have to fall between two instructions. That takes a handler or an affinity that belong to the
//! program, a second thread, and a wait of unknown length on a busy machine, at the first use of a
//! counter. Instead the process registers for the barrier that restarts sections; a kernel without
//! that barrier refuses.

use offlock_sync::atomic::{AtomicU64, Ordering};

use crate::cpu::CpuId;
use crate::rseq::operations::{Operations, Refused};
use crate::words::Words;

/// The number of attempts to get one id from a section and from `sched_getcpu`. A guess: the thread
/// may migrate between the two in each attempt but one.
const TRIES: usize = 100;

/// Returns the CPU as libc knows it, or a negative number.
pub(super) fn getcpu() -> i32 {
    // SAFETY: takes no arguments and writes no memory of this program; it reports errors by -1.
    unsafe { libc::sched_getcpu() }
}

/// Runs the self-test on usable operations and returns whether sections run, and if not, why. Calls
/// `enable` only for operations that did not fail the test.
///
/// Sections also run if the first use is on a thread that cannot test them. One without a CPU id is
/// none of libc's, and its sections all refuse. A helper thread would have no id either: glibc gives
/// a thread an id only if its parent has one.
pub(crate) fn decide<O: Operations>(
    usable: Result<O, &'static str>,
    enable: impl FnOnce(O),
) -> Result<(), &'static str> {
    let ops = usable?;
    self_test(&ops).unwrap_or(Ok(()))?;
    enable(ops);
    Ok(())
}

/// Tests `ops` on the calling thread. Returns `None` if the thread has no CPU id, or no memory. The
/// error names the failed check.
fn self_test(ops: &impl Operations) -> Option<Result<(), &'static str>> {
    let (open, closed) = (AtomicU64::new(0), AtomicU64::new(1));
    let words = Words::new().ok()?;
    if ops.add(&open, 0, &words, 1) == Err(Refused::NoCpu) {
        return None;
    }
    Some(check(ops, &open, &closed, &words))
}

/// Checks `ops` on `words`, whose sum is 1.
fn check(
    ops: &impl Operations,
    open: &AtomicU64,
    closed: &AtomicU64,
    words: &Words,
) -> Result<(), &'static str> {
    let sum = || {
        // Ordering: Relaxed; no other thread has these words.
        words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
    };
    let ensure = |holds: bool, error: &'static str| holds.then_some(()).ok_or(error);

    for n in 2..=8 {
        ensure(ops.add(open, 0, words, 1).is_ok(), "an add to an open gate was refused")?;
        ensure(sum() == n, "the sum of the words is not the sum of the adds")?;
    }
    ensure(ops.add(closed, 0, words, 1) == Err(Refused::Closed), "a closed gate let an add pass")?;
    ensure(sum() == 8, "a refused add changed a word")?;
    let gate = AtomicU64::new(u64::MAX - 7); // a section must compare all 64 bits
    ensure(
        ops.add(&gate, u64::MAX - 7, words, 2).is_ok() && sum() == 10,
        "an add to a gate with an open value went wrong",
    )?;
    ensure(
        [0, 7, u64::MAX - 7 - (1 << 63)].map(|other| ops.add(&gate, other, words, 1))
            == [Err(Refused::Closed); 3]
            && ops.add(&gate, u64::MAX - 7, words, 2_u64.wrapping_neg()).is_ok()
            && sum() == 8,
        "a gate with another value let an add pass",
    )?;
    ensure(ops.count(words, 3).is_ok() && sum() == 11, "an add without a gate went wrong")?;
    let confirmed = (0..TRIES).any(|_| {
        let cpu = ops.add(open, 0, words, 0).map(CpuId::get);
        cpu.is_ok_and(|cpu| i32::try_from(cpu) == Ok(getcpu()))
    });
    ensure(confirmed, "sched_getcpu never returned the CPU id")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations made of atomics. Each variant but `Correct` has one defect.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Faulty {
        Correct,
        NoId,
        AddsTwice,
        IgnoresGate,
        ComparesHalf,
        ChangesWhenRefused,
        WrongCpu,
        CountsNothing,
    }
    use Faulty::*;

    impl Faulty {
        fn enter(self, gate: &AtomicU64, open_value: u64) -> Result<CpuId, Refused> {
            if self == NoId {
                return Err(Refused::NoCpu);
            }
            let compared = if self == ComparesHalf { u64::from(u32::MAX) } else { u64::MAX };
            let closed = (gate.load(Ordering::Relaxed) ^ open_value) & compared != 0;
            if closed && self != IgnoresGate {
                return Err(Refused::Closed);
            }
            Ok(CpuId::new(0))
        }

        fn reported_cpu(self) -> CpuId {
            let here = u32::try_from(getcpu()).unwrap();
            CpuId::new(if self == WrongCpu { here + 1 } else { here })
        }
    }

    impl Operations for Faulty {
        fn add(
            &self,
            gate: &AtomicU64,
            open_value: u64,
            words: &Words,
            delta: u64,
        ) -> Result<CpuId, Refused> {
            let slot = self.enter(gate, open_value).inspect_err(|_| {
                if *self == ChangesWhenRefused {
                    words.slot(CpuId::new(0)).fetch_add(delta, Ordering::Relaxed);
                }
            })?;
            let times = if *self == AddsTwice { 2 } else { 1 };
            words.slot(slot).fetch_add(delta * times, Ordering::Relaxed);
            Ok(self.reported_cpu())
        }

        fn count(&self, words: &Words, delta: u64) -> Result<CpuId, Refused> {
            if *self != CountsNothing {
                words.slot(CpuId::new(0)).fetch_add(delta, Ordering::Relaxed);
            }
            Ok(self.reported_cpu())
        }
    }

    /// Returns the decision, and whether the operations were enabled.
    fn decided(ops: Result<Faulty, &'static str>) -> (Result<(), &'static str>, bool) {
        let mut enabled = None;
        let decided = decide(ops, |ops| enabled = Some(ops));
        assert!(enabled.is_none() || enabled == ops.ok());
        (decided, enabled.is_some())
    }

    #[test]
    fn inv17_faulty_operations_are_never_enabled() {
        assert_eq!(decided(Ok(Correct)), (Ok(()), true));
        assert_eq!(decided(Err("no barrier")), (Err("no barrier"), false));
        assert_eq!(decided(Ok(NoId)), (Ok(()), true), "another thread may have an id");
        for faulty in
            [AddsTwice, IgnoresGate, ComparesHalf, ChangesWhenRefused, WrongCpu, CountsNothing]
        {
            let (decided, enabled) = decided(Ok(faulty));
            assert!(decided.is_err() && !enabled, "{faulty:?}: {decided:?}");
        }
    }

    #[test]
    fn inv17_correct_operations_pass_and_each_defect_is_found() {
        assert_eq!(self_test(&Correct), Some(Ok(())));
        for (faulty, word) in [
            (AddsTwice, "sum of the adds"),
            (IgnoresGate, "closed gate"),
            (ComparesHalf, "another value"),
            (ChangesWhenRefused, "refused add"),
            (WrongCpu, "sched_getcpu"),
            (CountsNothing, "without a gate"),
        ] {
            let error = self_test(&faulty).expect("a CPU id").expect_err("a defect");
            assert!(error.contains(word), "{faulty:?}: {error}");
        }
    }
}
