//! The workspace: its folders, its crates, the commands that run in it, and the test programs that it
//! builds.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::process::{At, Cmd, Error, Result, folder, read, script};

/// The folder and the settings with which commands run.
#[derive(Clone)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    /// One target folder, and below it one for each cfg or toolchain that brings other
    /// dependencies, so that no build invalidates the files of another.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Finds the workspace that this program was built in.
    pub(crate) fn open() -> Result<Workspace> {
        // Set by `cargo run`; it differs from the built-in one where checkouts share a target folder.
        let package = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = package.join("../..");
        let root = root.canonicalize().at(&root)?;
        let start = env::current_dir().unwrap_or_else(|_| root.clone());
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |folder| start.join(folder));
        folder(&target)?;
        let target = target.canonicalize().at(&target)?;
        Ok(Workspace { root, target })
    }

    /// A command that runs in the root folder.
    pub(crate) fn cmd(&self, program: impl AsRef<OsStr>) -> Cmd {
        Cmd::new(program)
            .dir(&self.root)
            // Those of `cargo run`, for this package and with the pinned toolchain.
            .base_env("CARGO", None)
            .base_env("CARGO_MANIFEST_DIR", None)
            .base_env("CARGO_TARGET_DIR", Some(self.target.clone().into()))
            // Incremental files cost time to write, and a CI run never reads them.
            .base_env("CARGO_INCREMENTAL", Some("0".into()))
            // A missing client, privilege or kernel interface is a failure, not an ignored test.
            .base_env("OFFLOCK_REQUIRE_ALL", Some("1".into()))
    }

    /// `cargo` with these words.
    pub(crate) fn cargo(&self, words: &str) -> Cmd {
        self.cmd("cargo").words(words)
    }

    /// `cargo` with these words, and `--cfg offlock_NAME` for every crate of the build, in that cfg's own
    /// target folder.
    ///
    /// A build for `loom` or `shuttle` also has the cfg of every model build and the virtual CPUs. The
    /// feature of `offlock-sync` makes the checker a dependency.
    pub(crate) fn cargo_with_cfg(&self, name: &str, words: &str) -> Cmd {
        let flags = env::var("RUSTFLAGS").unwrap_or_default();
        let mut flags = format!("{flags} --cfg offlock_{name}");
        let mut cargo = self.cargo(words);
        if ["loom", "shuttle"].contains(&name) {
            flags += " --cfg offlock_model --cfg offlock_virtual_cpu";
            cargo = cargo.arg(format!("--features=offlock-sync/{name}"));
        }
        cargo
            .env("RUSTFLAGS", flags.trim())
            .base_env("CARGO_TARGET_DIR", Some(self.target.join(format!("cfg-{name}")).into()))
    }

    /// `cargo` with these words, and `--cfg offlock_NAME` for the members of the workspace only, in the usual
    /// target folder.
    ///
    /// The dependencies are those of the usual build. Cargo includes the wrapper's path in the file
    /// names of the members, so theirs lie beside those without the cfg.
    pub(crate) fn cargo_with_members_cfg(&self, name: &str, words: &str) -> Result<Cmd> {
        let wrapper = self.target.join(format!("rustc-{name}"));
        let exec = format!("rustc=$1\nshift\nexec \"$rustc\" --cfg offlock_{name} \"$@\"");
        script(&wrapper, &exec)?;
        Ok(self.cargo(words).env("RUSTC_WORKSPACE_WRAPPER", wrapper))
    }

    /// Every package below `crates`, sorted by folder.
    pub(crate) fn crates(&self) -> Result<Vec<Crate>> {
        let folder = self.root.join("crates");
        let entries = fs::read_dir(&folder).at(&folder)?;
        let mut crates: Vec<Crate> =
            entries.flatten().filter_map(|entry| Crate::read(&entry.path())).collect();
        crates.sort_by(|a, b| a.dir.cmp(&b.dir));
        Ok(crates)
    }

    /// The libraries: the packages below `crates` that are published.
    pub(crate) fn libraries(&self) -> Result<Vec<Crate>> {
        self.select(&[])
    }

    /// The libraries with these names, or all if no name is given.
    pub(crate) fn select(&self, names: &[String]) -> Result<Vec<Crate>> {
        let mut crates = self.crates()?;
        crates.retain(|package| package.published);
        choose(&mut crates, names, "library", Crate::is_called)?;
        Ok(crates)
    }
}

/// Keeps the items with one of these names, or all if no name is given. A name without an item is an error.
pub(crate) fn choose<T>(
    items: &mut Vec<T>,
    names: &[String],
    kind: &str,
    is_called: impl Fn(&T, &str) -> bool,
) -> Result<()> {
    if let Some(name) = names.iter().find(|name| !items.iter().any(|item| is_called(item, name))) {
        return Err(Error::with_status(format!("no {kind} is called {name}"), 2));
    }
    items.retain(|item| names.is_empty() || names.iter().any(|name| is_called(item, name)));
    if items.is_empty() { Err(Error::new(format!("no {kind} was found"))) } else { Ok(()) }
}

/// Returns whether a program of this name is in the path.
pub(crate) fn is_command(name: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|at| at.join(name).is_file()))
}

/// A package below `crates`.
#[derive(Clone)]
pub(crate) struct Crate {
    pub(crate) dir: PathBuf,
    /// The folder's name.
    pub(crate) name: String,
    /// The name of the package in cargo.
    pub(crate) package: String,
    pub(crate) published: bool,
}

impl Crate {
    fn read(dir: &Path) -> Option<Crate> {
        let manifest = read(dir.join("Cargo.toml")).ok()?;
        // The first name in a manifest is the package's.
        let package = manifest.lines().find_map(|line| line.strip_prefix("name = "))?;
        Some(Crate {
            dir: dir.to_path_buf(),
            name: dir.file_name()?.to_string_lossy().into_owned(),
            package: package.trim().trim_matches('"').to_string(),
            published: !manifest.lines().any(|line| line.trim() == "publish = false"),
        })
    }

    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.name == name || self.package == name
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        self.dir.join(file).exists()
    }

    /// Returns the option of `cargo test` that selects the models for a checker, or none without a
    /// model: those in `src/models` are unit tests of the library, others are a target of their own.
    pub(crate) fn models(&self, checker: &str) -> Option<String> {
        if self.has("src/models/mod.rs") {
            return Some("--lib".to_string());
        }
        self.has(&format!("tests/{checker}.rs")).then(|| format!("--test={checker}"))
    }
}

/// `-p NAME` for each crate.
///
/// One cargo command for all crates: what they share is compiled once, and no build ends on one CPU
/// while the next one waits.
pub(crate) fn packages(crates: &[Crate]) -> Vec<&str> {
    crates.iter().flat_map(|package| ["-p", package.package.as_str()]).collect()
}

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestBinary {
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// Whether it has the unit tests of a library.
    pub(crate) library: bool,
    /// The target's name: the library's, or that of the file below `tests`.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
}

impl TestBinary {
    /// Builds what `cargo`, a `cargo test`, would run.
    ///
    /// `cargo test` runs everything it has built, and another selection may be another build: with
    /// fewer packages, dependencies can have other features. So one build serves several runs here.
    pub(crate) fn build(cargo: Cmd) -> Result<Vec<TestBinary>> {
        let json = cargo.words("--no-run --message-format=json-render-diagnostics").output()?;
        let mut binaries: Vec<TestBinary> = json.lines().filter_map(TestBinary::parse).collect();
        if binaries.is_empty() {
            return Err(Error::new("the build has no test program"));
        }
        binaries.sort();
        Ok(binaries)
    }

    /// The option of `cargo test` that selects the target.
    pub(crate) fn option(&self) -> String {
        if self.library { "--lib".to_string() } else { format!("--test={}", self.name) }
    }

    /// The command that runs the tests, in the package's folder, as cargo does it.
    pub(crate) fn cmd(&self, ws: &Workspace) -> Cmd {
        ws.cmd(&self.executable)
            .dir(&self.package)
            .base_env("CARGO_MANIFEST_DIR", Some(self.package.clone().into()))
    }

    /// Reads one line of cargo's JSON. Returns `None` if it is not about a test program.
    ///
    /// The values wanted here are paths and names, which cargo writes without escapes unless a folder's
    /// name has a quote or a backslash.
    fn parse(line: &str) -> Option<TestBinary> {
        if !line.starts_with("{\"reason\":\"compiler-artifact\"")
            || !line.contains("\"test\":true},\"features\"")
        {
            return None;
        }
        let (name, executable) = program(line)?;
        Some(TestBinary {
            package: Path::new(&value(line, "manifest_path")?).parent()?.to_path_buf(),
            library: line.contains("\"target\":{\"kind\":[\"lib\"]"),
            name,
            executable,
        })
    }
}

/// Returns the name and the program of a target in one line of cargo's JSON.
pub(crate) fn program(line: &str) -> Option<(String, PathBuf)> {
    let (_, target) = line.split_once("\"target\":{")?;
    Some((value(target, "name")?, value(line, "executable")?.into()))
}

/// Returns the first text of this name in one line of cargo's JSON.
fn value(json: &str, key: &str) -> Option<String> {
    let (_, rest) = json.split_once(&format!("\"{key}\":\""))?;
    rest.split_once('"').map(|(value, _)| value.to_string())
}

/// Creates a folder for temporary files, outside the workspace, which is removed when this is dropped.
pub(crate) fn scratch() -> Result<TempDir> {
    tempfile::tempdir().at(env::temp_dir())
}

/// Every file below a folder whose name has this extension, sorted.
pub(crate) fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|end| end == extension) {
            found.push(path);
        }
    }
    found
}

/// The name of a file without its extension.
pub(crate) fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
