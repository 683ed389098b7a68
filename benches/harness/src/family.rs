//! A target bench whose rows are measured family by family: what its `main` does.

use std::error::Error;
use std::fmt::Display;
use std::time::Duration;

use crate::args::Args;
use crate::group::Plan;
use crate::header;
use crate::report::Report;
use crate::targets::Targets;

/// Rows that are measured together: the numbers of their targets and a word or two, such as `R7 mix 50/50`,
/// and what measures them.
pub type Family = (&'static str, fn(&Plan, &mut Report));

/// Measures the families that the arguments of this process ask for; prints their tables, the rows that we
/// lose, and the targets.
///
/// `name` is that of the bench in cargo and of its section in the targets; `source` is its `main.rs`, whose
/// documentation is the help; `about` has the conditions that the figures depend on beside the machine. The
/// limits are those of [`Plan::limit`], in milliseconds: with `--quick`, and without.
pub fn run(
    name: &str,
    source: &str,
    about: &dyn Display,
    [quick, usual]: [u64; 2],
    families: &[Family],
) -> Result<(), Box<dyn Error>> {
    let Some(args) = Args::of_bench(name, source) else { return Ok(()) };
    let mut report = Report::new(Targets::of(name)?.asked_for_by(&args));
    header::print(name);
    println!("# {about}");

    let mut plan = Plan::new(&args);
    if !args.smoke {
        plan.limit = Duration::from_millis(if args.quick { quick } else { usual });
    }
    if !families.iter().any(|(family, _)| args.wants_family(family)) {
        let names: Vec<_> = families.iter().map(|(name, _)| *name).collect();
        println!("# no family is named {:?}: {}", args.only.as_deref(), names.join(", "));
    }
    for (family, measure) in families.iter().filter(|(family, _)| args.wants_family(family)) {
        println!("\n# {family}");
        measure(&plan, &mut report);
    }
    report.print();
    Ok(())
}
