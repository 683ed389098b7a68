//! The same tests on what a machine has that lacks rseq or membarrier.

use std::fs;
use std::path::Path;

use super::stress::{self, SECOND_RUN};
use crate::binaries::{self, TestBinary};
use crate::cfg;
use crate::error::Result;
use crate::workspace::{Crate, Workspace, packages, rust_files};

/// Tests beside the libraries that run no code of `percpu`: checks of files, the wire protocol, and the
/// demo's client. What is not named here is run.
const ELSEWHERE_WITHOUT_RSEQ: [&str; 3] = ["fuzz_corpora", "invariants", "demo"];

/// Without libc's rseq area; then without the rseq code; then the two base crates without membarrier.
///
/// Doctests and the tests of crates that touch no rseq are left out: the same machine code has passed
/// in the part `tests`.
pub(crate) fn run(ws: &Workspace) -> Result<()> {
    let crates = ws.crates()?;
    without_rseq_area(ws, &crates)?;
    let with_rseq: Vec<Crate> = ws.libraries()?.into_iter().filter(touches_rseq).collect();
    let portable = ws.cargo(["test"]).args(packages(&with_rseq)).arg("--tests");
    cfg::members_only(ws, "portable", portable)?.run()?;
    without_membarrier(ws)
}

/// The test programs as they are. The server's run on one of its backends: between these nothing
/// differs that depends on rseq.
fn without_rseq_area(ws: &Workspace, crates: &[Crate]) -> Result<()> {
    ws.cargo(["build", "--workspace", "--examples"]).run()?; // the tests of examples run these
    let (name, value) = stress::WITHOUT_RSEQ;
    for binary in binaries::build(ws.cargo(["test", "--workspace", "--tests"]))? {
        if is_wanted(&binary, crates) {
            binary.cmd(ws).env(name, value).env("OFFLOCK_BACKEND", "threads").run()?;
        }
    }
    Ok(())
}

fn without_membarrier(ws: &Workspace) -> Result<()> {
    let bases = ws.select(&["percpu".to_string(), "sync".to_string()])?;
    let cargo = ws.cargo(["test"]).args(packages(&bases)).arg("--tests");
    let built = binaries::build(cfg::members_only(ws, "no_membarrier", cargo)?)?;
    for binary in &built {
        binary.cmd(ws).run()?;
    }
    // As they are built for the tests: the soak has them optimised.
    let stressed = |binary: &&TestBinary| {
        let package = bases.iter().find(|package| package.dir == binary.package);
        package.is_some_and(|p| stress::targets(&p.dir).iter().any(|target| target.is(binary)))
    };
    let stress: Vec<_> = built.iter().filter(stressed).collect();
    stress::run(ws, &stress, stress::SECONDS, None, &SECOND_RUN)
}

fn is_wanted(binary: &TestBinary, crates: &[Crate]) -> bool {
    match crates.iter().find(|package| package.dir == binary.package) {
        Some(package) if package.name != "nbd-server" => package.published && touches_rseq(package),
        _ => !ELSEWHERE_WITHOUT_RSEQ.contains(&binary.name.as_str()),
    }
}

/// Returns whether the crate is `percpu`, or its sources name it. `offlock-sync` has no sections.
fn touches_rseq(package: &Crate) -> bool {
    package.name == "percpu" || names_percpu(&package.dir.join("src"))
}

fn names_percpu(sources: &Path) -> bool {
    rust_files(sources).iter().any(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.any(|line| line.contains("offlock_percpu::"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Scratch;

    #[test]
    fn a_comment_touches_no_rseq() {
        let scratch = Scratch::new("rseq").unwrap();
        let touches = |text: &str| {
            fs::write(scratch.path.join("a.rs"), text).unwrap();
            names_percpu(&scratch.path)
        };
        assert!(!touches(
            "use offlock_sync::{Arc, Mutex};\n// as offlock_percpu::rcu does\nfn a() {}\n"
        ));
        assert!(touches("use offlock_sync::Arc;\nuse offlock_percpu::rcu;\n"));
    }

    #[test]
    fn some_tests_are_wanted_and_others_are_not() {
        let ws = Workspace::open().unwrap();
        let crates = ws.crates().unwrap();
        let wanted = |package: &str, name: &str| {
            let package = ws.root.join(package);
            let (library, name) = (false, name.to_string());
            is_wanted(&TestBinary { package, library, name, executable: "x".into() }, &crates)
        };
        assert!(wanted("crates/percpu", "cpu"));
        assert!(wanted("crates/radix-ctx", "table"));
        assert!(!wanted("crates/xtask", "xtask"));
        assert!(wanted("crates/nbd-server", "clients"));
        assert!(!wanted("crates/nbd-server", "demo"));
        assert!(!wanted("examples", "invariants"));
    }
}
