//! The other end of a connection.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;

use socket2::Socket;

/// The client of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Address(SocketAddr),
    /// A process that connected to a Unix socket. Its id is 0 if it is in another PID namespace.
    User {
        user: libc::uid_t,
        process: libc::pid_t,
    },
    /// The client is gone already.
    Unknown,
}

/// The key by which the limits count connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PeerKey {
    User(libc::uid_t),
    V4(Ipv4Addr),
    /// A /64 network: one host may use any number of its addresses.
    V6([u8; 8]),
    Unknown,
}

impl Peer {
    pub(crate) fn of(socket: &Socket) -> Self {
        let Ok(address) = socket.peer_addr() else { return Self::Unknown };
        match address.as_socket() {
            Some(address) => Self::Address(address),
            None => credentials(socket).map_or(Self::Unknown, |credentials| Self::User {
                user: credentials.uid,
                process: credentials.pid,
            }),
        }
    }

    pub(crate) fn key(&self) -> PeerKey {
        match self {
            Self::User { user, .. } => PeerKey::User(*user),
            Self::Unknown => PeerKey::Unknown,
            Self::Address(address) => match address.ip().to_canonical() {
                IpAddr::V4(ip) => PeerKey::V4(ip),
                IpAddr::V6(ip) => PeerKey::V6(*ip.octets().first_chunk().expect("16 bytes")),
            },
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.pad(&address.to_string()),
            Self::User { process: pid @ 1.., .. } => f.pad(&format!("pid {pid}")),
            Self::User { .. } | Self::Unknown => f.pad("?"),
        }
    }
}

/// Returns the process and the user that connected to a Unix socket.
fn credentials(socket: &Socket) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED stores one `ucred`, of the given size, and keeps no pointer to it.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if ret == 0 { Ok(cred) } else { Err(io::Error::last_os_error()) }
}
