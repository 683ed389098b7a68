//! The shell command of `--run`, started once the server listens.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, OnceLock};
use std::thread;

use nbd_protocol::TlsPolicy;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A running command.
pub(crate) struct RunCommand {
    /// A pidfd, which cannot name another process later. `None` if the kernel has none (before
    /// 5.3).
    process: Option<OwnedFd>,
    status: Arc<OnceLock<ExitStatus>>,
}

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
        let mut child =
            shell.args(["-c", command]).envs(variables(addresses, export, tls)).spawn()?;
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok();
        let status = Arc::new(OnceLock::new());
        let ended = Arc::clone(&status);
        let wait = move || {
            if let Ok(status) = child.wait() {
                let _ = ended.set(status); // only this thread sets it
            }
            let _ = (&notify).write(&[0]); // fails only if the server is ending already
        };
        thread::Builder::new().name("run".into()).spawn(wait)?;
        Ok(Self { process, status })
    }

    /// Returns the exit code, as a shell would, if the command has ended. Otherwise asks the
    /// command to end (SIGTERM).
    pub(crate) fn end(&self) -> Option<u8> {
        let Some(status) = self.status.get() else {
            let end = |process| pidfd_send_signal(process, Signal::TERM);
            let _ = self.process.as_ref().map(end); // fails if the command has just ended
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
