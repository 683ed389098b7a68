//! The start-up self-test: sections stay off if the kernel, an emulator or libc gets them wrong.
//!
//! The test checks sections that are not interrupted: one that commits changes the word of the CPU that
//! the kernel names, and no other word. A refused section changes nothing.
//!
//! The stress tests check that an interrupted section restarts. Here a signal or a migration would
//! have to fall between two instructions. That takes a handler or an affinity that belong to the
//! program, a second thread, and a wait of unknown length on a busy machine, at the first use of a
//! counter. Instead the process registers for the barrier that restarts sections; a kernel without
//! that barrier refuses.

use offlock_sync::atomic::{AtomicU64, Ordering};

use crate::cpu::{CpuId, possible_cpus};
use crate::rseq::Refused;
use crate::words::Words;

/// The number of attempts to see the word of this CPU change. In each attempt the thread may
/// migrate between the kernel's answer and the section.
const TRIES: usize = 100;

/// Returns the CPU as the kernel knows it, or a number that is no CPU. glibc's `sched_getcpu` would not
/// do: it returns the id in the rseq area.
pub(super) fn getcpu() -> u32 {
    let mut cpu = u32::MAX;
    let none = std::ptr::null_mut::<u32>();
    // SAFETY: writes `cpu`, and nothing through the null pointers.
    unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, none, none) };
    cpu
}

/// Tests sections on the calling thread. `run` adds by a section, with a gate and the value that opens
/// it, or without. Returns `None` if the thread has no CPU id, or no memory. The error names the failed
/// check.
pub(super) fn self_test(
    run: impl Fn(Option<(&AtomicU64, u64)>, &Words, u64) -> Result<(), Refused>,
) -> Option<Result<(), &'static str>> {
    let words = Words::new().ok()?;
    if run(None, &words, 1) == Err(Refused::WrongCpu) {
        return None;
    }
    Some(check(|gate, delta| run(gate, &words, delta), &words))
}

/// Checks `run` on `words`, whose sum is 1.
fn check(
    run: impl Fn(Option<(&AtomicU64, u64)>, u64) -> Result<(), Refused>,
    words: &Words,
) -> Result<(), &'static str> {
    let sum = || {
        // Ordering: Relaxed; no other thread has these words.
        words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
    };
    let ensure = |holds: bool, error: &'static str| holds.then_some(()).ok_or(error);

    let (open, closed) = (AtomicU64::new(0), AtomicU64::new(1));
    for n in 2..=8 {
        ensure(run(Some((&open, 0)), 1).is_ok(), "an add to an open gate was refused")?;
        ensure(sum() == n, "the sum of the words is not the sum of the adds")?;
    }
    ensure(run(Some((&closed, 0)), 1) == Err(Refused::Closed), "a closed gate let an add pass")?;
    ensure(sum() == 8, "a refused add changed a word")?;
    let gate = AtomicU64::new(u64::MAX - 7); // a section must compare all 64 bits
    ensure(
        run(Some((&gate, u64::MAX - 7)), 2).is_ok() && sum() == 10,
        "an add to a gate with an open value went wrong",
    )?;
    ensure(
        [0, 7, u64::MAX - 7 - (1 << 63)].map(|other| run(Some((&gate, other)), 1))
            == [Err(Refused::Closed); 3]
            && run(Some((&gate, u64::MAX - 7)), 2_u64.wrapping_neg()).is_ok()
            && sum() == 8,
        "a gate with another value let an add pass",
    )?;
    ensure(run(None, 3).is_ok() && sum() == 11, "an add without a gate went wrong")?;
    let confirmed = (0..TRIES).any(|_| {
        let cpu = CpuId::new(getcpu());
        let word = (cpu.index() < possible_cpus()).then(|| words.slot(cpu));
        word.is_some_and(|word| {
            let before = word.load(Ordering::Relaxed);
            run(None, 1).is_ok() && word.load(Ordering::Relaxed) == before.wrapping_add(1)
        })
    });
    ensure(
        confirmed,
        "the system call getcpu is refused, or never returned the CPU whose word changed",
    )
}

#[cfg(test)]
mod tests {
    use super::super::arch;
    use super::*;

    /// Adds by an atomic, like a section of this CPU, but with one defect.
    fn add(
        defect: &str,
        gate: Option<(&AtomicU64, u64)>,
        words: &Words,
        delta: u64,
    ) -> Result<(), Refused> {
        let add = |cpu: u32, delta: u64| {
            words.slot(CpuId::new(cpu)).fetch_add(delta, Ordering::Relaxed);
        };
        let here = getcpu();
        let compared = if defect == "compares half" { u64::from(u32::MAX) } else { u64::MAX };
        let differs = |(gate, open): (&AtomicU64, u64)| gate.load(Ordering::Relaxed) ^ open;
        if gate.map(differs).is_some_and(|bits| bits & compared != 0)
            && defect != "ignores the gate"
        {
            if defect == "changes when refused" {
                add(here, delta);
            }
            return Err(Refused::Closed);
        }
        match defect {
            "has no id" => return Err(Refused::WrongCpu),
            "adds twice" => add(here, 2 * delta),
            "counts nothing" if gate.is_none() => {}
            "is elsewhere" => add((here + 1) % possible_cpus() as u32, delta),
            _ => add(here, delta),
        }
        Ok(())
    }

    #[test]
    fn inv17_correct_sections_pass_and_each_defect_is_found() {
        let test = |defect| self_test(|gate, words, delta| add(defect, gate, words, delta));
        assert_eq!((test("none"), test("has no id")), (Some(Ok(())), None));
        for (defect, word) in [
            ("adds twice", "sum of the adds"),
            ("ignores the gate", "closed gate"),
            ("compares half", "another value"),
            ("changes when refused", "refused add"),
            ("counts nothing", "sum of the adds"),
            ("is elsewhere", "getcpu"),
        ] {
            if defect == "is elsewhere" && possible_cpus() == 1 {
                continue;
            }
            let error = test(defect).expect("a CPU id").expect_err(defect);
            assert!(error.contains(word), "{defect}: {error}");
        }
    }

    /// The id in the area is the number of another CPU, as after a kernel or an emulator that did not
    /// write it again.
    #[test]
    fn inv17_a_stale_id_is_found() {
        let Ok(found) = super::super::usable() else { return };
        let test = move || {
            self_test(|gate, words, delta| {
                let mut cpu = 0_u32;
                // SAFETY: writes `cpu`.
                unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, 0, 0) };
                let stale = (cpu + 1) % possible_cpus() as u32;
                let id = arch::thread_pointer().wrapping_add_signed(found.area) + 4;
                // SAFETY: the id in the area of this thread, which the kernel writes again when it
                // moves the thread.
                unsafe { (id as *mut u32).write_volatile(stale) };
                found.add(gate, words, delta)
            })
        };
        let is_found = move || test().is_some_and(|tested| tested.is_err());
        // On a busy machine the kernel may write the id again just before a section.
        let once = std::thread::spawn(move || (0..100).any(|_| is_found())).join().unwrap();
        assert!(once || possible_cpus() == 1);
    }
}
