//! The table of the Linux patch "fs: scale files_lock" (2010), from a recording of open files.
//!
//! Run:     cargo run -p examples --example percpu_list_seed_table
//! Prints:  the patch's three rows, and ours: 64933 removals, 98.93 % of them on the adding CPU
//!
//! An argument names another recording in the same format; see `benches/recordings`.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use percpu_list::PerCpuList;
use testkit::pin::pin_to; // `sched_setaffinity`

const RECORDING: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/recordings/files-dbench64.bin.gz");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or(RECORDING.into());
    let mut bytes = Vec::new();
    let file = File::open(&path).map_err(|error| format!("{path}: {error}"))?;
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes)?;
    let records = bytes.strip_prefix(b"FILELST1").filter(|rest| rest.len() % 8 == 0);
    let records = records.ok_or("it is no recording of files")?.chunks_exact(8).skip(1);

    let (list, mut open, mut hits) = (PerCpuList::new(), HashMap::new(), 0);
    let mut here = None;
    for record in records {
        let (file, cpu) = (&record[..4], usize::from(record[6]));
        if here != Some(cpu) {
            pin_to(&[cpu]);
            here = Some(cpu);
        }
        if record[7] == 0 {
            open.insert(file, list.insert(())?);
        } else if let Some(entry) = open.remove(file) {
            hits += u64::from(entry.slot().index() == cpu);
            entry.remove()?;
        }
    }
    let stats = list.stats(); // before those that are open still are dropped, here
    assert_eq!((stats.cpu_hits, list.len()), (hits, open.len()));

    println!("{:<15} {:>10} {:>11} {:>11}", "", "removals", "cpu hits", "node hits");
    println!("booting, 2010       25,049      92.5 %      95.6 %");
    println!("kbuild, 2010     2,281,913      96.8 %      98.7 %");
    println!("dbench 64, 2010  4,306,582      99.6 %      99.8 %");
    let (cpu, node) = (stats.cpu_hit_percent(), stats.node_hit_percent());
    println!("{:<15} {:>10} {cpu:>9.2} % {node:>9.2} %", "replayed", stats.removals);
    Ok(())
}
