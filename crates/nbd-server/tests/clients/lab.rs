//! One trial: its directory, its children, its deadline. And the imports of all trials.

pub(crate) use std::fs::{self, File, OpenOptions};
pub(crate) use std::io::{self, ErrorKind, Read, Write};
pub(crate) use std::net::{SocketAddr, TcpListener, TcpStream};
pub(crate) use std::os::fd::OwnedFd;
pub(crate) use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
pub(crate) use std::os::unix::net::{UnixListener, UnixStream};
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::process::{Command, Stdio};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, mpsc};
pub(crate) use std::thread;
pub(crate) use std::time::{Duration, Instant};

pub(crate) use libtest_mimic::Trial;

pub(crate) use crate::client::*;
pub(crate) use crate::image::{self, Random};
pub(crate) use crate::need::{self, Need};
pub(crate) use crate::server::{Launch, Server};

use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus};

use libtest_mimic::{Completion, Failed};

/// A trial's result.
pub(crate) type Res<T = ()> = Result<T, Failed>;

/// Fails the trial with a formatted message.
macro_rules! fail {
    ($($arg:tt)*) => { return Err(libtest_mimic::Failed::from(format!($($arg)*))) };
}
pub(crate) use fail;

/// Fails the trial unless the condition holds.
macro_rules! check {
    ($cond:expr, $($arg:tt)*) => { if !$cond { crate::lab::fail!($($arg)*) } };
}
pub(crate) use check;

/// How long a whole trial may take before its children are killed. It bounds only hangs, as
/// [`PATIENCE`] does.
const TRIAL_DEADLINE: Duration = Duration::from_secs(600);
/// How long to wait for an event that must come: no machine, however busy, is this late.
pub(crate) const PATIENCE: Duration = Duration::from_secs(100);

/// How the server does its device I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    Uring,
    /// With `--direct`, or libaio would not be used.
    Aio,
    Threads,
}

impl Backend {
    pub(crate) const ALL: [Backend; 3] = [Backend::Uring, Backend::Aio, Backend::Threads];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Backend::Uring => "uring",
            Backend::Aio => "aio",
            Backend::Threads => "threads",
        }
    }

    pub(crate) fn args(self) -> Vec<&'static str> {
        let mut args = vec!["--backend", self.name()];
        if self == Backend::Aio {
            args.push("--direct");
        }
        args
    }

    pub(crate) fn need(self) -> Option<Need> {
        match self {
            Backend::Uring => Some(Need::Uring),
            Backend::Aio => Some(Need::Aio),
            Backend::Threads => None,
        }
    }
}

pub(crate) const ALL: &[Backend] = &Backend::ALL;
/// Those that use the page cache.
pub(crate) const BUFFERED: &[Backend] = &[Backend::Uring, Backend::Threads];

/// The trials of a file.
pub(crate) fn all<const N: usize>(trials: [Vec<Trial>; N]) -> Vec<Trial> {
    trials.into_iter().flatten().collect()
}

/// Trials that run only if they are asked for.
pub(crate) fn ignored(trials: Vec<Trial>) -> Vec<Trial> {
    trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect()
}

/// One trial that does not depend on the backend.
pub(crate) fn trial(name: &str, needs: &[Need], body: fn(&Lab) -> Res) -> Vec<Trial> {
    vec![build(name.to_string(), needs.to_vec(), TRIAL_DEADLINE, body)]
}

/// The same, with another deadline.
pub(crate) fn trial_for(
    deadline: Duration,
    name: &str,
    needs: &[Need],
    body: impl FnOnce(&Lab) -> Res + Send + 'static,
) -> Vec<Trial> {
    vec![build(name.to_string(), needs.to_vec(), deadline, body)]
}

/// The trial `<backend>/<name>` for each of `backends`.
pub(crate) fn per_backend(
    backends: &[Backend],
    name: &str,
    needs: &[Need],
    body: impl Fn(&Lab, Backend) -> Res + Copy + Send + 'static,
) -> Vec<Trial> {
    per_backend_for(TRIAL_DEADLINE, backends, name, needs, body)
}

/// The same, with another deadline.
pub(crate) fn per_backend_for(
    deadline: Duration,
    backends: &[Backend],
    name: &str,
    needs: &[Need],
    body: impl Fn(&Lab, Backend) -> Res + Copy + Send + 'static,
) -> Vec<Trial> {
    let one = |&backend: &Backend| {
        let needs = backend.need().into_iter().chain(needs.iter().copied()).collect();
        let name = format!("{}/{name}", backend.name());
        build(name, needs, deadline, move |lab| body(lab, backend))
    };
    backends.iter().map(one).collect()
}

fn build(
    name: String,
    needs: Vec<Need>,
    deadline: Duration,
    body: impl FnOnce(&Lab) -> Res + Send + 'static,
) -> Trial {
    let title = name.clone();
    Trial::ignorable_test(name, move || {
        if let Some(reason) = need::first_missing(&needs) {
            if need::require_all() {
                fail!("OFFLOCK_REQUIRE_ALL=1, but {reason}");
            }
            return Ok(Completion::ignored_with(reason));
        }
        run_with_deadline(&title, deadline, body).map(|()| Completion::Completed)
    })
}

/// Runs `body` on a thread of its own; past the deadline its children are killed, which ends it.
fn run_with_deadline(
    title: &str,
    deadline: Duration,
    body: impl FnOnce(&Lab) -> Res + Send + 'static,
) -> Res {
    let children = Arc::new(Mutex::new(Vec::new()));
    let (done, result) = mpsc::channel();
    let registry = Arc::clone(&children);
    let runner = thread::Builder::new().name(title.to_string()).spawn(move || {
        let lab = Lab::new(registry)?;
        let outcome = body(&lab);
        let _ = done.send(());
        outcome
    })?;
    let late = matches!(result.recv_timeout(deadline), Err(mpsc::RecvTimeoutError::Timeout));
    if late {
        for &pid in children.lock().expect("no panic under the lock").iter() {
            signal(pid, libc::SIGKILL);
        }
    }
    let outcome = match runner.join() {
        Ok(outcome) => outcome,
        Err(panic) => Err(panic_text(&*panic).into()),
    };
    match outcome {
        Err(e) if late => {
            fail!("past {deadline:?}, children killed; then: {}", e.message().unwrap_or(""))
        }
        Ok(()) if late => fail!("took more than {deadline:?}"),
        outcome => outcome,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("with a payload that is not text"))
}

/// Asks the kernel to kill this process when the thread that started it ends.
fn die_with_parent() -> io::Result<()> {
    // SAFETY: this prctl takes plain numbers and changes nothing in memory.
    match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends `signal_number` to a process that still has this pid: a child that has not been waited for, or a
/// server whose pid file exists.
pub(crate) fn signal(pid: u32, signal_number: i32) {
    let pid = i32::try_from(pid).expect("Linux pids fit an i32");
    // SAFETY: kill takes plain numbers.
    unsafe { libc::kill(pid, signal_number) };
}

/// A finished tool.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    /// Standard output, then standard error.
    pub(crate) text: String,
}

/// A trial's own directory and the list of its children.
pub(crate) struct Lab {
    dir: tempfile::TempDir,
    children: Arc<Mutex<Vec<u32>>>,
    tools_run: std::cell::Cell<u32>,
}

impl Lab {
    fn new(children: Arc<Mutex<Vec<u32>>>) -> Res<Lab> {
        let dir = tempfile::Builder::new().prefix("nbd.").tempdir_in(need::image_root())?;
        Ok(Lab { dir, children, tools_run: std::cell::Cell::new(0) })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a child that dies with this trial: by `Tracked`'s drop, or by the kernel.
    pub(crate) fn spawn(&self, command: &mut Command) -> Res<Tracked> {
        let program = command.get_program().to_string_lossy().into_owned();
        // SAFETY: between fork and exec the closure makes one async-signal-safe system call, and
        // neither allocates nor locks.
        unsafe { command.pre_exec(die_with_parent) };
        let child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
        self.children.lock().expect("no panic under the lock").push(child.id());
        Ok(Tracked { child, children: Arc::clone(&self.children) })
    }

    /// Runs a tool to its end, or kills it after [`PATIENCE`]. Its output goes through files, so a
    /// full pipe cannot block it.
    pub(crate) fn run(&self, command: &mut Command) -> Res<Finished> {
        let number = self.tools_run.get();
        self.tools_run.set(number + 1);
        let log = self.path(&format!("tool-{number}.log"));
        let out = File::create(&log)?;
        command.current_dir(self.dir());
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let mut child = self.spawn(command)?;
        let status = child.wait_for(PATIENCE)?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        match status {
            Some(status) => Ok(Finished { status, text }),
            None => fail!("{command:?} did not end within {PATIENCE:?}\n{text}"),
        }
    }

    /// Runs a tool that must succeed; gives its output.
    pub(crate) fn run_ok(&self, command: &mut Command) -> Res<String> {
        let done = self.run(command)?;
        check!(done.status.success(), "{command:?}: {}\n{}", done.status, done.text);
        Ok(done.text)
    }
}

/// A child process: killed and waited for when dropped.
pub(crate) struct Tracked {
    child: Child,
    children: Arc<Mutex<Vec<u32>>>,
}

impl Tracked {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits up to `limit`; `None` if it still runs then.
    pub(crate) fn wait_for(&mut self, limit: Duration) -> Res<Option<ExitStatus>> {
        let deadline = Instant::now() + limit;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.forget();
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Sends a signal, unless it was already waited for.
    pub(crate) fn signal(&mut self, number: i32) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal(self.child.id(), number);
        }
    }

    /// The pid may be reused from now on: take it off the list of those to kill.
    fn forget(&self) {
        let pid = self.child.id();
        self.children.lock().expect("no panic under the lock").retain(|&p| p != pid);
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.forget();
    }
}

/// Polls `probe` until it gives a value, for up to [`PATIENCE`].
pub(crate) fn wait_until<T>(mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = probe() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Fails with `what` unless `is` becomes true within [`PATIENCE`].
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) -> Res {
    let is_so = wait_until(|| is().then_some(()));
    is_so.ok_or_else(|| format!("in vain: {what}").into())
}

/// The last `lines` lines of a text, indented, for a failure message.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    let mut out = String::new();
    for line in &all[all.len().saturating_sub(lines)..] {
        let _ = writeln!(out, "    | {line}");
    }
    out
}
