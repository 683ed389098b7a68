//! Child processes: how a command is shown, started, limited in time and judged.
//!
//! Each child leads a process group of its own, which is ended when the child exceeds its time and
//! when this program gets SIGINT, SIGTERM or SIGHUP.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use crate::error::{Error, Result};

/// When a command must have ended.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Deadline {
        Deadline { at: Instant::now() + limit, limit }
    }
}

/// A command that prints itself, runs in a process group of its own, and reads nothing.
#[derive(Clone)]
pub(crate) struct Cmd {
    program: OsString,
    args: Vec<OsString>,
    /// Settings that belong to this command; they are shown.
    env: Vec<(String, OsString)>,
    /// Settings that every command gets; they are not shown.
    base: Vec<(String, Option<OsString>)>,
    dir: Option<PathBuf>,
    log: Option<Arc<File>>,
    deadline: Option<Deadline>,
    until: Option<(PathBuf, &'static str)>,
    terminal: bool,
}

impl Cmd {
    pub(crate) fn new(program: impl Into<OsString>) -> Cmd {
        Cmd {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            base: Vec::new(),
            dir: None,
            log: None,
            deadline: None,
            until: None,
            terminal: false,
        }
    }

    pub(crate) fn arg(mut self, arg: impl Into<OsString>) -> Cmd {
        self.args.push(arg.into());
        self
    }

    pub(crate) fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Cmd {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable, and shows it with the command.
    pub(crate) fn env(mut self, name: &str, value: impl Into<OsString>) -> Cmd {
        self.env.push((name.to_string(), value.into()));
        self
    }

    /// Sets a variable, or removes it, without showing it.
    pub(crate) fn base_env(mut self, name: &str, value: Option<OsString>) -> Cmd {
        self.base.push((name.to_string(), value));
        self
    }

    pub(crate) fn dir(mut self, dir: &Path) -> Cmd {
        self.dir = Some(dir.to_path_buf());
        self
    }

    /// Sends the output, and the line that shows the command, to a file.
    pub(crate) fn log(mut self, log: Arc<File>) -> Cmd {
        self.log = Some(log);
        self
    }

    /// Ends the command if it is still running then.
    pub(crate) fn deadline(mut self, deadline: Deadline) -> Cmd {
        self.deadline = Some(deadline);
        self
    }

    /// Ends the command once this log contains `text`, which is a failure.
    pub(crate) fn until_logged(mut self, log: &Path, text: &'static str) -> Cmd {
        self.until = Some((log.to_path_buf(), text));
        self
    }

    /// Keeps the command in this program's group and on its terminal, where `sudo` asks.
    pub(crate) fn terminal(mut self) -> Cmd {
        self.terminal = true;
        self
    }

    /// Runs the command. An exit status other than 0 is an error.
    pub(crate) fn run(&self) -> Result<()> {
        self.show();
        let mut command = self.command();
        if self.terminal {
            let status = command.status().map_err(|error| self.not_started(error))?;
            return self.judge(status);
        }
        let mut group = Group::start(&mut command).map_err(|error| self.not_started(error))?;
        self.finish(&mut group)
    }

    /// Runs the command and returns its standard output.
    pub(crate) fn output(&self) -> Result<String> {
        self.show();
        let mut command = self.command();
        command.stdout(Stdio::piped());
        let mut group = Group::start(&mut command).map_err(|error| self.not_started(error))?;
        let mut pipe = group.child().stdout.take().expect("piped");
        let reader = thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes)
        });
        let outcome = self.finish(&mut group);
        drop(group);
        let bytes = reader.join().expect("reading does not panic");
        outcome?;
        let bytes = bytes.map_err(|error| Error::io(self.name(), error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn finish(&self, group: &mut Group) -> Result<()> {
        let logged = |(log, text): &(PathBuf, &'static str)| {
            fs::read_to_string(log).is_ok_and(|log| log.contains(text))
        };
        let stop = || {
            self.deadline.is_some_and(|deadline| Instant::now() >= deadline.at)
                || self.until.as_ref().is_some_and(logged)
        };
        let limited = self.deadline.is_some() || self.until.is_some();
        let stop = if limited { Some(&stop as &dyn Fn() -> bool) } else { None };
        match group.wait(stop).map_err(|error| Error::io(self.name(), error))? {
            Some(status) => self.judge(status),
            None => {
                if let Some((_, text)) = self.until.as_ref().filter(|until| logged(until)) {
                    return Err(Error::new(format!("{} logged {text:?}", self.name())));
                }
                let limit = self.deadline.map_or(0, |deadline| deadline.limit.as_secs());
                let message = format!("{} was ended after its {limit} seconds", self.name());
                Err(Error::with_status(message, 124)) // as timeout(1) has it
            }
        }
    }

    fn judge(&self, status: ExitStatus) -> Result<()> {
        if let Some(signal) = interrupted() {
            return Err(Error::with_status(format!("ended by signal {signal}"), 128 + signal));
        }
        if status.success() {
            return Ok(());
        }
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        Err(Error::with_status(format!("{}: {status}", self.name()), code))
    }

    fn not_started(&self, error: std::io::Error) -> Error {
        match interrupted() {
            Some(signal) => Error::with_status(format!("ended by signal {signal}"), 128 + signal),
            None => Error::io(self.name(), error),
        }
    }

    fn name(&self) -> String {
        Path::new(&self.program).file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        for (name, value) in &self.base {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        if !self.terminal {
            command.stdin(Stdio::null()); // a group in the background may not read the terminal
        }
        if let Some(log) = &self.log {
            let clone = || log.try_clone().expect("a descriptor for a log");
            command.stdout(clone()).stderr(clone());
        }
        command
    }

    fn show(&self) {
        let mut line = String::from("+");
        for (name, value) in &self.env {
            line += &format!(" {name}={}", quoted(value));
        }
        for word in [&self.program].into_iter().chain(&self.args) {
            line += " ";
            line += &quoted(word);
        }
        line += "\n";
        match &self.log {
            Some(log) => {
                let _ = (&**log).write_all(line.as_bytes());
            }
            None => {
                let _ = std::io::stdout().write_all(line.as_bytes());
            }
        }
    }
}

/// The word as a shell would read it.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_alphanumeric() || "-_=./:+,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// How long a group may take to end after SIGTERM, before it gets SIGKILL.
const GRACE: Duration = Duration::from_secs(10);
/// How often a child is looked at while its time is limited.
const LOOK: Duration = Duration::from_millis(20);

/// What the signal handlers' threads and those that run commands share.
struct Live {
    groups: BTreeSet<i32>,
    /// The signal that ends this program; no group is started after it.
    interrupted: Option<i32>,
}

static LIVE: Mutex<Live> = Mutex::new(Live { groups: BTreeSet::new(), interrupted: None });

fn live() -> MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the signal that has asked this program to end.
pub(crate) fn interrupted() -> Option<i32> {
    live().interrupted
}

/// Refuses new groups from now on, and ends those that run.
fn interrupt(signal: i32) {
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
struct Group {
    child: Child,
    id: i32,
}

impl Group {
    /// Starts `command`. The lock is held across the start: a signal that arrives now either
    /// refuses it or finds the group listed.
    fn start(command: &mut Command) -> io::Result<Group> {
        let mut live = live();
        if live.interrupted.is_some() {
            return Err(io::Error::from(io::ErrorKind::Interrupted));
        }
        let child = command.process_group(0).spawn()?;
        let id = i32::try_from(child.id()).expect("a process id fits");
        live.groups.insert(id);
        Ok(Group { child, id })
    }

    fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for the child. Once `stop` returns true the group is ended, and the result is `None`.
    fn wait(&mut self, stop: Option<&dyn Fn() -> bool>) -> io::Result<Option<ExitStatus>> {
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
    }
}

/// Signals a group. A group that has ended already is no error.
fn send(group: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(group) {
        let _ = kill_process_group(group, signal);
    }
}

/// Starts one thread per signal, which waits for its signal in a pipe.
///
/// The program does not end here: the commands that were running fail, and the caller reports that
/// and exits.
pub(crate) fn handle_signals() -> io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let (mut received, sender) = UnixStream::pair()?;
        pipe::register(signal, sender)?;
        thread::spawn(move || {
            while received.read_exact(&mut [0]).is_ok() {
                interrupt(signal);
            }
        });
    }
    Ok(())
}

/// Calls `run` for each item, on as many threads as there are CPUs, in order of the items.
///
/// All items run even if one fails. Returns the first failure.
pub(crate) fn each<T: Sync>(items: &[T], run: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let lanes = thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..lanes.min(items.len()) {
            scope.spawn(|| {
                // Ordering: Relaxed; the counter hands out indices and publishes nothing.
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(item) {
                        failure.lock().unwrap().get_or_insert(error);
                    }
                }
            });
        }
    });
    failure.into_inner().unwrap().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Cmd {
        Cmd::new("sh").arg("-c").arg(script)
    }

    #[test]
    fn a_failure_carries_the_status_of_the_command() {
        assert!(sh("exit 0").run().is_ok());
        assert_eq!(sh("exit 7").run().unwrap_err().status(), 7);
        assert_eq!(sh("kill -9 $$").run().unwrap_err().status(), 137);
        assert_eq!(Cmd::new("no-such-program").run().unwrap_err().status(), 1);
    }

    #[test]
    fn output_is_returned_and_settings_reach_the_command() {
        let said = sh("echo $A $B").env("A", "1").base_env("B", None).output().unwrap();
        assert_eq!(said, "1\n");
    }

    #[test]
    fn a_command_past_its_deadline_ends_with_its_descendants() {
        let started = Instant::now();
        let limit = Duration::from_millis(200);
        let script = "sleep 301 & echo $!; wait";
        let mut command = sh(script).command();
        command.stdout(Stdio::piped());
        let mut group = Group::start(&mut command).unwrap();
        let mut said = group.child().stdout.take().unwrap();
        let stop = || started.elapsed() > limit;
        assert!(group.wait(Some(&stop)).unwrap().is_none());
        drop(group);
        // The pipe ends only when the last process that holds it has ended.
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert!(text.trim().parse::<u32>().is_ok(), "{text}");
        assert!(started.elapsed() < Duration::from_secs(60));
        let error = sh("sleep 302").deadline(Deadline::after(limit)).run().unwrap_err();
        assert_eq!(error.status(), 124);
    }

    #[test]
    fn a_command_ends_once_its_log_has_the_text() {
        let path = std::env::temp_dir().join(format!("xtask-until-{}", std::process::id()));
        let log = Arc::new(File::create(&path).unwrap());
        let script = sh("echo one ... FAILED; sleep 303").log(log);
        let error = script.until_logged(&path, "... FAILED\n").run().unwrap_err();
        assert!(error.to_string().contains("logged"), "{error}");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted(OsStr::new("--profile")), "--profile");
        assert_eq!(quoted(OsStr::new("a b")), "'a b'");
        assert_eq!(quoted(OsStr::new("it's")), "'it'\\''s'");
        assert_eq!(quoted(OsStr::new("")), "''");
    }

    #[test]
    fn each_item_runs_once_and_a_failure_is_returned() {
        let sum = AtomicUsize::new(0);
        let add = |item: &usize| {
            sum.fetch_add(*item, Ordering::Relaxed);
            if *item == 3 { Err(Error::new("three")) } else { Ok(()) }
        };
        assert_eq!(each(&[1, 2, 3, 4], add).unwrap_err().to_string(), "three");
        assert_eq!(sum.load(Ordering::Relaxed), 10);
        assert!(each(&[1, 2], add).is_ok());
        assert!(each(&[], add).is_ok());
    }
}
