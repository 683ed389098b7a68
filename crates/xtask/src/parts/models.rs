//! The models under loom and shuttle, and the planted mutants that they must catch.

use std::sync::Mutex;

use clap::ValueEnum;

use super::logged;
use crate::binaries::{self, TestBinary};
use crate::cfg;
use crate::error::{Error, Result};
use crate::process;
use crate::workspace::{Crate, Scratch, Workspace, packages};

/// A model checker.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checker {
    /// Every interleaving up to a number of preemptions, weak memory included.
    Loom,
    /// Random schedules, sequentially consistent.
    Shuttle,
}

impl Checker {
    pub(crate) const ALL: [Checker; 2] = [Checker::Loom, Checker::Shuttle];

    /// The cfg, without `offlock_`, and the test target.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Checker::Loom => "loom",
            Checker::Shuttle => "shuttle",
        }
    }
}

/// Which models run.
pub(crate) struct Selection {
    pub(crate) crates: Vec<Crate>,
    pub(crate) checkers: Vec<Checker>,
    /// Arguments of the test programs: a part of a test's name.
    pub(crate) filter: Vec<String>,
}

/// Runs the models of one checker after those of the other.
///
/// The programs of one checker run several at a time, so that no CPU waits for the longest model of
/// a crate.
///
/// A filter that selects no model is an error: a misspelt name must not pass.
pub(crate) fn run(ws: &Workspace, selection: &Selection) -> Result<()> {
    let mut any = false;
    for &checker in &selection.checkers {
        let built = build(ws, checker, &selection.crates)?;
        let built = with_a_match(ws, built, &selection.filter)?;
        any |= !built.is_empty();
        let cmd = |binary: &TestBinary| {
            let cmd = binary.cmd(ws).args(&selection.filter);
            match checker {
                // Three preemptions take minutes: `soak`.
                Checker::Loom => cmd.env("LOOM_MAX_PREEMPTIONS", "2"),
                Checker::Shuttle => cmd,
            }
        };
        if let [only] = &built[..] {
            cmd(only).run()?;
            continue;
        }
        let (logs, printing) = (Scratch::new("models")?, Mutex::new(()));
        process::each(&built, |binary| logged(&logs, cmd(binary), &printing))?;
    }
    if !any {
        return Err(Error::new(format!("no model matches {}", selection.filter.join(" "))));
    }
    Ok(())
}

/// Returns the programs that have a test which the filter selects.
fn with_a_match(
    ws: &Workspace,
    built: Vec<TestBinary>,
    filter: &[String],
) -> Result<Vec<TestBinary>> {
    if filter.is_empty() {
        return Ok(built);
    }
    let mut kept = Vec::new();
    for binary in built {
        let listed = binary.cmd(ws).arg("--list").args(filter).output()?;
        if listed.lines().any(|line| line.ends_with(": test")) {
            kept.push(binary);
        }
    }
    Ok(kept)
}

fn build(ws: &Workspace, checker: Checker, crates: &[Crate]) -> Result<Vec<TestBinary>> {
    let name = checker.name();
    let with_models: Vec<Crate> =
        crates.iter().filter(|package| package.has(&format!("tests/{name}.rs"))).cloned().collect();
    if with_models.is_empty() {
        return Err(Error::new(format!("no model for {name} was found")));
    }
    let cargo = ws.cargo(["test", "--profile", "loom"]).args(packages(&with_models));
    binaries::build(cfg::model(ws, name, cargo.args(["--test", name])))
}
