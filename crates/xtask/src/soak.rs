//! The full counts, by hand: hours, not minutes. Goes on past a failure and ends with a summary. Each step has
//! its own log.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::sync::Arc;
use std::time::Instant;

use crate::process::{Cmd, Error, Result};
use crate::suites::{WITHOUT_RSEQ, fuzz_command, fuzz_targets};
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
struct Step {
    name: String,
    /// The counts, in words.
    asked: String,
    settings: Vec<(&'static str, String)>,
    action: Action,
}

enum Action {
    /// `cargo test --release` with these words.
    Release(String),
    /// `cargo test --profile loom` with a cfg for all crates and these words.
    WithCfg(&'static str, String),
    /// `cargo xtask` with these words.
    Xtask(String),
    /// A target, for so many seconds.
    Fuzz(String, u64),
}

/// Runs of `cargo test --release`: the name, the count in full and its name in the environment, what is asked in
/// words, and the arguments. `#` stands for the count.
///
/// Cases: of `aio-reap-model` 100 of 450 to 900 operations each, this many times; of `bufcache-operations` 150
/// operations on average.
const TESTS: &str = "\
percpu-stress | 120 OFFLOCK_STRESS_SECONDS | # s, 10^8 ids in 120 | -p offlock-percpu --lib --tests SERIALLY
percpu-stress-without-rseq | 30 OFFLOCK_STRESS_SECONDS | # s | -p offlock-percpu --lib --tests SERIALLY
percpu-properties | 1000000 PROPTEST_CASES | # cases | -p offlock-percpu --lib --tests
percpu-list-stress | 600 OFFLOCK_STRESS_SECONDS | # s | -p percpu-list --tests SERIALLY
percpu-list-stress-without-rseq | 10 OFFLOCK_STRESS_SECONDS | # s | -p percpu-list --tests SERIALLY --skip all_of_it
percpu-list-properties | 100000 PROPTEST_CASES | # cases | -p percpu-list --test api -- list_model::
aio-reap-stress | 60 OFFLOCK_SOAK | 9 x 2 s x # | -p aio-reap --test stress SERIALLY
aio-reap-simulated-stress | 60 OFFLOCK_STRESS_SECONDS | # s | -p aio-reap --test sim SERIALLY
aio-reap-model | 5000 OFFLOCK_SOAK | #00 cases, 10^8 operations in 500000 | -p aio-reap --test api -- engine_model::
bufcache-operations | 7000 PROPTEST_CASES | # cases, 10^6 operations in 7000 | -p bufcache --test api -- write_ops::
bufcache-storms | 20 OFFLOCK_STRESS_SECONDS | # s each | -p bufcache --test stress SERIALLY
protocol-properties | 10000000 PROPTEST_CASES | # cases | -p nbd-protocol --test api
nbd-tearings | 1000 OFFLOCK_TEARINGS | 6 x # kills | -p offlock-nbd --test clients -- --ignored --test-threads=1 stress_
nbd-volume | 1000 OFFLOCK_TEARINGS | 2 x # kills | -p offlock-nbd --features objects --test clients -- --test-threads=1 volume/what_was
nbd-load | 900 OFFLOCK_STRESS_SECONDS | 3 x # s, a kill each | -p offlock-nbd --test clients -- --ignored --test-threads=1 soak_
";

const SERIALLY: &str = "-- --ignored --test-threads=1 --show-output stress_";

/// Every step, with its counts multiplied by `scale`, but at least 1.
fn steps(crates: &[Crate], fuzz_targets: &[String], scale: f64) -> Vec<Step> {
    // The product is positive, and a scale that overflows gives the largest count.
    let scaled = |full: u32| ((f64::from(full) * scale) as u64).max(1);
    let mut steps = Vec::new();
    let mut step = |name: &str, asked: String, settings: &[(&'static str, String)], action| {
        steps.push(Step { name: name.to_string(), asked, settings: settings.to_vec(), action });
    };
    for line in TESTS.lines() {
        let cells: Vec<&str> = line.split(" | ").collect();
        let &[name, count, asked, words] = &cells[..] else { unreachable!("four cells: {line}") };
        let (full, variable) = count.split_once(' ').expect("a count and a variable");
        let count = scaled(full.parse().expect("a number")).to_string();
        let mut settings = vec![(variable, count.clone())];
        if name.ends_with("-without-rseq") {
            settings.push((WITHOUT_RSEQ.0, WITHOUT_RSEQ.1.to_string()));
        }
        let words = words.replace("SERIALLY", SERIALLY);
        step(name, asked.replace('#', &count), &settings, Action::Release(words));
    }
    let n = scaled(30);
    let words = format!("-p offlock-percpu --lib --tests {SERIALLY}");
    let settings = [("OFFLOCK_STRESS_SECONDS", n.to_string())];
    let without = Action::WithCfg("no_membarrier", words);
    step("percpu-stress-no-membarrier", format!("{n} s"), &settings, without);
    let n = scaled(1_000);
    let settings = [("PROPTEST_CASES", n.to_string()), ("OFFLOCK_TEARINGS", n.to_string())];
    let cuts = Action::Release("-p bufcache --test api -- crash::".to_string());
    step("bufcache-power-cuts", format!("{n} histories, {n} cuts of each"), &settings, cuts);
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
            let n = scaled(1_000_000);
            let settings = [("OFFLOCK_SHUTTLE_ITERATIONS", n.to_string())];
            let name = format!("{}-shuttle", package.name);
            step(&name, format!("{n} schedules"), &settings, models);
        }
    }
    step(
        "mutants-patches",
        "each patch".to_string(),
        &[],
        Action::Xtask("mutants --patches".into()),
    );
    for package in crates {
        let n = scaled(50);
        let random = Action::Xtask(format!("mutants {} --random {n}", package.name));
        step(&format!("{}-mutants-random", package.name), format!("{n} mutants"), &[], random);
    }
    for round in 1..=scaled(20) {
        let trials = Action::Release("-p offlock-nbd --test clients".to_string());
        step(&format!("nbd-clients-{round:02}"), "once".to_string(), &[], trials);
    }
    step("aarch64-qemu-user", "once".to_string(), &[], Action::Xtask("cross".into()));
    for guest in ["aarch64", "x86-64"] {
        let n = scaled(60);
        let words = format!("guest {guest} --seconds {n}");
        step(&format!("guest-{guest}"), format!("{n} s each"), &[], Action::Xtask(words));
    }
    // The only run with the feature, for which the main job does not wait.
    let tls = Action::Release("-p offlock-nbd --features tls --test clients -- tls/".to_string());
    step("nbd-tls", "once".to_string(), &[], tls);
    for target in fuzz_targets {
        let seconds = scaled(3_600);
        let action = Action::Fuzz(target.clone(), seconds);
        step(&format!("{target}-fuzz"), format!("{seconds} s"), &[], action);
    }
    steps
}

impl Step {
    /// Runs the step, with all output in the log.
    fn run(&self, ws: &Workspace, log: &Arc<File>) -> Result<()> {
        let settled = |mut cmd: Cmd| {
            for name in COUNTS {
                cmd = cmd.base_env(name, None);
            }
            for (name, value) in &self.settings {
                cmd = cmd.env(name, value);
            }
            cmd.log(Arc::clone(log))
        };
        match &self.action {
            Action::Release(words) => {
                settled(ws.cargo("test --release --locked").words(words)).run()
            }
            Action::WithCfg(name, words) => {
                let words = format!("test --profile loom --locked {words}");
                settled(ws.cargo_with_cfg(name, &words)).run()
            }
            Action::Xtask(words) => settled(ws.cargo("xtask").words(words)).run(),
            Action::Fuzz(target, seconds) => {
                let scratch = Scratch::new(target)?;
                settled(fuzz_command(ws, target, *seconds, &scratch)?).run()
            }
        }
    }
}

/// Prints or runs the steps that have one of `names` in their name, or all if no name is given.
pub(crate) fn run(ws: &Workspace, names: &[String], scale: f64, only_list: bool) -> Result<()> {
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::with_status("the scale must be a number above 0", 2));
    }
    let mut steps = steps(&ws.libraries()?, &fuzz_targets(ws), scale);
    steps.retain(|step| names.is_empty() || names.iter().any(|name| step.name.contains(name)));
    if steps.is_empty() {
        return Err(Error::new(format!("no step has '{}' in its name", names.join(" "))));
    }
    if only_list {
        steps.iter().for_each(|step| println!("{:<28} {}", step.name, step.asked));
        return Ok(());
    }
    let logs = ws.target.join("soak");
    fs::create_dir_all(&logs).map_err(|error| Error::io(logs.display(), error))?;
    let began = Instant::now();
    let (mut summary, mut failed) = (String::new(), 0);
    for step in &steps {
        let Step { name, asked, .. } = step;
        println!("{:>6} s  {name:<28} {asked}", began.elapsed().as_secs());
        let step_began = Instant::now();
        let path = logs.join(format!("{name}.log"));
        let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
        let outcome = step.run(ws, &Arc::new(log));
        let said = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        let counts = counted(&said);
        // A step that has run no test has failed, too.
        let ok = outcome.is_ok() && !counts.is_empty();
        if !ok {
            failed += 1;
            let lines: Vec<&str> = said.lines().collect();
            lines[lines.len().saturating_sub(30)..].iter().for_each(|line| println!("{line}"));
            outcome.err().iter().for_each(|error| println!("error: {error}"));
        }
        let (verdict, seconds) = (if ok { "ok" } else { "FAILED" }, step_began.elapsed().as_secs());
        let counts = if counts.is_empty() { "nothing ran" } else { &counts };
        let _ = writeln!(summary, "{name:<28} {verdict:<6} {seconds:>6} s   {asked}: {counts}");
    }
    let minutes = began.elapsed().as_secs() / 60;
    println!(
        "\n{summary}logs: {}\n{} steps in {minutes} minutes, {failed} FAILED",
        logs.display(),
        steps.len()
    );
    if failed > 0 { Err(Error::new(format!("{failed} steps failed, see above"))) } else { Ok(()) }
}

/// The sums and counts in a log, in a few words; empty if no test has run.
fn counted(log: &str) -> String {
    let number =
        |text: &str| text.trim().split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok();
    let before = |line: &str, word: &str| number(line.split_once(word)?.0.rsplit(' ').next()?);
    let after = |line: &str, word: &str| number(line.split_once(word)?.1);
    let sum = |count: &dyn Fn(&str) -> Option<u64>| log.lines().filter_map(count).sum::<u64>();
    let counts = [
        (sum(&|line| after(line, "test result: ok. ")), "tests"),
        (sum(&|line| before(line, " kills, ")), "kills"),
        (sum(&|line| before(line, " acknowledged writes")), "acknowledged writes"),
        (sum(&|line| after(line, ": requests ")), "requests"),
        (sum(&|line| before(line, " ids checked")), "ids checked"),
        (sum(&|line| after(line, "stat::number_of_executed_units:")), "inputs"),
        (sum(&|line| line.ends_with(" patches caught").then(|| number(line))?), "patches"),
    ];
    let mutants =
        log.lines().filter(|line| line.contains(" mutants tested in ")).map(str::to_string);
    let counts = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"));
    counts.chain(mutants).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::suites::stale_filters;

    #[test]
    fn each_step_has_its_own_name_and_the_scaled_counts() {
        let ws = Workspace::open().unwrap();
        let all = steps(&ws.libraries().unwrap(), &["a_ops".to_string()], 0.1);
        let names: BTreeSet<_> = all.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for name in ["percpu-loom", "bufcache-shuttle", "nbd-clients-02", "a_ops-fuzz"] {
            assert!(names.contains(name), "{name}");
        }
        let tearings = all.iter().find(|step| step.name == "nbd-tearings").unwrap();
        assert_eq!(tearings.asked, "6 x 100 kills");
        assert_eq!(tearings.settings, [("OFFLOCK_TEARINGS", "100".to_string())]);
        let stale = |step: &Step| match &step.action {
            Action::Release(words) => stale_filters(&ws, words),
            _ => Vec::new(),
        };
        assert_eq!(all.iter().flat_map(stale).collect::<Vec<_>>(), [""; 0]);
    }
}
