//! B8: hit ratios, on traces and on generated patterns, with room for a part of the blocks.
//!
//! The traces are those of "ARC: A Self-Tuning, Low Overhead Replacement Cache" (Megiddo and Modha,
//! FAST 2003), read from the folder that `OFFLOCK_TRACES` names; without it only the patterns are
//! measured, and the targets, which are about the traces, are not.

mod policies;
mod traces;

use harness::{Plan, Report};

use crate::keys::{cycle, zigzag, zipf, zipf_and_scans};
use policies::{OURS, PEERS, POLICIES};

/// Room, in percent of the blocks of a trace.
const ROOM: [usize; 3] = [1, 5, 20];
/// Blocks of a pattern, and requests.
const BLOCKS: usize = 20_000;
const REQUESTS: usize = 200_000;

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    print!("{:<18}{:>8}", "hits, %", "room");
    POLICIES.iter().for_each(|(name, _)| print!("{name:>12}"));
    println!();
    let exponent = 0.8;
    let patterns = [
        ("zipf 0.8", zipf(BLOCKS, exponent, REQUESTS)),
        ("loop", cycle(BLOCKS, REQUESTS)),
        ("zipf and scans", zipf_and_scans(BLOCKS, exponent, REQUESTS)),
        ("zigzag", zigzag(BLOCKS, REQUESTS)),
    ];
    for (name, keys) in &patterns {
        rows(name, keys, BLOCKS);
    }
    let Some(folder) = std::env::var_os("OFFLOCK_TRACES").filter(|folder| !folder.is_empty())
    else {
        println!("# not measured: OLTP and P3: OFFLOCK_TRACES names no folder with them");
        return;
    };
    let mut gaps = Vec::new();
    for name in ["OLTP", "P3"] {
        let trace = traces::load(folder.as_ref(), name).unwrap_or_else(|error| {
            panic!("trace {name} in {}: {error}", folder.to_string_lossy())
        });
        gaps.extend(rows(name, &trace.keys, trace.blocks));
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    println!("  points to the best of {}: {gaps:.1?}", PEERS.join(", "));
    report.record("B8.mean_gap.points", Some(mean));
    report.record("B8.worst_gap.points", gaps.into_iter().reduce(f64::max));
}

/// Prints what each policy makes of the keys; how far ours is behind the best of the peers.
fn rows(name: &str, keys: &[u32], blocks: usize) -> Vec<f64> {
    let gap = |percent: usize| {
        let room = blocks * percent / 100;
        print!("  {name:<16}{:>8}", format!("{percent} %"));
        let (mut ours, mut best) = (0.0, 0.0_f64);
        for (policy, hits) in POLICIES {
            let ratio = 100.0 * hits(keys, room) as f64 / keys.len() as f64;
            print!("{ratio:>12.1}");
            if *policy == OURS {
                ours = ratio;
            } else if PEERS.contains(policy) {
                best = best.max(ratio);
            }
        }
        println!();
        best - ours
    };
    ROOM.into_iter().map(gap).collect()
}
