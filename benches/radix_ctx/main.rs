//! radix-ctx against what a program uses instead: R1 to R10 and R12, family by family, in one run.
//!
//! ```text
//! cargo bench --bench radix_ctx                      every family: three minutes
//! cargo bench --bench radix_ctx -- --quick           fewer and shorter windows: under 60 s
//! cargo bench --bench radix_ctx -- --only R6         families and targets by part of a name
//! ```
//!
//! Every row is measured by one generic loop for all implementations, with the peers interleaved:
//! the name, a slash, the number of threads. Peers run as their documentation recommends, at the
//! versions of `benches/Cargo.toml`. What has guards has one per operation.
//!
//! R11 is the census: `cargo bench --bench census -- --only radix`.

mod get;
mod map;
mod mix;
mod ours;
mod peers;
mod reference;
mod rows;
mod seed;

use std::error::Error;

use harness::Family;

const FAMILIES: &[Family] = &[
    ("R1 get 1", |plan, report| drop(get::small(plan, report, "get, 1 entry", 1))),
    ("R1 get 16", |plan, report| drop(get::small(plan, report, "get, 16 entries", 16))),
    ("R1 R4 get 512", get::run_512),
    ("R2 R4 get 64k", get::run_64k),
    ("R3 R4 get 1M", get::run_1m),
    ("R5 reference", reference::run),
    ("R6 write", rows::run_write),
    ("R7 mix 95/5", |plan, report| mix::run(plan, report, 95)),
    ("R7 mix 50/50", |plan, report| mix::run(plan, report, 50)),
    ("R8 walk", rows::run_walk),
    ("R9 memory", rows::run_memory),
    ("R10 seed", seed::run),
    ("R12 close", rows::run_close),
];

fn main() -> Result<(), Box<dyn Error>> {
    let about = offlock_percpu::capabilities();
    harness::run("radix_ctx", include_str!("main.rs"), &about, [1_000, 7_000], FAMILIES)
}
