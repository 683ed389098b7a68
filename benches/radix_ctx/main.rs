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

mod close;
mod get;
mod iterate;
mod map;
mod memory;
mod mix;
mod ours;
mod peers;
mod reference;
mod seed;
mod write;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};

const FAMILIES: &[Family] = &[
    Family { name: "R1 get 1", run: get::run_1 },
    Family { name: "R1 get 16", run: get::run_16 },
    Family { name: "R1 R4 get 512", run: get::run_512 },
    Family { name: "R2 R4 get 64k", run: get::run_64k },
    Family { name: "R3 R4 get 1M", run: get::run_1m },
    Family { name: "R5 reference", run: reference::run },
    Family { name: "R6 write", run: write::run },
    Family { name: "R7 mix 95/5", run: mix::run_95 },
    Family { name: "R7 mix 50/50", run: mix::run_50 },
    Family { name: "R8 walk", run: iterate::run },
    Family { name: "R9 memory", run: memory::run },
    Family { name: "R10 seed", run: seed::run },
    Family { name: "R12 close", run: close::run },
];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "radix_ctx",
        source: include_str!("main.rs"),
        targets: include_str!("../targets.toml"),
        about: &offlock_percpu::capabilities(),
        decides: |_| true,
        // More groups than other benches have, within the same time.
        quick_limit: Duration::from_secs(1),
        limit: Duration::from_secs(7),
        families: FAMILIES,
    };
    bench.run()
}
