//! The options of the command line.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use aio_reap::BackendKind;
use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use nbd_protocol::TlsPolicy;

use crate::image_spec::{ImageSpec, parse_size};

/// What `--help` says before the options and after them.
const MANUAL: [&str; 2] = [
    include_str!("manual/about.txt").trim_ascii_end(),
    include_str!("manual/more.txt").trim_ascii_end(),
];

/// Serves disk images over the network block device protocol (NBD, fixed newstyle).
#[derive(Clone, Debug, Parser)]
#[command(name = "nbd_server", version, long_about = MANUAL[0], after_long_help = MANUAL[1])]
pub(crate) struct Args {
    /// Image to serve: a file, a block device, or the URI of an export.
    ///
    /// Repeatable; the first is the default export. Without NAME the file's name is the export's. Options: readonly, offset=BYTES and size=BYTES, for a part of the file. A
    /// comma of PATH is written twice. In place of PATH an NBD URI names an export of another server:
    /// nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH, and with TLS
    /// nbds://HOST[:PORT]/EXPORT?tls-certificates=DIR.
    #[arg(long = "image", value_name = "[NAME=]PATH[,OPTION..]", help_heading = "Images")]
    pub(crate) images: Vec<ImageSpec>,

    /// Serve every file and block device of this folder by its name.
    ///
    /// Also those that come later; but not those whose name begins with a dot, and no symbolic links. Up to 1024 are open
    /// at a time.
    #[arg(long, value_name = "DIR", help_heading = "Images")]
    pub(crate) export_dir: Option<PathBuf>,

    /// Unlock an image of the folder that no client has open after this.
    ///
    /// 0 keeps it locked until the server ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, help_heading = "Images")]
    pub(crate) idle: u64,

    /// How long requests wait for another server that is gone.
    ///
    /// Its export is an image here, and requests fail after that time. What it had not made durable is sent to it again
    /// when it is back.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Images")]
    pub(crate) reconnect: u64,

    /// Create a missing image with this size, or grow a smaller one to it.
    ///
    /// K, M, G, T are powers of 1024.
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "Images")]
    pub(crate) size: Option<u64>,

    /// Listen on this Unix socket.
    #[arg(long, value_name = "PATH", help_heading = "Clients")]
    pub(crate) socket: Option<PathBuf>,

    /// Permissions of the --socket, in octal. A client needs the write permission.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode, help_heading = "Clients")]
    pub(crate) socket_mode: u32,

    /// Group of the --socket, by name or number.
    #[arg(long, value_name = "GROUP", requires = "socket", value_parser = parse_group, help_heading = "Clients")]
    pub(crate) socket_group: Option<u32>,

    /// Listen on this TCP address; a port alone binds the loopback address.
    #[arg(long, value_name = "[ADDR:]PORT", value_parser = parse_tcp, help_heading = "Clients")]
    pub(crate) tcp: Option<SocketAddr>,

    /// Whether connections are over TLS: only if the client wants it (on), or all of them (require).
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = tls_policies(), help_heading = "Clients")]
    pub(crate) tls: TlsPolicy,

    /// Folder of the certificates.
    ///
    /// These are server-cert.pem, server-key.pem, and ca-cert.pem, by which clients are verified. If
    /// ca-crl.pem is there, the certificates that it revokes are refused.
    #[arg(long, value_name = "DIR", help_heading = "Clients")]
    pub(crate) tls_certificates: Option<PathBuf>,

    /// Admit clients without a certificate; ca-cert.pem is not needed.
    #[arg(long, requires = "tls_certificates", help_heading = "Clients")]
    pub(crate) tls_no_verify_peer: bool,

    /// Serve a TCP address that other machines reach without requiring TLS.
    #[arg(long, help_heading = "Clients")]
    pub(crate) insecure: bool,

    /// Refuse everything that would change an image.
    #[arg(long, help_heading = "Images")]
    pub(crate) read_only: bool,

    /// Bypass the page cache (O_DIRECT). Exports are rounded down to the minimum block.
    #[arg(long, help_heading = "Images")]
    pub(crate) direct: bool,

    /// Do not lock the images against other writers.
    #[arg(long, help_heading = "Images")]
    pub(crate) no_lock: bool,

    /// Memory for blocks; 0 for none.
    ///
    /// It keeps blocks that were read, so that they need not be read again, and that were written, until a FLUSH, or
    /// some seconds; K, M, G as above, 0 for none. Reads longer than 64K are not kept, nor writes
    /// longer than 16K.
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_size, help_heading = "Resources")]
    pub(crate) cache: u64,

    /// Kernel interface for disk I/O.
    #[arg(long, default_value = "auto", value_parser = backends(), help_heading = "Resources")]
    pub(crate) backend: Backend,

    /// Requests each worker keeps in flight in the kernel.
    ///
    /// What is above that waits, syncs and small reads before large writes.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Resources")]
    pub(crate) depth: u32,

    /// Worker threads; by default one per CPU, at most 4.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Resources")]
    pub(crate) workers: Option<u32>,

    /// Connections served at a time.
    ///
    /// At the limit, a new connection takes the place of the oldest one that has not
    /// finished its handshake; if there is none, the new connection is closed.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Clients")]
    pub(crate) max_connections: u32,

    /// Connections of one peer served at a time.
    ///
    /// A peer is a user on Unix sockets, and an address on TCP (a /64
    /// network of IPv6). By default, an address has at most half of --max-connections, and a user all of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Clients")]
    pub(crate) max_per_peer: Option<u32>,

    /// Go on in the background: the command ends when the server listens.
    ///
    /// What the server prints later goes nowhere.
    #[arg(long, help_heading = "Process")]
    pub(crate) fork: bool,

    /// Write the server's process id to this file.
    ///
    /// Once it listens; the file is removed at the end.
    #[arg(long, value_name = "PATH", help_heading = "Process")]
    pub(crate) pid_file: Option<PathBuf>,

    /// Run this command of the shell, and end with it and its exit code.
    ///
    /// It runs once the server listens. Its variables uri,
    /// unixsocket, port and exportname say how to connect. Without --socket and --tcp, to a socket for the command
    /// alone.
    #[arg(long, value_name = "COMMAND", conflicts_with = "fork", help_heading = "Process")]
    pub(crate) run: Option<String>,

    /// End when the last client that has finished its handshake disconnects.
    #[arg(long, help_heading = "Process")]
    pub(crate) exit_with_last: bool,

    /// Without an image: print the server's own figures behind those of the client.
    #[arg(long, conflicts_with_all = ["images", "export_dir"], help_heading = "Figures")]
    pub(crate) verbose: bool,

    /// Serve the figures to Prometheus on this Unix socket (mode 0600): HTTP, `/metrics`.
    #[arg(long, value_name = "PATH", help_heading = "Figures")]
    pub(crate) metrics: Option<PathBuf>,

    /// Print sessions and statistics to standard error so often.
    ///
    /// Every so many seconds; SIGUSR1 prints them at once.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Figures")]
    pub(crate) stats: Option<u64>,
}

/// The backend of `--backend`; none if the engine chooses. (With `Option` itself, clap would expect a backend.)
type Backend = Option<BackendKind>;

fn backends() -> impl TypedValueParser<Value = Backend> {
    let kinds = [
        ("auto", "The first of the others that the system allows", None),
        ("uring", "io_uring", Some(BackendKind::Uring)),
        ("aio", "Linux AIO for --direct images, threads for the rest", Some(BackendKind::Aio)),
        ("threads", "Blocking system calls in a pool of threads", Some(BackendKind::Threads)),
    ];
    PossibleValuesParser::new(kinds.map(|(name, help, _)| PossibleValue::new(name).help(help)))
        .map(move |word| kinds.into_iter().find(|(name, ..)| *name == word)?.2)
}

fn tls_policies() -> impl TypedValueParser<Value = TlsPolicy> {
    PossibleValuesParser::new(["off", "on", "require"]).map(|word| match word.as_str() {
        "off" => TlsPolicy::Off,
        "on" => TlsPolicy::On,
        _ => TlsPolicy::Require,
    })
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|&mode| mode <= 0o777);
    mode.ok_or_else(|| format!("'{text}' is not an octal mode between 0 and 777"))
}

/// Returns the number of a group. A name is looked up as the system is configured to (`getgrnam_r`).
fn parse_group(text: &str) -> Result<u32, String> {
    let number = text.parse().ok();
    let number = number.or_else(|| uzers::get_group_by_name(text).map(|group| group.gid()));
    number.ok_or_else(|| format!("there is no group '{text}'"))
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
    fn modes_are_octal_and_groups_have_names_or_numbers() {
        assert_eq!(parse_mode("0660"), Ok(0o660));
        for bad in ["", "8", "1000", "-1", "rw"] {
            assert!(parse_mode(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_group("65534"), Ok(65534));
        assert_eq!(parse_group("root"), Ok(0));
        assert!(parse_group("no such group").unwrap_err().contains("no such group"));
        assert!(parse_group("a\0b").is_err());
    }

    #[test]
    fn a_port_alone_is_loopback() {
        assert_eq!(parse_tcp("10809").unwrap().to_string(), "127.0.0.1:10809");
        assert_eq!(parse_tcp(":0").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(parse_tcp("0.0.0.0:1").unwrap().to_string(), "0.0.0.0:1");
        assert!(parse_tcp("nowhere").is_err());
    }
}
