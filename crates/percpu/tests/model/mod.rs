//! Runs operations of every structure of the crate, and compares each result with a model.
//!
//! The property test and the fuzz target share it. It uses one thread, and searches for a sequence
//! of operations on several types after which a count is wrong.

use offlock_percpu::{CpuId, LgLock, PerCpuCounter, possible_cpus};
use testkit::pin::{allowed_cpus, pin_to};

use self::locks::Locks;
use self::readers::Readers;
use self::references::{References, Released};

mod locks;
mod readers;
mod references;

/// Runs one input. Returns the number of steps.
///
/// # Panics
///
/// Panics if the result of an operation differs from the model's.
pub(crate) fn run(input: &[u8]) -> usize {
    let steps = input.get(4..).unwrap_or_default().chunks(4); // the corpus has a header
    run_steps(steps.map(|chunk| {
        let mut step = [0; 4];
        step[..chunk.len()].copy_from_slice(chunk);
        step
    }))
}

/// Runs steps, and returns their number. Panics like [`run`].
pub(crate) fn run_steps(input: impl Iterator<Item = [u8; 4]>) -> usize {
    let mut counting = Counting { counter: PerCpuCounter::new(), sum: 0 };
    let released = Released::default();
    let refs = released.counted();
    let mut references = References::new(&refs, &released);
    let lock = LgLock::default();
    let mut locks = Locks::new(&lock);
    let mut readers = Readers::default();
    let (mut steps, cpus) = (0, allowed_cpus());
    for [what, a, b, c] in input {
        let amount = amount(b, c);
        match what % 32 {
            what @ 0..=13 => counting.step(what % 5, a, amount),
            14 | 15 => {
                let cpu = cpus[usize::from(a) % cpus.len()];
                pin_to(&[cpu]);
                locks.pinned = Some(cpu); // also for a guard that is held: it unlocks its own slot
            }
            what @ 16..=19 => references.step(what - 16, a),
            20..=29 => locks.step(a, cpu(b)),
            what => readers.step(what - 30, a),
        }
        counting.check();
        steps += 1;
    }
    pin_to(&cpus);
    references.end();
    readers.end();
    locks.end();
    steps
}

/// Returns a small or middling number, or one so large that sums wrap: `shift` decides.
fn amount(base: u8, shift: u8) -> u64 {
    match shift % 4 {
        0 => u64::from(base % 8),
        1 => u64::from(base),
        2 => u64::from(base) << (shift / 4),
        _ => (u64::from(base) << (shift / 4)).wrapping_sub(1),
    }
}

fn cpu(a: u8) -> CpuId {
    CpuId::new(u32::from(a) % possible_cpus() as u32)
}

struct Counting {
    counter: PerCpuCounter,
    sum: i64,
}

impl Counting {
    fn step(&mut self, what: u8, a: u8, amount: u64) {
        match what {
            0 | 1 => {
                let delta = if a.is_multiple_of(2) {
                    amount as i64
                } else {
                    (amount as i64).wrapping_neg()
                };
                self.counter.add(delta);
                self.sum = self.sum.wrapping_add(delta);
            }
            _ => {
                (0..a).for_each(|_| self.counter.increment());
                self.sum = self.sum.wrapping_add(i64::from(a));
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.counter.sum(), self.sum);
    }
}
