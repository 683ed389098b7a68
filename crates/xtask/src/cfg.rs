//! Builds with one of the workspace's cfgs.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::error::{Error, Result};
use crate::process::Cmd;
use crate::workspace::Workspace;

/// Adds `--cfg offlock_NAME` for every crate of the build, in that cfg's own target folder.
pub(crate) fn everywhere(ws: &Workspace, name: &str, cmd: Cmd) -> Cmd {
    let mut flags = env::var("RUSTFLAGS").unwrap_or_default();
    if !flags.is_empty() {
        flags.push(' ');
    }
    flags += &format!("--cfg offlock_{name}");
    cmd.env("RUSTFLAGS", flags)
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join(format!("cfg-{name}")).into()))
}

/// Builds for a model checker, `loom` or `shuttle`: its own cfg, the cfg of every model build, and the
/// virtual CPUs. The feature of `offlock-sync` makes the checker a dependency.
pub(crate) fn model(ws: &Workspace, checker: &str, cmd: Cmd) -> Cmd {
    let cfgs = format!("{checker} --cfg offlock_model --cfg offlock_virtual_cpu");
    everywhere(ws, &cfgs, cmd)
        .args([format!("--features=offlock-sync/{checker}")])
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join(format!("cfg-{checker}")).into()))
}

/// Adds `--cfg offlock_NAME` for the members of the workspace only, in the usual target folder.
///
/// The dependencies are those of the usual build. Cargo includes the wrapper's path in the file
/// names of the members, so theirs lie beside those without the cfg.
pub(crate) fn members_only(ws: &Workspace, name: &str, cmd: Cmd) -> Result<Cmd> {
    let wrapper = ws.target.join(format!("rustc-{name}"));
    let script =
        format!("#!/bin/sh\nrustc=$1\nshift\nexec \"$rustc\" --cfg offlock_{name} \"$@\"\n");
    let failed = |error| Error::io(wrapper.display(), error);
    fs::write(&wrapper, script).map_err(failed)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    Ok(cmd.env("RUSTC_WORKSPACE_WRAPPER", wrapper))
}
