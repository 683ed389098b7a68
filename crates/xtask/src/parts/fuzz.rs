//! The fuzz targets, and tests under AddressSanitizer.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use super::{logged, stress};
use crate::error::{Error, Result};
use crate::process::{self, Cmd};
use crate::workspace::{Scratch, Workspace, rust_files};

/// The default for each target.
pub(crate) const SECONDS: u32 = 8;

/// The targets for a few seconds each, then the sanitized tests.
pub(crate) fn all(ws: &Workspace) -> Result<()> {
    targets(ws, &[], SECONDS)?;
    sanitized(ws)
}

/// Runs these targets, or all if none is named, as many at a time as there are CPUs: a target runs
/// on one.
pub(crate) fn targets(ws: &Workspace, names: &[String], seconds: u32) -> Result<()> {
    let mut targets = list(ws)?;
    for name in names {
        if !targets.contains(name) {
            return Err(Error::with_status(format!("no fuzz target is called {name}"), 2));
        }
    }
    targets.retain(|target| names.is_empty() || names.contains(target));
    match &targets[..] {
        [only] => cargo_fuzz(ws).args(["build", only]).run()?,
        _ => cargo_fuzz(ws).arg("build").run()?,
    }
    let (scratch, printing) = (Scratch::new("fuzz")?, Mutex::new(()));
    if let [only] = &targets[..] {
        return fuzz(ws, only, seconds, &scratch.path)?.run();
    }
    process::each(&targets, |target| {
        logged(&scratch, fuzz(ws, target, seconds, &scratch.path)?, &printing)
    })
}

/// The names of the targets: one file each, as `tests/fuzz_corpora.rs` of the examples checks.
pub(crate) fn list(ws: &Workspace) -> Result<Vec<String>> {
    let files = rust_files(&ws.root.join("fuzz/fuzz_targets"));
    let targets: Vec<String> = files
        .iter()
        .filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    if targets.is_empty() { Err(Error::new("no fuzz target was found")) } else { Ok(targets) }
}

/// The command that runs one target. What it finds goes below `scratch`.
pub(crate) fn fuzz(ws: &Workspace, target: &str, seconds: u32, scratch: &Path) -> Result<Cmd> {
    // libFuzzer writes new inputs to the first folder: the committed corpus is only read.
    let found = scratch.join(format!("found-by-{target}"));
    let corpus = ws.root.join("fuzz/corpus").join(target);
    for folder in [&found, &corpus] {
        fs::create_dir_all(folder).map_err(|error| Error::io(folder.display(), error))?;
    }
    let limits = [format!("-max_total_time={seconds}"), "-print_final_stats=1".to_string()];
    Ok(cargo_fuzz(ws).args(["run", target]).arg(found).arg(corpus).arg("--").args(limits))
}

fn cargo_fuzz(ws: &Workspace) -> Cmd {
    let target = ws.target.join("fuzz");
    ws.nightly(["fuzz"]).base_env("CARGO_TARGET_DIR", Some(target.into()))
}

/// Tests of memory that threads and panics pass around, which no fuzz target has.
pub(crate) fn sanitized(ws: &Workspace) -> Result<()> {
    let version = ws.cmd("rustc").args(["+nightly", "-vV"]).output()?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or_else(|| Error::new("rustc +nightly -vV names no host"))?;
    for (tests, options) in SANITIZED {
        let cmd = ws
            .nightly(["test", "--target", host])
            .args(tests.split_whitespace())
            .env("RUSTFLAGS", "-Zsanitizer=address")
            .env("OFFLOCK_STRESS_SECONDS", stress::SECONDS.to_string())
            .base_env("CARGO_TARGET_DIR", Some(ws.target.join("asan").into()));
        cmd.arg("--").args(options.split_whitespace()).run()?;
    }
    Ok(())
}

/// The options of cargo, and those of the test programs. The tests that are skipped leak by design: the
/// payload of a panic in the drop of a payload.
const SANITIZED: [(&str, &str); 5] = [
    (
        "-p percpu-list --test api --test list_stress --test walk_stress",
        "--include-ignored --test-threads=1 --skip without_rseq lists:: list_model:: stress_",
    ),
    ("-p mq-rbtree --test api", "--skip payloads panics:: reentry:: orders:: promises::"),
    ("-p mq-rbtree --test streams", ""),
    ("-p radix-ctx --test api", "table::"),
    ("-p radix-ctx --test table_memory", ""),
];
