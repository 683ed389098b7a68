//! Planted bugs that need code of their own: patches in the folders `tests/mutants` of the crates.
//!
//! The first line of a patch names the model that must fail with it, below `models` of the crate's
//! loom tests: `model: rcu::a_reader_keeps_its_value`; or a unit test of a program, which runs with
//! `OFFLOCK_SOAK=15`: `test: worker::tests::a_write_survives`. The rest is a unified diff of the crate.

use std::fs;
use std::path::{Path, PathBuf};

use super::stages::{BUILD, PATIENCE, copy, log, models, stage};
use crate::error::{Error, Result};
use crate::process::interrupted;
use crate::workspace::{Crate, Workspace, packages};

/// Checks that each patch of these crates, or of all if no name is given, builds and fails its test.
pub(crate) fn run(ws: &Workspace, names: &[String]) -> Result<()> {
    let crates = ws.crates()?;
    if let Some(name) = names.iter().find(|name| !crates.iter().any(|of| of.is_called(name))) {
        return Err(Error::with_status(format!("no crate is called {name}"), 2));
    }
    let chosen = |of: &&Crate| names.is_empty() || names.iter().any(|name| of.is_called(name));
    let copy = copy(ws)?;
    let (mut caught, mut missed) = (0, Vec::new());
    for package in crates.iter().filter(chosen) {
        for patch in patches(&copy.root.join("crates").join(&package.name))? {
            let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match check(&copy, package, &patch)? {
                None => caught += 1,
                Some(why) => missed.push(format!("{}: {name}: {why}", package.name)),
            }
        }
    }
    println!("{caught} of {} patches caught", caught + missed.len());
    if missed.is_empty() { Ok(()) } else { Err(Error::new(missed.join("\n"))) }
}

fn patches(package: &Path) -> Result<Vec<PathBuf>> {
    let folder = package.join("tests/mutants");
    let Ok(entries) = fs::read_dir(&folder) else { return Ok(Vec::new()) };
    let mut patches: Vec<PathBuf> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()
        .map_err(|error| Error::io(folder.display(), error))?;
    patches.sort();
    Ok(patches)
}

/// Applies a patch, runs its test and takes the patch back. Returns why it is not caught.
fn check(copy: &Workspace, package: &Crate, patch: &Path) -> Result<Option<String>> {
    let text = fs::read_to_string(patch).map_err(|error| Error::io(patch.display(), error))?;
    let first = text.lines().next().unwrap_or_default();
    let (name, cargo) = if let Some(model) = first.strip_prefix("model: ") {
        (format!("models::{model}"), models(copy, package, "loom"))
    } else if let Some(test) = first.strip_prefix("test: ") {
        let cargo = copy.cargo(["test", "--offline", "--bins"]).env("OFFLOCK_SOAK", "15");
        (test.to_string(), cargo.args(packages(std::slice::from_ref(package))))
    } else {
        return Ok(Some("the first line names no model and no test".to_string()));
    };
    let dir = copy.root.join("crates").join(&package.name);
    let apply = |options: &[&str]| apply(copy, &dir, patch, options);
    if apply(&["--dry-run"]).is_err() {
        return Ok(Some("the patch does not apply".to_string()));
    }
    apply(&[])?;
    let outcome = stage(copy, "patch", cargo, &["--exact", &name], PATIENCE);
    let ran = fs::read_to_string(log(copy)).unwrap_or_default().contains("running 1 test");
    apply(&["--reverse"])?;
    Ok(match outcome {
        Err((_, error)) if interrupted().is_some() => return Err(error),
        Err((BUILD, _)) => Some("it does not build".to_string()),
        _ if !ran => Some(format!("there is no {name}")),
        Err(_) => None,
        Ok(_) => Some(format!("{name} passes")),
    })
}

/// Applies a patch to the folder of a crate.
fn apply(ws: &Workspace, dir: &Path, patch: &Path, options: &[&str]) -> Result<()> {
    let patched = ws.cmd("patch").args(["--silent", "--strip=1", "--force", "--fuzz=0"]);
    patched.args(options.iter().copied()).arg("--input").arg(patch).dir(dir).run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::rust_files;

    /// A patch that a change has made stale is found before the soak.
    #[test]
    fn every_patch_applies_and_names_a_test() {
        let ws = Workspace::open().unwrap();
        for package in ws.crates().unwrap() {
            let folders = [package.dir.join("tests/models"), package.dir.join("src")];
            let sources = folders.iter().flat_map(|folder| rust_files(folder));
            let tests: String = sources.map(|file| fs::read_to_string(file).unwrap()).collect();
            for patch in patches(&package.dir).unwrap() {
                let shown = patch.display();
                let text = fs::read_to_string(&patch).unwrap();
                let test = text.lines().next().unwrap().rsplit([':', ' ']).next().unwrap();
                assert!(tests.contains(&format!("fn {test}()")), "{shown}: no test {test}");
                assert!(apply(&ws, &package.dir, &patch, &["--dry-run"]).is_ok(), "{shown}");
            }
        }
    }
}
