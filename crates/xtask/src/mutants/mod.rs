//! Mutants planted at random: the share that a crate's tests and models catch.
//!
//! The planted mutants of the model tests are known when the tests are written. These are not, so
//! their share says how the tests do on bugs that they were not written for. A survivor is a bug
//! that no test sees, or a change that is no bug; a reader decides.
//!
//! The mutants are built in a copy of the workspace below the target folder, with the real one's
//! settings. One mutant takes a build and a run of the crate's tests, of its loom models and of its
//! shuttle models, up to the first failure.

pub(crate) mod patches;
mod sites;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::sites::{Kind, Site};
use crate::cfg;
use crate::error::{Error, Result};
use crate::process::{Cmd, Deadline, interrupted};
use crate::workspace::{Crate, Workspace, packages, rust_files};

/// How long each of the stages took without a mutant.
type Times = BTreeMap<&'static str, Duration>;

/// For the first run of a stage.
const PATIENCE: Duration = Duration::from_secs(3600);

/// How long a stage may take: a mutant with which it hangs is caught. Ten times as long as without a mutant,
/// as the machine may be busier, but three times where that is minutes.
fn patience(times: &Times, stage: &str) -> Duration {
    let secs = Duration::from_secs;
    let limit = |&time: &Duration| (10 * time).clamp(secs(60), secs(300)).max(3 * time);
    times.get(stage).map_or(PATIENCE, limit)
}

/// Plants `count` mutants that compile in each of these crates, one at a time.
pub(crate) fn run(ws: &Workspace, crates: &[Crate], count: usize, seed: u64) -> Result<()> {
    let copy = copy(ws)?;
    println!("seed {seed}");
    for package in crates {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut candidates = candidates(&copy, package)?;
        let mut report = Report::default();
        let times = test(&copy, package, Kind::Statement, &Times::new());
        let times = times.map_err(|(stage, error)| {
            Error::new(format!("{}: {stage} fail without a mutant: {error}", package.name))
        })?;
        while report.planted() < count {
            let Some(mutant) = draw(&mut candidates, &mut rng) else { break };
            let outcome = plant(&copy, package, &mutant, &times)?;
            if let Some(line) = report.add(outcome, &mutant.to_string()) {
                println!("{}: {line}", package.name);
            }
        }
        println!("{}: {}", package.name, report.summary());
    }
    Ok(())
}

/// A site in a file.
struct Mutant {
    file: PathBuf,
    /// Below the crate's folder.
    shown: String,
    site: Site,
    was: String,
}

impl std::fmt::Display for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mutant { shown, site, was, .. } = self;
        let was = was.split_whitespace().collect::<Vec<_>>().join(" ");
        write!(f, "{shown}:{}: `{was}` -> `{}`", site.line, site.with)
    }
}

/// What became of a mutant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    DoesNotBuild,
    /// By the tests or models of this name.
    Caught(&'static str),
    Survived,
}

#[derive(Default)]
struct Report {
    caught: usize,
    survivors: Vec<String>,
}

impl Report {
    fn planted(&self) -> usize {
        self.caught + self.survivors.len()
    }

    /// Returns the line to print; none for a mutant that does not count.
    fn add(&mut self, outcome: Outcome, mutant: &str) -> Option<String> {
        match outcome {
            Outcome::DoesNotBuild => None,
            Outcome::Caught(by) => {
                self.caught += 1;
                Some(format!("caught by {by}: {mutant}"))
            }
            Outcome::Survived => {
                self.survivors.push(mutant.to_string());
                Some(format!("SURVIVED: {mutant}"))
            }
        }
    }

    fn summary(&self) -> String {
        let (caught, planted) = (self.caught, self.planted());
        let share = caught as f64 / planted.max(1) as f64;
        let mut text = format!("{caught} of {planted} random mutants caught, {share:.2}");
        for survivor in &self.survivors {
            text += &format!("\n  survived: {survivor}");
        }
        text
    }
}

/// Copies every file that git knows or does not ignore to a folder below the target folder.
fn copy(ws: &Workspace) -> Result<Workspace> {
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

/// The mutants of a crate, by kind.
fn candidates(copy: &Workspace, package: &Crate) -> Result<Vec<(Kind, Vec<Mutant>)>> {
    let dir = copy.root.join("crates").join(&package.name);
    let mut all = Vec::new();
    let mut files = rust_files(&dir.join("src"));
    files.retain(|file| !is_for_tests(file));
    let read =
        |file: &PathBuf| fs::read_to_string(file).map_err(|error| Error::io(file.display(), error));
    let texts: Vec<String> = files.iter().map(read).collect::<Result<_>>()?;
    let parse = |(file, text): (&PathBuf, &String)| {
        sites::parse(text).map_err(|error| Error::new(format!("{}: {error}", file.display())))
    };
    let parsed: Vec<_> = files.iter().zip(&texts).map(parse).collect::<Result<_>>()?;
    for ((file, text), found) in files.into_iter().zip(&texts).zip(sites::sites(&parsed)) {
        let shown = file.strip_prefix(&dir).unwrap_or(&file).display().to_string();
        for site in found {
            let was = text[site.bytes.clone()].to_string();
            all.push(Mutant { file: file.clone(), shown: shown.clone(), site, was });
        }
    }
    let mut by_kind: Vec<(Kind, Vec<Mutant>)> = Kind::ALL.map(|kind| (kind, Vec::new())).into();
    for mutant in all {
        let of_kind = by_kind.iter_mut().find(|(kind, _)| *kind == mutant.site.kind);
        of_kind.expect("every kind is listed").1.push(mutant);
    }
    by_kind.retain(|(_, mutants)| !mutants.is_empty());
    Ok(by_kind)
}

fn is_for_tests(file: &Path) -> bool {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let supports_models = name == "model" || name == "planted" || name.starts_with("virtual_");
    name == "tests" || name.ends_with("_tests") || name == "stress" || supports_models
}

/// Takes a mutant out, each kind as often as the others.
fn draw(candidates: &mut Vec<(Kind, Vec<Mutant>)>, rng: &mut fastrand::Rng) -> Option<Mutant> {
    if candidates.is_empty() {
        return None;
    }
    let kind = rng.usize(..candidates.len());
    let mutants = &mut candidates[kind].1;
    let mutant = mutants.swap_remove(rng.usize(..mutants.len()));
    if mutants.is_empty() {
        candidates.remove(kind);
    }
    Some(mutant)
}

/// Writes the mutant, runs the tests, and takes it back.
fn plant(copy: &Workspace, package: &Crate, mutant: &Mutant, times: &Times) -> Result<Outcome> {
    let failed = |error| Error::io(mutant.file.display(), error);
    let text = fs::read_to_string(&mutant.file).map_err(failed)?;
    let mut mutated = text.clone();
    mutated.replace_range(mutant.site.bytes.clone(), mutant.site.with);
    fs::write(&mutant.file, mutated).map_err(failed)?;
    let outcome = test(copy, package, mutant.site.kind, times);
    fs::write(&mutant.file, text).map_err(failed)?;
    match outcome {
        Ok(_) => Ok(Outcome::Survived),
        Err((_, error)) if interrupted().is_some() => Err(error),
        Err((BUILD, _)) => Ok(Outcome::DoesNotBuild),
        Err((stage, _)) => Ok(Outcome::Caught(stage)),
    }
}

const BUILD: &str = "build";

/// The command that runs a crate's models under one checker.
fn models(copy: &Workspace, package: &Crate, checker: &str) -> Cmd {
    let cargo = copy.cargo(["test", "--offline", "--profile", "loom", "--test", checker]);
    let cargo = cargo.args(packages(std::slice::from_ref(package)));
    cfg::everywhere(copy, checker, cargo).env("LOOM_MAX_PREEMPTIONS", "2")
}

/// Runs the crate's tests and models up to the first failure. Returns how long each of them took, or which failed.
///
/// What most often catches a mutant of this kind runs first.
fn test(
    copy: &Workspace,
    package: &Crate,
    kind: Kind,
    times: &Times,
) -> std::result::Result<Times, (&'static str, Error)> {
    let mut taken = Times::new();
    let stages = match kind {
        Kind::Ordering | Kind::Fence => ["loom", "tests", "shuttle"],
        Kind::Operator | Kind::Statement => ["tests", "loom", "shuttle"],
    };
    for name in stages {
        let patience = patience(times, name);
        let time = if name == "tests" {
            let tests = copy.cargo(["test", "--offline", "--lib", "--tests"]);
            stage(copy, name, tests.args(packages(std::slice::from_ref(package))), &[], patience)?
        } else if package.has(&format!("tests/{name}.rs")) {
            // The planted mutants would run once more for each random one.
            let options = ["--skip", "mutants::"];
            stage(copy, name, models(copy, package, name), &options, patience)?
        } else {
            continue;
        };
        taken.insert(name, time);
    }
    Ok(taken)
}

/// Builds and runs one stage. Returns how long the run took.
fn stage(
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
fn log(copy: &Workspace) -> PathBuf {
    copy.target.join("log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_counts_what_builds() {
        let mut report = Report::default();
        assert_eq!(report.add(Outcome::DoesNotBuild, "a"), None);
        assert!(report.add(Outcome::Caught("tests"), "b").unwrap().contains("caught by tests"));
        assert!(report.add(Outcome::Survived, "c").unwrap().starts_with("SURVIVED"));
        assert_eq!(report.planted(), 2);
        assert_eq!(report.summary(), "1 of 2 random mutants caught, 0.50\n  survived: c");
    }

    #[test]
    fn a_stage_hangs_after_a_multiple_of_its_time() {
        let secs = Duration::from_secs;
        for (time, limit) in [(1, 60), (12, 120), (90, 300), (200, 600)] {
            assert_eq!(patience(&Times::from([("loom", secs(time))]), "loom"), secs(limit));
        }
        assert_eq!(patience(&Times::new(), "loom"), PATIENCE);
    }

    #[test]
    fn each_kind_is_drawn_and_none_twice() {
        let site = |kind, at| Site { kind, bytes: at..at + 1, line: 1, with: "" };
        let mutant = |kind, at| Mutant {
            file: PathBuf::new(),
            shown: String::new(),
            site: site(kind, at),
            was: String::new(),
        };
        let few = (Kind::Fence, vec![mutant(Kind::Fence, 0)]);
        let many = (Kind::Statement, (1..100).map(|at| mutant(Kind::Statement, at)).collect());
        let mut candidates = vec![few, many];
        let mut rng = fastrand::Rng::with_seed(1);
        let drawn: Vec<Mutant> =
            (0..20).map(|_| draw(&mut candidates, &mut rng).unwrap()).collect();
        assert!(drawn.iter().any(|mutant| mutant.site.kind == Kind::Fence));
        let places: BTreeSet<usize> = drawn.iter().map(|mutant| mutant.site.bytes.start).collect();
        assert_eq!(places.len(), 20);
        assert!(draw(&mut Vec::new(), &mut rng).is_none());
    }
}
