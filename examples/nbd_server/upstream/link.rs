//! The socket of a connection to the upstream: it connects, negotiates, and transfers bytes, with
//! or without TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nbd_protocol::{ClientHandshake, ClientStep, Connected, HeaderStyle, TlsPolicy};
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::address::{Address, Endpoint};
use super::error::UpstreamError;
use super::secure::Secure;

/// Timeout to connect, and for each step of the handshake. A guess.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for the server to close a dropped connection. A guess: a live server carries out
/// what it has received, and then closes.
const DRAIN: Duration = Duration::from_secs(1);

/// A socket, with TLS if the address asks for it.
pub(super) struct Link {
    socket: Socket,
    secure: Option<Secure>,
}

impl Link {
    /// Connects and negotiates the export. Blocks.
    ///
    /// Without `extents`, a connection to a local server uses simple replies: servers send a chunk
    /// with more system calls. Over a network chunks are cheaper, because they describe holes
    /// without sending zeros.
    ///
    /// # Errors
    ///
    /// Any failure; the connection is closed.
    pub(super) fn connect(
        address: &Address,
        extents: bool,
    ) -> Result<(Self, Connected), UpstreamError> {
        let socket = match &address.endpoint {
            Endpoint::Unix(path) => {
                let to = SockAddr::unix(path).map_err(UpstreamError::Connect)?;
                connect_to(Domain::UNIX, &to)?
            }
            Endpoint::Tcp { host, port } => {
                let found = (host.as_str(), *port).to_socket_addrs();
                let mut last = UpstreamError::Connect(io::ErrorKind::AddrNotAvailable.into());
                let mut connected = None;
                for to in found.map_err(UpstreamError::Connect)? {
                    match connect_to(Domain::for_address(to), &to.into()) {
                        Ok(socket) => {
                            connected = Some(socket);
                            break;
                        }
                        Err(error) => last = error,
                    }
                }
                let socket = connected.ok_or(last)?;
                let keepalive = TcpKeepalive::new().with_time(PATIENCE).with_interval(PATIENCE);
                let set = socket.set_tcp_nodelay(true);
                set.and_then(|()| socket.set_tcp_keepalive(&keepalive))
                    .map_err(UpstreamError::Connect)?;
                socket
            }
        };
        let mut link = Self { socket, secure: None };
        let connected = link.negotiate(address, extents)?;
        link.socket.set_nonblocking(true).map_err(UpstreamError::Socket)?;
        Ok((link, connected))
    }

    fn negotiate(&mut self, address: &Address, extents: bool) -> Result<Connected, UpstreamError> {
        let socket = &self.socket;
        socket.set_read_timeout(Some(PATIENCE)).map_err(UpstreamError::Socket)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(UpstreamError::Socket)?;
        let policy = if address.tls.is_some() { TlsPolicy::Require } else { TlsPolicy::Off };
        let is_near = matches!(address.endpoint, Endpoint::Unix(_));
        let mut handshake = match extents || !is_near {
            true => ClientHandshake::new(&address.export, HeaderStyle::Extended).ask_allocation(),
            false => ClientHandshake::new(&address.export, HeaderStyle::Simple),
        }
        .tls(policy);
        let (mut input, mut out) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (used, step) = handshake.receive(&input, &mut out)?;
            input.drain(..used);
            self.write_all(&out).map_err(UpstreamError::Socket)?;
            out.clear();
            match step {
                ClientStep::More => {}
                ClientStep::StartTls => {
                    let tls = address.tls.as_ref();
                    let tls = tls.ok_or(UpstreamError::Tls("not asked for".into()))?;
                    self.secure =
                        Some(Secure::start(&self.socket, tls).map_err(UpstreamError::Tls)?);
                    continue;
                }
                ClientStep::Connected(connected) if input.is_empty() => return Ok(connected),
                // No request was sent, so these bytes are no reply.
                _ => return Err(UpstreamError::UnknownCookie(0)),
            }
            if Instant::now() > deadline {
                return Err(UpstreamError::Socket(io::ErrorKind::TimedOut.into()));
            }
            let mut part = [0; 4096];
            let late = |error: io::Error| match error.kind() {
                ErrorKind::WouldBlock => ErrorKind::TimedOut.into(), // the socket's timeout
                _ => error,
            };
            match self.read(&mut part).map_err(|error| UpstreamError::Socket(late(error)))? {
                0 => return Err(UpstreamError::Closed),
                count => input.extend_from_slice(&part[..count]),
            }
        }
    }

    /// Closes the sending side, and waits until the server has closed its side. After that the
    /// server carries out no more requests of this connection. Waits for [`DRAIN`] at most.
    pub(super) fn drain(self) {
        let Self { socket, .. } = self;
        let deadline = Instant::now() + DRAIN;
        let ended = socket.shutdown(Shutdown::Write).and_then(|()| socket.set_nonblocking(false));
        let mut part = [0; 4096];
        while ended.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match (&socket).read(&mut part) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    /// Returns whether the link uses TLS, so that a short read does not mean that no more is
    /// available.
    pub(super) fn is_secure(&self) -> bool {
        self.secure.is_some()
    }

    /// Returns whether TLS holds bytes that the socket has not taken.
    pub(super) fn holds_output(&self) -> bool {
        self.secure.as_ref().is_some_and(Secure::holds_output)
    }
}

fn connect_to(domain: Domain, to: &SockAddr) -> Result<Socket, UpstreamError> {
    let socket = Socket::new(domain, Type::STREAM, None).map_err(UpstreamError::Connect)?;
    socket.connect_timeout(to, PATIENCE).map_err(UpstreamError::Connect)?;
    Ok(socket)
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Read for Link {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.secure {
            None => (&self.socket).read(buf),
            Some(secure) => secure.read(&self.socket, buf),
        }
    }
}

impl Write for Link {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.secure {
            None => (&self.socket).write(buf),
            Some(secure) => secure.write(&self.socket, buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.secure.as_mut().map_or(Ok(()), |secure| secure.flush(&self.socket))
    }
}
