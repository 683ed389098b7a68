//! Child processes: how a command is shown, started, limited in time and judged.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The failure of a command: a message, and the exit status of this program.
#[derive(Debug)]
pub(crate) struct Error {
    message: String,
    status: i32,
}

impl Error {
    /// A failed check, which ends the program with status 1.
    pub(crate) fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), status: 1 }
    }

    /// A failure that has an exit status of its own, such as that of a child process.
    pub(crate) fn with_status(message: impl Into<String>, status: i32) -> Error {
        Error { message: message.into(), status }
    }

    pub(crate) fn status(&self) -> i32 {
        self.status
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Adds to an I/O error what it is about, such as a path.
pub(crate) trait At<T> {
    fn at(self, what: impl AsRef<Path>) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, what: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Error::new(format!("{}: {error}", what.as_ref().display())))
    }
}

/// Reads a text file. The error names the path.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    fs::read_to_string(&path).at(path)
}

/// Creates a folder and those above it.
pub(crate) fn folder(path: impl AsRef<Path>) -> Result<()> {
    fs::create_dir_all(&path).at(path)
}

/// Writes a file and the folders above it. The error names the path.
pub(crate) fn write(path: impl AsRef<Path>, text: impl AsRef<[u8]>) -> Result<()> {
    path.as_ref().parent().map_or(Ok(()), folder)?;
    fs::write(&path, text).at(path)
}

/// Writes a program for the shell.
pub(crate) fn script(path: &Path, text: &str) -> Result<()> {
    write(path, format!("#!/bin/sh\n{text}\n"))?;
    fs::set_permissions(path, Permissions::from_mode(0o755)).at(path)
}

/// A command that prints itself, runs in a process group of its own, and reads nothing.
///
/// `timeout` leads the group: it kills all of it, itself as well, when the time of the command is over. It gets
/// SIGTERM, which it passes on to the group, when this program ends, by a signal or otherwise.
pub(crate) struct Cmd {
    words: Vec<OsString>,
    /// Holds the settings; started by way of `timeout`.
    command: Command,
    /// The settings that are shown with the command.
    shown: String,
    log: Option<PathBuf>,
    limit: Option<Duration>,
}

impl Cmd {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Cmd {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "timeout", "--signal=KILL"]).stdin(Stdio::null());
        let words = vec![program.as_ref().into()];
        Cmd { words, command, shown: String::from("+"), log: None, limit: None }
    }

    pub(crate) fn arg(self, arg: impl AsRef<OsStr>) -> Cmd {
        self.args([arg])
    }

    pub(crate) fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Cmd {
        self.words.extend(args.into_iter().map(|arg| arg.as_ref().into()));
        self
    }

    /// Adds the words of a text, which are separated by blanks.
    pub(crate) fn words(self, words: &str) -> Cmd {
        self.args(words.split_whitespace())
    }

    /// Sets a variable, and shows it with the command.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Cmd {
        self.shown += &format!(" {name}={}", quoted(value.as_ref()));
        self.base_env(name, Some(value.as_ref().into()))
    }

    /// Sets a variable, or removes it, without showing it.
    pub(crate) fn base_env(mut self, name: &str, value: Option<OsString>) -> Cmd {
        match value {
            Some(value) => self.command.env(name, value),
            None => self.command.env_remove(name),
        };
        self
    }

    pub(crate) fn dir(mut self, dir: &Path) -> Cmd {
        self.command.current_dir(dir);
        self
    }

    /// Sends the output, and the line that shows the command, to a file of its own.
    pub(crate) fn log(mut self, log: impl Into<PathBuf>) -> Cmd {
        self.log = Some(log.into());
        self
    }

    /// Ends the command after this time.
    pub(crate) fn limit(mut self, limit: Duration) -> Cmd {
        self.limit = Some(limit);
        self
    }

    /// Runs the command. An exit status other than 0 is an error.
    pub(crate) fn run(self) -> Result<()> {
        self.finish(false).map(drop)
    }

    /// Runs the command and returns its standard output.
    pub(crate) fn output(self) -> Result<String> {
        self.finish(true)
    }

    fn finish(mut self, captured: bool) -> Result<String> {
        let line = self.line();
        let name = Path::new(&self.words[0]).file_name().unwrap_or_default().to_owned();
        if let Some(path) = &self.log {
            let mut log = File::create(path).at(path)?;
            log.write_all(line.as_bytes()).at(path)?;
            self.command.stdout(log.try_clone().at(path)?).stderr(log);
        } else {
            let _ = io::stdout().write_all(line.as_bytes());
        }
        // A file instead of a pipe: a process that outlives the command may keep the pipe open, and the read would
        // not end.
        let mut said = tempfile::tempfile().at(&name)?;
        if captured {
            self.command.stdout(said.try_clone().at(&name)?);
        }
        let began = Instant::now();
        let part = *END.lock().unwrap_or_else(PoisonError::into_inner);
        let part = part.map(|end| end.saturating_duration_since(began));
        let limit = self.limit.into_iter().chain(part).min();
        // Without a limit it is 0, which `timeout` takes for none.
        let seconds = limit.map_or(0.0, |limit| limit.as_secs_f64().max(0.001));
        self.command.arg(seconds.to_string()).args(&self.words);
        let status = self.command.status().at(&name)?;
        if status.success() {
            let mut text = Vec::new();
            said.rewind().and_then(|()| said.read_to_end(&mut text)).at(&name)?;
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        if limit.is_some_and(|limit| began.elapsed() >= limit) {
            let seconds = began.elapsed().as_secs();
            let message =
                format!("{} was ended after {seconds} seconds, its time was over", name.display());
            return Err(Error::with_status(message, 124)); // as timeout(1) has it
        }
        Err(Error::with_status(format!("{}: {status}", name.display()), code))
    }

    /// The line that shows the command.
    fn line(&self) -> String {
        let words = self.words.iter().map(|word| quoted(word));
        [self.shown.clone()].into_iter().chain(words).collect::<Vec<_>>().join(" ") + "\n"
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

/// The time at which every command must have ended.
static END: Mutex<Option<Instant>> = Mutex::new(None);

/// Ends each command that still runs at this time, whatever its own limit is.
pub(crate) fn end_all_at(end: Instant) {
    *END.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
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

/// Runs a command that others run beside, and prints its output once it has ended.
///
/// A failure quotes from the output: what other commands print later may be all that is kept of it.
pub(crate) fn logged(folder: &Path, cmd: Cmd) -> Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Ordering: Relaxed; the counter makes the names of files differ and publishes nothing.
    let path = folder.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    let outcome = cmd.log(&path).run();
    let said = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
    let _ = io::stdout().lock().write_all(said.as_bytes());
    outcome
        .map_err(|error| Error::with_status(format!("{error}\n{}", quote(&said)), error.status()))
}

/// The command's line, the lines that name a failure each with the line behind it, and the last
/// line: at most twelve.
fn quote(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    let marks = ["panicked at", "ERROR: ", "SUMMARY: ", "Base64: ", "FAILED"];
    let failed = (0..lines.len()).filter(|at| marks.iter().any(|mark| lines[*at].contains(mark)));
    let mut chosen: Vec<usize> = failed.flat_map(|at| [at, at + 1]).take(10).collect();
    chosen.extend([0, lines.len().saturating_sub(1)]);
    chosen.retain(|at| *at < lines.len());
    chosen.sort_unstable();
    chosen.dedup();
    chosen.iter().map(|at| lines[*at]).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::scratch;

    #[test]
    fn a_command_past_its_time_ends_with_its_descendants() {
        // One in the background ignores SIGTERM.
        let script = "(trap '' TERM; sleep 301) & echo $! >pid.new; mv pid.new pid; wait";
        let scratch = scratch().unwrap();
        // On a busy machine the shell may need longer than the limit until it has written the file.
        let pid = (0..6).find_map(|attempt| {
            let limited = Cmd::new("sh").arg("-c").arg(script).dir(scratch.path());
            let limited = limited.limit(Duration::from_secs(1 << attempt));
            assert_eq!(limited.output().unwrap_err().status(), 124);
            read(scratch.path().join("pid")).ok()
        });
        let stat = format!("/proc/{}/stat", pid.expect("the shell writes the file").trim());
        // It has ended, whether or not a parent has waited for it.
        let ended = || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z"));
        let began = Instant::now();
        while !ended() {
            assert!(began.elapsed() < Duration::from_secs(60), "it still runs");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
