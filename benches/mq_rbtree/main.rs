//! mq-rbtree against what a program uses instead: M1 to M8 and M10, family by family, in one run.
//!
//! ```text
//! cargo bench --bench mq_rbtree                    every family
//! cargo bench --bench mq_rbtree -- --quick         fewer and shorter windows: under 90 s
//! cargo bench --bench mq_rbtree -- --only M4       families and targets by part of a name
//! ```
//!
//! Every row is measured by one generic loop for all implementations, with the peers interleaved:
//! the name, a slash, the number of threads. Peers run as their documentation recommends, at the
//! versions of `benches/Cargo.toml`. Heaps have a sequence number, so that they keep the order within
//! a priority as well. Channels without priorities are there to show what those cost.

mod deep;
mod empty;
#[path = "../../crates/mq-rbtree/tests/common/kernel.rs"]
#[expect(dead_code, reason = "a test looks at more of the queue")]
mod kernel;
mod peers;
mod queue;
mod rows;

use std::error::Error;

use harness::Family;
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    ("M1 empty", empty::run),
    ("M2 M3 deep", deep::run),
    ("M4 flow", rows::run_flow),
    ("M5 ping", rows::run_ping),
    ("M6 alloc", rows::run_alloc),
    ("M7 seed", empty::run_seed),
    ("M8 async", empty::run_async),
    ("M10 many", rows::run_many),
];

fn main() -> Result<(), Box<dyn Error>> {
    let about = offlock_percpu::capabilities();
    harness::run("mq_rbtree", include_str!("main.rs"), &about, [1_500, 10_000], FAMILIES)
}
