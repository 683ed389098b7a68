//! The workspace: its folders, its crates, and the commands that run in it.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::process::Cmd;

/// Where commands run, and with which settings.
#[derive(Clone)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    /// One target folder, and below it one for each cfg or toolchain that brings other
    /// dependencies, so that no build invalidates the files of another.
    pub(crate) target: PathBuf,
    env: Vec<(String, Option<OsString>)>,
}

impl Workspace {
    /// Finds the workspace that this program was built in.
    pub(crate) fn open() -> Result<Workspace> {
        // Set by `cargo run`; it differs from the built-in one where checkouts share a target folder.
        let package = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = package.join("../..");
        let root = root.canonicalize().map_err(|error| Error::io(root.display(), error))?;
        let start = env::current_dir().unwrap_or_else(|_| root.clone());
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |folder| start.join(folder));
        fs::create_dir_all(&target).map_err(|error| Error::io(target.display(), error))?;
        let target = target.canonicalize().map_err(|error| Error::io(target.display(), error))?;
        let env = settings(&target);
        Ok(Workspace { root, target, env })
    }

    /// A copy of this workspace in another folder, with a target folder of its own.
    pub(crate) fn moved(&self, root: PathBuf, target: PathBuf) -> Workspace {
        let env = settings(&target);
        Workspace { root, target, env }
    }

    /// A command that runs in the root folder.
    pub(crate) fn cmd(&self, program: impl Into<OsString>) -> Cmd {
        let mut cmd = Cmd::new(program).dir(&self.root);
        for (name, value) in &self.env {
            cmd = cmd.base_env(name, value.clone());
        }
        cmd
    }

    /// `cargo` with these words.
    pub(crate) fn cargo<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Cmd {
        self.cmd("cargo").args(words)
    }

    /// `cargo +nightly` with these words.
    pub(crate) fn nightly<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Cmd {
        self.cmd("cargo").arg("+nightly").args(words)
    }

    /// Every package below `crates`, sorted by folder.
    pub(crate) fn crates(&self) -> Result<Vec<Crate>> {
        let folder = self.root.join("crates");
        let entries = fs::read_dir(&folder).map_err(|error| Error::io(folder.display(), error))?;
        let mut crates: Vec<Crate> =
            entries.flatten().filter_map(|entry| Crate::read(&entry.path())).collect();
        crates.sort_by(|a, b| a.dir.cmp(&b.dir));
        Ok(crates)
    }

    /// The libraries: the packages below `crates` that are published.
    pub(crate) fn libraries(&self) -> Result<Vec<Crate>> {
        let mut crates = self.crates()?;
        crates.retain(|package| package.published);
        if crates.is_empty() { Err(Error::new("no library was found")) } else { Ok(crates) }
    }

    /// The libraries with these names, or all if no name is given.
    pub(crate) fn select(&self, names: &[String]) -> Result<Vec<Crate>> {
        let mut crates = self.libraries()?;
        for name in names {
            if !crates.iter().any(|package| package.is_called(name)) {
                return Err(Error::with_status(format!("no library is called {name}"), 2));
            }
        }
        crates
            .retain(|package| names.is_empty() || names.iter().any(|name| package.is_called(name)));
        Ok(crates)
    }
}

/// The settings of every command.
fn settings(target: &Path) -> Vec<(String, Option<OsString>)> {
    let mut settings: Vec<(String, Option<OsString>)> = env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        // What `cargo run` says about this package is wrong for the packages that are built here.
        .filter(|name| {
            name == "CARGO" || ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|p| name.starts_with(p))
        })
        .map(|name| (name, None))
        .collect();
    let mut set = |name: &str, value: OsString| settings.push((name.to_string(), Some(value)));
    set("CARGO_TARGET_DIR", target.into());
    // Incremental files cost time to write, and a CI run never reads them.
    set("CARGO_INCREMENTAL", "0".into());
    // A missing client, privilege or kernel interface is a failure, not an ignored test.
    set("OFFLOCK_REQUIRE_ALL", "1".into());
    if let Some(path) = path_with_cargo() {
        set("PATH", path);
    }
    settings
}

/// `PATH` with the folder that `cargo install` installs to at its end.
fn path_with_cargo() -> Option<OsString> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))?;
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(env::split_paths(&path).chain([home.join("bin")])).ok()
}

/// Returns whether a program of this name is in the path.
pub(crate) fn is_command(name: &str) -> bool {
    let path = path_with_cargo().unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// A package below `crates`.
#[derive(Clone)]
pub(crate) struct Crate {
    pub(crate) dir: PathBuf,
    /// The folder's name.
    pub(crate) name: String,
    /// What cargo calls it.
    pub(crate) package: String,
    pub(crate) published: bool,
}

impl Crate {
    fn read(dir: &Path) -> Option<Crate> {
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).ok()?;
        Some(Crate {
            dir: dir.to_path_buf(),
            name: dir.file_name()?.to_string_lossy().into_owned(),
            package: package_name(&manifest)?,
            published: !manifest.lines().any(|line| line.trim() == "publish = false"),
        })
    }

    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.name == name || self.package == name
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        self.dir.join(file).exists()
    }

    /// Returns the options of `cargo test` that select the models for a checker, or none without a
    /// model: those in `src/models` are unit tests of the library, others are a target of their own.
    pub(crate) fn models(&self, checker: &'static str) -> Option<&'static [&'static str]> {
        match checker {
            _ if self.has("src/models/mod.rs") => Some(&["--lib"]),
            "loom" if self.has("tests/loom.rs") => Some(&["--test", "loom"]),
            "shuttle" if self.has("tests/shuttle.rs") => Some(&["--test", "shuttle"]),
            _ => None,
        }
    }
}

/// The first name in a manifest, which is the package's.
fn package_name(manifest: &str) -> Option<String> {
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = "))?;
    Some(name.trim().trim_matches('"').to_string())
}

/// `-p NAME` for each crate.
///
/// One cargo command for all crates: what they share is compiled once, and no build ends on one CPU
/// while the next one waits.
pub(crate) fn packages(crates: &[Crate]) -> Vec<&str> {
    crates.iter().flat_map(|package| ["-p", package.package.as_str()]).collect()
}

/// A folder for temporary files, outside the workspace, which is removed when this is dropped.
pub(crate) struct Scratch {
    pub(crate) path: PathBuf,
}

impl Scratch {
    /// Creates the folder. `name` is different for each one that this process has at a time.
    pub(crate) fn new(name: &str) -> Result<Scratch> {
        let path = env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path); // of an earlier process with the same id
        fs::create_dir_all(&path).map_err(|error| Error::io(path.display(), error))?;
        Ok(Scratch { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Every `.rs` file below a folder, sorted.
pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_are_found_and_this_package_is_none() {
        let ws = Workspace::open().unwrap();
        let all = ws.crates().unwrap();
        assert!(all.iter().any(|package| package.name == "xtask" && !package.published));
        let libraries = ws.libraries().unwrap();
        let percpu = libraries.iter().find(|package| package.name == "percpu").unwrap();
        assert_eq!(percpu.package, "offlock-percpu");
        assert!(!libraries.iter().any(|package| package.name == "xtask"));
        assert_eq!(ws.select(&["offlock-percpu".into()]).unwrap().len(), 1);
        assert_eq!(ws.select(&["bufcache".into(), "percpu".into()]).unwrap().len(), 2);
        assert_eq!(ws.select(&[]).unwrap().len(), libraries.len());
        assert!(ws.select(&["xtask".into()]).is_err());
    }

    #[test]
    fn the_package_is_the_first_name_of_its_manifest() {
        let manifest = "[package]\nname = \"a\"\n\n[[bin]]\nname = \"b\"\n";
        assert_eq!(package_name(manifest).as_deref(), Some("a"));
        assert_eq!(package_name("[workspace]\n"), None);
    }
}
