//! The process groups that are running, and how they are ended.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::guard::{Guard, send};

/// How long a group may take to end after SIGTERM, before it gets SIGKILL.
const GRACE: Duration = Duration::from_secs(10);
/// How often a child is looked at while its time is limited.
const LOOK: Duration = Duration::from_millis(20);

/// What the signal handlers' threads and those that run commands share.
struct Live {
    groups: BTreeSet<i32>,
    /// The signal that ends this program; no group is started after it.
    interrupted: Option<i32>,
    guard: Option<Guard>,
}

static LIVE: Mutex<Live> =
    Mutex::new(Live { groups: BTreeSet::new(), interrupted: None, guard: None });

fn live() -> MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the signal that has asked this program to end.
pub(crate) fn interrupted() -> Option<i32> {
    live().interrupted
}

/// Refuses new groups from now on, and ends those that run.
pub(super) fn interrupt(signal: i32) {
    live().interrupted.get_or_insert(signal);
    end_all();
}

/// Ends every group. Returns once each has ended, or has been killed.
fn end_all() {
    signal_all(Signal::TERM);
    let until = Instant::now() + GRACE;
    while !live().groups.is_empty() {
        if Instant::now() > until {
            signal_all(Signal::KILL);
            return;
        }
        thread::sleep(LOOK);
    }
}

fn signal_all(signal: Signal) {
    for &group in &live().groups {
        send(group, signal);
    }
}

/// A child that leads its own process group.
pub(super) struct Group {
    child: Child,
    id: i32,
}

impl Group {
    /// Starts `command`. The lock is held across the start: a signal that arrives now either
    /// refuses it or finds the group listed.
    pub(super) fn start(command: &mut Command) -> io::Result<Group> {
        let mut live = live();
        if live.interrupted.is_some() {
            return Err(io::Error::from(io::ErrorKind::Interrupted));
        }
        if live.guard.is_none() {
            live.guard = Some(Guard::start()?);
        }
        let child = command.process_group(0).spawn()?;
        let id = i32::try_from(child.id()).expect("a process id fits");
        live.groups.insert(id);
        if let Some(guard) = &mut live.guard {
            guard.add(id);
        }
        Ok(Group { child, id })
    }

    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for the child. Once `stop` returns true the group is ended, and the result is `None`.
    pub(super) fn wait(
        &mut self,
        stop: Option<&dyn Fn() -> bool>,
    ) -> io::Result<Option<ExitStatus>> {
        let Some(stop) = stop else { return self.child.wait().map(Some) };
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if stop() {
                self.end()?;
                return Ok(None);
            }
            thread::sleep(LOOK);
        }
    }

    fn end(&mut self) -> io::Result<()> {
        send(self.id, Signal::TERM);
        let until = Instant::now() + GRACE;
        while self.child.try_wait()?.is_none() && Instant::now() < until {
            thread::sleep(LOOK);
        }
        // Also for what the child had started, which may have ignored SIGTERM.
        send(self.id, Signal::KILL);
        self.child.wait().map(drop)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.end();
        }
        let mut live = live();
        if live.interrupted.is_some() {
            send(self.id, Signal::KILL);
        }
        live.groups.remove(&self.id);
        if let Some(guard) = &mut live.guard {
            guard.remove(self.id);
        }
    }
}
