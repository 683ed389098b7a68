//! The process: a server in the background (`--fork`, `--pid-file`), and the shell command of `--run`.
//!
//! The process that the user started forks before it has threads, waits until the new process listens, and
//! ends.

use std::io::{PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::{fs, io, thread};

use nbd_protocol::TlsPolicy;
use rustix::fs::FileType;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, waitid};

/// The pipe to the process that the user started, which waits. Its end without a
/// [`report`](Self::report) tells that process that the server did not start.
pub(crate) struct Starter(PipeWriter);

/// The process in which [`Starter::fork`] returns.
pub(crate) enum Forked {
    /// The new process, which is to serve.
    Server(Starter),
    /// The process that the user started: the new one listens or has ended. This one is to exit with the code.
    Started(ExitCode),
}

impl Starter {
    /// Returns in a new process without the session and the terminal of this one, and in this process
    /// once the new one listens or has ended.
    ///
    /// # Safety
    ///
    /// The process has one thread.
    pub(crate) unsafe fn fork() -> io::Result<Forked> {
        let (mut ready, theirs) = io::pipe()?;
        // SAFETY: there is no other thread, whose locks the new process would find locked.
        let new = match unsafe { libc::fork() } {
            ..0 => return Err(io::Error::last_os_error()),
            0 => {
                rustix::process::setsid()?;
                rustix::stdio::dup2_stdin(fs::File::open("/dev/null")?)?;
                return Ok(Forked::Server(Self(theirs)));
            }
            new => Pid::from_raw(new),
        };
        drop(theirs); // then only the new process holds the pipe open
        if ready.read(&mut [0])? > 0 {
            return Ok(Forked::Started(ExitCode::SUCCESS));
        }
        let ended = rustix::process::waitpid(new, WaitOptions::empty())?;
        let code = ended.and_then(|(_, status)| status.exit_status());
        let code = code.and_then(|code| u8::try_from(code).ok());
        Ok(Forked::Started(code.map_or(ExitCode::FAILURE, ExitCode::from)))
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

/// A running command.
pub(crate) struct RunCommand(Child);

impl RunCommand {
    /// Starts a shell command. Its environment tells where the server listens (`addresses`, in the
    /// form that the server prints) and how to reach `export`, by TLS if it is required. `notify`
    /// gets a byte when the command ends.
    pub(crate) fn start(
        command: &str,
        addresses: &[String],
        export: &str,
        tls: TlsPolicy,
        notify: UnixStream,
    ) -> io::Result<Self> {
        let mut shell = Command::new("/bin/sh");
        // The sockets that these name were handed to the server.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            shell.env_remove(name);
        }
        let child = shell.args(["-c", command]).envs(variables(addresses, export, tls)).spawn()?;
        let process = Pid::from_child(&child);
        let wait = move || {
            // Leaves the exit status, so that the id names no other process before `end`.
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            let wait = || waitid(WaitId::Pid(process), ended);
            let _ = rustix::io::retry_on_intr(wait); // only this server's process waits for its child
            let _ = (&notify).write(&[0]); // fails only if the server is ending already
        };
        thread::Builder::new().name("run".into()).spawn(wait)?;
        Ok(Self(child))
    }

    /// Returns the exit code, as a shell would, if the command has ended. Otherwise asks the
    /// command to end (SIGTERM).
    pub(crate) fn end(mut self) -> Option<u8> {
        // Fails only without a child.
        let Some(status) = self.0.try_wait().ok()? else {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            return None;
        };
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
    }
}

/// Returns the variables of nbdkit's `--run` that apply here.
fn variables(addresses: &[String], export: &str, tls: TlsPolicy) -> Vec<(&'static str, String)> {
    let unix = addresses.iter().find_map(|address| address.strip_prefix("unix:"));
    let tcp = addresses.iter().find_map(|address| address.strip_prefix("tcp:"));
    let export_in_uri = escaped(export);
    let scheme = if tls == TlsPolicy::Require { "nbds" } else { "nbd" };
    let mut found = vec![("exportname", export.to_owned())];
    if let Some(path) = unix {
        found.push(("uri", format!("{scheme}+unix:///{export_in_uri}?socket={}", escaped(path))));
        found.push(("unixsocket", path.to_owned()));
    }
    if let Some(address) = tcp {
        if unix.is_none() {
            found.push(("uri", format!("{scheme}://{address}/{export_in_uri}")));
        }
        let port = address.rsplit(':').next().unwrap_or_default();
        found.push(("port", port.to_owned()));
    }
    found
}

/// Escapes every byte that has a meaning in a URI.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            escaped.push(byte.into());
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_told_where_to_connect() {
        let addresses = ["unix:/tmp/a b".into(), "tcp:127.0.0.1:10809".into()];
        let both = variables(&addresses, "x?", TlsPolicy::On);
        let expected = [
            ("exportname", "x?"),
            ("uri", "nbd+unix:///x%3F?socket=/tmp/a%20b"),
            ("unixsocket", "/tmp/a b"),
            ("port", "10809"),
        ];
        assert_eq!(both, expected.map(|(name, value)| (name, value.to_owned())));
        let uri = |addresses, tls| variables(addresses, "disk", tls).swap_remove(1).1;
        assert_eq!(uri(&addresses[1..], TlsPolicy::Off), "nbd://127.0.0.1:10809/disk");
        assert_eq!(uri(&addresses[1..], TlsPolicy::Require), "nbds://127.0.0.1:10809/disk");
        let unix = "nbds+unix:///disk?socket=/tmp/a%20b";
        assert_eq!(uri(&addresses[..], TlsPolicy::Require), unix);
    }
}
