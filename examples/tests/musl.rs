//! The published crates compile for musl.
//!
//! No musl toolchain is needed: the crates are compiled against a copy of the `libc` crate in which every
//! `target_env = "musl"` holds and no `target_env = "gnu"` does. That copy declares the types, constants and functions of
//! musl. Only the `tokio` feature of aio-reap is left out, because tokio's dependencies would need the same treatment; it
//! adds no C call of its own.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The published crates.
const CRATES: [&str; 6] =
    ["aio-reap", "bufcache", "mq-rbtree", "offlock-percpu", "percpu-list", "radix-ctx"];

const FEATURES: &str = "bufcache/aio-reap,mq-rbtree/stream";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Returns the standard output of a command.
///
/// # Panics
///
/// Panics with what it prints on its standard error if it fails.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn cargo(folder: &Path) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(folder);
    // The build of these tests may have flags of its own; this one is the same for all of them.
    for flags in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER"] {
        cargo.env_remove(flags);
    }
    cargo
}

/// The folder of the `libc` crate that the workspace uses.
fn libc_source() -> PathBuf {
    // Without the packages of other platforms, which may not have been downloaded.
    let platform = format!("--filter-platform={}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = output(cargo(&root()).args([
        "metadata",
        "--offline",
        "--locked",
        "--format-version=1",
        &platform,
    ]));
    let after = |text: &str, mark: &str| {
        let at = text.find(mark).unwrap_or_else(|| panic!("no {mark} in the metadata"));
        text[at + mark.len()..].to_owned()
    };
    let package = after(&metadata, r#"{"name":"libc","version":"0.2."#);
    let manifest = after(&package, r#""manifest_path":""#);
    let manifest = Path::new(manifest.split('"').next().unwrap());
    manifest.parent().unwrap().to_path_buf()
}

/// Writes a file unless it has that content already: cargo compiles again what is newer.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().expect("a file has a folder"))?;
    fs::write(path, content)
}

/// Copies a folder, with all Rust files made those of musl.
fn copy_as_musl(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry?.file_name()));
        if from.is_dir() {
            copy_as_musl(&from, &to)?;
        } else if from.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&from)?;
            let text = text.replace(r#"target_env = "gnu""#, "any()");
            write(&to, text.replace(r#"target_env = "musl""#, "all()").as_bytes())?;
        } else {
            write(&to, &fs::read(&from)?)?;
        }
    }
    Ok(())
}

#[test]
fn crates_compile_against_musl() {
    // One for each checkout that uses this target folder: cargo tells sources by path and time.
    let mut hasher = DefaultHasher::new();
    root().hash(&mut hasher);
    let name = format!("musl-{:x}", hasher.finish());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    copy_as_musl(&libc_source(), &folder.join("libc")).unwrap();
    let text = fs::read_to_string(folder.join("libc/src/unix/linux_like/linux/mod.rs"));
    assert!(text.unwrap().contains("all()"), "the libc crate asks for its environment otherwise");
    // The copy of the workspace is links, but for the lock file: the patch changes it.
    for name in ["Cargo.toml", "benches", "crates", "examples"] {
        let link = folder.join(name);
        if fs::read_link(&link).is_err() {
            std::os::unix::fs::symlink(root().join(name), link).unwrap();
        }
    }
    write(&folder.join("Cargo.lock"), &fs::read(root().join("Cargo.lock")).unwrap()).unwrap();
    let mut cargo = cargo(&folder);
    cargo.args(["check", "--offline", "--lib", "--features", FEATURES]);
    cargo.args(["--config", r#"patch.crates-io.libc.path="libc""#, "--target-dir", "target"]);
    for package in CRATES {
        cargo.args(["--package", package]);
    }
    cargo.env("CARGO_INCREMENTAL", "0");
    output(&mut cargo);
}
