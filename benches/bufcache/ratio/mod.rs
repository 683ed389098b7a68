//! B8 and B11: hit ratios, on traces and on generated patterns.
//!
//! B8 is about OLTP and P3 of "ARC: A Self-Tuning, Low Overhead Replacement Cache" (Megiddo and Modha,
//! FAST 2003), and about the recordings of the workspace, with room for a part of their blocks.
//! `OFFLOCK_TRACES` names a folder of traces, in any format that `testkit::traces` reads. All of them are
//! printed; without OLTP and P3 the targets of B8 are not measured. B11 is about the patterns.

#[path = "../../../examples/bufcache_replay.rs"]
mod bufcache_replay;
mod policies;

use std::thread;

use harness::{Plan, Report, Table, number};
use recordings::{CREATE8, UNLINK8};
use testkit::traces::{Trace, in_folder};

use crate::keys::{cycle, shifting_zipf, write_once_read_once, zigzag, zipf};
use crate::replay::gets;
use policies::{LRU, OPT, OURS, POLICIES, QUICK_CACHE};

/// Room, in percent of the blocks of a trace.
const ROOM: [usize; 3] = [1, 5, 20];
/// The traces of the paper.
const PAPER: [&str; 2] = ["OLTP", "P3"];
/// Blocks of a pattern, and requests.
const BLOCKS: usize = 20_000;
const REQUESTS: usize = 200_000;

/// Hits in percent, in the order of [`POLICIES`].
type Row = Vec<f64>;

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let mut table = heading();
    let mut gaps = Vec::new();
    for recording in [UNLINK8, CREATE8] {
        // A buffer is known by its address, and has one length.
        let blocks = gets(&recording).into_iter().map(|get| u64::from(get.address));
        gaps.extend(rows(&mut table, &Trace::new(recording.name, blocks)));
    }
    let mut found = 0;
    if let Some(folder) = std::env::var_os("OFFLOCK_TRACES").filter(|folder| !folder.is_empty()) {
        for path in in_folder(folder.as_ref()).unwrap_or_else(|error| fail(&error)) {
            let trace = Trace::read(&path).unwrap_or_else(|error| fail(&error));
            let of_trace = rows(&mut table, &trace);
            if PAPER.contains(&trace.name.as_str()) {
                gaps.extend(of_trace);
                found += 1;
            }
        }
    }
    print!("{table}");
    println!("- points to the best peer: {gaps:.1?}");
    if found == PAPER.len() {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        report.record("B8.mean_gap.points", Some(mean));
        report.record("B8.worst_gap.points", gaps.into_iter().reduce(f64::max));
    } else {
        println!("# not measured: OFFLOCK_TRACES names no folder with OLTP and P3");
    }
}

/// Ends the bench because `OFFLOCK_TRACES` cannot be used.
fn fail(error: &std::io::Error) -> ! {
    eprintln!("OFFLOCK_TRACES: {error}");
    std::process::exit(1)
}

/// A table without rows.
fn heading() -> Table {
    let mut table = Table::new("hits, %", ["room"]);
    table.columns.extend(POLICIES.iter().map(|(name, _)| name.to_string()));
    table
}

/// Adds what each policy makes of the trace. Returns how far ours is behind the best peer.
fn rows(table: &mut Table, trace: &Trace) -> Vec<f64> {
    let gap = |percent: usize| {
        let row = row(table, &trace.name, &trace.keys, trace.blocks * percent / 100);
        let peers = POLICIES.iter().zip(&row).filter(|((name, _), _)| ![OURS, OPT].contains(name));
        peers.map(|(_, hits)| *hits).fold(0.0, f64::max) - of(&row, OURS)
    };
    ROOM.into_iter().map(gap).collect()
}

fn of(row: &Row, policy: &str) -> f64 {
    let at = POLICIES.iter().position(|(name, _)| *name == policy);
    at.map_or(f64::NAN, |at| row[at])
}

/// Adds what each policy makes of the keys.
fn row(table: &mut Table, name: &str, keys: &[u32], room: usize) -> Row {
    let room = room.max(1);
    let hits: Vec<u64> = thread::scope(|scope| {
        let hits = |(_, hits): &(_, policies::Hits)| {
            let hits = *hits;
            scope.spawn(move || hits(keys, room))
        };
        let running: Vec<_> = POLICIES.iter().map(hits).collect();
        running.into_iter().map(|thread| thread.join().expect("a policy runs to its end")).collect()
    });
    let row: Row = hits.into_iter().map(|hits| 100.0 * hits as f64 / keys.len() as f64).collect();
    let ratios = row.iter().map(|ratio| number(Some(*ratio), 1));
    table.row(name, [room.to_string()].into_iter().chain(ratios));
    row
}

/// B11: patterns, each with the policy that ours must come near to.
pub(crate) fn run_patterns(_plan: &Plan, report: &mut Report) {
    let mut table = heading();
    let ratio = |row: &Row, peer| of(row, OURS) / of(row, peer);
    let room = BLOCKS / 5;
    let above = row(&mut table, "loop 1.01 x room", &cycle(room * 101 / 100, REQUESTS), room);
    report.record("B11.loop_just_above.quick_cache", Some(ratio(&above, QUICK_CACHE)));
    // What a cache learns of a pattern must not depend on the blocks before it.
    for place in 1..=4 {
        let scan = (place * 2 * room..(place + 1) * 2 * room).map(|block| block as u32);
        let keys: Vec<u32> = scan.chain(cycle(room * 101 / 100, REQUESTS)).collect();
        row(&mut table, "loop after a scan", &keys, room);
    }
    let once = row(
        &mut table,
        "write once read once",
        &write_once_read_once(room * 9 / 20, REQUESTS),
        room,
    );
    report.record("B11.write_once_read_once.lru", Some(ratio(&once, LRU)));
    let zigzag = zigzag(BLOCKS, REQUESTS);
    let ratios = [5, 20, 50]
        .map(|percent| ratio(&row(&mut table, "zigzag", &zigzag, BLOCKS * percent / 100), LRU));
    let others = [
        ("zipf 0.8", zipf(BLOCKS, 0.8, REQUESTS)),
        ("shifting zipf", shifting_zipf(BLOCKS, 0.8, REQUESTS)),
    ];
    for (name, keys) in &others {
        for percent in ROOM {
            row(&mut table, name, keys, BLOCKS * percent / 100);
        }
    }
    print!("{table}");
    report.record("B11.zigzag.lru", ratios.into_iter().reduce(f64::min));
}
