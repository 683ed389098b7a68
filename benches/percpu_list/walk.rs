//! L6: 100,000 entries walked.
//!
//! The entries were added in the order in which they lie in memory, and then each was removed and
//! added again, in random order: so a list leads all over the memory. Every walk reads a word of
//! each object, and holds the lock all the way unless its row says otherwise.

use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};

use crate::ours::Owning;
use crate::peers::{MutexList, MutexSlab, ShardedList};
use crate::registry::{Entries, LIVE, Registry, Walk};

const OURS: &str = Owning::NAME;
/// The message of `expect`: no call is refused.
const FREE: &str = "this thread has nothing locked";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = Owning::new();
    let (list, slab, sharded) = (MutexList::new(), MutexSlab::new(), ShardedList::new());
    let _ours = shuffled(&ours);
    let _list = shuffled(&list);
    let _slab = shuffled(&slab);
    let _sharded = shuffled(&sharded);
    let rows = vec![
        locked(&ours),
        locked(&list),
        locked(&slab),
        locked(&sharded),
        row("PerCpuList, snapshot", || ours.0.lock_all().expect(FREE).iter().sum()),
        row("PerCpuList, unlocked", || ours.0.iter().map(|value| *value).sum()),
    ];
    let rounds = measure("walk 100 k entries, per entry", plan, rows);
    report.show(&rounds);
    let peers = [MutexList::NAME, MutexSlab::NAME, ShardedList::NAME];
    report.against(&rounds, OURS, 1, &peers);
    for other in ["snapshot", "unlocked"] {
        report.against(&rounds, &format!("{OURS}, {other}"), 1, &peers);
    }
    let ratio = |ours: &str, peer| rounds.time_ratio(&format!("{ours}/1"), &format!("{peer}/1"));
    report.record("L6.lock_all_walk.slab", ratio(OURS, MutexSlab::NAME));
    report.record("L6.iter.slab", ratio(&format!("{OURS}, unlocked"), MutexSlab::NAME));
}

fn shuffled<R: Registry>(registry: &R) -> Entries<'_, R> {
    let mut entries = Entries::new(registry, 0, LIVE);
    for at in Random::new(1).permutation(entries.len()) {
        entries.renew(at as usize);
    }
    entries
}

fn locked<R: Walk>(registry: &R) -> Row<'_> {
    row(R::NAME, || {
        let mut sum = 0;
        registry.each(|number| sum += number);
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
