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

mod alloc;
mod deep;
mod empty;
mod flow;
mod kernel;
mod peers;
mod ping;
mod queue;

use std::error::Error;
use std::time::Duration;

use harness::{Bench, Family};
use testkit::alloc::CountingAllocator;

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAMILIES: &[Family] = &[
    Family { name: "M1 empty", run: empty::run },
    Family { name: "M2 M3 deep", run: deep::run },
    Family { name: "M4 flow", run: flow::run },
    Family { name: "M5 ping", run: ping::run },
    Family { name: "M6 alloc", run: alloc::run },
    Family { name: "M7 seed", run: empty::run_seed },
    Family { name: "M8 async", run: empty::run_async },
    Family { name: "M10 many", run: flow::run_many },
];

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench {
        name: "mq_rbtree",
        source: include_str!("main.rs"),
        targets: include_str!("../targets.toml"),
        about: &offlock_percpu::capabilities(),
        decides: |_| true,
        quick_limit: Duration::from_millis(1_500),
        limit: Duration::from_secs(10),
        families: FAMILIES,
    };
    bench.run()
}
