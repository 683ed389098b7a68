//! Mutants planted at random: the share that a crate's tests and models catch.
//!
//! The planted mutants of the model tests are known when the tests are written. These are not, so
//! their share says how the tests do on bugs that they were not written for. A survivor is a bug
//! that no test sees, or a change that is no bug; a reader decides.
//!
//! The mutants are built in a copy of the workspace below the target folder, with the real one's
//! settings, in one build in which each run switches one on. A mutant that cannot be switched on, such
//! as one in a constant, has a build of its own. Each takes a run of the crate's tests, of its loom
//! models and of its shuttle models, up to the first failure.

pub(crate) mod patches;
mod sites;
mod stages;
mod switched;
#[cfg(test)]
mod tables;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::sites::{Kind, Mutant};
use self::stages::{BUILD, PATIENCE, Stage, copy, stage, stages};
use crate::error::{Error, Result};
use crate::process::{Cmd, interrupted};
use crate::workspace::{Crate, Workspace, rust_files};

/// How long each of the stages took without a mutant.
type Times = BTreeMap<&'static str, Duration>;

/// How long a stage may take: a mutant with which it hangs is caught. Ten times as long as without a mutant,
/// as the machine may be busier, but three times where that is minutes.
fn patience(times: &Times, stage: &str) -> Duration {
    let secs = Duration::from_secs;
    let limit = |&time: &Duration| (10 * time).clamp(secs(60), secs(300)).max(3 * time);
    times.get(stage).map_or(PATIENCE, limit)
}

/// Which mutants are planted.
#[derive(Clone, Copy)]
pub(crate) enum Choice {
    /// So many that compile, at random. All tests and models run.
    Random(usize),
    /// Each ordering and fence without a label. Only the models of loom run, as with a planted bug.
    Unlabelled,
}

/// Plants mutants in each of these crates, one at a time.
pub(crate) fn run(ws: &Workspace, crates: &[Crate], choice: Choice, seed: u64) -> Result<()> {
    let copy = copy(ws)?;
    println!("seed {seed}");
    let (count, names) = match choice {
        Choice::Random(count) => (count, ["tests", "loom", "shuttle"].as_slice()),
        Choice::Unlabelled => (usize::MAX, ["loom"].as_slice()),
    };
    for package in crates {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut candidates = candidates(&copy, package)?;
        if matches!(choice, Choice::Unlabelled) {
            candidates.retain(|(kind, _)| matches!(kind, Kind::Ordering | Kind::Fence));
            candidates.iter_mut().for_each(|(_, all)| all.retain(|mutant| !mutant.site.labelled));
            candidates.retain(|(_, mutants)| !mutants.is_empty());
        }
        let mut report = Report::default();
        let mut times = Times::new();
        while report.planted() < count {
            let missing = count - report.planted();
            let drawn: Vec<Mutant> =
                (0..missing).map_while(|_| draw(&mut candidates, &mut rng)).collect();
            if drawn.is_empty() {
                break;
            }
            let mut stages = stages(&copy, package, names);
            if matches!(choice, Choice::Unlabelled) {
                // Models that run at three preemptions do not with a planted bug.
                let planted = |cmd: Cmd| cmd.env("OFFLOCK_MUTANT", "of no label");
                stages = stages.into_iter().map(|(name, cmd, o)| (name, planted(cmd), o)).collect();
            }
            let (together, alone) = switched::write(&copy, package, &stages, drawn)?;
            // A stage that fails without a mutant would catch each.
            for (name, cargo, options) in &stages {
                if !times.contains_key(name) {
                    let none = cargo.clone().env(switched::VARIABLE, "0");
                    let time = stage(&copy, name, none, options, PATIENCE).map_err(|(_, error)| {
                        Error::new(format!("{}, without a mutant: {error}", package.name))
                    });
                    times.insert(name, time?);
                }
            }
            for (number, mutant) in (1..).zip(&together.mutants) {
                let outcome = test(&copy, &stages, mutant.site.kind, Some(number), &times);
                report.add(package, outcome, mutant)?;
            }
            together.take_back()?;
            for mutant in &alone {
                report.add(package, plant(&copy, &stages, mutant, &times)?, mutant)?;
            }
        }
        println!("{}: {}", package.name, report.summary());
    }
    Ok(())
}

/// Which stage failed, if one did.
type Tested = std::result::Result<(), (&'static str, Error)>;

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

    /// Counts and prints what became of a mutant.
    fn add(&mut self, package: &Crate, tested: Tested, mutant: &Mutant) -> Result<()> {
        let outcome = match tested {
            Ok(()) => Outcome::Survived,
            Err((_, error)) if interrupted().is_some() => return Err(error),
            Err((BUILD, _)) => Outcome::DoesNotBuild,
            Err((stage, _)) => Outcome::Caught(stage),
        };
        if let Some(line) = self.count(outcome, &mutant.to_string()) {
            println!("{}: {line}", package.name);
        }
        Ok(())
    }

    /// Returns the line to print; none for a mutant that does not count.
    fn count(&mut self, outcome: Outcome, mutant: &str) -> Option<String> {
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
    let for_tests = sites::test_modules(&parsed);
    for ((file, text), found) in files.into_iter().zip(&texts).zip(sites::sites(&parsed)) {
        if for_tests.contains(&*file.file_stem().unwrap_or_default().to_string_lossy()) {
            continue;
        }
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

/// Returns whether a file is for tests or model checkers that its own name, but no `cfg`, tells of.
fn is_for_tests(file: &Path) -> bool {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let is_model = file.parent().is_some_and(|folder| folder.ends_with("src/models"));
    is_model || name.ends_with("_tests") || name == "model" || name == "planted"
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
fn plant(copy: &Workspace, stages: &[Stage], mutant: &Mutant, times: &Times) -> Result<Tested> {
    let failed = |error| Error::io(mutant.file.display(), error);
    let text = fs::read_to_string(&mutant.file).map_err(failed)?;
    let mut mutated = text.clone();
    mutated.replace_range(mutant.site.bytes.clone(), mutant.site.with);
    fs::write(&mutant.file, mutated).map_err(failed)?;
    let tested = test(copy, stages, mutant.site.kind, None, times);
    fs::write(&mutant.file, text).map_err(failed)?;
    Ok(tested)
}

/// Runs the stages up to the first failure, with the mutant of this number switched on.
///
/// What most often catches a mutant of this kind runs first.
fn test(
    copy: &Workspace,
    stages: &[Stage],
    kind: Kind,
    number: Option<usize>,
    times: &Times,
) -> Tested {
    let mut stages = stages.to_vec();
    if matches!(kind, Kind::Ordering | Kind::Fence) {
        stages.retain(|stage| stage.0 != "shuttle"); // it is sequentially consistent
        stages.sort_by_key(|stage| stage.0); // "loom" is before "tests"
    }
    for (name, cargo, options) in stages {
        let cargo = cargo.env(switched::VARIABLE, number.unwrap_or(0).to_string());
        stage(copy, name, cargo, options, patience(times, name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::mutants::sites::Site;

    #[test]
    fn the_share_counts_what_builds() {
        let mut report = Report::default();
        assert_eq!(report.count(Outcome::DoesNotBuild, "a"), None);
        assert!(report.count(Outcome::Caught("tests"), "b").unwrap().contains("caught by tests"));
        assert!(report.count(Outcome::Survived, "c").unwrap().starts_with("SURVIVED"));
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
        let site = |kind, at| {
            let bytes = at..at + 1;
            Site { kind, bytes: bytes.clone(), whole: bytes, labelled: false, line: 1, with: "" }
        };
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
