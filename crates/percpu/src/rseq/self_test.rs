//! The start-up self-test: a kernel, an emulator or a libc that gets sections wrong is not used.
//!
//! It checks what holds without an interruption: the id is a CPU's that `sched_getcpu` confirms, a
//! section that commits changes its word and no other, and one that is refused changes nothing.
//!
//! That a section which is interrupted starts again is left to the stress tests. To see it here a
//! signal or a migration would have to fall between two instructions: that takes a handler or an
//! affinity that belong to the program, a second thread, and a wait of unknown length on a busy
//! machine, at the first use of a counter. The registration of the barrier that restarts sections
//! is asked for, and a kernel that lacks it refuses.

use super::operations::{Operations, Refused};
use super::state::Sections;
use crate::cpu::{CpuId, getcpu};
use crate::starting::starting_with_helper;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::words::Words;

/// A guess: how often a thread may be moved between two questions before we call it a lie.
const TRIES: usize = 100;

/// What becomes of sections: `arm` is called for operations that passed the test, and no others.
pub(crate) fn decide<O: Operations + Copy + Send + 'static>(
    usable: Result<O, Sections>,
    arm: impl FnOnce(O),
) -> Sections {
    let ops = match usable {
        Ok(ops) => ops,
        Err(why) => return why,
    };
    if let Err(what) = test_somewhere(ops) {
        return Sections::Misbehave(what);
    }
    arm(ops);
    Sections::InUse
}

/// Runs the self-test here, or on a thread of its own if this one has no id to test with.
fn test_somewhere<O: Operations + Copy + Send + 'static>(ops: O) -> Result<(), &'static str> {
    self_test(&ops).unwrap_or_else(|| {
        // The helper allocates while the calling thread waits for it inside a `OnceLock`.
        let tested = starting_with_helper(|| {
            let helper = std::thread::Builder::new().spawn(move || self_test(&ops));
            helper.ok().and_then(|thread| thread.join().ok()).flatten()
        });
        tested.unwrap_or(Err("no thread has an id to test with"))
    })
}

/// Tests `ops` on the calling thread; `None` if it has no CPU id. The error says what went wrong.
fn self_test(ops: &impl Operations) -> Option<Result<(), &'static str>> {
    let (open, closed) = (AtomicU64::new(0), AtomicU64::new(1));
    let Ok(words) = Words::new() else { return Some(Err("no memory to test with")) };
    if ops.add(&open, &words, 1) == Err(Refused::NoCpu) {
        return None;
    }
    Some(verdict(ops, &open, &closed, &words))
}

fn verdict(
    ops: &impl Operations,
    open: &AtomicU64,
    closed: &AtomicU64,
    words: &Words,
) -> Result<(), &'static str> {
    let sum = || {
        // Ordering: Relaxed; nobody else has these words.
        words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
    };
    let holds = |truth: bool, what: &'static str| truth.then_some(()).ok_or(what);

    for n in 2..=8 {
        holds(ops.add(open, words, 1).is_ok(), "an add to an open gate was refused")?;
        holds(sum() == n, "the words do not add up to what was added")?;
    }
    holds(ops.add(closed, words, 1) == Err(Refused::Closed), "a closed gate let an add pass")?;
    holds(sum() == 8, "a refused add changed a word")?;
    let named = AtomicU64::new(u64::MAX - 7); // of 64 bits that matter
    holds(
        ops.add_while(&named, u64::MAX - 7, words, 2).is_ok() && sum() == 10,
        "an add to a named gate went wrong",
    )?;
    holds(
        [0, 7, u64::MAX - 7 - (1 << 63)].map(|not| ops.add_while(&named, not, words, 1))
            == [Err(Refused::Closed); 3]
            && ops.add_while(&named, u64::MAX - 7, words, 2_u64.wrapping_neg()).is_ok()
            && sum() == 8,
        "a gate of another name let an add pass",
    )?;
    holds(
        ops.add_within(open, words, 100, 50) == Err(Refused::Busy) && sum() == 8,
        "an add beyond its bound was not refused",
    )?;
    holds(ops.add_within(open, words, -3, 50).is_ok() && sum() == 5, "a bounded add went wrong")?;
    let confirmed = (0..TRIES).any(|_| {
        let cpu = ops.add(open, words, 0).map(CpuId::get);
        cpu.is_ok_and(|cpu| i32::try_from(cpu) == Ok(getcpu()))
    });
    holds(confirmed, "the CPU id is not what sched_getcpu says")?;

    // From here on every word is 0 before, whatever CPU comes next.
    let word = |cpu: CpuId| words.slot(cpu).load(Ordering::Relaxed);
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let swapped = ops.swap(open, words, 7);
    holds(
        swapped.is_ok_and(|(cpu, old)| old == 0 && word(cpu) == 7) && sum() == 7,
        "a swap returned or stored something else",
    )?;
    words.iter().for_each(|word| word.store(7, Ordering::Relaxed));
    let swapped = ops.swap(open, words, 0);
    holds(
        swapped.is_ok_and(|(cpu, old)| old == 7 && word(cpu) == 0),
        "a swap returned or stored something else",
    )?;
    holds(ops.swap(closed, words, 1) == Err(Refused::Closed), "a closed gate let a swap pass")
}

#[cfg(test)]
mod tests {
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
}
