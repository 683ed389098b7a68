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
    for faulty in
        [NoId, AddsTwice, IgnoresGate, ComparesHalf, ChangesWhenRefused, WrongCpu, CountsNothing]
    {
        let (decided, enabled) = decided(Ok(faulty));
        assert!(decided.is_err() && !enabled, "{faulty:?}: {decided:?}");
    }
}

#[test]
fn inv17_correct_operations_pass_and_each_defect_is_found() {
    assert_eq!(self_test(&Correct), Some(Ok(())));
    assert_eq!(self_test(&NoId), None, "the helper thread must run the test");
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
