//! L4: one CPU adds, the other removes: the seed's worst case, "no worse" than the single lock.
//!
//! ```text
//! thread 0   add object 0, 1, ... 63, 0, ...     waits until its place is free
//! thread 1   remove it                           waits until its place is full
//! ```

use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_utils::CachePadded;
use harness::timed::{Row, at_once, measure, wait};
use harness::{Plan, Report, two};

use crate::peers::{MutexList, MutexSlab, Owning, ShardedSlab};
use crate::registry::{Handed, Registry};

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

/// The place in which an object waits for its removal: full once the object is added.
struct Place<T> {
    full: AtomicBool,
    ticket: Handed<T>,
}

impl<T> Place<T> {
    fn new() -> Self {
        Self { full: AtomicBool::new(false), ticket: Handed::new() }
    }
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
                // Ordering: Acquire loads pair with the Release store of the other thread; they
                // carry the ticket.
                if thread == 0 {
                    wait(|| !place.full.load(Ordering::Acquire));
                    let ticket = registry.add(object);
                    // SAFETY: it is empty, as was just seen, and stays so until the store.
                    unsafe { place.ticket.put(ticket) };
                    place.full.store(true, Ordering::Release);
                } else {
                    wait(|| place.full.load(Ordering::Acquire));
                    // SAFETY: it is full, as was just seen, and stays so until the store.
                    let ticket = unsafe { place.ticket.take() }.expect("a full place has one");
                    assert!(registry.remove(object, ticket));
                    place.full.store(false, Ordering::Release);
                }
            }
        });
        timed.throughput(plan.min_overlap, OBJECTS as u64).map(|rate| [rate])
    })
}
