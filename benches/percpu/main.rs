//! percpu against what a program uses instead: P1 to P5, P7 and P8, family by family, in one run.
//!
//! ```text
//! cargo bench --bench percpu                    every family, 101 rounds of 10 ms windows: minutes
//! cargo bench --bench percpu -- --quick         31 rounds of 5 ms: under 60 s
//! cargo bench --bench percpu -- --only P4       families and targets by part of a name
//! cargo bench --bench percpu -- --only P8       the same families without rseq
//! ```
//!
//! Every row is a case of the one generic loop of `harness::Group`: the name, a slash, the number of
//! threads. Peers run as their documentation recommends, at the versions of `benches/Cargo.toml`.
//!
//! libc registers its rseq areas at the start of a process or never. The families therefore run a
//! second time in a child of this bench, with `GLIBC_TUNABLES=glibc.pthread.rseq=0`. A process without
//! rseq sections (that variable set, `--cfg offlock_portable`) measures P8, and no other target.
//!
//! P9 is the census: `cargo bench --bench census`.

mod rows;

use std::env;
use std::error::Error;
use std::process::{Command, Stdio};

use harness::{Family, Plan, Report};

const FAMILIES: &[Family] = &[
    ("P1 cpu", rows::cpu),
    ("P2 counter", rows::counter),
    ("P3 reference", rows::reference),
    ("P4 lock", rows::lock),
    ("P5 pin", rows::pin),
    ("P7 fence", rows::heavy),
    ("P7 retire", rows::retire),
    ("P8 without rseq", without_rseq),
];

/// The families that cost something else without rseq, of a process without it.
const WITHOUT_RSEQ: &[Family] = &[
    ("P1 P8 cpu", rows::cpu),
    ("P2 P8 counter", rows::counter),
    ("P3 P8 reference", rows::reference),
    ("P4 P8 lock", rows::lock),
    ("P5 P8 pin", rows::pin),
];

const TUNABLES: &str = "GLIBC_TUNABLES";

fn main() -> Result<(), Box<dyn Error>> {
    let families = if rows::has_sections() { FAMILIES } else { WITHOUT_RSEQ };
    let about = offlock_percpu::capabilities();
    harness::run("percpu", include_str!("main.rs"), &about, [1_500, 60_000], families)
}

/// Runs this bench once more in a process whose libc registers no rseq area, which prints its tables and targets.
fn without_rseq(plan: &Plan, report: &mut Report) {
    let tunables = env::var(TUNABLES).map_or(String::new(), |set| set + ":");
    let own = env::current_exe().map(Command::new);
    let status = own.and_then(|mut command| {
        command.args(["--bench", "--only", "P8"]).args(plan.pace);
        command.env(TUNABLES, tunables + "glibc.pthread.rseq=0").stdin(Stdio::null()).status()
    });
    match status {
        Ok(status) if status.success() => report.leave_out("P8."),
        failed => println!("# not measured: {failed:?}"),
    }
}
