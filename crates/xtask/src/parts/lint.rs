//! Format, clippy, documentation, layers, licences.

use crate::error::Result;
use crate::tools;
use crate::workspace::Workspace;
use crate::{examples, layers, size};

/// The crates whose modules form layers. The others get there one by one.
const LAYERED: [&str; 9] = [
    "sync",
    "percpu",
    "aio-reap",
    "mq-rbtree",
    "nbd-protocol",
    "percpu-list",
    "radix-ctx",
    "testkit",
    "xtask",
];

/// The crates of which every public type has an example.
const WITH_EXAMPLES: [&str; 6] =
    ["percpu", "aio-reap", "mq-rbtree", "nbd-protocol", "percpu-list", "radix-ctx"];

/// Format first: it takes a second and fails most often.
///
/// clippy checks what `cargo check` would, and rustdoc uses the metadata that clippy has written.
pub(crate) fn lint(ws: &Workspace) -> Result<()> {
    let fuzz = ["--manifest-path", "fuzz/Cargo.toml"];
    ws.cargo(["fmt", "--all", "--check"]).run()?;
    ws.cargo(["fmt"]).args(fuzz).arg("--check").run()?;
    let strict = ["--", "-D", "warnings"];
    ws.cargo(["clippy", "--locked", "--workspace", "--all-targets"]).args(strict).run()?;
    ws.cargo(["clippy", "--locked"])
        .args(fuzz)
        .arg("--all-targets")
        .args(strict)
        // Nothing is linked here, and libFuzzer is not compiled if a path to it is given.
        .env("CUSTOM_LIBFUZZER_PATH", "none/none.a")
        .run()?;
    ws.cargo(["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .run()?;
    examples::report(ws, &WITH_EXAMPLES.map(String::from), true)?;
    layers::run(ws, &LAYERED.map(String::from), true)?;
    size::run(ws)
}

/// Licences, bans and sources of the dependencies; advisories need a database from the network.
pub(crate) fn deny(ws: &Workspace) -> Result<()> {
    tools::fetch(ws)?;
    let checks = ["check", "licenses", "bans", "sources"];
    ws.cargo(["deny", "--offline"]).args(checks).run()?;
    // deny.toml is found in the parent folder.
    ws.cargo(["deny", "--offline", "--manifest-path", "fuzz/Cargo.toml"]).args(checks).run()
}
