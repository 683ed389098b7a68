//! The test that every planted bug is caught by the model that is about it.
//!
//! A crate lists its bugs in a [`Planted`] and calls the three checks from its model tests. Each
//! model runs in a process of its own: under loom a deadlock may abort. For tests only.
//!
//! # Panics
//!
//! Every check panics with what does not hold.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A guess: a hundred times what the slowest takes.
const LIMIT: Duration = Duration::from_secs(120);

/// A planted bug that changes nothing, wherever one is planted: whatever a run does once it has met a
/// bug, it passes with this one.
pub(super) const CONTROL: &str = "control";

/// The planted bugs of a crate.
#[derive(Debug)]
pub struct Planted {
    /// A bug's name or label, and the model in `mod models` of the test program that must fail for it: one
    /// list per module of models.
    pub mutants: &'static [&'static [(&'static str, &'static str)]],
    /// Bugs that only a checker of weak memory and of plain accesses can see: shuttle must pass,
    /// or the list says too much.
    pub loom_only: &'static [&'static [&'static str]],
    /// The crate's `CARGO_MANIFEST_DIR`, and the folders in it below which files plant bugs.
    pub root: &'static str,
    /// See `root`.
    pub dirs: &'static [&'static str],
}

impl Planted {
    /// Every planted bug fails its model.
    pub fn assert_caught(&self) {
        for (mutant, model) in self.mutants.concat() {
            let visible = cfg!(offlock_loom) || !self.loom_only.concat().contains(&mutant);
            let mut run = run_some(mutant, model, SCHEDULES);
            if visible && !run.failed && cfg!(offlock_shuttle) {
                // Missed by chance, or not at all: some bugs fall to one schedule in some hundred.
                run = run_some(mutant, model, 20 * SCHEDULES);
            }
            let said = format!("{mutant} in {model}:\n{}", run.said);
            assert!(run.said.contains("running 1 test"), "the model did not run: {said}");
            let reached = format!("planted mutant reached: {mutant}");
            assert!(run.said.contains(&reached), "the bug was not on the model's path: {said}");
            assert_eq!(run.failed, visible, "{said}");
        }
    }

    /// The control: with a bug that changes nothing, the same command passes.
    pub fn assert_control_passes(&self) {
        let models: BTreeSet<_> = self.mutants.concat().iter().map(|(_, model)| *model).collect();
        for model in models {
            let mut run = run_some(CONTROL, model, SCHEDULES);
            if run.failed {
                // A model that is to panic ends there with any bug; not without one.
                let without = run_some("no-such-mutant", model, SCHEDULES);
                if without.said.contains("- should panic") {
                    run.failed = without.failed;
                    run.said += &without.said;
                }
            }
            assert!(!run.failed, "{model}:\n{}", run.said);
            assert!(run.said.contains("1 passed") && run.said.contains("mutant reached"));
        }
    }

    /// Each label and each `mutant("...")` in the folders is in the list, and the reverse.
    pub fn assert_listed(&self) {
        let mut planted = BTreeSet::new();
        for dir in self.dirs {
            collect(&Path::new(self.root).join(dir), &mut planted);
        }
        for name in &planted {
            let listed = self.mutants.concat().iter().any(|(mutant, _)| mutant == name);
            assert!(listed, "{name} has no model");
        }
        for (mutant, _) in self.mutants.concat() {
            assert!(planted.contains(mutant), "{mutant} is not planted");
        }
    }
}

/// Adds the names in the sources in a folder and in the folders below it.
///
/// Files named `tests.rs` are left out: unit tests do not run in a model build.
fn collect(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            names.extend(names_in(&fs::read_to_string(path).unwrap()));
        }
    }
}

/// The names of the planted bugs in a source text: the labels of `fence!`, `order!`, `step!` and
/// `check!`, and the names in `mutant("...")`. Comments are left out.
#[must_use]
pub fn names_in(source: &str) -> BTreeSet<String> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code = source.lines().filter(is_code).collect::<Vec<_>>().join("\n");
    let mut names = BTreeSet::new();
    for name in ["fence!", "order!", "step!", "check!", "mutant"] {
        let call = format!("{name}(");
        for (at, _) in code.match_indices(&call) {
            // `my_check!(` is another macro.
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let mut arguments = code[at + call.len()..].trim_start();
            if matches!(name, "fence!" | "order!") {
                let ordering = |c: char| c.is_alphanumeric();
                let rest = arguments.trim_start_matches(ordering).trim_start();
                arguments = rest.strip_prefix(',').unwrap_or_default().trim_start();
            }
            let label = arguments.strip_prefix('"').and_then(|rest| rest.split_once('"'));
            names.extend(label.map(|(label, _)| label.to_string()));
        }
    }
    names
}

struct Run {
    failed: bool,
    said: String,
}

/// Random schedules for each model, however many a soak asks for elsewhere.
const SCHEDULES: u32 = 1_000;

/// Runs one model of this test program in a process of its own, with one bug planted.
fn run_some(mutant: &str, model: &str, schedules: u32) -> Run {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("models::{model}"), "--nocapture"])
        .env("OFFLOCK_MUTANT", mutant)
        .env("OFFLOCK_SHUTTLE_ITERATIONS", schedules.to_string())
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = reader(child.stdout.take().unwrap());
    let err = reader(child.stderr.take().unwrap());
    let failed = !wait(&mut child).success();
    Run { failed, said: out.join().unwrap() + &err.join().unwrap() }
}

/// Reads a pipe to its end on a thread, so that a talkative child does not block on the other.
fn reader(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A child that hangs is no proof: it is killed, and the test fails.
fn wait(child: &mut Child) -> std::process::ExitStatus {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("the model neither passed nor failed within {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}
