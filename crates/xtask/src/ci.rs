//! The parts of a CI run: their order, their minutes, and the summary; and the small parts themselves.

use std::fs;
use std::time::{Duration, Instant};

use crate::process::{self, At, Cmd, Error, Result, read, write};
use crate::workspace::{Workspace, choose, packages, scratch};
use crate::{lint, litmus, results, suites, tools};

/// The name of a part, and what it does.
type Part = (&'static str, fn(&Workspace) -> Result<()>);

/// All parts, in the order in which they run: what fails fast and often comes first; `fallbacks`
/// uses the build of `tests`.
const PARTS: [Part; 13] = [
    ("tools", tools::install),
    ("lint", lint::lint),
    ("tests", tests),
    ("adopt", adopt),
    ("fallbacks", suites::fallbacks),
    ("objects", objects),
    ("models", |ws| suites::models(ws, &ws.libraries()?, None, &[])),
    ("litmus", litmus::run_if_installed),
    ("stress", |ws| suites::stress(ws, &[], suites::SECONDS)),
    ("fuzz", suites::fuzz_and_sanitizer),
    ("deny", deny),
    ("benches", |ws| results::benches(ws, Some("--smoke"), None)),
    ("demo", demo),
];

/// Prints the names of the parts.
pub(crate) fn list() {
    PARTS.iter().for_each(|(part, _)| println!("{part}"));
}

/// The time limit of one part. Each takes minutes; a busy machine needs longer.
const PATIENCE: Duration = Duration::from_secs(7200);

/// Runs the parts with these names, or all if none is named. The summary ends with the failure, if there is one.
pub(crate) fn run(ws: &Workspace, names: &[String]) -> Result<()> {
    let mut chosen = PARTS.to_vec();
    choose(&mut chosen, names, "part", |(part, _), name| *part == name)?;
    let minutes = |since: Instant| since.elapsed().as_secs_f64() / 60.0;
    let (began, mut summary) = (Instant::now(), format!("\n{:<12} minutes\n", "part"));
    for (part, run) in &chosen {
        println!("\n=== {part}");
        let part_began = Instant::now();
        process::end_all_at(part_began + PATIENCE);
        if let Err(error) = run(ws) {
            eprintln!("error: {error}");
            println!("{summary}FAILED in part '{part}' after {:.1} minutes", minutes(began));
            return Err(Error::with_status(format!("part '{part}' failed"), error.status()));
        }
        summary += &format!("{part:<12} {:>7.1}\n", minutes(part_began));
    }
    println!("{summary}OK: all {} parts passed in {:.1} minutes", chosen.len(), minutes(began));
    Ok(())
}

fn tests(ws: &Workspace) -> Result<()> {
    ws.cargo("test --workspace --no-run").run()?;
    // Tests that write to the disk and wait for it would wait for the files of the build as well.
    ws.cmd("sync").run()?;
    promised(ws, "cargo test --workspace")?.run()
}

/// The server with volumes on object stores: a feature of its own, because it brings 170 packages.
fn objects(ws: &Workspace) -> Result<()> {
    let server = "--locked -p offlock-nbd --features objects";
    ws.cargo(&format!("clippy {server} --all-targets -- -D warnings")).run()?;
    ws.cargo(&format!("test {server} --bin offlock-nbd --test clients -- volume")).run()
}

/// The demo verifies every byte itself, and ends with 0 only if all were right.
fn demo(ws: &Workspace) -> Result<()> {
    promised(ws, "cargo run --release --bin offlock-nbd")?.run()
}

/// Returns the command, if README.md has it as a line of its own, word for word.
fn promised(ws: &Workspace, line: &str) -> Result<Cmd> {
    if !read(ws.root.join("README.md"))?.lines().any(|there| there == line) {
        return Err(Error::new(format!("README.md has no line: {line}")));
    }
    let (program, words) = line.split_once(' ').unwrap_or((line, ""));
    Ok(ws.cmd(program).words(words))
}

/// Does what a user does: a crate of their own, the libraries added by path, and the README's examples. Checks
/// that the libraries can be published.
fn adopt(ws: &Workspace) -> Result<()> {
    let crates = ws.libraries()?;
    let scratch = scratch()?;
    let (dir, manifest) = (scratch.path(), scratch.path().join("Cargo.toml"));
    ws.cargo("init --quiet --vcs none --lib --name adopter").arg(dir).run()?;
    for package in &crates {
        let add = ws.cargo("add --quiet --offline --manifest-path").arg(&manifest);
        add.arg("--path").arg(&package.dir).run()?;
    }
    // The same versions, which are here.
    fs::copy(ws.root.join("Cargo.lock"), dir.join("Cargo.lock")).at(dir)?;
    let source = format!("#![doc = include_str!(\"{}/README.md\")]\n", ws.root.display());
    write(dir.join("src/lib.rs"), source)?;
    ws.cargo("test --quiet --offline --doc --manifest-path").arg(&manifest).run()?;

    let readme = read(ws.root.join("README.md"))?;
    for package in crates.iter().filter(|package| package.name != "sync") {
        let name = &package.name;
        let command = format!("cargo add --path ../offlock/crates/{name}");
        if !['\n', ' '].iter().any(|end| readme.contains(&format!("{command}{end}"))) {
            return Err(Error::new(format!("README.md has no line: {command}")));
        }
        let page = read(package.dir.join("README.md"))?;
        if let Some(line) = page.lines().find(|line| has_relative_link(line)) {
            let why = "crates.io shows the page alone, and this link breaks";
            return Err(Error::new(format!("crates/{name}/README.md: {why}: {line}")));
        }
    }

    // Packs what would be published. A warning is a failure.
    let path = ws.target.join("package.log");
    let cargo = ws.cargo("package --offline --no-verify --allow-dirty").args(packages(&crates));
    let outcome = cargo.log(&path).run();
    let said = read(path)?;
    print!("{said}");
    outcome?;
    match said.lines().find(|line| line.starts_with("warning")) {
        Some(line) => Err(Error::new(format!("what would be published has a warning: {line}"))),
        None => Ok(()),
    }
}

/// Returns whether a Markdown line links to something that is neither on the web nor on this page.
fn has_relative_link(line: &str) -> bool {
    let mut targets = line.split("](").skip(1);
    targets.any(|target| !target.starts_with("https://") && !target.starts_with('#'))
}

/// Licences, bans and sources of the dependencies; advisories need a database from the network.
pub(crate) fn deny(ws: &Workspace) -> Result<()> {
    tools::fetch(ws)?;
    ws.cargo("deny --offline check licenses bans sources").run()?;
    // deny.toml is found in the parent folder.
    ws.cargo("deny --offline --manifest-path fuzz/Cargo.toml check licenses bans sources").run()
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    /// The file that a reader is sent to, `src/tree.rs`, is one of the crate whose paragraph or row it is.
    #[test]
    fn each_file_on_the_map_is_there() {
        let ws = Workspace::open().unwrap();
        let map = read(ws.root.join("ARCHITECTURE.md")).unwrap();
        let (mut package, mut count) = ("", 0);
        for line in map.lines() {
            let start = line.strip_prefix("**").or_else(|| line.strip_prefix("| `"));
            package = start.and_then(|rest| rest.split(['*', '`']).next()).unwrap_or(package);
            for file in line.split('`').skip(1).step_by(2).filter(|name| name.starts_with("src/")) {
                assert!(
                    ws.root.join("crates").join(package).join(file).exists(),
                    "{package}: {file}"
                );
                count += 1;
            }
        }
        assert!(count > 40, "{count} files");
    }
}
