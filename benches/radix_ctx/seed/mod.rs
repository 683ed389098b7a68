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

pub(crate) mod aio;
mod crowd;
pub(crate) mod list;

use std::fs::File;
use std::hint::black_box;
use std::io;

use harness::timed::{Row, measure};
use harness::{Case, Foreign, Group, Plan, Random, Ratio, Report, Table, allowed_cpus, number};

use self::aio::{Handle, file_in_memory};
use self::crowd::{BYTES, Requests, Side, crowd};
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

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    if let Err(error) = measured(plan, report) {
        println!("# not measured: {error}");
    }
}

fn measured(plan: &Plan, report: &mut Report) -> io::Result<()> {
    let handles = (0..THREADS).map(|_| Handle::setup()).collect::<io::Result<Vec<_>>>()?;
    let (list, table) = (list_of(&handles), table_of(&handles));
    per_lookup(plan, report, &list, &table);

    let files = (0..THREADS).map(|_| file_in_memory(BYTES)).collect::<io::Result<Vec<_>>>()?;
    let cpus = allowed_cpus();
    let title = "512 threads: wall time of the tree over the list's";
    let mut figures = Table::new(title, ["published", "here"]);
    figures.bars = vec![0, 1];
    for (cores, before, after) in PUBLISHED {
        let ratio = match cpus.get(..cores) {
            Some(cpus) if cores <= 2 => wall(plan, &files, cpus, &list, &table)?,
            _ => None,
        };
        let published = number(Some(f64::from(after) / f64::from(before)), 3);
        let here = number(ratio.map(|ratio| ratio.median), 3);
        figures.row(format!("{cores} cores"), [published, here]);
        match cores {
            1 => report.record("R10.wall_1core", ratio),
            2 => report.record("R10.wall_2cores", ratio),
            _ => {}
        }
    }
    print!("{figures}");
    one_context(plan, report, &files[0], handles[0]);
    Ok(())
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

/// The contexts in a table.
fn table_of(handles: &[Handle]) -> Side<Contexts> {
    let registry = Contexts::new();
    let ids = handles.iter().map(|handle| registry.insert(Context::new(0, *handle))).collect();
    Side { registry, ids }
}

/// Lookups alone, of random ids.
fn per_lookup(plan: &Plan, report: &mut Report, list: &Side<List>, table: &Side<Contexts>) {
    let order = order(list.ids.len());
    let rounds = Group::new("lookup, 512 contexts")
        .case(case("radix-ctx", table, &order))
        .case(case("list under RCU", list, &order))
        .run(plan);
    report.compare(&rounds, &["radix-ctx"]);
    report.record("R10.lookup_vs_list", rounds.time_ratio("radix-ctx", "list under RCU"));
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

/// Returns the wall time with the table over that with the list. `None` where other programs kept the CPUs busy.
///
/// Runs of a quarter of a second and more: waking 512 threads takes milliseconds, and a thread that
/// comes to its CPU finds the list in the last cache.
fn wall(
    plan: &Plan,
    files: &[File],
    cpus: &[usize],
    list: &Side<List>,
    table: &Side<Contexts>,
) -> io::Result<Option<Ratio>> {
    let quick = plan.rounds < 100;
    let (pairs, requests) = if quick { (3, 150) } else { (7, 500) };
    let (mut ratios, mut discarded) = (Vec::new(), 0);
    let seconds = |before, requests| -> io::Result<f64> {
        let took = if before {
            crowd(files, cpus, list, requests)
        } else {
            crowd(files, cpus, table, requests)
        };
        Ok(took?.as_secs_f64())
    };
    for before in [true, false] {
        seconds(before, requests / 10)?; // warm up
    }
    while ratios.len() < pairs && discarded < pairs {
        let foreign = Foreign::start(cpus, &[])?;
        // The first of the pair alternates, so that neither always follows the other.
        let first = ratios.len() % 2 == 0;
        let (one, other) = (seconds(first, requests)?, seconds(!first, requests)?);
        if foreign.share()? > 1.0 - plan.min_overlap {
            discarded += 1;
        } else {
            ratios.push(if first { other / one } else { one / other });
        }
    }
    println!(
        "# {} pairs of runs; {discarded} discarded because other programs took the CPUs",
        ratios.len()
    );
    Ok(Ratio::of(&ratios))
}

/// One thread, and one context in each registry.
fn one_context(plan: &Plan, report: &mut Report, file: &File, handle: Handle) {
    let (list, table) = (list_of(&[handle]), table_of(&[handle]));
    let rows = vec![requests("radix-ctx", file, &table), requests("list under RCU", file, &list)];
    let [rounds] = measure(["a request, one context"], plan, rows);
    report.show(&rounds);
    report.record("R10.one_context", rounds.time_ratio("radix-ctx", "list under RCU"));
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
