//! herd7, which checks every execution of a small program that a memory model allows.
//!
//! Debian has it in the package `herdtools7` of unstable alone. Where no `herd7` is in the path, that
//! package and the C library that it needs are unpacked into a folder of their own, and `herd7` is
//! started by that library's loader. Nothing of the system changes.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::program::Program;
use crate::error::{Error, Result};
use crate::process::{Cmd, Deadline};
use crate::workspace::{Scratch, Workspace, is_command};

/// What herd7 says of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The outcome is in no execution.
    Never,
    /// The outcome is in an execution.
    Reachable,
    /// Two plain accesses race in an execution.
    Race,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Never => "never",
            Verdict::Reachable => "reachable",
            Verdict::Race => "race",
        })
    }
}

/// The time for all programs of one test. They take a second or two.
const LIMIT: Duration = Duration::from_secs(120);

/// The program and the model.
pub(super) struct Herd {
    cmd: Cmd,
}

impl Herd {
    pub(super) fn find(ws: &Workspace) -> Result<Herd> {
        install(ws)?;
        let cmd = match unpacked(ws) {
            _ if is_command("herd7") => ws.cmd("herd7"),
            Some(cmd) => cmd,
            None => return Err(Error::new("herd7 was not found where it was unpacked")),
        };
        let model = ws.root.join("litmus");
        let cmd = cmd
            .arg("-bell")
            .arg(model.join("offlock.bell"))
            .arg("-macros")
            .arg(model.join("offlock.def"))
            .arg("-model")
            .arg(model.join("offlock.cat"))
            // Leaves out executions that the axiom `coherence` of the model refuses: ten times faster.
            .args(["-optace", "true"]);
        Ok(Herd { cmd })
    }

    /// Returns the verdict of each program of a test.
    pub(super) fn run(&self, name: &str, programs: &[Program]) -> Result<Vec<Verdict>> {
        let folder = Scratch::new(&format!("litmus-{name}"))?;
        let mut cmd = self.cmd.clone().dir(&folder.path).deadline(Deadline::after(LIMIT));
        for (number, program) in programs.iter().enumerate() {
            let path = folder.path.join(format!("{number}.litmus"));
            let (_, body) = program.text.split_once('\n').unwrap_or_default();
            fs::write(&path, format!("C program-{number}\n{body}"))
                .map_err(|error| Error::io(path.display(), error))?;
            cmd = cmd.arg(format!("{number}.litmus"));
        }
        let log = folder.path.join("log");
        let file = File::create(&log).map_err(|error| Error::io(log.display(), error))?;
        let output = cmd.log(Arc::new(file)).output()?;
        let verdict = |(number, program): (usize, &Program)| {
            verdict(&output, number).ok_or_else(|| {
                let said = fs::read_to_string(&log).unwrap_or_default();
                Error::new(format!("{name}: {}: herd7 gave no verdict\n{said}", program.what))
            })
        };
        programs.iter().enumerate().map(verdict).collect()
    }
}

/// Reads the part of herd7's output that is about one program.
fn verdict(output: &str, number: usize) -> Option<Verdict> {
    let (_, rest) = output.split_once(&format!("Test program-{number} "))?;
    let part = rest.split("\nTest ").next()?;
    let observed = part.lines().find_map(|line| line.strip_prefix("Observation "))?;
    if part.lines().any(|line| line == "Flag data-race") {
        return Some(Verdict::Race);
    }
    match observed.split(' ').nth(1)? {
        "Never" => Some(Verdict::Never),
        "Sometimes" | "Always" => Some(Verdict::Reachable),
        _ => None,
    }
}

/// Unpacks herd7 unless it is there. Takes some seconds and 60 MB of downloads.
pub(crate) fn install(ws: &Workspace) -> Result<()> {
    if is_command("herd7") || unpacked(ws).is_some() {
        println!("herd7 is there");
        return Ok(());
    }
    for program in ["apt-get", "dpkg-deb"] {
        if !is_command(program) {
            return Err(Error::new(format!(
                "herd7 is not installed, and there is no {program} to get it with. It is in the \
                 package herdtools7 of opam"
            )));
        }
    }
    let apt = Apt::new(ws)?;
    apt.get(["update", "-qq"])?;
    let packages = ["download", "-qq", "herdtools7", "libc6", "libgmp10"];
    apt.get(packages)?;
    // The folder gets its name when it is complete.
    let (root, partial) = (folder(ws), folder(ws).with_extension("partial"));
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).map_err(|error| Error::io(partial.display(), error))?;
    for package in files_with(&apt.folder.path, "deb")? {
        ws.cmd("dpkg-deb").arg("--extract").arg(package).arg(&partial).run()?;
    }
    let _ = fs::remove_dir_all(&root);
    fs::rename(&partial, &root).map_err(|error| Error::io(root.display(), error))
}

fn folder(ws: &Workspace) -> PathBuf {
    ws.target.join("tools/herd")
}

/// The command that starts the unpacked herd7.
fn unpacked(ws: &Workspace) -> Option<Cmd> {
    let usr = folder(ws).join("usr");
    let program = usr.join("bin/herd7");
    let libraries = subfolders(&usr.join("lib")).into_iter().find(|path| loader(path).is_some())?;
    let loader = loader(&libraries)?;
    program.is_file().then(|| {
        ws.cmd(loader)
            .arg("--library-path")
            .arg(libraries)
            .arg(program)
            .arg("-set-libdir")
            .arg(usr.join("share/herdtools7/herd"))
    })
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// `ld-linux-x86-64.so.2`, or that of another architecture.
fn loader(folder: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .find(|entry| entry.file_name().to_string_lossy().starts_with("ld-linux"))
        .map(|e| e.path())
}

fn files_with(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|error| Error::io(folder.display(), error))?;
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect())
}

/// apt with lists of its own, for Debian unstable from the mirror of this machine.
struct Apt<'a> {
    ws: &'a Workspace,
    folder: Scratch,
}

impl<'a> Apt<'a> {
    fn new(ws: &'a Workspace) -> Result<Self> {
        let folder = Scratch::new("apt")?;
        let path = folder.path.display();
        let write = |name: &str, text: String| {
            let path = folder.path.join(name);
            fs::write(&path, text).map_err(|error| Error::io(path.display(), error))
        };
        for lists in ["lists/partial", "cache/archives/partial"] {
            let lists = folder.path.join(lists);
            fs::create_dir_all(&lists).map_err(|error| Error::io(lists.display(), error))?;
        }
        write(
            "unstable.sources",
            format!(
                "Types: deb\nURIs: {}\nSuites: unstable\nComponents: main\n\
                 Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n",
                mirror(ws)
            ),
        )?;
        write(
            "apt.conf",
            format!(
                "Dir::State::lists \"{path}/lists\";\nDir::Cache \"{path}/cache\";\n\
                 Dir::Etc::sourcelist \"{path}/unstable.sources\";\nDir::Etc::sourceparts \"-\";\n\
                 Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
                 APT::Sandbox::User \"\";\n"
            ),
        )?;
        Ok(Apt { ws, folder })
    }

    fn get<const N: usize>(&self, words: [&str; N]) -> Result<()> {
        let conf = self.folder.path.join("apt.conf");
        self.ws.cmd("apt-get").args(words).env("APT_CONFIG", conf).dir(&self.folder.path).run()
    }
}

/// The Debian mirror that apt is configured for.
fn mirror(ws: &Workspace) -> String {
    let targets = ["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"];
    let listed = ws.cmd("apt-get").args(targets).output().unwrap_or_default();
    let debian = listed.lines().find_map(|line| line.strip_prefix("Debian "));
    debian.unwrap_or("http://deb.debian.org/debian/").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_is_that_of_the_program() {
        let output = "Test program-1 Allowed\nStates 1\nNo\nObservation program-1 Never 0 3\n\n\
            Test program-10 Allowed\nOk\nFlag data-race\nObservation program-10 Never 0 4\n\n\
            Test program-2 Allowed\nOk\nObservation program-2 Sometimes 1 2\n\
            Test program-3 Allowed\nOk\nObservation program-3 Always 1 0\n\
            Test program-4 Allowed\n";
        let verdicts = [1, 10, 2, 3, 4, 5].map(|number| verdict(output, number));
        let expected = [
            Some(Verdict::Never),
            Some(Verdict::Race),
            Some(Verdict::Reachable),
            Some(Verdict::Reachable),
            None,
            None,
        ];
        assert_eq!(verdicts, expected);
    }
}
