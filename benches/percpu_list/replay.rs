//! L3: the recordings of open files, replayed, and the seed's table of hits.
//!
//! The hits are counted in one thread, which adds and removes as if it ran on the recorded CPU. For
//! the throughput each of two threads, pinned to a CPU, does what was recorded on one:
//!
//! ```text
//! recorded    0 add a | 1 add b | 0 remove b | 1 add b | ...
//! thread 0    add a, remove b        waits until thread 1 has added b
//! thread 1    add b, add b           waits until thread 0 has removed b
//! ```
//!
//! A file is used again when it was in the recording, so it comes back on another CPU as often as
//! it did there. Nothing else keeps the threads together.

use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_utils::CachePadded;
use harness::{Plan, Report};
use percpu::CpuId;
use percpu_list::Stats;
use recordings::files::{Action, BUILD16, CPUS, DBENCH64, Event, Recording};

use crate::locked::{MutexList, MutexSlab, ShardedList};
use crate::ours::{Intrusive, Owning};
use crate::peers::{Dash, ShardedSlab};
use crate::registry::Registry;
use crate::two::{Handed, Row, at_once, measure, wait};

/// The seed's table: workload, removals, and hits of the CPU and of the node in percent.
const PUBLISHED: [(&str, &str, f64, f64); 3] = [
    ("booting", "25,049", 92.5, 95.6),
    ("kbuild -j16", "2,281,913", 96.8, 98.7),
    ("dbench 64", "4,306,582", 99.6, 99.8),
];

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let recordings = [DBENCH64, BUILD16]
        .map(|recording| (recording, recording.load().unwrap_or_else(|error| panic!("{error}"))));
    hits(report, &recordings);
    let ratios: Vec<Option<f64>> = recordings
        .iter()
        .map(|(recording, events)| throughput(plan, report, recording, events))
        .collect();
    // Both recordings are to reach it.
    let worst = ratios.into_iter().collect::<Option<Vec<f64>>>();
    report.record("L3.mutex_list_2t.tput", worst.and_then(|all| all.into_iter().reduce(f64::min)));
    println!("  published, of a compile on 64 threads: throughput 24.5 before, 24.9 after;");
    println!("  system time 28.25 % before, 18.5 % after");
}

fn hits(report: &mut Report, recordings: &[(Recording, Vec<Event>)]) {
    let cpus = percpu::topology().capacity();
    if cpus < CPUS {
        println!("# not measured: hits: recorded on {CPUS} CPUs, and this machine has {cpus}");
        return;
    }
    println!(
        "# a single list has no hits to count; one list per CPU, replayed here and published:"
    );
    println!("# {:<12}{:>10}{:>10}{:>10}{:>11}", "", "adds", "removals", "cpu hits", "node hits");
    for (recording, events) in recordings {
        let stats = sequentially(events);
        let name = recording.name;
        println!(
            "# {name:<12}{:>10}{:>10}{:>8.2} %{:>9.2} %    replayed",
            stats.adds,
            stats.removals,
            stats.cpu_hit_percent(),
            stats.node_hit_percent()
        );
        report.record(&format!("L3.{name}.cpu_hits.pct"), Some(stats.cpu_hit_percent()));
    }
    for (name, removals, cpu, node) in PUBLISHED {
        println!("# {name:<12}{:>10}{removals:>10}{cpu:>8.2} %{node:>9.2} %    published", "");
    }
}

/// What the list has counted after all events.
fn sequentially(events: &[Event]) -> Stats {
    let registry = Intrusive::new();
    let files: Vec<_> = (0..files(events) as u64).map(|n| registry.object(n)).collect();
    for event in events {
        let (cpu, file) = (CpuId::new(event.cpu.into()), &files[event.file as usize]);
        match event.action {
            Action::Add => registry.0.insert_on(cpu, file.as_ref()).expect("memory for a file"),
            Action::Remove => assert_eq!(registry.0.remove_on(cpu, file), Ok(true)),
        }
    }
    registry.0.stats()
}

fn files(events: &[Event]) -> usize {
    events.iter().map(|event| event.file as usize + 1).max().unwrap_or(0)
}

/// Ours over the single-lock list.
fn throughput(
    plan: &Plan,
    report: &mut Report,
    recording: &Recording,
    events: &[Event],
) -> Option<f64> {
    let script = Script::new(events);
    let (ours, owning) = (Intrusive::new(), Owning::new());
    let (list, slab, sharded_list) = (MutexList::new(), MutexSlab::new(), ShardedList::new());
    let (sharded_slab, dashmap) = (ShardedSlab::new(), Dash::new());
    let rows = vec![
        row(&ours, &script),
        row(&owning, &script),
        row(&list, &script),
        row(&slab, &script),
        row(&sharded_list, &script),
        row(&sharded_slab, &script),
        row(&dashmap, &script),
    ];
    let rounds = measure(&format!("replay {}, per event", recording.name), plan, rows);
    report.show(&rounds);
    let peers = [MutexList::NAME, MutexSlab::NAME, ShardedList::NAME, ShardedSlab::NAME];
    report.against(&rounds, Intrusive::NAME, 2, &peers);
    report.against(&rounds, Owning::NAME, 2, &[ShardedSlab::NAME, Dash::NAME]);
    let name = |name: &str| format!("{name}/2");
    let ratio = rounds.tput_ratio(&name(Intrusive::NAME), &name(MutexList::NAME));
    println!(
        "  before, one list: {}; after: {} Mop/s",
        mops(&rounds, MutexList::NAME),
        mops(&rounds, Intrusive::NAME)
    );
    ratio
}

fn mops(rounds: &harness::Rounds, name: &str) -> String {
    let throughput = rounds.throughput(&format!("{name}/2"));
    throughput.map_or("none".to_string(), |ops| format!("{:.2}", ops / 1e6))
}

/// An event as a thread does it.
struct Step {
    file: u32,
    action: Action,
    /// This many events of the file must be over; `None` if the last was this thread's own.
    after: Option<u32>,
    /// What to tell the other thread, if the file's next event is its.
    tell: Option<u32>,
}

/// What each thread does, and how many events there are.
struct Script {
    threads: [Vec<Step>; CPUS],
    files: usize,
    events: u64,
}

impl Script {
    fn new(events: &[Event]) -> Self {
        let files = files(events);
        let mut threads = [Vec::new(), Vec::new()];
        // The last step of each file: thread, place in it, events of the file so far.
        let mut last: Vec<Option<(usize, usize, u32)>> = vec![None; files];
        for event in events {
            let thread = usize::from(event.cpu);
            let last = &mut last[event.file as usize];
            let mut step = Step { file: event.file, action: event.action, after: None, tell: None };
            let over = last.map_or(0, |(.., over)| over);
            if let Some((before, at, over)) = *last {
                if before != thread {
                    step.after = Some(over);
                    let other: &mut Step = &mut threads[before][at];
                    other.tell = Some(over);
                }
            }
            *last = Some((thread, threads[thread].len(), over + 1));
            threads[thread].push(step);
        }
        Self { threads, files, events: events.len() as u64 }
    }
}

/// A file's place in the replay.
struct File<T> {
    /// How many of its events are over, as far as the other thread must know.
    over: AtomicU32,
    ticket: Handed<T>,
}

fn row<'a, R: Registry>(registry: &'a R, script: &'a Script) -> Row<'a> {
    let objects: Vec<R::Object> = (0..script.files as u64).map(|n| registry.object(n)).collect();
    let files: Vec<CachePadded<File<R::Ticket<'a>>>> = (0..script.files)
        .map(|_| CachePadded::new(File { over: AtomicU32::new(0), ticket: Handed::new() }))
        .collect();
    Row::new(R::NAME, move || {
        let timed = at_once(script.events, |thread| {
            for step in &script.threads[thread] {
                let (object, file) = (&objects[step.file as usize], &files[step.file as usize]);
                if let Some(events) = step.after {
                    // Ordering: Acquire pairs with the Release below; it carries the ticket.
                    wait(|| file.over.load(Ordering::Acquire) == events);
                }
                match step.action {
                    Action::Add => {
                        let ticket = registry.add(object);
                        // SAFETY: the file's events take turns: the last one is over, and is
                        // this thread's own or was waited for.
                        unsafe { file.ticket.put(ticket) };
                    }
                    Action::Remove => {
                        // SAFETY: as above.
                        let ticket = unsafe { file.ticket.take() }.expect("it was added");
                        assert!(registry.remove(object, ticket));
                    }
                }
                if let Some(events) = step.tell {
                    // Ordering: Release pairs with the Acquire above.
                    file.over.store(events, Ordering::Release);
                }
            }
        });
        for (object, file) in objects.iter().zip(&files) {
            // Ordering: Relaxed; the threads have ended, and the next are not started.
            file.over.store(0, Ordering::Relaxed);
            // SAFETY: as above.
            if let Some(ticket) = unsafe { file.ticket.take() } {
                registry.remove(object, ticket); // still open at the end
            }
        }
        timed
    })
}
