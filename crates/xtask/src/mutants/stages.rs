//! The copy of the workspace in which mutants are planted, and the runs of a crate's tests and models there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cfg;
use crate::error::{Error, Result};
use crate::process::{Cmd, Deadline};
use crate::workspace::{Crate, Workspace, packages, rust_files};

/// For the first run of a stage.
pub(super) const PATIENCE: Duration = Duration::from_secs(3600);

pub(super) const BUILD: &str = "build";

/// Copies every file that git knows or does not ignore to a folder below the target folder.
pub(super) fn copy(ws: &Workspace) -> Result<Workspace> {
    let root = ws.target.join("mutants/workspace");
    let listed = ws
        .cmd("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .output()?;
    let files: BTreeSet<&str> = listed.split('\0').filter(|name| !name.is_empty()).collect();
    for left in rust_files(&root.join("crates")) {
        let name = left.strip_prefix(&root).unwrap_or(&left).to_string_lossy();
        if !files.contains(&*name) {
            fs::remove_file(&left).map_err(|error| Error::io(left.display(), error))?;
        }
    }
    for name in files {
        let (from, to) = (ws.root.join(name), root.join(name));
        let failed = |error| Error::io(to.display(), error);
        let Ok(text) = fs::read(&from) else { continue }; // deleted, and not committed yet
        // An equal file keeps its time, so that cargo does not build it again.
        if fs::read(&to).is_ok_and(|there| there == text) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(&root)).map_err(failed)?;
        fs::write(&to, text).map_err(failed)?;
    }
    Ok(ws.moved(root, ws.target.join("mutants")))
}

/// The command that runs a crate's models under one checker.
pub(super) fn models(copy: &Workspace, package: &Crate, checker: &str) -> Cmd {
    let cargo = copy.cargo(["test", "--offline", "--profile", "loom", "--test", checker]);
    let cargo = cargo.args(packages(std::slice::from_ref(package)));
    cfg::model(copy, checker, cargo).env("LOOM_MAX_PREEMPTIONS", "2")
}

/// The name of a stage, what runs it, and the options of its test programs.
pub(super) type Stage = (&'static str, Cmd, &'static [&'static str]);

/// The stages of a crate with one of these names, without the planted mutants, which would run once
/// more for each random one.
pub(super) fn stages(copy: &Workspace, package: &Crate, names: &[&str]) -> Vec<Stage> {
    let packages = packages(std::slice::from_ref(package));
    let tests = copy.cargo(["test", "--offline", "--lib", "--tests"]).args(packages);
    let mut stages = vec![("tests", tests, [].as_slice())];
    for checker in ["loom", "shuttle"] {
        if package.has(&format!("tests/{checker}.rs")) {
            stages.push((checker, models(copy, package, checker), &["--skip", "mutants::"]));
        }
    }
    stages.retain(|(name, ..)| names.contains(name));
    stages
}

/// Builds and runs one stage. Returns how long the run took.
pub(super) fn stage(
    copy: &Workspace,
    name: &'static str,
    cargo: Cmd,
    options: &[&str],
    patience: Duration,
) -> std::result::Result<Duration, (&'static str, Error)> {
    let path = log(copy);
    let log = File::create(&path).map_err(|error| (BUILD, Error::io(path.display(), error)))?;
    let cargo = cargo.log(Arc::new(log));
    cargo.clone().arg("--no-run").run().map_err(|error| (BUILD, error))?;
    let run = cargo.arg("--").args(options.iter().copied()).deadline(Deadline::after(patience));
    let run = run.until_logged(&path, " ... FAILED\n");
    let begun = Instant::now();
    let outcome = run.run().map_err(|error| (name, error));
    let _ = std::io::stdout().flush();
    outcome.map(|()| begun.elapsed())
}

/// The output of the last [`stage`].
pub(super) fn log(copy: &Workspace) -> PathBuf {
    copy.target.join("log")
}
