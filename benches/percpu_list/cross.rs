//! L4: one CPU adds, the other removes: the seed's worst case, "no worse" than the single lock.
//!
//! ```text
//! thread 0   add object 0, 1, ... 63, 0, ...     waits until its place is free
//! thread 1   remove it                           waits until its place is full
//! ```

use crossbeam_utils::CachePadded;
use harness::timed::{Row, at_once, measure};
use harness::{Plan, Report, two};

use crate::peers::{MutexList, MutexSlab, Owning, ShardedSlab};
use crate::registry::{Place, Registry};

/// Objects on their way, at most.
const PLACES: usize = 64;
/// Objects that make a window: some milliseconds.
const OBJECTS: usize = 40_000;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rows = vec![row::<Owning>(), row::<MutexList>(), row::<MutexSlab>(), row::<ShardedSlab>()];
    let [rounds] = measure(["one adds, the other removes"], plan, rows);
    report.compare(&rounds, &[Owning::NAME]);
    let ratio = rounds.tput_ratio(&two(Owning::NAME), &two(MutexList::NAME));
    report.record("L4.mutex_list.tput", ratio);
}

fn row<R: Registry>() -> Row<'static> {
    let registry = R::new();
    let objects: Vec<R::Object> = (0..PLACES as u64).map(R::Object::from).collect();
    let places: Vec<CachePadded<Place<R::Ticket>>> =
        (0..PLACES).map(|_| CachePadded::new(Place::new())).collect();
    Row::of_windows(two(R::NAME), 2, move |plan| {
        let timed = at_once(2, |thread| {
            for n in 0..OBJECTS {
                let (object, place) = (&objects[n % PLACES], &places[n % PLACES]);
                if thread == 0 {
                    place.wait_until_empty();
                    // SAFETY: it is empty, and this thread alone puts.
                    unsafe { place.put(registry.add(object)) };
                } else {
                    // SAFETY: this thread alone takes.
                    unsafe { place.take(|ticket| assert!(registry.remove(object, ticket))) };
                }
            }
        });
        timed.throughput(plan.min_overlap, OBJECTS as u64).map(|rate| [rate])
    })
}
