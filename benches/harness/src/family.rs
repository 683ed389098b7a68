//! A target bench whose rows are measured family by family: what its `main` does.

use std::error::Error;
use std::fmt::Display;
use std::time::Duration;

use crate::args::Args;
use crate::group::Plan;
use crate::header::Header;
use crate::report::Report;
use crate::targets::Targets;

/// Rows that are measured together.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The numbers of its targets and a word or two: `R7 mix 50/50`.
    pub name: &'static str,
    /// Measures them.
    pub run: fn(&Plan, &mut Report),
}

/// A target bench of families.
pub struct Bench<'a> {
    /// The name of the bench in cargo, and of its section in the targets.
    pub name: &'a str,
    /// Its `main.rs`, whose documentation is the help: `include_str!("main.rs")`.
    pub source: &'a str,
    /// All targets: `include_str!("../targets.toml")`.
    pub targets: &'a str,
    /// The conditions that the figures depend on beside the machine; printed below the header.
    pub about: &'a dyn Display,
    /// Whether this process decides a target: another run of the bench may.
    pub decides: fn(&str) -> bool,
    /// [`Plan::limit`] with `--quick`: by the number of groups.
    pub quick_limit: Duration,
    /// And without.
    pub limit: Duration,
    /// The families in the order in which they are measured.
    pub families: &'a [Family],
}

impl Bench<'_> {
    /// Measures the families that the arguments of this process ask for; prints their tables, the
    /// rows that we lose, and the targets.
    ///
    /// # Errors
    ///
    /// If the targets cannot be read.
    ///
    /// # Panics
    ///
    /// As [`Group::run`](crate::Group::run) and [`Report::record`].
    pub fn run(&self) -> Result<(), Box<dyn Error>> {
        let args = Args::from_env(self.source);
        if !args.bench {
            println!("{}: measures only under `cargo bench`", self.name);
            return Ok(());
        }
        let targets = Targets::parse(self.targets, self.name)?.asked_for_by(&args);
        let mut report = Report::new(targets).deciding(self.decides);
        print!("{}", Header::take(self.name));
        println!("# {}", self.about);

        let mut plan = Plan::new(&args);
        if !args.smoke {
            plan.limit = if args.quick { self.quick_limit } else { self.limit };
        }
        if !self.families.iter().any(|family| args.wants_family(family.name)) {
            let names: Vec<_> = self.families.iter().map(|family| family.name).collect();
            println!("# no family is named {:?}: {}", args.only.as_deref(), names.join(", "));
        }
        for family in self.families.iter().filter(|family| args.wants_family(family.name)) {
            println!("\n# {}", family.name);
            (family.run)(&plan, &mut report);
        }
        report.print();
        Ok(())
    }
}
