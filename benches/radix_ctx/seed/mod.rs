//! R10: the message "aio: convert the ioctx list to radix tree", measured again, honestly.
//!
//! ```text
//! 512 threads, an AIO context each; per request:
//!   lookup, io_submit of one random 1 KiB read or write, lookup, io_getevents
//!
//! before   list -> 511 -> 510 -> ... each context 1 KiB, anywhere on the heap
//! after    CtxTable of boxes of the very same contexts
//! ```
//!
//! Both lookups run under the same RCU guard, compare an id and return the kernel's handle; nothing
//! else differs. Each thread has a file of 256 KiB, in memory, as there. The contexts stay
//! boxed in the table, although it could hold them itself: that would spare it a load.
//!
//! The walk of the list, measured alone between the runs, predicts the ratio: with `base` the time of
//! a request after the change, radix / list = base / (base + 2 x walk). The gap that is printed is how
//! far the measured ratio is from that.

pub(crate) mod aio;
mod crowd;
pub(crate) mod list;

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::time::Instant;

use harness::timed::{Row, measure};
use harness::{
    Case, Chapter, Claim, Foreign, Group, Plan, Plot, Random, Report, Series, Table, allowed_cpus,
    median, number,
};

use self::aio::{Handle, file_in_memory};
use self::crowd::{BYTES, Requests, Run, Side, with_crowd};
use self::list::{Context, List, Registry};
use crate::map::order;
use crate::ours::Contexts;

const THREADS: usize = 512;

/// The message's table: cores, and milliseconds with the list and with the radix tree.
const PUBLISHED: [(usize, u32, u32); 6] = [
    (1, 111_025, 75_400),
    (2, 62_219, 42_668),
    (4, 34_193, 23_923),
    (8, 22_998, 17_206),
    (16, 19_335, 15_820),
    (32, 15_956, 13_295),
];
/// The same with one context only.
const PUBLISHED_ONE: (u32, u32) = (65_241, 65_402);

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let measured = measured(plan, report).unwrap_or_else(|error| {
        println!("# not measured: {error}");
        Measured::default()
    });
    report.chapter(&measured.seed());
}

/// What there is to compare with what was published.
#[derive(Default)]
struct Measured {
    /// On one core, and on two.
    walls: [Option<Wall>; 2],
    /// A lookup over a walk of the list, with 512 contexts.
    lookup: Option<f64>,
    /// The time of a request with one context only, over that with the list.
    one_context: Option<f64>,
}

fn measured(plan: &Plan, report: &mut Report) -> io::Result<Measured> {
    let handles = (0..THREADS).map(|_| Handle::setup()).collect::<io::Result<Vec<_>>>()?;
    let (list, table) = (list_of(&handles), table_of(&handles));
    let lookup = per_lookup(plan, report, &list, &table);

    let files = (0..THREADS).map(|_| file_in_memory(BYTES)).collect::<io::Result<Vec<_>>>()?;
    let cpus = allowed_cpus()?;
    let mut walls = [None, None];
    for (at, measured) in walls.iter_mut().enumerate() {
        let cores = at + 1;
        if cpus.len() < cores {
            println!("# not measured: {cores} cores: there is one");
            continue;
        }
        *measured = wall(plan, &files, &cpus[..cores], &list, &table)?;
        let Some(wall) = measured else {
            println!("# not measured: {cores} cores");
            continue;
        };
        println!(
            "# cores {cores}: radix/list {:.3}, {:+.3} from the predicted one: a request takes {:.0} ns, \
             a walk {:.0} ns",
            wall.ratio, wall.gap, wall.base, wall.walk
        );
        let id = if cores == 1 { "R10.wall_1core" } else { "R10.wall_2cores" };
        report.record(id, Some(wall.ratio));
    }
    let one_context = one_context(plan, report, &files[0], handles[0]);
    Ok(Measured { walls, lookup, one_context })
}

impl Measured {
    fn seed(&self) -> Chapter {
        let ratio = |(_, list, radix): (usize, u32, u32)| f64::from(radix) / f64::from(list);
        let wall = |at: usize| self.walls.get(at).and_then(Option::as_ref);
        let columns = ["list, ms", "radix, ms", "ratio", "ratio here", "list, ns", "radix, ns"];
        let mut table = Table::new(
            "512 threads, 1 KiB requests: wall time as published (13.1 M I/Os), and a request here",
            columns,
        );
        for (at, published @ (cores, list, radix)) in PUBLISHED.into_iter().enumerate() {
            let ours = wall(at);
            let measured = [
                number(ours.map(|wall| wall.ratio), 3),
                number(ours.map(|wall| wall.base / wall.ratio), 0),
                number(ours.map(|wall| wall.base), 0),
            ];
            let figures = [list.to_string(), radix.to_string(), number(Some(ratio(published)), 3)];
            table.row(self::cores(cores), figures.into_iter().chain(measured));
        }
        let plot = Plot {
            title: "Wall time with the tree over that with the list, 512 contexts".into(),
            unit: "radix / list".into(),
            places: PUBLISHED.iter().map(|(count, ..)| cores(*count)).collect(),
            series: vec![
                Series::published("ratio", PUBLISHED.map(ratio)),
                Series::measured(
                    "ratio, measured",
                    (0..PUBLISHED.len()).map(|at| wall(at).map_or(f64::NAN, |wall| wall.ratio)),
                ),
            ],
            ..Plot::default()
        };
        let (list, radix) = PUBLISHED_ONE;
        let one = f64::from(radix) / f64::from(list);
        let less = |ratio: f64| ratio <= 0.80;
        let walls = [0, 1].map(|at| {
            Claim::new(
                &format!("{}, 512 contexts: wall time with the tree over the list", cores(at + 1)),
                format_args!("{:.3}", ratio(PUBLISHED[at])),
                wall(at).map(|wall| wall.ratio),
                3,
                less,
            )
        });
        let lookup = Claim::new(
            "512 contexts: a lookup in the tree over a walk of the list",
            "none",
            self.lookup,
            4,
            |ratio| ratio <= 0.01,
        );
        let one_context = Claim::new(
            "one context: a request is no slower with the tree",
            format_args!("{one:.4}"),
            self.one_context,
            4,
            |ratio| ratio <= 1.01,
        );
        let beyond = Claim::new("4 to 32 cores", "0.700 to 0.833", None, 3, less)
            .remark("Measured on one and two cores only; the census shows what more would share.");
        Chapter {
        command: String::new(),
            of: "radix-ctx".into(),
            title: "aio: convert the ioctx list to radix tree".into(),
            about: "Before: a linked list of 512 contexts of 1 KiB, walked under an RCU guard. \
                     After: CtxTable with the same contexts under the same guard. Each request is a real AIO \
                     read or write of 1 KiB with two lookups."
                .into(),
            claims: walls.into_iter().chain([lookup, one_context, beyond]).collect(),
            tables: vec![table],
            plots: vec![plot],
        }
    }
}

fn cores(count: usize) -> String {
    if count == 1 { "1 core".into() } else { format!("{count} cores") }
}

/// The contexts in a list: in random order on the heap, and in another in the list.
fn list_of(handles: &[Handle]) -> Side<List> {
    let mut random = Random::new(10);
    let mut boxes: Vec<Option<Box<Context>>> = handles.iter().map(|_| None).collect();
    let mut ids = vec![0; handles.len()];
    for thread in random.permutation(handles.len()) {
        let id = 1 << 32 | u64::from(thread);
        ids[thread as usize] = id;
        boxes[thread as usize] = Some(Context::new(id, handles[thread as usize]));
    }
    let mut registry = List::new();
    for thread in random.permutation(handles.len()) {
        registry.push(boxes[thread as usize].take().expect("each once"));
    }
    Side { registry, ids }
}

/// The same in a table.
fn table_of(handles: &[Handle]) -> Side<Contexts> {
    let registry = Contexts::new();
    let ids = handles.iter().map(|handle| registry.insert(Context::new(0, *handle))).collect();
    Side { registry, ids }
}

/// Lookups alone, of random ids.
fn per_lookup(
    plan: &Plan,
    report: &mut Report,
    list: &Side<List>,
    table: &Side<Contexts>,
) -> Option<f64> {
    let order = order(list.ids.len());
    let rounds = Group::new("lookup, 512 contexts")
        .case(case("radix-ctx", table, &order))
        .case(case("list under RCU", list, &order))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "radix-ctx", 1, &["list under RCU"]);
    let ratio = rounds.time_ratio("radix-ctx/1", "list under RCU/1");
    report.record("R10.lookup_vs_list", ratio);
    ratio
}

/// Nanoseconds of a walk to a random context, with nothing else in between.
fn walk(list: &Side<List>) -> f64 {
    const WALKS: usize = 10_000;
    let mut random = Random::new(11);
    let mut some = |walks: usize| {
        let start = Instant::now();
        for _ in 0..walks {
            let id = list.ids[random.below(list.ids.len())];
            black_box(list.registry.find(id).expect("it is there"));
        }
        start.elapsed().as_nanos() as f64 / walks as f64
    };
    some(WALKS / 10); // warm up
    some(WALKS)
}

fn case<'a, R: Registry>(name: &str, side: &'a Side<R>, order: &'a [u32]) -> Case<'a> {
    Case::new(name, 1, move |_| {
        let ids: Vec<u64> = order.iter().map(|at| side.ids[*at as usize]).collect();
        move |i| {
            let id = ids[i as usize & (ids.len() - 1)];
            black_box(side.registry.find(id).expect("it is there"));
        }
    })
}

/// What the runs of one number of cores say.
struct Wall {
    /// Wall time with the table over that with the list.
    ratio: f64,
    /// That, less the predicted ratio.
    gap: f64,
    /// CPU nanoseconds of a request with the table.
    base: f64,
    /// Those of a walk.
    walk: f64,
}

/// Runs of a quarter of a second and more: waking 512 threads takes milliseconds, and a thread that
/// comes to its CPU finds the list in the last cache. `None` where other programs kept the CPUs busy.
fn wall(
    plan: &Plan,
    files: &[File],
    cpus: &[usize],
    list: &Side<List>,
    table: &Side<Contexts>,
) -> io::Result<Option<Wall>> {
    let quick = plan.rounds < 100;
    let (pairs, requests) = if quick { (3, 150) } else { (7, 500) };
    let (mut ratios, mut gaps, mut discarded) = (Vec::new(), Vec::new(), 0);
    let (mut bases, mut walks) = (Vec::new(), Vec::new());
    with_crowd(files, cpus, list, table, |run| {
        let mut seconds = |before, requests| run(Run { before, requests }).as_secs_f64();
        for before in [true, false] {
            seconds(before, requests / 10); // warm up
        }
        while ratios.len() < pairs && discarded < pairs {
            let foreign = Foreign::start(cpus, &[])?;
            // The first of the pair alternates, so that neither always follows the other.
            let first = ratios.len() % 2 == 0;
            let one = seconds(first, requests);
            let other = seconds(!first, requests);
            let (before, after) = if first { (one, other) } else { (other, one) };
            if foreign.share()? > 1.0 - plan.min_overlap {
                discarded += 1;
                continue;
            }
            let base = 1e9 * after * cpus.len() as f64 / (THREADS * requests) as f64;
            let walk = walk(list);
            let ratio = after / before;
            gaps.push(ratio - base / (base + 2.0 * walk));
            ratios.push(ratio);
            bases.push(base);
            walks.push(walk);
        }
        io::Result::Ok(())
    })??;
    println!(
        "# {} pairs of runs, {discarded} discarded: other programs took the CPUs",
        ratios.len()
    );
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    let wall = Wall {
        ratio: middle(&ratios),
        gap: middle(&gaps),
        base: middle(&bases),
        walk: middle(&walks),
    };
    Ok((!ratios.is_empty()).then_some(wall))
}

/// One thread, and one context in each registry.
fn one_context(plan: &Plan, report: &mut Report, file: &File, handle: Handle) -> Option<f64> {
    let (list, table) = (list_of(&[handle]), table_of(&[handle]));
    let rounds = measure(
        "a request, one context",
        plan,
        vec![requests("radix-ctx", file, &table), requests("list under RCU", file, &list)],
    );
    report.show(&rounds);
    let ratio = rounds.time_ratio("radix-ctx/1", "list under RCU/1");
    println!("  radix-ctx/1 over list under RCU/1: {:.4}", ratio.unwrap_or(f64::NAN));
    report.record("R10.one_context", ratio);
    ratio
}

fn requests<'a, R: Registry>(name: &str, file: &'a File, side: &'a Side<R>) -> Row<'a> {
    let mut requests = Requests::new(file, 0);
    let mut some = move |count: u64| {
        (0..count).for_each(|_| requests.one(&side.registry, side.ids[0]));
        count
    };
    some(100);
    Row::new(name, move || some(100))
}
