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

use super::operations::{Operations, Refused};
use crate::cpu::{CpuId, getcpu};
use crate::starting::starting_with_helper;
use crate::words::Words;

/// The number of attempts to get one id from a section and from `sched_getcpu`. A guess: the thread
/// may migrate between the two in each attempt but one.
const TRIES: usize = 100;

/// Runs the self-test on usable operations and returns whether sections run, and if not, why. Calls
/// `enable` only for operations that passed the test.
pub(crate) fn decide<O: Operations + Copy + Send + 'static>(
    usable: Result<O, &'static str>,
    enable: impl FnOnce(O),
) -> Result<(), &'static str> {
    let ops = usable?;
    test_somewhere(ops)?;
    enable(ops);
    Ok(())
}

/// Runs the self-test on the calling thread, or on a helper thread if the calling thread has no CPU
/// id.
fn test_somewhere<O: Operations + Copy + Send + 'static>(ops: O) -> Result<(), &'static str> {
    self_test(&ops).unwrap_or_else(|| {
        // The helper allocates while the calling thread waits for it inside a `OnceLock`.
        let tested = starting_with_helper(|| {
            let helper = std::thread::Builder::new().spawn(move || self_test(&ops));
            helper.ok().and_then(|thread| thread.join().ok()).flatten()
        });
        tested.unwrap_or(Err("no thread has a CPU id to test with"))
    })
}

/// Tests `ops` on the calling thread. Returns `None` if the thread has no CPU id. The error names
/// the failed check.
fn self_test(ops: &impl Operations) -> Option<Result<(), &'static str>> {
    let (open, closed) = (AtomicU64::new(0), AtomicU64::new(1));
    let Ok(words) = Words::new() else { return Some(Err("no memory to test with")) };
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
    ensure(
        ops.add_within(open, words, 100, 50) == Err(Refused::OutOfRange) && sum() == 8,
        "an add beyond its bound was not refused",
    )?;
    ensure(ops.add_within(open, words, -3, 50).is_ok() && sum() == 5, "a bounded add went wrong")?;
    let confirmed = (0..TRIES).any(|_| {
        let cpu = ops.add(open, 0, words, 0).map(CpuId::get);
        cpu.is_ok_and(|cpu| i32::try_from(cpu) == Ok(getcpu()))
    });
    ensure(confirmed, "sched_getcpu never returned the CPU id")?;

    // The thread may migrate between two operations, so each starts with equal words on all CPUs.
    let word = |cpu: CpuId| words.slot(cpu).load(Ordering::Relaxed);
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let swapped = ops.swap(open, words, 7);
    ensure(
        swapped.is_ok_and(|(cpu, old)| old == 0 && word(cpu) == 7) && sum() == 7,
        "a swap returned or stored a wrong value",
    )?;
    words.iter().for_each(|word| word.store(7, Ordering::Relaxed));
    let swapped = ops.swap(open, words, 0);
    ensure(
        swapped.is_ok_and(|(cpu, old)| old == 7 && word(cpu) == 0),
        "a swap returned or stored a wrong value",
    )?;
    ensure(ops.swap(closed, words, 1) == Err(Refused::Closed), "a closed gate let a swap pass")
}

#[cfg(test)]
mod tests;
