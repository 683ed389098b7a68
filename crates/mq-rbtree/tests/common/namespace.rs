//! Tests in an IPC namespace of their own: they see only their own queues, and may set limits.

use std::env;
use std::process::Command;

/// The environment variable that marks the child.
const CHILD: &str = "OFFLOCK_IN_A_NAMESPACE";

/// Runs the ignored test `name` of this program in a child process in a new namespace.
///
/// If the parent is not root, the child is root of a new user namespace.
///
/// # Errors
///
/// The reason why the system provides no namespace.
///
/// # Panics
///
/// Panics if the child fails.
pub(crate) fn run_in_one(name: &str) -> Result<(), String> {
    // SAFETY: has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut words = vec!["unshare", "--ipc"];
    if !is_root {
        words.extend(["--user", "--map-root-user"]);
    }
    let command = |rest: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(rest);
        command
    };
    let probe = command(&["true"]).output().map_err(|error| format!("unshare: {error}"))?;
    if !probe.status.success() {
        return Err(String::from_utf8_lossy(&probe.stderr).trim().to_owned());
    }
    let this = env::current_exe().unwrap();
    let output = command(&[this.to_str().unwrap(), name, "--exact", "--ignored", "--nocapture"])
        .env(CHILD, name)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} failed in its namespace");
    assert!(said.contains("1 passed"), "{name} did not run");
    Ok(())
}

/// Returns whether this process is the child that runs the test `name`.
pub(crate) fn is_child(name: &str) -> bool {
    env::var(CHILD).is_ok_and(|child| child == name)
}

/// Prints why there is no namespace.
///
/// # Panics
///
/// Panics if no test may be skipped: `OFFLOCK_REQUIRE_ALL=1`.
pub(crate) fn say_refused(why: &str) {
    let required = env::var_os("OFFLOCK_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "no IPC namespace here: {why}");
    eprintln!("no IPC namespace here: {why}");
}
