//! percpu-list against what a program uses instead: L1 to L6, L8 and L9, family by family, in one run.
//!
//! ```text
//! cargo bench --bench percpu_list                    every family: a minute and a half
//! cargo bench --bench percpu_list -- --quick         fewer and shorter windows: under 60 s
//! cargo bench --bench percpu_list -- --only L4       families and targets by part of a name
//! ```
//!
//! Every row is measured by one generic loop for all implementations, with the peers interleaved:
//! the name, a slash, the number of threads. Peers run as their documentation recommends, at the
//! versions of `benches/Cargo.toml`. Two of them cannot remove a given entry, and say so: they are
//! asked for any.
//!
//! L7 is the census: `cargo bench --bench census -- --only list`.

mod cross;
mod pair;
mod peers;
mod registry;
mod replay;

use std::error::Error;

use harness::Family;

const FAMILIES: &[Family] = &[
    ("L1 L2 pair", pair::run_pair),
    ("L1 L8 live", pair::run_live),
    ("L3 replay", replay::run),
    ("L4 cross", cross::run),
    ("L5 owning", pair::run_owning),
    ("L6 walk", pair::run_walk),
    ("L9 beside", pair::run_beside),
    ("L9 bytes", pair::run_bytes),
];

fn main() -> Result<(), Box<dyn Error>> {
    let about = offlock_percpu::capabilities();
    harness::run("percpu_list", include_str!("main.rs"), &about, [1_500, 10_000], FAMILIES)
}
