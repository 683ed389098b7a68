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

mod beside;
mod hit;
mod keys;
mod mix;
mod ours;
mod pages;
mod peers;
mod ratio;
mod replay;
mod rows;

use std::error::Error;

use harness::Family;
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    ("B1 B2 B3 hot", hit::run_hot),
    ("B2 hit 4k", hit::run_4k),
    ("B1 B2 hit 64k", hit::run_64k),
    ("B1 hit 64k, none huge", hit::run_64k_nohuge),
    ("B4 alloc", rows::run_alloc),
    ("B5 mix", mix::run),
    ("B5 B12 dirty", mix::run_dirty),
    ("B5 replay", replay::run),
    ("B6 slow", beside::run_slow),
    ("B7 once", rows::run_once),
    ("B8 ratio", ratio::run),
    ("B11 patterns", ratio::run_patterns),
    ("B9 pread", rows::run_pread),
    ("B12 write-back", rows::run_back),
    ("B13 hung", beside::run_hung),
];

fn main() -> Result<(), Box<dyn Error>> {
    let about = offlock_percpu::capabilities();
    harness::run("bufcache", include_str!("main.rs"), &about, [800, 15_000], FAMILIES)
}
