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
mod readers;
mod reads;
#[cfg(feature = "runtimes")]
mod runtimes;
mod seed;
mod simulated;
mod soak;
mod syscalls;

use std::error::Error;

use harness::Family;
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    ("A1 nop", nop::run),
    ("A2 ram", disks::run_ram),
    ("A3 disk", disks::run_disk),
    ("A4 seed", seed::run),
    ("A5 simulated", simulated::run),
    ("A6 soak", soak::run),
];

fn main() -> Result<(), Box<dyn Error>> {
    harness::run("aio_reap", include_str!("main.rs"), &readers::FLAGS, [2_000, 10_000], FAMILIES)
}
