//! The requirements of the checks on a machine: toolchains, Debian packages, cargo subcommands.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::process::{Error, Result};
use crate::workspace::{Workspace, is_command};

/// A command, and the Debian package that has it.
const PACKAGES: [(&str, &str); 13] = [
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("curl", "curl"),
    ("fio", "fio"),
    ("nbdkit", "nbdkit"),
    ("strace", "strace"),
    ("patch", "patch"),
    ("unshare", "util-linux"),
    ("c++", "g++"),
    ("cc", "gcc"),
    ("qemu-x86_64", "qemu-user"),
];

/// Installs what is missing. The toolchains must be there: the pinned one, and nightly.
pub(crate) fn install(ws: &Workspace) -> Result<()> {
    ws.cmd("rustup").words("which --toolchain nightly rustc").output()?; // says how to install it
    need(ws, &PACKAGES)?;
    install_subcommand(ws, "cargo-deny", "0.20.2")?;
    install_subcommand(ws, "cargo-fuzz", "0.13.2")?;
    fetch(ws)
}

/// Installs the Debian packages of the commands that are missing, which only root can do.
pub(crate) fn need(ws: &Workspace, commands: &[(&str, &str)]) -> Result<()> {
    let missing = commands.iter().filter(|(command, _)| !is_command(command));
    let mut missing: Vec<&str> = missing.map(|(_, package)| *package).collect();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    if !fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        let missing = missing.join(" ");
        return Err(Error::new(format!("missing, only root can: apt-get install {missing}")));
    }
    ws.cmd("apt-get").words("update -qq").run()?;
    let install = "DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends";
    ws.cmd("env").words(install).args(missing).run()
}

/// Downloads the dependencies for every platform, which an offline look at the whole graph needs.
pub(crate) fn fetch(ws: &Workspace) -> Result<()> {
    ws.cargo("fetch --locked").run()?;
    ws.cargo("fetch --locked --manifest-path fuzz/Cargo.toml").run()
}

/// Installs a cargo subcommand unless this version is there. A debug build: what counts is the time of the
/// build.
pub(crate) fn install_subcommand(ws: &Workspace, name: &str, version: &str) -> Result<()> {
    let there = is_command(name)
        && ws
            .cmd(name)
            .words("--version")
            .output()
            .is_ok_and(|said| said.split_whitespace().any(|word| word == version));
    if there {
        return Ok(());
    }
    ws.cargo(&format!("install --debug --locked --version {version} {name}"))
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join("tools").into()))
        .run()
}
