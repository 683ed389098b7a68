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
mod tests;
