//! What a user does: a crate of their own, the libraries added by path, and the README's examples.
//! And whether the libraries can be published.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::workspace::{Crate, Scratch, Workspace, packages};

/// The library that no user adds: the others bring it.
const INTERNAL: &str = "sync";

pub(crate) fn run(ws: &Workspace) -> Result<()> {
    let crates = ws.libraries()?;
    examples_of_the_readme(ws, &crates)?;
    let readme = read(ws.root.join("README.md"))?;
    for package in &crates {
        if package.name != INTERNAL && !says_how_to_add(&readme, &package.name) {
            let name = &package.name;
            return Err(Error::new(format!("README.md does not say how to add crates/{name}")));
        }
        let page = read(package.dir.join("README.md"))?;
        if let Some(line) = page.lines().find(|line| has_relative_link(line)) {
            let name = &package.name;
            return Err(Error::new(format!(
                "crates/{name}/README.md: crates.io shows the page alone, and this link breaks: {line}"
            )));
        }
    }
    pack(ws, &crates)
}

fn examples_of_the_readme(ws: &Workspace, crates: &[Crate]) -> Result<()> {
    let scratch = Scratch::new("adopt")?;
    let (dir, manifest) = (&scratch.path, scratch.path.join("Cargo.toml"));
    ws.cargo(["init", "--quiet", "--vcs", "none", "--lib", "--name", "adopter"]).arg(dir).run()?;
    let failed = |error| Error::io(dir.display(), error);
    for package in crates {
        let add = ws.cargo(["add", "--quiet", "--offline", "--manifest-path"]).arg(&manifest);
        add.arg("--path").arg(&package.dir).run()?;
    }
    // The same versions, which are here.
    fs::copy(ws.root.join("Cargo.lock"), dir.join("Cargo.lock")).map_err(failed)?;
    let source = format!("#![doc = include_str!(\"{}/README.md\")]\n", ws.root.display());
    fs::write(dir.join("src/lib.rs"), source).map_err(failed)?;
    ws.cargo(["test", "--quiet", "--offline", "--doc", "--manifest-path"]).arg(&manifest).run()
}

/// Packs what would be published. A warning is a failure.
fn pack(ws: &Workspace, crates: &[Crate]) -> Result<()> {
    let path = ws.target.join("package.log");
    let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
    let cargo = ws.cargo(["package", "--offline", "--no-verify", "--allow-dirty"]);
    let outcome = cargo.args(packages(crates)).log(Arc::new(log)).run();
    let said = read(path)?;
    print!("{said}");
    outcome?;
    match said.lines().find(|line| line.starts_with("warning")) {
        Some(line) => Err(Error::new(format!("what would be published has a warning: {line}"))),
        None => Ok(()),
    }
}

fn read(path: PathBuf) -> Result<String> {
    fs::read_to_string(&path).map_err(|error| Error::io(path.display(), error))
}

fn says_how_to_add(readme: &str, name: &str) -> bool {
    let command = format!("cargo add --path ../offlock/crates/{name}");
    let is_end = |rest: &str| rest.is_empty() || rest.starts_with(' ');
    readme.lines().any(|line| line.strip_prefix(&command).is_some_and(is_end))
}

/// Returns whether a Markdown line links to something that is neither on the web nor on this page.
fn has_relative_link(line: &str) -> bool {
    line.split("](")
        .skip(1)
        .any(|target| !target.starts_with("https://") && !target.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_the_web_and_on_the_page_are_right() {
        assert!(!has_relative_link("see [a](https://a.example) and [b](#b), [c]"));
        assert!(has_relative_link("see [a](https://a.example) and [b](../b)"));
        assert!(has_relative_link("![hits](hits.svg)"));
    }

    #[test]
    fn a_crate_is_added_by_its_own_name() {
        let readme = "cargo add --path ../offlock/crates/percpu # a package\n\
                      cargo add --path ../offlock/crates/percpu-list\n";
        assert!(says_how_to_add(readme, "percpu"));
        assert!(says_how_to_add(readme, "percpu-list"));
        assert!(!says_how_to_add(readme, "perc"));
        let other = "cargo add --path ../offlock/crates/percpu-list\n";
        assert!(!says_how_to_add(other, "percpu"));
    }
}
