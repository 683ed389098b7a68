//! The stress tests: `stress_...`, ignored by default, serial and optimised.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::binaries::{self, TestBinary};
use crate::error::{Error, Result};
use crate::process::Deadline;
use crate::workspace::{Crate, Workspace, packages, rust_files};

/// For all stress tests of one crate together: a test that hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// The default of each stress test. A busy machine needs longer, which a test sees for itself; the
/// soak runs for longer.
pub(crate) const SECONDS: u32 = 1;
/// The arguments of the test programs.
pub(crate) const SERIALLY: [&str; 3] = ["--ignored", "--test-threads=1", "stress_"];
/// What a second run of the same tests leaves out: a stall of ten seconds. Shorter ones remain.
pub(crate) const SECOND_RUN: [&str; 2] = ["--skip", "a_reader_stalled_for_ten_seconds"];
/// Switches rseq off in glibc.
pub(crate) const WITHOUT_RSEQ: (&str, &str) = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");

/// The stress tests of all libraries, and those of the server.
pub(crate) fn all(ws: &Workspace, seconds: u32) -> Result<()> {
    let crates = ws.libraries()?;
    let built = build(ws, &crates, true)?;
    run_crates(ws, &crates, &built, seconds)?;
    server(ws, seconds)
}

/// The stress tests of some libraries.
pub(crate) fn some(ws: &Workspace, crates: &[Crate], seconds: u32) -> Result<()> {
    let built = build(ws, crates, false)?;
    run_crates(ws, crates, &built, seconds)
}

/// Builds the stress tests of these crates.
///
/// The profile is release's without what makes that slow to build. `whole` selects the features of
/// the whole workspace, as the benches do: with fewer packages, dependencies may have other
/// features, and would be compiled anew.
fn build(ws: &Workspace, crates: &[Crate], whole: bool) -> Result<Vec<TestBinary>> {
    let mut options: Vec<String> = Vec::new();
    for package in crates {
        for option in targets(&package.dir).iter().flat_map(Target::options) {
            if option == "--test" || !options.contains(&option) {
                options.push(option);
            }
        }
    }
    if options.is_empty() {
        return Err(Error::new("no stress test was found"));
    }
    let selected = if whole { vec!["--workspace"] } else { packages(crates) };
    binaries::build(ws.cargo(["test", "--profile", "stress"]).args(selected).args(options))
}

fn run_crates(ws: &Workspace, crates: &[Crate], built: &[TestBinary], seconds: u32) -> Result<()> {
    for package in crates {
        // Targets of other crates may be called the same.
        let wanted = targets(&package.dir);
        let own: Vec<_> = built
            .iter()
            .filter(|binary| binary.package == package.dir)
            .filter(|binary| wanted.iter().any(|target| target.is(binary)))
            .collect();
        run(ws, &own, seconds, None, &[])?;
        if package.name == "percpu" {
            run(ws, &own, seconds, Some(WITHOUT_RSEQ), &SECOND_RUN)?;
        }
    }
    Ok(())
}

/// Runs the stress tests of one crate, within its time.
pub(crate) fn run(
    ws: &Workspace,
    binaries: &[&TestBinary],
    seconds: u32,
    setting: Option<(&str, &str)>,
    options: &[&str],
) -> Result<()> {
    // Longer runs than CI's have the more time.
    let deadline = Deadline::after(PATIENCE * seconds.max(1));
    for binary in binaries {
        let mut cmd = binary.cmd(ws).env("OFFLOCK_STRESS_SECONDS", seconds.to_string());
        if let Some((name, value)) = setting {
            cmd = cmd.env(name, value);
        }
        cmd.args(SERIALLY).args(options).deadline(deadline).run()?;
    }
    Ok(())
}

/// The stress tests of the server, which kill it and look at the disk.
///
/// They are built as for the tests: the server is not what they measure, and the soak has it
/// optimised.
fn server(ws: &Workspace, seconds: u32) -> Result<()> {
    let wanted = targets(&ws.root.join("crates/nbd-server"));
    let options = wanted.iter().flat_map(Target::options);
    let built = binaries::build(ws.cargo(["test", "--workspace"]).args(options))?;
    let own: Vec<_> =
        built.iter().filter(|binary| wanted.iter().any(|target| target.is(binary))).collect();
    run(ws, &own, seconds, None, &[])
}

/// A test program that has stress tests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Library,
    Test(String),
}

impl Target {
    fn options(&self) -> Vec<String> {
        match self {
            Target::Library => vec!["--lib".to_string()],
            Target::Test(name) => vec!["--test".to_string(), name.clone()],
        }
    }

    pub(crate) fn is(&self, binary: &TestBinary) -> bool {
        match self {
            Target::Library => binary.library,
            Target::Test(name) => !binary.library && binary.name == *name,
        }
    }
}

/// The targets in a package's folder whose sources have a `fn stress_...`.
pub(crate) fn targets(package: &Path) -> Vec<Target> {
    let mut found = Vec::new();
    if has_stress_test(&package.join("src")) {
        found.push(Target::Library);
    }
    let entries = fs::read_dir(package.join("tests")).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        // tests/x.rs stands alone; tests/x/main.rs brings its folder.
        let is_target =
            path.join("main.rs").exists() || path.extension().is_some_and(|e| e == "rs");
        if is_target && has_stress_test(&path) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Target::Test(name));
        }
    }
    found.sort_by_key(|target| target.options());
    found
}

fn has_stress_test(path: &Path) -> bool {
    let files = if path.is_dir() { rust_files(path) } else { vec![path.to_path_buf()] };
    files.iter().any(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().any(|line| line.trim_start().starts_with("fn stress_"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Scratch;

    #[test]
    fn stress_tests_are_found_in_files_folders_and_the_library() {
        let scratch = Scratch::new("stress-targets").unwrap();
        let write = |path: &str, text: &str| {
            let path = scratch.path.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("tests/alone.rs", "#[test]\nfn stress_a() {}\n");
        write("tests/without.rs", "fn a() {} // fn stress_b\n");
        write("tests/folder/main.rs", "mod inner;\n");
        write("tests/folder/inner.rs", "    fn stress_c() {}\n");
        write("tests/common/mod.rs", "fn stress_helper() {}\n");
        let tests = ["alone", "folder"].map(|name| Target::Test(name.to_string()));
        assert_eq!(targets(&scratch.path), tests);
        write("src/deep/er.rs", "mod tests {\n    fn stress_d() {}\n}\n");
        assert_eq!(targets(&scratch.path)[0], Target::Library);
        assert_eq!(targets(&scratch.path)[1..], tests);
    }
}
