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
mod paired;
mod peers;
mod registry;
mod replay;
mod walk;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};

const FAMILIES: &[Family] = &[
    Family { name: "L1 L2 pair", run: pair::run_pair },
    Family { name: "L1 L8 live", run: pair::run_live },
    Family { name: "L3 replay", run: replay::run },
    Family { name: "L4 cross", run: cross::run },
    Family { name: "L5 owning", run: pair::run_owning },
    Family { name: "L6 walk", run: walk::run },
    Family { name: "L9 beside", run: pair::run_beside },
    Family { name: "L9 bytes", run: pair::run_bytes },
];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "percpu_list",
        source: include_str!("main.rs"),
        targets: include_str!("../targets.toml"),
        about: &offlock_percpu::capabilities(),
        decides: |_| true,
        // More groups than other benches have, within the same time.
        quick_limit: Duration::from_millis(1_500),
        limit: Duration::from_secs(10),
        families: FAMILIES,
    };
    bench.run()
}
