//! Listening sockets: those that the server binds, and those that another program hands over.
//!
//! A program that starts the server on demand (`systemd.socket`, `systemd-socket-activate`) has
//! bound the sockets already. The environment variable `LISTEN_PID` has the id of the process that
//! gets them, and `LISTEN_FDS` their number; they are the descriptors from 3 on.

use std::fs::Permissions;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nbd_protocol::TlsPolicy;
use socket2::{Socket, Type};
use thiserror::Error;

use crate::args::Args;

/// Why the server cannot listen.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    #[error("cannot listen on {address}: {error}")]
    Address { address: String, error: io::Error },
    #[error(
        "every machine that reaches {0} could read and change the images, because connections without TLS are \
         neither encrypted nor authenticated: --tls require --tls-certificates DIR protects them, --insecure \
         serves them all the same"
    )]
    Insecure(SocketAddr),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The descriptor of the first socket that is handed over.
const FIRST: RawFd = 3;
/// Most sockets that may be handed over. More than a server needs.
const MOST: RawFd = 256;

/// The sockets on which the server accepts connections.
pub(crate) struct Listeners(Vec<Listener>);

struct Listener {
    socket: Socket,
    /// The path of a Unix socket that the server has bound.
    _file: Option<SocketFile>,
    address: String,
    tcp: bool,
}

/// The path of a bound Unix socket. Dropping it removes the file.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode, unless `stat` failed.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Takes the path of a socket that was just bound.
    fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), identity: Self::identity(path) }
    }

    fn identity(path: &Path) -> Option<(u64, u64)> {
        path.symlink_metadata().ok().map(|meta| (meta.dev(), meta.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another server may have replaced the file with its own socket.
        if self.identity.is_some() && Self::identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listeners {
    /// Opens the sockets that were handed over, and those of the command line.
    pub(crate) fn open(args: &Args, handed_over: Vec<OwnedFd>) -> Result<Self, ListenError> {
        let mut all = Vec::new();
        for (fd, number) in handed_over.into_iter().zip(FIRST..) {
            let address = format!("descriptor {number}");
            let listener = Listener::from_fd(fd);
            let listener = listener.map_err(|error| ListenError::Address { address, error })?;
            let address = listener.socket.local_addr()?.as_socket();
            address.map_or(Ok(()), |address| admit(args, address))?;
            all.push(listener);
        }
        if let Some(path) = &args.socket {
            let (socket, file) = listen_unix(path, args.socket_mode, args.socket_group)?;
            all.push(Listener::new(socket, Some(file))?);
        }
        if let Some(address) = args.tcp {
            admit(args, address)?;
            let listen = |address| {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Listener::new(listener.into(), None)
            };
            let fail = |error| ListenError::Address { address: address.to_string(), error };
            all.push(listen(address).map_err(fail)?);
        }
        Ok(Self(all))
    }

    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns one line per socket.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|listener| listener.address.clone()).collect()
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|listener| listener.socket.as_fd())
    }

    /// Accepts one connection from each socket that has one. Does not block.
    pub(crate) fn accept(&self) -> impl Iterator<Item = io::Result<Socket>> {
        self.0.iter().filter_map(|listener| match listener.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            accepted => Some(accepted),
        })
    }
}

impl Listener {
    fn new(socket: Socket, file: Option<SocketFile>) -> io::Result<Self> {
        let address = socket.local_addr()?;
        let tcp = !address.is_unix();
        let address = match (address.as_socket(), address.as_pathname()) {
            (Some(address), _) => format!("tcp:{address}"),
            (None, Some(path)) => format!("unix:{}", path.display()),
            (None, None) => {
                let name = address.as_abstract_namespace();
                name.map_or("unix:".into(), |name| format!("unix:@{}", name.escape_ascii()))
            }
        };
        Ok(Self { socket, _file: file, address, tcp })
    }

    /// Checks a socket that was handed over: the server must be able to accept streams on it.
    fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let socket = Socket::from(fd);
        // The first fails if it is no socket.
        if !socket.is_listener()? || socket.r#type()? != Type::STREAM {
            return Err(io::Error::other("it is not a listening stream socket"));
        }
        // The process that handed it over does not accept on it any more, so the flags can be
        // changed.
        socket.set_nonblocking(true)?;
        socket.set_cloexec(true)?;
        Self::new(socket, None)
    }

    fn accept(&self) -> io::Result<Socket> {
        let (socket, _) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        if self.tcp {
            // On failure a connection is slower, or outlives its vanished client.
            let _ = socket.set_tcp_nodelay(true);
            let _ = socket.set_keepalive(true);
        }
        Ok(socket)
    }
}

/// Takes the sockets that were handed to this process. Must be called once, before the process
/// opens descriptors of its own. Ignores an environment that is meant for another process.
pub(crate) fn handed_over() -> Result<Vec<OwnedFd>, ListenError> {
    let said = |name: &str| std::env::var(name).ok();
    let mine = said("LISTEN_PID").is_some_and(|pid| pid.parse() == Ok(std::process::id()));
    if !mine {
        return Ok(vec![]);
    }
    let count = said("LISTEN_FDS").unwrap_or_default();
    let fail = |error| ListenError::Address { address: format!("LISTEN_FDS={count}"), error };
    let number = count.parse().ok().filter(|number| (0..=MOST).contains(number));
    let number: RawFd = number.ok_or_else(|| fail(io::Error::other("not a number of sockets")))?;
    let mut fds = Vec::new();
    for raw in FIRST..FIRST + number {
        // SAFETY: fcntl takes plain numbers, and F_GETFD changes nothing.
        if unsafe { libc::fcntl(raw, libc::F_GETFD) } < 0 {
            return Err(fail(io::Error::other(format!("descriptor {raw} is not open"))));
        }
        // SAFETY: the descriptor is open, and was handed to this process by its number. This
        // function is called once, before anything is opened, so nothing else owns the descriptor.
        fds.push(unsafe { OwnedFd::from_raw_fd(raw) });
    }
    Ok(fds)
}

/// Refuses an address that other machines reach without TLS, unless `--insecure` allows it.
fn admit(args: &Args, address: SocketAddr) -> Result<(), ListenError> {
    if address.ip().is_loopback() || args.tls == TlsPolicy::Require || args.insecure {
        return Ok(());
    }
    Err(ListenError::Insecure(address))
}

/// Binds a Unix socket with these permissions: a client needs that to write. Replaces the socket of a
/// server that was killed.
pub(crate) fn listen_unix(
    path: &Path,
    mode: u32,
    group: Option<u32>,
) -> Result<(Socket, SocketFile), ListenError> {
    let fail = |error| ListenError::Address { address: format!("'{}'", path.display()), error };
    // The socket of a killed server refuses connections, so it can be removed.
    let stale = path.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket())
        && UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if stale {
        std::fs::remove_file(path).map_err(fail)?;
    }
    match path.symlink_metadata() {
        Ok(meta) if meta.file_type().is_socket() => {
            return Err(fail(io::Error::other("another program listens on this socket")));
        }
        Ok(_) => {
            let reason =
                "there is a file of this name that is no socket; the server does not replace it";
            return Err(fail(io::Error::other(reason)));
        }
        Err(_) => {} // if the folder is missing, `bind` says so
    }
    // Only the owner is admitted until the group is set, so that no other user connects in between.
    let old = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(old);
    let listener = bound.map_err(fail)?;
    let file = SocketFile::new(path); // removes the file if a later step fails
    let opened = match group {
        Some(group) => std::os::unix::fs::chown(path, None, Some(group)),
        None => Ok(()),
    };
    opened
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(mode)))
        .and_then(|()| listener.set_nonblocking(true))
        .map_err(fail)?;
    Ok((listener.into(), file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_another_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listen = || listen_unix(&path, 0o600, None).unwrap();
        let (first, its) = listen();
        assert!(listen_unix(&path, 0o600, None).is_err(), "another socket listens there");
        std::fs::rename(&path, dir.path().join("old")).unwrap(); // so that its inode is not reused
        let (_second, others) = listen();
        drop((first, its));
        assert!(UnixStream::connect(&path).is_ok());
        drop(others);
        assert!(!path.exists());
        let gone = SocketFile::new(&path);
        std::fs::write(&path, b"a file").unwrap();
        drop(gone);
        assert!(path.exists());
    }
}
