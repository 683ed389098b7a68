//! The coherence census: how many cache lines an operation moves between cores, at more threads
//! than this machine has cores.
//!
//! ```text
//! cargo bench --bench census                    every structure at 1, 2, 8 and 64 threads
//! cargo bench --bench census -- --quick         fewer operations
//! cargo bench --bench census -- --only counter  structures by part of a name
//! ```
//!
//! ```text
//! this program, as built by cargo bench           (driver.rs)
//!   builds coherence.c, the plugin of QEMU
//!   builds this bench again with --cfg offlock_virtual_cpu, and runs that under QEMU:
//!      census <structure> <threads> <operations>  (program.rs, structures.rs)
//!        thread n on virtual CPU n; marks each operation by a system call that does not exist
//! the plugin records the data accesses and replays them, one core per thread
//! ```
//!
//! The figure is a property of the code, not of this machine's speed: transfers of a line per
//! operation, once with whole operations taking turns (LOW) and once with single accesses (HIGH).
//! QEMU has no rseq: what runs is the portable path, with atomics on per-CPU words.
//!
//! To add a structure, write what makes its operation and give it a row in `structures.rs`; its target, if
//! it has one, is in the section `[census]` of `targets.toml`.

mod driver;
#[cfg(offlock_virtual_cpu)]
mod program;
mod structures;

use std::error::Error;

use harness::Args;

fn main() -> Result<(), Box<dyn Error>> {
    #[cfg(offlock_virtual_cpu)]
    return program::run(&std::env::args().skip(1).collect::<Vec<_>>());
    #[cfg(not(offlock_virtual_cpu))]
    Args::of_bench("census", include_str!("main.rs")).map_or(Ok(()), |args| driver::run(&args))
}
