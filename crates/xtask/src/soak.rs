//! The full counts, by hand: hours, not minutes. Goes on past a failure and ends with a summary. Each step has
//! its own log.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::process::{Error, Result, folder};
use crate::suites::{WITHOUT_RSEQ, fuzz_targets};
use crate::workspace::{Crate, Workspace};

/// One step.
struct Step {
    name: String,
    /// The counts, in words.
    asked: String,
    settings: Vec<(&'static str, String)>,
    /// Of a build with a cfg for all crates, in the profile `loom`.
    cfg: Option<&'static str>,
    /// The words of cargo.
    words: String,
}

/// Runs of `cargo test --release`, or of `cargo xtask`: the name; the full count and the variable that passes it on, or
/// `-` without one; what is asked, in words; the arguments. `#` stands for the count.
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
aio-reap-stress | 120 OFFLOCK_STRESS_SECONDS | 7 x # s | -p aio-reap --test stress SERIALLY
aio-reap-model | 5000 OFFLOCK_SOAK | #00 cases, 10^8 operations in 500000 | -p aio-reap --test api -- engine_model::
bufcache-operations | 7000 PROPTEST_CASES | # cases, 10^6 operations in 7000 | -p bufcache --test api -- write_ops::
bufcache-storms | 20 OFFLOCK_STRESS_SECONDS | # s each | -p bufcache --test api SERIALLY
bufcache-power-cuts | 1000 OFFLOCK_TEARINGS | # histories | -p bufcache --test api -- write_ops::inv20_threads
protocol-properties | 10000000 PROPTEST_CASES | # cases | -p nbd-protocol --test api
nbd-tearings | 1000 OFFLOCK_TEARINGS | 6 x # kills | -p offlock-nbd --test clients -- --ignored --test-threads=1 stress_
nbd-volume | 1000 OFFLOCK_TEARINGS | 2 x # kills | -p offlock-nbd --features objects --test clients -- --test-threads=1 volume/what_was
mutants-patches | 1 - | each patch | xtask mutants --patches
aarch64-qemu-user | 1 - | once | xtask cross
guest-aarch64 | 60 - | # s each | xtask guest aarch64 --seconds #
guest-x86-64 | 60 - | # s each | xtask guest x86-64 --seconds #
nbd-load | 900 OFFLOCK_STRESS_SECONDS | 3 x # s, a kill each | -p offlock-nbd --test clients -- --ignored --test-threads=1 soak_
";

const SERIALLY: &str = "-- --ignored --test-threads=1 --show-output stress_";

/// Every step, with its counts multiplied by `scale`, but at least 1.
fn steps(crates: &[Crate], fuzz_targets: &[String], scale: f64) -> Vec<Step> {
    const TEST: &str = "test --release --locked";
    const MODEL: &str = "test --profile loom --locked";
    // The product is positive, and a scale that overflows gives the largest count.
    let scaled = |full: u32| ((f64::from(full) * scale) as u64).max(1);
    let mut steps = Vec::new();
    // Each of the settings has the count; `#` in `asked` and in `words` stands for it.
    let mut step =
        |name: String, count: u64, settings: &[&'static str], cfg, asked: &str, words: &str| {
            let count = count.to_string();
            let settings = settings.iter().map(|name| (*name, count.clone())).collect();
            let (asked, words) = (asked.replace('#', &count), words.replace('#', &count));
            steps.push(Step { name, asked, settings, cfg, words });
        };
    for line in TESTS.lines() {
        let cells: Vec<&str> = line.split(" | ").collect();
        let &[name, count, asked, words] = &cells[..] else { unreachable!("four cells: {line}") };
        let (full, variable) = count.split_once(' ').expect("a count and its variable");
        let count = scaled(full.parse().expect("a number"));
        let words = match words.starts_with("xtask ") {
            true => words.to_string(),
            false => format!("{TEST} {}", words.replace("SERIALLY", SERIALLY)),
        };
        let settings = if variable == "-" { &[][..] } else { &[variable] };
        step(name.to_string(), count, settings, None, asked, &words);
    }
    let words = format!("{MODEL} -p offlock-percpu --lib --tests {SERIALLY}");
    let (name, no_membarrier) = ("percpu-stress-no-membarrier".to_string(), Some("no_membarrier"));
    step(name, scaled(30), &["OFFLOCK_STRESS_SECONDS"], no_membarrier, "# s", &words);
    for package in crates {
        for (cfg, count, setting, asked) in [
            ("loom", 3, "LOOM_MAX_PREEMPTIONS", "# preemptions"),
            ("shuttle", scaled(1_000_000), "OFFLOCK_SHUTTLE_ITERATIONS", "# schedules"),
        ] {
            let Some(target) = package.models(cfg) else { continue };
            let words = format!("{MODEL} -p {} {} models::", package.package, target);
            let name = format!("{}-{cfg}", package.name);
            step(name, count, &[setting], Some(cfg), asked, &words);
        }
    }
    for package in crates {
        let (name, words) = (&package.name, format!("xtask mutants {} --random #", package.name));
        step(format!("{name}-mutants-random"), scaled(50), &[], None, "# mutants", &words);
    }
    for round in 1..=scaled(20) {
        let words = format!("{TEST} -p offlock-nbd --test clients");
        step(format!("nbd-clients-{round:02}"), 1, &[], None, "once", &words);
    }
    for target in fuzz_targets {
        let words = format!("xtask fuzz {target} --seconds #");
        step(format!("{target}-fuzz"), scaled(3_600), &[], None, "# s", &words);
    }
    steps
}

impl Step {
    /// Runs the step, with all output in the log.
    fn run(&self, ws: &Workspace, log: &Path) -> Result<()> {
        let mut cmd = match self.cfg {
            Some(cfg) => ws.cargo_with_cfg(cfg, &self.words),
            None => ws.cargo(&self.words),
        };
        for (name, value) in &self.settings {
            cmd = cmd.env(name, value);
        }
        if self.name.ends_with("-without-rseq") {
            cmd = cmd.env(WITHOUT_RSEQ.0, WITHOUT_RSEQ.1);
        }
        cmd.log(log).run()
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
    folder(&logs)?;
    let began = Instant::now();
    let (mut summary, mut failed) = (String::new(), 0);
    for step in &steps {
        let Step { name, asked, .. } = step;
        println!("{:>6} s  {name:<28} {asked}", began.elapsed().as_secs());
        let step_began = Instant::now();
        let path = logs.join(format!("{name}.log"));
        let outcome = step.run(ws, &path);
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

/// The counts in a log, in a few words; empty if no test has run.
fn counted(log: &str) -> String {
    let number = |text: &str| text.trim().split(' ').next()?.parse::<u64>().ok();
    let sum = |mark: &str| -> u64 {
        log.lines().filter_map(|line| number(line.split_once(mark)?.1)).sum()
    };
    let sums = [("tests", "test result: ok. "), ("inputs", "stat::number_of_executed_units:")];
    let sums = sums.map(|(what, mark)| (sum(mark), what)).into_iter().filter(|sum| sum.0 > 0);
    let sums = sums.map(|(count, what)| format!("{count} {what}"));
    let is_count =
        |line: &&str| line.contains(" mutants tested in ") || line.ends_with(" patches caught");
    sums.chain(log.lines().filter(is_count).map(str::to_string)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::process::read;
    use crate::workspace::files;

    /// A filter that matches nothing would be found after hours.
    #[test]
    fn each_step_has_its_own_name_and_finds_its_tests() {
        let ws = Workspace::open().unwrap();
        let all = steps(&ws.libraries().unwrap(), &["a_ops".to_string()], 0.1);
        let names: BTreeSet<_> = all.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for Step { name, words, .. } in all.iter().filter(|step| step.words.contains("--release")) {
            let (cargo, filters) = words.split_once(" -- ").unwrap_or((words, ""));
            let package = cargo.split("-p ").nth(1).unwrap().split(' ').next().unwrap();
            let crates = ws.crates().unwrap();
            let package = crates.iter().find(|each| each.is_called(package)).unwrap();
            let sources: String =
                files(&package.dir, "rs").iter().map(|file| read(file).unwrap()).collect();
            for filter in filters.split(' ').filter(|filter| !filter.starts_with("--")) {
                let word = filter.trim_end_matches([':', '/']).rsplit([':', '/']).next().unwrap();
                assert!(sources.contains(word), "{name}: {filter}");
            }
        }
    }
}
