//! What the checks need on a machine: toolchains, Debian packages, cargo subcommands.

use std::fs;

use crate::error::{Error, Result};
use crate::workspace::{Workspace, is_command};

const CARGO_DENY: &str = "0.20.2";
const CARGO_FUZZ: &str = "0.13.2";

/// A command, and the Debian package that has it.
const PACKAGES: [(&str, &str); 15] = [
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("curl", "curl"),
    ("fio", "fio"),
    ("nbdkit", "nbdkit"),
    ("strace", "strace"),
    ("nm", "binutils"),
    ("ld-musl-config", "musl"),
    ("patch", "patch"),
    ("unshare", "util-linux"),
    ("c++", "g++"),
    ("cc", "gcc"),
    ("qemu-x86_64", "qemu-user"),
];

/// Installs what is missing. The toolchains must be there: the pinned one, and nightly.
pub(crate) fn install(ws: &Workspace) -> Result<()> {
    check_toolchains(ws)?;
    install_packages(ws)?;
    install_subcommand(ws, "cargo-deny", CARGO_DENY)?;
    install_subcommand(ws, "cargo-fuzz", CARGO_FUZZ)?;
    fetch(ws)
}

/// Downloads the dependencies for every platform, which an offline look at the whole graph needs.
pub(crate) fn fetch(ws: &Workspace) -> Result<()> {
    ws.cargo(["fetch", "--locked"]).run()?;
    ws.cargo(["fetch", "--locked", "--manifest-path", "fuzz/Cargo.toml"]).run()
}

/// Checks that the toolchains are installed. A command that names a missing one would let rustup
/// download it without a word.
fn check_toolchains(ws: &Workspace) -> Result<()> {
    let file = fs::read_to_string(ws.root.join("rust-toolchain.toml")).unwrap_or_default();
    let pinned = file
        .lines()
        .find_map(|line| line.strip_prefix("channel = "))
        .map(|channel| channel.trim().trim_matches('"'))
        .ok_or_else(|| Error::new("rust-toolchain.toml pins no channel"))?;
    if !is_command("rustup") {
        let message =
            format!("rustup is not installed: the toolchains {pinned} and nightly are wanted");
        return Err(Error::new(message));
    }
    let installed = ws.cmd("rustup").args(["toolchain", "list"]).output()?;
    let missing = missing(&[pinned, "nightly"], &installed);
    if !missing.is_empty() {
        let list = missing.join(" ");
        return Err(Error::new(format!(
            "missing: {list}. Install with: rustup toolchain install {list}"
        )));
    }
    let list = ["component", "list", "--toolchain", pinned, "--installed"];
    let installed = ws.cmd("rustup").args(list).output()?;
    let missing = self::missing(&["rustfmt", "clippy"], &installed);
    if !missing.is_empty() {
        let list = missing.join(" ");
        return Err(Error::new(format!(
            "missing in {pinned}: {list}. Install with: rustup component add {list}"
        )));
    }
    println!("toolchains {pinned} and nightly are there");
    Ok(())
}

/// The names that no line of rustup's list is about. A line may add the platform: `1.95.0-x86_64-...`.
fn missing<'a>(names: &[&'a str], list: &str) -> Vec<&'a str> {
    let is_about = |line: &str, name: &str| {
        let entry = line.split_whitespace().next().unwrap_or_default();
        entry.strip_prefix(name).is_some_and(|rest| {
            let platform =
                rest.strip_prefix('-').is_some_and(|p| p.starts_with(char::is_alphabetic));
            rest.is_empty() || platform
        })
    };
    let is_missing = |name: &&str| !list.lines().any(|line| is_about(line, name));
    names.iter().copied().filter(is_missing).collect()
}

fn install_packages(ws: &Workspace) -> Result<()> {
    let mut missing: Vec<&str> = PACKAGES
        .iter()
        .filter(|(command, _)| !is_command(command))
        .map(|(_, name)| *name)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    if missing.is_empty() {
        println!("the clients and compilers are there");
        return Ok(());
    }
    let root = rustix::process::getuid().is_root();
    let start = |program: &str| {
        if root { ws.cmd(program) } else { ws.cmd("sudo").arg(program).terminal() }
    };
    start("apt-get").args(["update", "-qq"]).run()?;
    start("env")
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq"])
        .arg("--no-install-recommends")
        .args(missing)
        .run()
}

/// Installs a cargo subcommand unless this version is there. A debug build: the tool runs for a
/// second, so the time of its build is what counts.
fn install_subcommand(ws: &Workspace, name: &str, version: &str) -> Result<()> {
    let there = is_command(name)
        && ws.cmd(name).arg("--version").output()?.split_whitespace().any(|word| word == version);
    if there {
        println!("{name} {version} is there");
        return Ok(());
    }
    ws.cargo(["install", "--debug", "--locked", "--version", version, name])
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join("tools").into()))
        .run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toolchains_are_found_with_and_without_their_platform() {
        let list = "stable-x86_64-unknown-linux-gnu (default)\n1.95.0-x86_64-unknown-linux-gnu (active)\nmine\n";
        assert_eq!(missing(&["1.95.0", "stable", "mine"], list), [""; 0]);
        assert_eq!(
            missing(&["1.95", "nightly", "min", "stable-2"], list),
            ["1.95", "nightly", "min", "stable-2"]
        );
        assert_eq!(
            missing(&["rustfmt", "clippy"], "clippy-x86_64-unknown-linux-gnu\n"),
            ["rustfmt"]
        );
    }
}
