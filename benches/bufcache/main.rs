//! bufcache against what a program uses instead: B1 to B9 and B11 to B13, family by family, in one run.
//!
//! ```text
//! cargo bench --bench bufcache                    every family
//! cargo bench --bench bufcache -- --quick         fewer and shorter windows: under 25 s
//! cargo bench --bench bufcache -- --only B5       families and targets by part of a name
//! cargo bench --bench bufcache --features foyer -- --only B8   hit ratios beside those of foyer
//! OFFLOCK_TRACES=FOLDER cargo bench --bench bufcache -- --only B8
//! ```
//!
//! Every row is measured by one generic loop for all implementations, with the peers interleaved:
//! the name, a slash, the number of threads. Each has its own copies of the pages, 1.5 GiB in all.
//! Peers run as their documentation recommends, at the versions of `benches/Cargo.toml`, with Fx as
//! the hash, which is the fastest for numbers; their pages are behind an `Arc`.
//!
//! B10 is the census: `cargo bench --bench census -- --only buf`.

mod alloc;
mod back;
mod hit;
mod hung;
mod keys;
mod mix;
mod once;
mod ours;
mod pages;
mod peers;
mod pread;
mod ratio;
mod replay;
mod slow;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    Family { name: "B1 B2 B3 hot", run: hit::run_hot },
    Family { name: "B2 hit 4k", run: hit::run_4k },
    Family { name: "B1 B2 hit 64k", run: hit::run_64k },
    Family { name: "B1 hit 64k, none huge", run: hit::run_64k_nohuge },
    Family { name: "B4 alloc", run: alloc::run },
    Family { name: "B5 mix", run: mix::run },
    Family { name: "B5 B12 dirty", run: mix::run_dirty },
    Family { name: "B5 replay", run: replay::run },
    Family { name: "B6 slow", run: slow::run },
    Family { name: "B7 once", run: once::run },
    Family { name: "B8 ratio", run: ratio::run },
    Family { name: "B11 patterns", run: ratio::run_patterns },
    Family { name: "B9 pread", run: pread::run },
    Family { name: "B12 write-back", run: back::run },
    Family { name: "B13 hung", run: hung::run },
];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "bufcache",
        source: include_str!("main.rs"),
        targets: include_str!("../targets.toml"),
        about: &offlock_percpu::capabilities(),
        decides: |_| true,
        quick_limit: Duration::from_millis(800),
        limit: Duration::from_secs(15),
        families: FAMILIES,
    };
    bench.run()
}
