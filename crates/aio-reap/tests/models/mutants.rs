//! Every planted bug must fail the model that is about it.
//!
//! Each runs in a process of its own: under loom a deadlock may abort.

use std::env;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A planted bug, and the model that must fail for it.
const MUTANTS: &[(&str, &str)] = &[
    ("bell-answered-after-the-reap", "pool_announces_what_a_budget_leaves"),
    ("pool-bell-by-an-older-look", "pool_loses_no_job_and_no_wake_up"),
    ("pool-budget-hides-the-rest", "pool_announces_what_a_budget_leaves"),
    ("pool-close-wakes-one", "pool_closes_with_every_worker"),
    ("pool-leaves-jobs-behind", "pool_performs_what_is_queued_when_it_closes"),
    ("pool-notify-before-push", "pool_loses_no_job_and_no_wake_up"),
    ("ring-head-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
    ("ring-release-before-read", "inv08_ring_hands_over_whole_events_and_wraps"),
    ("ring-tail-relaxed", "inv08_ring_hands_over_whole_events_and_wraps"),
];

/// Bugs that only a checker of weak memory and of plain accesses can see: shuttle must pass, or it
/// says too much.
const LOOM_ONLY: &[&str] = &["ring-head-relaxed", "ring-release-before-read", "ring-tail-relaxed"];

/// A guess: a hundred times what the slowest takes.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn planted_mutants_are_caught() {
    for (mutant, model) in MUTANTS {
        let run = run(mutant, model);
        let said = format!("{mutant} in {model}:\n{}", run.said);
        assert!(run.said.contains("running 1 test"), "the model did not run: {said}");
        let reached = format!("planted mutant reached: {mutant}");
        assert!(run.said.contains(&reached), "the bug was not on the model's path: {said}");
        let visible = cfg!(offlock_loom) || !LOOM_ONLY.contains(mutant);
        assert_eq!(run.failed, visible, "{said}");
    }
}

/// The control of the test above: with no bug planted, or with one that does not exist, the same
/// command passes.
#[test]
fn a_mutant_that_does_not_exist_changes_nothing() {
    for (_, model) in MUTANTS {
        let run = run("no-such-mutant", model);
        assert!(!run.failed, "{model}:\n{}", run.said);
        assert!(run.said.contains("1 passed") && !run.said.contains("mutant reached"));
    }
}

/// Each `mutant("...")` of the crate and of its models is in the table.
#[test]
fn every_planted_mutant_has_a_model() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut planted = Vec::new();
    for dir in ["src/backend", "tests/models"] {
        for entry in fs::read_dir(root.join(dir)).unwrap() {
            let text = fs::read_to_string(entry.unwrap().path()).unwrap();
            let call = concat!("mutant", "(\"");
            planted.extend(
                text.split(call).skip(1).map(|rest| rest.split('"').next().unwrap().to_string()),
            );
        }
    }
    planted.retain(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-'));
    assert!(planted.len() >= 9, "the search finds them: {planted:?}");
    for name in planted {
        assert!(MUTANTS.iter().any(|(mutant, _)| *mutant == name), "{name} has no model");
    }
}

struct Run {
    failed: bool,
    said: String,
}

fn run(mutant: &str, model: &str) -> Run {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("models::{model}"), "--nocapture"])
        .env("OFFLOCK_MUTANT", mutant)
        .env("OFFLOCK_SHUTTLE_ITERATIONS", "1000") // enough for each, however long a soak asks for
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
