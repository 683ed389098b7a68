//! Checks that each planted bug fails the model that it is listed with.
//!
//! A crate lists its planted bugs in a [`Planted`], and [`planted_tests!`](crate::planted_tests) makes
//! the three checks tests of its models.
//! Each model runs in a process of its own, because under loom a deadlock may abort the process.
//! For tests only.
//!
//! # Panics
//!
//! A check that fails panics. The message names the planted bug or the model.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The processor time after which a model counts as hung: far more than any model takes. Wall-clock
/// time would depend on the load of the machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The time without any processor time after which a model counts as blocked.
const BLOCKED: Duration = Duration::from_secs(60);

/// The name of a planted bug that changes no code.
///
/// A run with it reports the first planted bug that it reaches, like a run with a bug, and must
/// pass.
const CONTROL: &str = "control";

/// The planted bugs of a crate.
#[derive(Debug)]
pub struct Planted {
    /// One list per module of models. Each entry has the name or label of a bug, and the path below
    /// `mod models` of the model that must fail with the bug.
    pub mutants: &'static [&'static [(&'static str, &'static str)]],
    /// The bugs that only loom can see, because they need weak memory or a check of plain accesses.
    /// With each of them the model must pass under shuttle.
    pub loom_only: &'static [&'static [&'static str]],
    /// The `CARGO_MANIFEST_DIR` of the crate.
    pub root: &'static str,
    /// The folders below `root` whose source files plant bugs.
    pub dirs: &'static [&'static str],
}

impl Planted {
    /// Checks that each planted bug fails its model.
    pub fn assert_caught(&self) {
        let mut wrong = Vec::new();
        for (mutant, model) in self.mutants.concat() {
            let visible = cfg!(offlock_loom) || !self.loom_only.concat().contains(&mutant);
            let mut run = run_some(mutant, model, None);
            let reached = format!("planted mutant reached: {mutant}");
            let missed = |run: &Run| !run.said.contains(&reached) || (visible && !run.failed);
            if missed(&run) && cfg!(offlock_shuttle) {
                // Only a few schedules in a thousand reach or show some bugs, so try others.
                run = run_some(mutant, model, Some(SWITCHES));
                // A model without a bug fails with such schedules if one of its threads spins
                // without a hint. Its failure with the bug then shows nothing.
                if run.failed {
                    run.failed = !run_some(CONTROL, model, Some(SWITCHES)).failed;
                }
            }
            let why = match run.failed {
                _ if !run.said.contains("running 1 test") => "the model did not run",
                _ if !run.said.contains(&reached) => "the bug is not on the model's path",
                failed if failed == visible => continue,
                true => "the bug is visible under shuttle",
                false => "the model passes",
            };
            wrong.push(format!("{mutant} in {model}: {why}:\n{}", run.said));
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// Checks that each model passes with a planted bug that changes no code.
    ///
    /// This is the control of [`assert_caught`](Self::assert_caught): it runs the same commands.
    pub fn assert_control_passes(&self) {
        let models: BTreeSet<_> = self.mutants.concat().iter().map(|(_, model)| *model).collect();
        for model in models {
            let mut run = run_some(CONTROL, model, None);
            if run.failed {
                // A `should_panic` model that reaches any planted bug aborts at its panic. Without
                // a bug it must pass.
                let without = run_some("no-such-mutant", model, None);
                if without.said.contains("- should panic") {
                    run.failed = without.failed;
                    run.said += &without.said;
                }
            }
            assert!(!run.failed, "{model}:\n{}", run.said);
            assert!(run.said.contains("1 passed") && run.said.contains("mutant reached"));
        }
    }

    /// Checks that the source files plant exactly the listed bugs.
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

/// Makes the three checks of a [`Planted`] tests. An attribute after it applies to the test that each
/// planted bug is listed.
#[macro_export]
macro_rules! planted_tests {
    ($planted:expr $(, #[$listed:meta])?) => {
        #[test]
        fn planted_mutants_are_caught() {
            $planted.assert_caught();
        }

        #[test]
        fn a_mutant_that_does_not_exist_changes_nothing() {
            $planted.assert_control_passes();
        }

        $(#[$listed])?
        #[test]
        fn every_planted_mutant_has_a_model() {
            $planted.assert_listed();
        }
    };
}

/// Adds the names of the planted bugs in the source files of a folder and of its subfolders.
///
/// Skips files named `tests.rs`, because unit tests do not run in a model build.
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

/// Returns the names of the planted bugs in a source text. Skips comment lines.
///
/// These are the labels of `fence!`, `order!`, `step!` and `check!`, and the names in
/// `is_planted("...")`.
#[must_use]
pub fn names_in(source: &str) -> BTreeSet<String> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code = source.lines().filter(is_code).collect::<Vec<_>>().join("\n");
    let mut names = BTreeSet::new();
    for name in ["fence!", "order!", "step!", "check!", "mutant", "is_planted"] {
        let call = format!("{name}(");
        for (at, _) in code.match_indices(&call) {
            // Skips macros whose names end like one of these, such as `my_check!(`.
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

/// The number of random schedules of each run, whatever `OFFLOCK_SHUTTLE_ITERATIONS` says.
const SCHEDULES: u32 = 1_000;

/// The number of changes of the running thread in a schedule of the second attempt. A bug of a missed
/// notification needs two.
const SWITCHES: u32 = 3;

/// The seed of the random schedules of each run. A fixed seed makes the outcome depend on the code
/// alone: a rare bug is seen in each run of the same code, or in none.
const SEED: &str = "1";

/// Runs one model of this test program in a process of its own, with one planted bug.
///
/// With `switches` each schedule changes the running thread that often only.
fn run_some(mutant: &str, model: &str, switches: Option<u32>) -> Run {
    let mut command = Command::new(env::current_exe().unwrap());
    if let Some(switches) = switches {
        command.env("OFFLOCK_SHUTTLE_SWITCHES", switches.to_string());
    }
    let mut child = command
        .args(["--exact", &format!("models::{model}"), "--nocapture"])
        .env("OFFLOCK_MUTANT", mutant)
        .env("OFFLOCK_SHUTTLE_ITERATIONS", SCHEDULES.to_string())
        .env("SHUTTLE_RANDOM_SEED", SEED)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = reader(child.stdout.take().unwrap());
    let err = reader(child.stderr.take().unwrap());
    let status = wait(&mut child, LIMIT, BLOCKED);
    let said = format!("{}{}{status}", out.join().unwrap(), err.join().unwrap());
    Run { failed: !status.success(), said }
}

/// Reads a pipe to its end on a thread of its own, so that the child never blocks on a full pipe.
fn reader(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for the child. A child that hangs does not show the bug, so it is killed and the test
/// fails.
fn wait(child: &mut Child, limit: Duration, blocked: Duration) -> ExitStatus {
    let (mut used, mut since) = (Duration::ZERO, Instant::now());
    loop {
        let now = processor_time(child.id());
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if now > used {
            (used, since) = (now, Instant::now());
        }
        if used > limit || since.elapsed() > blocked {
            child.kill().unwrap();
            child.wait().unwrap();
            let why =
                if used > limit { "used too much processor time" } else { "has been blocked" };
            panic!(
                "the model neither passed nor failed: after {used:?} of processor time it {why}"
            );
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the processor time of a child that has not been waited for.
fn processor_time(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // User and system time, in hundredths of a second, stand at the 11th and 12th place after the name.
    let after_name = stat.rsplit_once(')').unwrap().1.split_whitespace();
    let ticks = after_name.skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_hangs_is_killed() {
        const TICKS: Duration = Duration::from_millis(100);
        for (script, limit, blocked, why) in [
            ("while :; do :; done", TICKS, BLOCKED, "used too much processor time"),
            ("exec sleep 1000", LIMIT, TICKS, "has been blocked"),
        ] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                wait(&mut child, limit, blocked)
            }));
            let panic = waited.expect_err(script);
            let said = panic.downcast_ref::<String>().unwrap();
            assert!(said.ends_with(why), "{script}: {said}");
        }
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        assert_eq!(wait(&mut child, LIMIT, BLOCKED).code(), Some(3));
    }

    /// A name that is missed would need no model.
    #[test]
    fn labels_and_names_are_found_in_a_source() {
        // A `#` stands for the `!`: this file is searched, too.
        let source = r#"
        fence#(SeqCst, "one: skips the fence");
        word.store(0, order#(Release, "two"));
        step#(
            "three, in lines of its own",
            word.store(0, order#(
                Relaxed,
                "four: inside another"
            )),
        );
        if !check#("five", word.load(Relaxed) == 0) && !mutant#("six") {}
        // step#("a comment", none());
        /// step#("documentation", none());
        crate_check#("another macro", 1); check#(no_label, 1); step#(1 == 2, "no label");
        "#
        .replace('#', "!")
        .replace("mutant!", "mutant");
        let found = names_in(&source);
        let expected = [
            "five",
            "four: inside another",
            "one: skips the fence",
            "six",
            "three, in lines of its own",
            "two",
        ];
        assert!(found.iter().map(String::as_str).eq(expected), "{found:?}");
    }
}
