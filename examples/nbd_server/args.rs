//! The command line.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use aio_reap::BackendKind;
use clap::{Parser, ValueEnum};

use crate::manual;

/// Serves disk images over the network block device protocol (NBD, fixed newstyle).
#[derive(Clone, Debug, Parser)]
#[command(name = "nbd_server", long_about = manual::ABOUT, after_long_help = manual::MORE)]
pub(crate) struct Args {
    /// Image to serve: a file or block device, as PATH or NAME=PATH. Repeatable; the first is the
    /// default export. Without NAME the file's name is the export's.
    #[arg(long = "image", value_name = "[NAME=]PATH", help_heading = "Images")]
    pub(crate) images: Vec<String>,

    /// Serve every file and block device of this folder by its name, also those that come later; but not
    /// those whose name begins with a dot, and no symbolic links. Up to 1024 of them.
    #[arg(long, value_name = "DIR", help_heading = "Images")]
    pub(crate) export_dir: Option<PathBuf>,

    /// Unlock an image of the folder that no client has had open for so many seconds; 0 keeps it locked until
    /// the server ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, help_heading = "Images")]
    pub(crate) idle: u64,

    /// Create a missing image with this size, or grow a smaller one to it; K, M, G, T are powers
    /// of 1024.
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Images")]
    pub(crate) size: Option<u64>,

    /// Listen on this Unix socket (mode 0600).
    #[arg(long, value_name = "PATH", help_heading = "Clients")]
    pub(crate) socket: Option<PathBuf>,

    /// Listen on this TCP address; a port alone binds the loopback address.
    #[arg(long, value_name = "[ADDR:]PORT", value_parser = parse_tcp, help_heading = "Clients")]
    pub(crate) tcp: Option<SocketAddr>,

    /// Refuse everything that would change an image.
    #[arg(long, help_heading = "Images")]
    pub(crate) read_only: bool,

    /// Bypass the page cache (O_DIRECT). Exports are rounded down to the minimum block.
    #[arg(long, help_heading = "Images")]
    pub(crate) direct: bool,

    /// Do not lock the images against other writers.
    #[arg(long, help_heading = "Images")]
    pub(crate) no_lock: bool,

    /// Memory for blocks that were read, so that they need not be read again, and that were written, until
    /// a FLUSH, or some seconds; K, M, G as above, 0 for none. Reads longer than 64K are not kept, nor writes
    /// longer than 16K.
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_size, help_heading = "Resources")]
    pub(crate) cache: u64,

    /// Kernel interface for disk I/O.
    #[arg(long, value_enum, default_value_t = Backend::Auto, help_heading = "Resources")]
    pub(crate) backend: Backend,

    /// Requests each worker keeps in flight in the kernel; what is above that waits, syncs and small
    /// reads before large writes.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Resources")]
    pub(crate) depth: u32,

    /// Worker threads; by default one per CPU, at most 4.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Resources")]
    pub(crate) workers: Option<u32>,

    /// Connections served at a time. At the limit, a new connection takes the place of the oldest one that has not
    /// finished its handshake; if there is none, the new connection is closed.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Clients")]
    pub(crate) max_connections: u32,

    /// Connections of one peer served at a time. A peer is a user on Unix sockets, and an address on TCP (a /64
    /// network of IPv6). By default, an address has at most half of --max-connections, and a user all of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Clients")]
    pub(crate) max_per_peer: Option<u32>,

    /// Serve the figures to Prometheus on this Unix socket (mode 0600): HTTP, `/metrics`.
    #[arg(long, value_name = "PATH", help_heading = "Figures")]
    pub(crate) metrics: Option<PathBuf>,

    /// Print sessions and statistics to standard error every so many seconds; SIGUSR1 prints them
    /// at once.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Figures")]
    pub(crate) stats: Option<u64>,
}

/// `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The first of the others that the system allows.
    Auto,
    /// io_uring.
    Uring,
    /// Linux AIO for --direct images, threads for the rest.
    Aio,
    /// Blocking system calls in a pool of threads.
    Threads,
}

impl Backend {
    /// The one to force, if any.
    pub(crate) fn kind(self) -> Option<BackendKind> {
        match self {
            Self::Auto => None,
            Self::Uring => Some(BackendKind::Uring),
            Self::Aio => Some(BackendKind::Aio),
            Self::Threads => Some(BackendKind::Threads),
        }
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.bytes().last().map(|last| last.to_ascii_uppercase()) {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        Some(b'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("'{text}' is not a size"))?;
    let size = number.checked_mul(1 << shift).filter(|&size| i64::try_from(size).is_ok());
    size.ok_or_else(|| format!("'{text}' is too large"))
}

fn parse_tcp(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if let Ok(port) = port.parse::<u16>() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    let mut found = text.to_socket_addrs().map_err(|error| format!("'{text}': {error}"))?;
    found.next().ok_or_else(|| format!("'{text}' names no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_suffixes() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1t"), Ok(1 << 40));
        for bad in ["", "M", "-1", "1.5G", "9000000T", "18446744073709551615"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_alone_is_loopback() {
        assert_eq!(parse_tcp("10809").unwrap().to_string(), "127.0.0.1:10809");
        assert_eq!(parse_tcp(":0").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(parse_tcp("0.0.0.0:1").unwrap().to_string(), "0.0.0.0:1");
        assert!(parse_tcp("nowhere").is_err());
    }
}
