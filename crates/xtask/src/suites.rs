//! The suites beside `cargo test`: models, stress tests, fall-backs, fuzz targets, AddressSanitizer.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::process::{self, Cmd, Error, Result, folder, logged, read};
use crate::workspace::{Crate, TestBinary, Workspace, choose, files, packages, scratch, stem};

/// The model checkers: the cfg of each, without `offlock_`, and its test target.
pub(crate) const CHECKERS: [&str; 2] = ["loom", "shuttle"];

/// The command that builds and runs the models of a crate under one checker. Two preemptions; three
/// take minutes: `soak`.
pub(crate) fn models_command(ws: &Workspace, package: &Crate, checker: &str) -> Cmd {
    ws.cargo_with_cfg(checker, "test --profile loom")
        .args(["-p", &package.package])
        .args(package.models(checker))
        .env("LOOM_MAX_PREEMPTIONS", "2")
}

/// Runs the models of one checker after those of the other, or of one only. `filter` has arguments of the
/// test programs: a part of a model's name.
///
/// The programs of one checker run several at a time, so that no CPU waits for the longest model of
/// a crate. A filter that selects no model is an error: a misspelt name must not pass.
pub(crate) fn models(
    ws: &Workspace,
    crates: &[Crate],
    only: Option<&str>,
    filter: &[String],
) -> Result<()> {
    let mut any = false;
    for checker in CHECKERS.into_iter().filter(|checker| only.is_none_or(|only| only == *checker)) {
        let cmd = |binary: &TestBinary| {
            // The other unit tests of a library are no models.
            let all = if binary.library && filter.is_empty() { "models::" } else { "" };
            binary.cmd(ws).words(all).args(filter).env("LOOM_MAX_PREEMPTIONS", "2")
        };
        let mut built = Vec::new();
        for option in ["--lib".to_string(), format!("--test={checker}")] {
            let has_models = |package: &&Crate| package.models(checker).as_ref() == Some(&option);
            let chosen: Vec<Crate> = crates.iter().filter(has_models).cloned().collect();
            if !chosen.is_empty() {
                let cargo = ws.cargo_with_cfg(checker, "test --profile loom");
                built.extend(TestBinary::build(cargo.args(packages(&chosen)).arg(&option))?);
            }
        }
        let mut with_models = Vec::new();
        for binary in built {
            let listed = cmd(&binary).arg("--list").output()?;
            if listed.lines().any(|line| line.ends_with(": test")) {
                with_models.push(binary);
            } else if filter.is_empty() {
                return Err(Error::new(format!("{} has no model", binary.executable.display())));
            }
        }
        any |= !with_models.is_empty();
        let logs = scratch()?;
        process::each(&with_models, |binary| logged(logs.path(), cmd(binary)))?;
    }
    if any { Ok(()) } else { Err(Error::new(format!("no model matches '{}'", filter.join(" ")))) }
}

/// The time limit of all stress tests of one crate together, for a test that hangs.
const PATIENCE: Duration = Duration::from_secs(900);
/// The default of each stress test. A busy machine needs longer, which a test sees for itself; the
/// soak runs for longer.
pub(crate) const SECONDS: u32 = 1;
/// The tests that a second run leaves out: a stall of ten seconds. Shorter stalls remain.
const SECOND_RUN: &str = "--skip a_reader_stalled_for_ten_seconds";
/// Switches rseq off in glibc.
pub(crate) const WITHOUT_RSEQ: (&str, &str) = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");

/// The stress tests of some libraries: `stress_...`, ignored by default, serial and optimised. If no
/// library is given, those of all libraries and of the server.
///
/// The profile is release's without what makes that slow to build. All libraries are built with the
/// features of the whole workspace, as the benches are: with fewer packages, dependencies may have other
/// features, and would be compiled anew.
pub(crate) fn stress(ws: &Workspace, crates: &[Crate], seconds: u32) -> Result<()> {
    let all = crates.is_empty();
    let crates = if all { &ws.libraries()?[..] } else { crates };
    let selected = if all { vec!["--workspace"] } else { packages(crates) };
    let targets: BTreeSet<String> = crates.iter().flat_map(stress_targets).collect();
    if targets.is_empty() {
        return Err(Error::new("no stress test was found"));
    }
    let cargo = ws.cargo("test --profile stress").args(selected).args(targets);
    let built = TestBinary::build(cargo)?;
    for package in crates {
        run_stress(ws, package, &built, seconds, None, "")?;
        if package.name == "percpu" {
            run_stress(ws, package, &built, seconds, Some(WITHOUT_RSEQ), SECOND_RUN)?;
        }
    }
    let server = ws.crates()?.into_iter().find(|package| package.name == "nbd-server");
    if let Some(server) = server.filter(|_| all) {
        // They kill the server and look at the disk. They are built as for the tests: the server is not what
        // they measure, and the soak has it optimised.
        let built = TestBinary::build(ws.cargo("test --workspace").args(stress_targets(&server)))?;
        run_stress(ws, &server, &built, seconds, None, "")?;
    }
    Ok(())
}

/// Runs the stress tests of one crate.
fn run_stress(
    ws: &Workspace,
    package: &Crate,
    built: &[TestBinary],
    seconds: u32,
    setting: Option<(&str, &str)>,
    options: &str,
) -> Result<()> {
    // Longer runs than CI's have the more time.
    let end = Instant::now() + PATIENCE * seconds.max(1);
    let targets = stress_targets(package);
    // Targets of other crates may be called the same.
    let own = built.iter().filter(|binary| binary.package == package.dir);
    for binary in own.filter(|binary| targets.contains(&binary.option())) {
        let mut cmd = binary.cmd(ws).env("OFFLOCK_STRESS_SECONDS", seconds.to_string());
        if let Some((name, value)) = setting {
            cmd = cmd.env(name, value);
        }
        let cmd = cmd.words("--ignored --test-threads=1 stress_").words(options);
        cmd.limit(end.saturating_duration_since(Instant::now())).run()?;
    }
    Ok(())
}

/// The options of cargo for each target of a package whose sources have a `fn stress_...`.
fn stress_targets(package: &Crate) -> BTreeSet<String> {
    let of_file = |file: PathBuf| {
        let text = read(&file).ok()?;
        text.lines().find(|line| line.trim_start().starts_with("fn stress_"))?;
        let inside = file.strip_prefix(&package.dir).ok()?;
        // tests/x.rs stands alone; tests/x/main.rs brings its folder.
        match inside.strip_prefix("tests") {
            Ok(target) => Some(format!("--test={}", stem(target.iter().next()?.as_ref()))),
            Err(_) => Some("--lib".to_string()),
        }
    };
    files(&package.dir, "rs").into_iter().filter_map(of_file).collect()
}

/// Tests beside the libraries that run no code of `percpu`: checks of files, the wire protocol, and the
/// demo's client. What is not named here is run.
const ELSEWHERE_WITHOUT_RSEQ: [&str; 3] = ["fuzz_corpora", "invariants", "demo"];

/// The same tests on what a machine has that lacks rseq or membarrier: without libc's rseq area; then
/// without the rseq code; then the two base crates without membarrier.
///
/// Doctests and the tests of crates that touch no rseq are left out: the same machine code has passed
/// in the part `tests`.
pub(crate) fn fallbacks(ws: &Workspace) -> Result<()> {
    let crates = ws.crates()?;
    ws.cargo("build --workspace --examples").run()?; // the tests of examples run these
    for binary in TestBinary::build(ws.cargo("test --workspace --tests"))? {
        if is_wanted(&binary, &crates) {
            // The server's run on one of its backends: between these nothing differs that depends on rseq.
            let cmd = binary.cmd(ws).env(WITHOUT_RSEQ.0, WITHOUT_RSEQ.1);
            cmd.env("OFFLOCK_BACKEND", "threads").run()?;
        }
    }
    let with_rseq: Vec<Crate> = ws.libraries()?.into_iter().filter(touches_rseq).collect();
    ws.cargo_with_members_cfg("portable", "test --tests")?.args(packages(&with_rseq)).run()?;

    let bases = ws.select(&["percpu".to_string(), "sync".to_string()])?;
    let cargo = ws.cargo_with_members_cfg("no_membarrier", "test --tests")?;
    let built = TestBinary::build(cargo.args(packages(&bases)))?;
    built.iter().try_for_each(|binary| binary.cmd(ws).run())?;
    // As they are built for the tests: the soak has them optimised.
    bases.iter().try_for_each(|base| run_stress(ws, base, &built, SECONDS, None, SECOND_RUN))
}

fn is_wanted(binary: &TestBinary, crates: &[Crate]) -> bool {
    match crates.iter().find(|package| package.dir == binary.package) {
        Some(package) if package.name != "nbd-server" => package.published && touches_rseq(package),
        _ => !ELSEWHERE_WITHOUT_RSEQ.contains(&binary.name.as_str()),
    }
}

/// Returns whether the crate is `percpu`, or uses it. `offlock-sync` has no sections.
fn touches_rseq(package: &Crate) -> bool {
    read(package.dir.join("Cargo.toml")).is_ok_and(|manifest| manifest.contains("offlock-percpu"))
}

/// The default for each fuzz target.
pub(crate) const FUZZ_SECONDS: u32 = 8;

pub(crate) fn fuzz_and_sanitizer(ws: &Workspace) -> Result<()> {
    fuzz(ws, &[], FUZZ_SECONDS)?;
    sanitizer(ws)
}

/// The names of the fuzz targets: one file each, as `tests/fuzz_corpora.rs` of the examples checks.
pub(crate) fn fuzz_targets(ws: &Workspace) -> Vec<String> {
    files(&ws.root.join("fuzz/fuzz_targets"), "rs").iter().map(|file| stem(file)).collect()
}

/// Runs these fuzz targets, or all if none is named, as many at a time as there are CPUs: a target runs
/// on one.
pub(crate) fn fuzz(ws: &Workspace, names: &[String], seconds: u32) -> Result<()> {
    let mut targets = fuzz_targets(ws);
    choose(&mut targets, names, "fuzz target", |target, name| target == name)?;
    let build = cargo_fuzz(ws).arg("build");
    let scratch = scratch()?;
    if let [only] = &targets[..] {
        build.arg(only).run()?;
        return fuzz_command(ws, only, seconds.into(), scratch.path())?.run();
    }
    build.run()?;
    process::each(&targets, |target| {
        logged(scratch.path(), fuzz_command(ws, target, seconds.into(), scratch.path())?)
    })
}

/// The command that runs one target. What it finds goes below `scratch`: libFuzzer writes new inputs to the
/// first folder, and the committed corpus is only read.
fn fuzz_command(ws: &Workspace, target: &str, seconds: u64, scratch: &Path) -> Result<Cmd> {
    let found = scratch.join(format!("found-by-{target}"));
    let corpus = ws.root.join("fuzz/corpus").join(target);
    folder(&found)?;
    folder(&corpus)?;
    let limits = format!("-- -max_total_time={seconds} -print_final_stats=1");
    Ok(cargo_fuzz(ws).args(["run", target]).arg(found).arg(corpus).words(&limits))
}

fn cargo_fuzz(ws: &Workspace) -> Cmd {
    ws.cargo("+nightly fuzz").base_env("CARGO_TARGET_DIR", Some(ws.target.join("fuzz").into()))
}

/// The options of cargo, and those of the test programs. Skipped are tests that run others once more, in a process
/// of their own; tests that do not give memory back, by design; and those of the adaptive policy, which take minutes.
const SANITIZED: [(&str, &str); 6] = [
    (
        "-p offlock-percpu --test api",
        "--skip in_a_thread_local --skip absurd_sizes --skip denied::",
    ),
    ("-p aio-reap --test api", "--skip dropped_or_forgotten"),
    ("-p bufcache --test api", "--skip adaptive:: --skip fairness:: --skip panics::"),
    (
        "-p percpu-list --test api --test stress",
        "--include-ignored --test-threads=1 --skip without_rseq",
    ),
    ("-p mq-rbtree --test api", "--skip stalled:: --skip does_not_time_out_beside"),
    ("-p radix-ctx --test api --test table_memory", "--skip table_model::"),
];

/// Tests of memory that threads and panics pass around, which no fuzz target has.
pub(crate) fn sanitizer(ws: &Workspace) -> Result<()> {
    let version = ws.cmd("rustc").words("+nightly -vV").output()?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or_else(|| Error::new("rustc +nightly -vV names no host"))?;
    for (tests, options) in SANITIZED {
        ws.cargo(&format!("+nightly test --target {host} {tests} -- {options}"))
            .env("RUSTFLAGS", "-Zsanitizer=address")
            .env("OFFLOCK_STRESS_SECONDS", SECONDS.to_string())
            .base_env("CARGO_TARGET_DIR", Some(ws.target.join("asan").into()))
            .run()?;
    }
    Ok(())
}
