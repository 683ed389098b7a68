//! L6: 100,000 entries walked.
//!
//! The entries were added in the order in which they lie in memory, and then each was removed and
//! added again, in random order: so a list leads all over the memory. Every walk reads a word of
//! each object, and holds the lock all the way unless its row says otherwise.

use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};

use crate::peers::{MutexSlab, Owning};
use crate::registry::{Entries, LIVE, Registry, Walk};

const OURS: &str = Owning::NAME;
const SNAPSHOT: &str = "PerCpuList, snapshot";
const UNLOCKED: &str = "PerCpuList, unlocked";
/// The message of `expect`: no call is refused.
const FREE: &str = "this thread has nothing locked";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = shuffled::<Owning>();
    let list = &ours.registry.0;
    let rows = vec![
        locked::<Owning>(),
        locked::<MutexSlab>(),
        row(SNAPSHOT, || list.lock_all().expect(FREE).iter().sum()),
        row(UNLOCKED, || list.iter().map(|value| *value).sum()),
    ];
    let [rounds] = measure(["walk 100 k entries, per entry"], plan, rows);
    report.compare(&rounds, &[OURS, SNAPSHOT, UNLOCKED]);
    report.record("L6.lock_all_walk.slab", rounds.time_ratio(OURS, MutexSlab::NAME));
    report.record("L6.iter.slab", rounds.time_ratio(UNLOCKED, MutexSlab::NAME));
}

fn shuffled<R: Registry>() -> Entries<R> {
    let mut entries = Entries::new(0, LIVE);
    for at in Random::new(1).permutation(LIVE) {
        entries.renew(at as usize);
    }
    entries
}

fn locked<R: Walk>() -> Row<'static> {
    let entries = shuffled::<R>();
    row(R::NAME, move || {
        let mut sum = 0;
        entries.registry.each(|number| sum += number);
        sum
    })
}

/// A walk that adds up the numbers of all objects.
fn row<'a>(name: &str, walk: impl Fn() -> u64 + 'a) -> Row<'a> {
    Row::new(name, move || {
        assert_eq!(walk(), (0..LIVE as u64).sum::<u64>(), "the entries");
        LIVE as u64
    })
}
