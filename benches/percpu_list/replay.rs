//! L3: the recordings of open files, replayed, and the seed's table of hits.
//!
//! The hits are counted in one thread, which moves to the recorded CPU of each event. For the
//! throughput each of two threads, pinned to a CPU, does what was recorded on one:
//!
//! ```text
//! recorded    0 add a | 1 add b | 0 remove b | 1 add b | ...
//! thread 0    add a, remove b        waits until thread 1 has added b
//! thread 1    add b, add b'          never waits
//! ```
//!
//! Every addition is of an object of its own, as every open file was: the recording names files by
//! numbers that are used again, and a thread that would wait for such a number to come free would
//! measure that. Nothing else keeps the threads together.

use std::thread;

use harness::timed::{Row, at_once, measure};
use harness::{Plan, Ratio, Report, Table, allowed_cpus, number, pin, two};
use percpu_list::Stats;
use recordings::{BUILD16, CPUS, DBENCH64, FileEvent as Event, Recording};

use crate::peers::{MutexList, Owning};
use crate::registry::{Place, Registry};

/// The seed's table: workload, removals, and hits of the CPU and of the node in percent.
const PUBLISHED: [(&str, &str, f64, f64); 3] = [
    ("booting", "25,049", 92.5, 95.6),
    ("kbuild -j16", "2,281,913", 96.8, 98.7),
    ("dbench 64", "4,306,582", 99.6, 99.8),
];

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let columns = ["adds", "removals", "cpu hits, %", "node hits, %"];
    let mut table = Table::new("removals that met their own CPU's list", columns);
    table.bars = vec![2, 3];
    let mut ratios = Vec::new();
    for recording in [DBENCH64, BUILD16] {
        let events = recording.files().unwrap_or_else(|error| panic!("{error}"));
        if let Some(stats) = hits(&events) {
            let percents = [stats.cpu_hit_percent(), stats.node_hit_percent()];
            let id = format!("L3.{}.cpu_hits.pct", recording.name);
            report.record(&id, Some(percents[0]));
            let counts = [stats.adds, stats.removals].map(|count| count.to_string());
            let percents = percents.map(|percent| number(Some(percent), 2));
            table.row(format!("{}, replayed", recording.name), counts.into_iter().chain(percents));
        }
        ratios.push(throughput(plan, report, &recording, &events));
    }
    for (name, removals, cpu, node) in PUBLISHED {
        let percents = [cpu, node].map(|percent| number(Some(percent), 2));
        let counts = [String::new(), removals.to_string()];
        table.row(format!("{name}, published"), counts.into_iter().chain(percents));
    }
    print!("{table}");
    // Both recordings are to reach it.
    let ratios: Option<Vec<Ratio>> = ratios.into_iter().collect();
    let worst = ratios.and_then(|all| all.into_iter().reduce(Ratio::lower));
    report.record("L3.mutex_list_2t.tput", worst);
}

/// Returns the counters of the list after all events, each on its CPU.
fn hits(events: &[Event]) -> Option<Stats> {
    let cpus = allowed_cpus();
    if cpus.len() < CPUS {
        let count = cpus.len();
        println!("# not measured: hits: recorded on {CPUS} CPUs, and this process has {count}");
        return None;
    }
    let replay = || {
        let registry = Owning::new();
        let mut open: Vec<_> = (0..files(events)).map(|_| None).collect();
        let mut here = usize::MAX;
        for event in events {
            let (cpu, file) = (cpus[usize::from(event.cpu)], &mut open[event.file as usize]);
            if cpu != here {
                pin(cpu);
                here = cpu;
            }
            if event.is_added {
                *file = Some(registry.0.insert(event.file.into()).expect("memory for a file"));
            } else {
                let entry = file.take().expect("it is open");
                assert!(entry.remove().is_ok_and(|removed| removed));
            }
        }
        registry.0.stats() // before the files that are still open are removed
    };
    Some(thread::scope(|scope| scope.spawn(replay).join().expect("a replay that ends")))
}

fn files(events: &[Event]) -> usize {
    events.iter().map(|event| event.file as usize + 1).max().unwrap_or(0)
}

/// Two threads at once.
fn throughput(
    plan: &Plan,
    report: &mut Report,
    recording: &Recording,
    events: &[Event],
) -> Option<Ratio> {
    let script = Script::new(events);
    let rows = vec![row::<Owning>(&script), row::<MutexList>(&script)];
    let group = format!("replay {}, per event", recording.name);
    let [rounds] = measure([&group], plan, rows);
    report.compare(&rounds, &[Owning::NAME]);
    rounds.tput_ratio(&two(Owning::NAME), &two(MutexList::NAME))
}

/// An event as a thread does it.
struct Step {
    object: u32,
    is_addition: bool,
}

/// The events of each thread, and their number.
struct Script {
    threads: [Vec<Step>; CPUS],
    objects: usize,
    events: u64,
}

impl Script {
    fn new(events: &[Event]) -> Self {
        let mut threads = [Vec::new(), Vec::new()];
        // The object that each number stands for.
        let mut added: Vec<Option<u32>> = vec![None; files(events)];
        // Each thread's objects lie together, so that the two share no lines but those of what one
        // adds and the other removes.
        let adds = |cpu: u8| {
            let of_cpu = |event: &&Event| event.is_added && event.cpu == cpu;
            events.iter().filter(of_cpu).count() as u32
        };
        let (first, second) = (adds(0), adds(1));
        let mut next = [0, first];
        for event in events {
            let thread = usize::from(event.cpu);
            let (file, is_addition) = (&mut added[event.file as usize], event.is_added);
            if is_addition {
                *file = Some(next[thread]);
                next[thread] += 1;
            }
            let object = if is_addition { *file } else { file.take() };
            let object = object.expect("what is removed was added");
            threads[thread].push(Step { object, is_addition });
        }
        Self { threads, objects: (first + second) as usize, events: events.len() as u64 }
    }
}

fn row<R: Registry>(script: &Script) -> Row<'_> {
    let registry = R::new();
    let objects: Vec<R::Object> = (0..script.objects as u64).map(R::Object::from).collect();
    let mut files: Vec<Place<R::Ticket>> = (0..script.objects).map(|_| Place::new()).collect();
    Row::of_windows(two(R::NAME), 2, move |plan| {
        let timed = at_once(2, |thread| {
            for step in &script.threads[thread] {
                let (object, file) = (&objects[step.object as usize], &files[step.object as usize]);
                if step.is_addition {
                    // SAFETY: each object is added once, into an empty place.
                    unsafe { file.put(registry.add(object)) };
                } else {
                    // SAFETY: each object is removed once.
                    unsafe { file.take(|ticket| assert!(registry.remove(object, ticket))) };
                }
            }
        });
        for (object, file) in objects.iter().zip(&mut files) {
            if let Some(ticket) = file.clear() {
                registry.remove(object, ticket); // still open at the end
            }
        }
        timed.throughput(plan.min_overlap, script.events).map(|rate| [rate])
    })
}
