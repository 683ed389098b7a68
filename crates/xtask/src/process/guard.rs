//! A second process that ends the groups when this program is killed.
//!
//! No signal handler runs on SIGKILL. The guard reads the running groups from a pipe, one line for
//! each start (`+123`) and each end (`-123`). The pipe closes with this program, however that ends,
//! and the guard kills the groups that are left.

use std::collections::BTreeSet;
use std::env;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

/// The name of the command that runs the guard.
pub(crate) const COMMAND: &str = "guard-of-process-groups";

/// This program's end of the pipe.
pub(super) struct Guard {
    pipe: ChildStdin,
}

impl Guard {
    /// Starts the guard in a group of its own, so that Ctrl-C does not reach it.
    pub(super) fn start() -> io::Result<Guard> {
        let mut child = Command::new(env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::null()) // so that a pipe which reads this program's output is not held open
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Guard { pipe: child.stdin.take().expect("piped") })
    }

    pub(super) fn add(&mut self, group: i32) {
        let _ = writeln!(self.pipe, "+{group}");
    }

    pub(super) fn remove(&mut self, group: i32) {
        let _ = writeln!(self.pipe, "-{group}");
    }
}

/// Signals a group. A group that has ended already is no error.
pub(super) fn send(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

/// The guard's own program.
pub(crate) fn run() {
    for group in left(io::stdin().lock()) {
        send(group, Signal::KILL);
    }
}

/// Returns the groups that were started and not ended when the pipe closed.
fn left(pipe: impl BufRead) -> BTreeSet<i32> {
    let mut groups = BTreeSet::new();
    for line in pipe.lines().map_while(Result::ok) {
        let Some((sign, Ok(group))) =
            line.split_at_checked(1).map(|(s, id)| (s, id.parse::<i32>()))
        else {
            continue;
        };
        if sign == "+" {
            groups.insert(group);
        } else {
            groups.remove(&group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_ended_are_left_alone() {
        let pipe = "+10\n+11\n-10\n+12\nx\n\n+\n-12\n+13";
        assert_eq!(left(pipe.as_bytes()), BTreeSet::from([11, 13]));
        assert!(left("+7\n-7\n".as_bytes()).is_empty());
    }
}
