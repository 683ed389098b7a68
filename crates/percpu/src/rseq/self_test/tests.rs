use super::*;

/// Sections that work, made of atomics, but for one lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Liar {
    Honest,
    NoId,
    AddsTwice,
    IgnoresTheGate,
    IgnoresTheName,
    IgnoresTheBound,
    ChangesWhatItRefuses,
    WrongCpu,
    SwapsNothing,
}
use Liar::*;

impl Liar {
    fn enter(self, gate: &AtomicU64) -> Result<CpuId, Refused> {
        if self == NoId {
            return Err(Refused::NoCpu);
        }
        if gate.load(Ordering::Relaxed) != 0 && self != IgnoresTheGate {
            return Err(Refused::Closed);
        }
        Ok(CpuId::new(0))
    }

    fn says(self) -> CpuId {
        let here = u32::try_from(getcpu()).unwrap();
        CpuId::new(if self == WrongCpu { here + 1 } else { here })
    }
}

impl Operations for Liar {
    fn add(&self, gate: &AtomicU64, words: &Words, delta: u64) -> Result<CpuId, Refused> {
        let slot = self.enter(gate).inspect_err(|_| {
            if *self == ChangesWhatItRefuses {
                words.slot(CpuId::new(0)).fetch_add(delta, Ordering::Relaxed);
            }
        })?;
        let times = if *self == AddsTwice { 2 } else { 1 };
        words.slot(slot).fetch_add(delta * times, Ordering::Relaxed);
        Ok(self.says())
    }

    fn add_while(
        &self,
        gate: &AtomicU64,
        open: u64,
        words: &Words,
        delta: u64,
    ) -> Result<CpuId, Refused> {
        if gate.load(Ordering::Relaxed) != open && *self != IgnoresTheName {
            return Err(Refused::Closed);
        }
        self.add(&AtomicU64::new(0), words, delta)
    }

    fn add_within(
        &self,
        gate: &AtomicU64,
        words: &Words,
        delta: i64,
        bound: i64,
    ) -> Result<CpuId, Refused> {
        let slot = self.enter(gate)?;
        let sum = words.slot(slot).load(Ordering::Relaxed) as i64 + delta;
        if sum.abs() >= bound && *self != IgnoresTheBound {
            return Err(Refused::Busy);
        }
        words.slot(slot).store(sum as u64, Ordering::Relaxed);
        Ok(self.says())
    }

    fn swap(&self, gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused> {
        let slot = self.enter(gate)?;
        let old = words.slot(slot).load(Ordering::Relaxed);
        if *self != SwapsNothing {
            words.slot(slot).store(new, Ordering::Relaxed);
        }
        Ok((slot, old))
    }
}

/// What is decided, and whether it was armed.
fn decided(ops: Result<Liar, Sections>) -> (Sections, bool) {
    let mut armed = None;
    let decided = decide(ops, |ops| armed = Some(ops));
    assert!(armed.is_none() || armed == ops.ok());
    (decided, armed.is_some())
}

#[test]
fn inv17_a_liar_is_never_armed() {
    assert_eq!(decided(Ok(Honest)), (Sections::InUse, true));
    assert_eq!(decided(Err(Sections::NoBarrier)), (Sections::NoBarrier, false));
    for liar in [
        NoId,
        AddsTwice,
        IgnoresTheGate,
        IgnoresTheName,
        IgnoresTheBound,
        ChangesWhatItRefuses,
        WrongCpu,
        SwapsNothing,
    ] {
        let (decided, armed) = decided(Ok(liar));
        assert!(matches!(decided, Sections::Misbehave(_)) && !armed, "{liar:?}: {decided}");
    }
}

#[test]
fn inv17_an_honest_backend_passes_and_each_liar_is_found_out() {
    assert_eq!(self_test(&Honest), Some(Ok(())));
    assert_eq!(self_test(&NoId), None, "another thread must be asked");
    for (liar, word) in [
        (AddsTwice, "add up"),
        (IgnoresTheGate, "closed gate"),
        (IgnoresTheName, "another name"),
        (IgnoresTheBound, "bound"),
        (ChangesWhatItRefuses, "refused add"),
        (WrongCpu, "sched_getcpu"),
        (SwapsNothing, "swap"),
    ] {
        let said = self_test(&liar).expect("it has an id").expect_err("a lie");
        assert!(said.contains(word), "{liar:?}: {said}");
    }
}
