//! The common parts of every bench of the workspace.
//!
//! A bench names its [`Case`]s, a [`Group`] measures them in interleaved rounds through one generic
//! loop on pinned threads, and [`Targets`] turns the ratios into the lines that a reader greps. See
//! `percpu/rows.rs`.
//!
//! Every ratio is taken inside a round, where the cases ran within milliseconds of each other, and
//! the median of the rounds is reported: what disturbs a shared machine for longer than a round
//! disturbs both sides of the ratio.

mod args;
mod built;
mod cpu;
mod family;
mod fio;
mod foreign;
mod group;
pub mod header;
mod process;
mod random;
mod report;
mod rounds;
mod stats;
mod table;
mod targets;
pub mod timed;
mod window;

pub use self::args::Args;
pub use self::built::{profile, profile_dir, target_dir};
pub use self::cpu::{allowed_cpus, pin, thread_cpu_time, with_cpus};
pub use self::family::{Family, run};
pub use self::fio::{FioMix, FioSide};
pub use self::foreign::Foreign;
pub use self::group::{Case, Group, Plan};
pub use self::process::Process;
pub use self::random::Random;
pub use self::report::Report;
pub use self::rounds::{Rounds, two};
pub use self::stats::{Ratio, median, percentile, ratios};
pub use self::table::{Table, number};
pub use self::targets::Targets;
pub use self::window::{Span, Window};
