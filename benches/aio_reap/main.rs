//! aio-reap against the ring underneath it: A1, family by family, in one run.
//!
//! ```text
//! cargo bench --bench aio_reap                    every family
//! cargo bench --bench aio_reap -- --quick         fewer and shorter windows
//! cargo bench --bench aio_reap -- --only A1       families and targets by part of a name
//! ```

mod nop;
mod raw;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};

const FAMILIES: &[Family] = &[Family { name: "A1 nop", run: nop::run }];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "aio_reap",
        targets: include_str!("../targets.toml"),
        about: &raw::FLAGS,
        quick_limit: Duration::from_millis(2_000),
        limit: Duration::from_secs(10),
        families: FAMILIES,
    };
    bench.run()
}
