//! aio-reap against rings, runtimes and fio: A1 to A6, family by family, in one run.
//!
//! ```text
//! cargo bench --bench aio_reap                      every family, without the runtimes
//! cargo bench --bench aio_reap --features runtimes  and with them: more than a minute to compile
//! cargo bench --bench aio_reap -- --quick           fewer and shorter windows: under 90 s
//! cargo bench --bench aio_reap -- --only A1         families and targets by part of a name
//! ```
//!
//! A2 and A4 read a RAM disk, which they set up and take down: that takes root. A3 reads a file in the
//! temporary folder, which has to be on a disk. A5 and A6 are computed in virtual time. Peers run as their documentation recommends, at the
//! versions of `benches/Cargo.toml`, one thread each, all on the same CPU.

mod device;
mod disks;
mod nop;
mod nops;
mod ours;
mod peers;
mod raw;
mod reads;
#[cfg(feature = "runtimes")]
mod runtimes;
mod seed;
mod simulated;
mod soak;
mod syscalls;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    Family { name: "A1 nop", run: nop::run },
    Family { name: "A2 ram", run: disks::run_ram },
    Family { name: "A3 disk", run: disks::run_disk },
    Family { name: "A4 seed", run: seed::run },
    Family { name: "A5 simulated", run: simulated::run },
    Family { name: "A6 soak", run: soak::run },
];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "aio_reap",
        source: include_str!("main.rs"),
        targets: include_str!("../targets.toml"),
        about: &raw::FLAGS,
        decides: |_| true,
        quick_limit: Duration::from_millis(2_000),
        limit: Duration::from_secs(10),
        families: FAMILIES,
    };
    bench.run()
}
