//! The steps, and the commands that they run.

use std::fs::File;
use std::sync::Arc;

use crate::cfg;
use crate::error::Result;
use crate::parts::{fuzz, stress};
use crate::process::Cmd;
use crate::workspace::{Crate, Scratch, Workspace};

/// The counts that a test takes from its environment. Each step sets its own: PROPTEST_CASES
/// overrules what a test asks for itself.
const COUNTS: [&str; 5] = [
    "PROPTEST_CASES",
    "OFFLOCK_SOAK",
    "OFFLOCK_STRESS_SECONDS",
    "OFFLOCK_SHUTTLE_ITERATIONS",
    "OFFLOCK_TEARINGS",
];

/// One step.
pub(super) struct Step {
    pub(super) name: String,
    /// The counts, in words.
    pub(super) asked: String,
    settings: Vec<(&'static str, String)>,
    action: Action,
}

enum Action {
    /// `cargo test --release` with these words.
    Release(String),
    /// `cargo test --profile loom` with a cfg for all crates and these words.
    WithCfg(&'static str, String),
    /// `cargo xtask mutants` with these words.
    Mutants(String),
    /// The server's trials with real clients: options of cargo, and of the trials.
    Clients(&'static str, &'static str),
    Fuzz {
        target: String,
        seconds: u64,
    },
}

impl Step {
    /// Runs the step, with all output in the log.
    pub(super) fn run(&self, ws: &Workspace, log: &Arc<File>) -> Result<()> {
        match &self.action {
            Action::Release(words) => self.prepare(ws.cargo(RELEASE), words, log).run(),
            Action::WithCfg(name, words) => {
                let cargo = ws.cargo(["test", "--profile", "loom", "--locked"]);
                let cargo = match *name {
                    "loom" | "shuttle" => cfg::model(ws, name, cargo),
                    _ => cfg::everywhere(ws, name, cargo),
                };
                self.prepare(cargo, words, log).run()
            }
            Action::Mutants(words) => {
                let words = format!("xtask mutants {words}");
                ws.cmd("cargo").args(words.split_whitespace()).log(Arc::clone(log)).run()
            }
            Action::Clients(features, options) => {
                let trials = format!("-p offlock-nbd {features} --test clients -- {options}");
                self.prepare(ws.cargo(RELEASE), &trials, log).run()
            }
            Action::Fuzz { target, seconds } => {
                let scratch = Scratch::new("soak")?;
                let seconds = u32::try_from(*seconds).unwrap_or(u32::MAX);
                fuzz::fuzz(ws, target, seconds, &scratch.path)?.log(Arc::clone(log)).run()
            }
        }
    }

    fn prepare(&self, mut cmd: Cmd, words: &str, log: &Arc<File>) -> Cmd {
        for name in COUNTS {
            cmd = cmd.base_env(name, None);
        }
        for (name, value) in &self.settings {
            cmd = cmd.env(name, value);
        }
        cmd.args(words.split_whitespace()).log(Arc::clone(log))
    }
}

const RELEASE: [&str; 3] = ["test", "--release", "--locked"];
const SERIALLY: &str = "-- --ignored --test-threads=1 --show-output stress_";

/// Every step, with its counts multiplied by `scale`.
pub(super) fn steps(crates: &[Crate], fuzz_targets: &[String], scale: f64) -> Vec<Step> {
    let count = |full| scaled(full, scale);
    let mut steps = Vec::new();
    let mut step = |name: &str, asked: String, settings: &[(&'static str, String)], action| {
        steps.push(Step { name: name.to_string(), asked, settings: settings.to_vec(), action });
    };
    let release = |words: &str| Action::Release(words.to_string());
    let serially = |tests: &str| Action::Release(format!("{tests} {SERIALLY}"));
    let for_seconds = |seconds: u64| ("OFFLOCK_STRESS_SECONDS", seconds.to_string());
    let cases = |cases: u64| ("PROPTEST_CASES", cases.to_string());
    let without_rseq = (stress::WITHOUT_RSEQ.0, stress::WITHOUT_RSEQ.1.to_string());

    let percpu = "-p offlock-percpu --lib --tests";
    let n = count(120);
    step("percpu-stress", format!("{n} s, 10^8 ids in 120"), &[for_seconds(n)], serially(percpu));
    let n = count(30);
    step(
        "percpu-stress-without-rseq",
        format!("{n} s"),
        &[for_seconds(n), without_rseq.clone()],
        serially(percpu),
    );
    step(
        "percpu-stress-no-membarrier",
        format!("{n} s"),
        &[for_seconds(n)],
        Action::WithCfg("no_membarrier", format!("{percpu} {SERIALLY}")),
    );
    let n = count(1_000_000);
    step("percpu-properties", format!("{n} cases"), &[cases(n)], release(percpu));

    let lists = "-p percpu-list --tests";
    let n = count(10);
    step("percpu-list-stress", format!("{n} s"), &[for_seconds(n)], serially(lists));
    step(
        "percpu-list-stress-without-rseq",
        format!("{n} s"),
        &[for_seconds(n), without_rseq],
        Action::Release(format!("{lists} {SERIALLY} --skip all_of_it")),
    );
    let n = count(100_000);
    step(
        "percpu-list-properties",
        format!("{n} cases"),
        &[cases(n)],
        release("-p percpu-list --test api -- list_model:: ops::"),
    );

    let n = count(60);
    step(
        "aio-reap-stress",
        format!("9 x 2 s x {n}"),
        &[("OFFLOCK_SOAK", n.to_string())],
        serially("-p aio-reap --test stress"),
    );
    step(
        "aio-reap-simulated-stress",
        format!("{n} s"),
        &[for_seconds(n)],
        serially("-p aio-reap --test sim"),
    );
    // 100 cases of 450 to 900 operations each, this many times.
    let n = count(5_000);
    step(
        "aio-reap-model",
        format!("{n}00 cases, 10^8 operations in 500000"),
        &[("OFFLOCK_SOAK", n.to_string())],
        release("-p aio-reap --test api -- engine_model::"),
    );

    // A case has 150 operations on average.
    let n = count(7_000);
    step(
        "bufcache-operations",
        format!("{n} cases, 10^6 operations in 7000"),
        &[cases(n)],
        release("-p bufcache --test api -- write_ops:: ops::"),
    );
    let n = count(1_000);
    step(
        "bufcache-power-cuts",
        format!("{n} histories, 1000 cuts of each"),
        &[cases(n), ("OFFLOCK_TEARINGS", n.to_string())],
        release("-p bufcache --test api -- crash::"),
    );
    let n = count(20);
    step(
        "bufcache-storms",
        format!("{n} s each"),
        &[for_seconds(n)],
        serially("-p bufcache --test stress --test storm_writes"),
    );

    let n = count(1_000_000);
    for package in crates {
        let models = |cfg: &'static str| {
            let target = package.models(cfg)?.join(" ");
            Some(Action::WithCfg(cfg, format!("-p {} {target} models::", package.package)))
        };
        if let Some(models) = models("loom") {
            let settings = [("LOOM_MAX_PREEMPTIONS", "3".to_string())];
            let name = format!("{}-loom", package.name);
            step(&name, "3 preemptions".to_string(), &settings, models);
        }
        if let Some(models) = models("shuttle") {
            let settings = [("OFFLOCK_SHUTTLE_ITERATIONS", n.to_string())];
            let name = format!("{}-shuttle", package.name);
            step(&name, format!("{n} schedules"), &settings, models);
        }
    }

    let patches = Action::Mutants("--patches".to_string());
    step("mutants-patches", "each patch".to_string(), &[], patches);
    for package in crates {
        let n = count(50);
        let random = Action::Mutants(format!("{} --random {n}", package.name));
        step(&format!("{}-mutants-random", package.name), format!("{n} mutants"), &[], random);
    }

    let n = count(10_000_000);
    step(
        "protocol-properties",
        format!("{n} cases"),
        &[cases(n)],
        release("-p nbd-protocol --test api"),
    );
    let n = count(1_000);
    step(
        "nbd-tearings",
        format!("6 x {n} kills"),
        &[("OFFLOCK_TEARINGS", n.to_string())],
        Action::Clients("", "--ignored --test-threads=1 stress_"),
    );
    let n = count(900);
    step(
        "nbd-load",
        format!("3 x {n} s, a kill each"),
        &[for_seconds(n)],
        Action::Clients("", "--ignored --test-threads=1 soak_"),
    );
    let rounds = count(20);
    let width = rounds.to_string().len();
    for round in 1..=rounds {
        let all = Action::Clients("", "");
        step(&format!("nbd-clients-{round:0width$}"), "once".to_string(), &[], all);
    }
    let n = count(1_000);
    step(
        "nbd-volume",
        format!("2 x {n} kills"),
        &[("OFFLOCK_TEARINGS", n.to_string())],
        Action::Clients("--features objects", "volume/"),
    );
    // The only run with the feature, for which the main job does not wait.
    step("nbd-tls", "once".to_string(), &[], Action::Clients("--features tls", "tls/"));

    let seconds = count(3_600);
    for target in fuzz_targets {
        let action = Action::Fuzz { target: target.clone(), seconds };
        step(&format!("{target}-fuzz"), format!("{seconds} s"), &[], action);
    }
    steps
}

/// `full` times the scale, at least 1.
fn scaled(full: u32, scale: f64) -> u64 {
    // The product is positive, and a scale that overflows gives the largest count.
    ((f64::from(full) * scale) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn counts_are_scaled_and_never_zero() {
        assert_eq!(scaled(1_000, 1.0), 1_000);
        assert_eq!(scaled(1_000, 0.01), 10);
        assert_eq!(scaled(20, 0.01), 1);
        assert_eq!(scaled(60, 2.5), 150);
    }

    #[test]
    fn each_step_has_its_own_name_and_the_scaled_counts() {
        let crates = Workspace::open().unwrap().libraries().unwrap();
        let targets = ["a_ops".to_string()];
        let all = steps(&crates, &targets, 0.1);
        let names: BTreeSet<_> = all.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for name in ["percpu-loom", "bufcache-shuttle", "nbd-clients-2", "a_ops-fuzz"] {
            assert!(names.contains(name), "{name}");
        }
        let tearings = all.iter().find(|step| step.name == "nbd-tearings").unwrap();
        assert_eq!(tearings.asked, "6 x 100 kills");
        assert_eq!(tearings.settings, [("OFFLOCK_TEARINGS", "100".to_string())]);
        let full = steps(&crates, &targets, 1.0);
        assert!(full.iter().any(|step| step.name == "nbd-clients-07"));
    }
}
