//! The two commands of the README: every test, and the demo.

use crate::error::Result;
use crate::readme;
use crate::workspace::Workspace;

pub(crate) fn tests(ws: &Workspace) -> Result<()> {
    ws.cargo(["test", "--workspace", "--no-run"]).run()?;
    // Tests that write to the disk and wait for it would wait for the files of the build as well.
    ws.cmd("sync").run()?;
    readme::command(ws, "cargo test --workspace")?.run()
}

/// The server with volumes on object stores. They are off by default, because they bring 170 packages.
pub(crate) fn objects(ws: &Workspace) -> Result<()> {
    let of = ["--locked", "-p", "offlock-nbd", "--features", "objects"];
    let only = ["--bin", "offlock-nbd", "--test", "clients", "--", "volume"];
    ws.cargo(["test"]).args(of).args(only).run()
}

/// The demo verifies every byte itself, and ends with 0 only if all were right.
pub(crate) fn demo(ws: &Workspace) -> Result<()> {
    readme::command(ws, "cargo run --release --bin offlock-nbd")?.run()
}
