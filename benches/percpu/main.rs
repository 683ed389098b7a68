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
//! second time in a child of this bench, with `GLIBC_TUNABLES=glibc.pthread.rseq=0`: its tables
//! are shown, and its P8 targets are taken over. Where this process itself has no rseq sections
//! (that variable set, `--cfg offlock_portable`), it measures P8 itself, and no other family.
//!
//! P9 is the census: `cargo bench --bench census`.

mod rows;

use std::env;
use std::error::Error;
use std::process::{Command, Stdio};

use harness::{Args, Header, Plan, Report, Targets};

/// Rows that are measured together.
struct Family {
    /// The number of its targets and a word or two.
    name: &'static str,
    /// Whether it costs something else without rseq.
    depends_on_rseq: bool,
    run: fn(&Plan, &mut Report),
}

const FAMILIES: [Family; 7] = [
    Family { name: "P1 cpu", depends_on_rseq: true, run: rows::cpu },
    Family { name: "P2 counter", depends_on_rseq: true, run: rows::counter },
    Family { name: "P3 reference", depends_on_rseq: true, run: rows::reference },
    Family { name: "P4 lock", depends_on_rseq: true, run: rows::lock },
    Family { name: "P5 pin", depends_on_rseq: true, run: rows::pin },
    Family { name: "P7 fence", depends_on_rseq: false, run: rows::heavy },
    Family { name: "P7 retire", depends_on_rseq: false, run: rows::retire },
];

/// The name that `--only` accepts beside the families.
const WITHOUT_RSEQ: &str = "P8 without rseq";
/// Tells the child that it is one.
const CHILD: &str = "OFFLOCK_BENCH_WITHOUT_RSEQ";
const TUNABLES: &str = "GLIBC_TUNABLES";

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::from_env(include_str!("main.rs"));
    if !args.bench {
        println!("percpu: measures only under `cargo bench`");
        return Ok(());
    }
    let has_sections = offlock_percpu::capabilities().sections.is_ok();
    let targets = Targets::parse(include_str!("../targets.toml"), "percpu")?.asked_for_by(&args);
    // With sections this process decides P1 to P7, and without P8.
    let decides: fn(&str) -> bool =
        if has_sections { |id| !id.starts_with("P8.") } else { |id| id.starts_with("P8.") };
    let mut report = Report::new(targets).deciding(decides);
    if env::var_os(CHILD).is_none() {
        print!("{}", Header::take("percpu"));
    }
    println!("# {}", offlock_percpu::capabilities());

    let plan = Plan::new(&args);
    let only_without = args.only.is_some() && args.wants_family(WITHOUT_RSEQ);
    for family in &FAMILIES {
        let asked = args.wants_family(family.name);
        let is_repeated = family.depends_on_rseq || env::var_os(CHILD).is_none();
        let wanted = if has_sections { asked } else { (asked || only_without) && is_repeated };
        if wanted {
            println!("\n# {}", family.name);
            (family.run)(&plan, &mut report);
        }
    }
    if has_sections && args.wants_family(WITHOUT_RSEQ) {
        if let Err(error) = without_rseq(&args, &mut report) {
            println!("# not measured: {WITHOUT_RSEQ}: {error}");
        }
    }
    report.print();
    Ok(())
}

/// Runs this bench once more in a process whose libc registers no rseq area.
fn without_rseq(args: &Args, report: &mut Report) -> Result<(), Box<dyn Error>> {
    println!("\n# {WITHOUT_RSEQ}: this bench again, with {TUNABLES}=glibc.pthread.rseq=0");
    let mut command = Command::new(env::current_exe()?);
    command.arg("--bench").args(args.pace());
    let tunables = env::var(TUNABLES).map_or(String::new(), |set| set + ":");
    command.env(TUNABLES, tunables + "glibc.pthread.rseq=0").env(CHILD, "1");
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    for line in String::from_utf8(output.stdout)?.lines() {
        if line.starts_with("TARGET P8.") {
            report.record_line(line)?;
        } else if !line.starts_with("TARGET ") {
            println!("{line}");
        }
    }
    if !output.status.success() {
        return Err(format!("it ended with {}", output.status).into());
    }
    Ok(())
}
