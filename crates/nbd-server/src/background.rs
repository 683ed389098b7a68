//! A server in the background: `--fork`, `--pid-file`.
//!
//! The process that the user started runs the same command line again, waits until the new process
//! listens, and ends. A process never forks while it has threads.

use std::fs;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use rustix::fs::FileType;
use rustix::io::FdFlags;

/// The environment variable of the background process with the descriptor number of the pipe.
const READY: &str = "OFFLOCK_READY_FD";

/// Runs this program again, and waits until the new process listens or has ended. Returns the exit
/// code for the process that the user started.
pub(crate) fn start() -> io::Result<ExitCode> {
    let (mut ready, theirs) = io::pipe()?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?; // so that the new process inherits it
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(READY, theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .spawn()?;
    drop(theirs); // then only the new process holds the pipe open
    if ready.read(&mut [0])? > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let code = child.wait()?.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// The pipe to the process that the user started, which waits. Dropping it without
/// [`report`](Self::report) tells that process that the server did not start.
pub(crate) struct Starter(PipeWriter);

impl Starter {
    /// Returns `None` in the process that the user started. In the background process leaves the
    /// session and the terminal of that one. Must be called once, before the process has threads or
    /// opens descriptors.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let Some(number) = std::env::var_os(READY) else { return Ok(None) };
        // SAFETY: there is no other thread, which could read the environment.
        unsafe { std::env::remove_var(READY) };
        let number = number.to_str().and_then(|number| number.parse::<RawFd>().ok());
        let number = number.filter(|&number| number > 2);
        let wrong = || io::Error::other(format!("{READY} is set, but names no pipe"));
        let number = number.ok_or_else(wrong)?;
        // SAFETY: fcntl takes plain numbers, and F_GETFD changes nothing.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
            return Err(wrong());
        }
        // SAFETY: the descriptor is open, and this process has opened none yet, so nothing else
        // owns it.
        let pipe = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&pipe, FdFlags::CLOEXEC)?;
        rustix::process::setsid()?;
        Ok(Some(Self(pipe.into())))
    }

    /// Reports that the server listens. Later output is discarded, because standard output and
    /// error belong to the process that the user started; but a file keeps the log, because no
    /// program waits for its end.
    pub(crate) fn report(mut self) -> io::Result<()> {
        let null = fs::OpenOptions::new().write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdout(null.as_fd())?;
        let error = rustix::fs::fstat(io::stderr())?;
        if !FileType::from_raw_mode(error.st_mode).is_file() {
            rustix::stdio::dup2_stderr(null.as_fd())?;
        }
        self.0.write_all(&[1])
    }
}

/// The file with the server's process id. Dropping it removes the file, unless the content has
/// changed.
pub(crate) struct PidFile {
    path: PathBuf,
    content: String,
}

impl PidFile {
    /// Writes the file. Replaces the file of another server, but no file with other content, which
    /// may be an image that was named by mistake. The error names the file.
    pub(crate) fn create(path: &Path) -> Result<Self, String> {
        let content = format!("{}\n", std::process::id());
        let written = match fs::metadata(path) {
            Ok(meta) if !meta.is_file() || !has_process_id(path, meta.len()) => {
                Err(io::Error::other("there is another file of this name, which has no process id"))
            }
            _ => fs::write(path, &content),
        };
        match written {
            Ok(()) => Ok(Self { path: path.to_owned(), content }),
            Err(error) => Err(format!("cannot write the pid file '{}': {error}", path.display())),
        }
    }
}

/// Returns whether a file of `len` bytes is empty, or has one number in one line.
fn has_process_id(path: &Path, len: u64) -> bool {
    const LONGEST: u64 = 24; // a number of 64 bits, and the end of its line
    len == 0
        || len <= LONGEST
            && fs::read_to_string(path).is_ok_and(|text| text.trim_end().parse::<u64>().is_ok())
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if fs::read_to_string(&self.path).is_ok_and(|found| found == self.content) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
