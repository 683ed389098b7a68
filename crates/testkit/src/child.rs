//! Child processes: this test program run again.

use std::env;
use std::ffi::OsStr;
use std::process::{Command, Output};

/// The environment variable that names the test that a child process runs.
pub const CHILD: &str = "OFFLOCK_TEST_CHILD";

/// Runs `f` in a process of its own, with more environment variables: for the test `name` alone, this
/// test program is started again. Returns what that process said; none in that process itself.
pub fn in_child(name: &str, variables: &[(&str, &str)], f: impl FnOnce()) -> Option<Output> {
    in_child_by(&[], name, variables, f)
}

/// As [`in_child`], with the words of a command that starts the process; none start it directly.
fn in_child_by(
    starter: &[&str],
    name: &str,
    variables: &[(&str, &str)],
    f: impl FnOnce(),
) -> Option<Output> {
    if env::var(CHILD).is_ok_and(|child| child == name) {
        f();
        return None;
    }
    let this = env::current_exe().unwrap();
    let mut words = starter.iter().map(OsStr::new).chain([this.as_os_str()]);
    let mut child = Command::new(words.next().unwrap());
    child.args(words).args(["--exact", name, "--nocapture"]).env(CHILD, name);
    Some(child.envs(variables.iter().copied()).output().unwrap())
}

/// Runs `f` in a process of its own, like [`in_child`].
///
/// # Panics
///
/// Panics with the child's output if the test fails there, or if there is no such test.
pub fn in_own_process(name: &str, f: impl FnOnce()) {
    in_own_process_by(&[], name, f);
}

/// As [`in_own_process`], in a process that this command starts: `unshare`, for example.
///
/// # Panics
///
/// Panics as [`in_own_process`] does.
pub fn in_own_process_by(starter: &[&str], name: &str, f: impl FnOnce()) {
    let Some(child) = in_child_by(starter, name, &[], f) else { return };
    let stdout = String::from_utf8_lossy(&child.stdout);
    let stderr = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
}

/// Runs those ignored tests of this test program that have `filter` in their name, one after the
/// other, each for a second, in a process in which glibc registers no rseq area.
///
/// # Panics
///
/// Panics if a test fails there.
pub fn rerun_without_rseq(filter: &str) {
    let status = Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--test-threads=1", filter])
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .env("OFFLOCK_STRESS_SECONDS", "1")
        .status()
        .unwrap();
    assert!(status.success(), "{filter} without rseq: {status}");
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    #[test]
    fn the_closure_runs_in_another_process() {
        static RAN: AtomicBool = AtomicBool::new(false);
        let name = "child::tests::the_closure_runs_in_another_process";
        in_own_process(name, || RAN.store(true, Relaxed));
        let is_child = env::var(CHILD).is_ok_and(|child| child == name);
        assert_eq!(RAN.load(Relaxed), is_child);
    }

    #[test]
    fn a_failure_in_the_child_is_one_here() {
        let name = "child::tests::a_failure_in_the_child_is_one_here";
        let run = || in_own_process(name, || panic!("in the child"));
        if env::var(CHILD).is_ok_and(|child| child == name) {
            return run();
        }
        let panic = catch_unwind(run).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("in the child"), "{message}");
        assert!(catch_unwind(|| in_own_process("no_such_test", || ())).is_err());
    }
}
