//! The options of the command line.

use std::env;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use aio_reap::BackendKind;
use clap::builder::{
    NonEmptyStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser,
};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use nbd_protocol::TlsPolicy;

use crate::blocks::BLOCK;
use crate::image_spec::ImageSpec;
use crate::values::parse_size;

/// The texts that `--help` prints before and after the options.
const MANUAL: [&str; 2] = [
    include_str!("manual/about.txt").trim_ascii_end(),
    include_str!("manual/more.txt").trim_ascii_end(),
];

/// Serves disk images over the network block device protocol (NBD, fixed newstyle).
#[derive(Clone, Debug, Parser)]
#[command(name = "offlock-nbd", version, long_about = MANUAL[0], after_long_help = MANUAL[1])]
pub(crate) struct Args {
    /// Image to serve: a file or a block device.
    ///
    /// Repeatable; the first image is the default export. NAME is the name of the export, by
    /// default the name of the file. The option readonly refuses commands that change the image. Write a
    /// comma of PATH twice. A server built with the feature objects also serves
    /// volumes on object stores: s3://BUCKET/VOLUME?size=BYTES, also gs, az and file.
    #[arg(long = "image", value_name = "[NAME=]PATH[,readonly]", help_heading = "Images")]
    pub(crate) images: Vec<ImageSpec>,

    /// Serve each file and block device of this folder as an export with its name.
    ///
    /// Includes files that are added later. Leaves out symbolic links and names that begin with a
    /// dot. At most 1024 files are open at a time.
    #[arg(long, value_name = "DIR", help_heading = "Images")]
    pub(crate) export_dir: Option<PathBuf>,

    /// Create a missing image with this size, or grow a smaller image to it.
    ///
    /// K, M, G, T are powers of 1024.
    #[arg(long, value_name = "BYTES", value_parser = parse_image_size, help_heading = "Images")]
    pub(crate) size: Option<u64>,

    /// Listen on this Unix socket.
    #[arg(long, value_name = "PATH", help_heading = "Clients")]
    pub(crate) socket: Option<PathBuf>,

    /// Permissions of the --socket, in octal. A client needs write permission.
    #[arg(long, value_name = "MODE", default_value = "600", requires = "socket", value_parser = parse_mode, help_heading = "Clients")]
    pub(crate) socket_mode: u32,

    /// Group of the --socket, by name or number.
    #[arg(long, value_name = "GROUP", requires = "socket", value_parser = parse_group, help_heading = "Clients")]
    pub(crate) socket_group: Option<u32>,

    /// Listen on this TCP address; a port alone means the loopback address.
    #[arg(long, value_name = "[ADDR:]PORT", value_parser = parse_tcp, help_heading = "Clients")]
    pub(crate) tcp: Option<SocketAddr>,

    /// Whether clients may (on) or must (require) use TLS.
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = tls_policies(), help_heading = "Clients")]
    pub(crate) tls: TlsPolicy,

    /// Folder of the TLS certificates.
    ///
    /// The server identifies itself with server-cert.pem and server-key.pem, and verifies clients
    /// against ca-cert.pem. It refuses the certificates that ca-crl.pem revokes, if that file
    /// exists.
    #[arg(long, value_name = "DIR", help_heading = "Clients")]
    pub(crate) tls_certificates: Option<PathBuf>,

    /// Admit clients without a certificate; ca-cert.pem is then not needed.
    #[arg(long, requires = "tls_certificates", help_heading = "Clients")]
    pub(crate) tls_no_verify_peer: bool,

    /// Allow a TCP address that other machines reach without --tls require.
    #[arg(long, help_heading = "Clients")]
    pub(crate) insecure: bool,

    /// Refuse all commands that change an image.
    #[arg(long, help_heading = "Images")]
    pub(crate) read_only: bool,

    /// Bypass the page cache (O_DIRECT). Sizes of exports are rounded down to whole minimum blocks.
    #[arg(long, help_heading = "Images")]
    pub(crate) direct: bool,

    /// Take volumes over from servers that have them open, which end.
    #[cfg(feature = "objects")]
    #[arg(long, help_heading = "Images")]
    pub(crate) takeover: bool,

    /// Do not lock the images against other programs.
    #[arg(long, help_heading = "Images")]
    pub(crate) no_lock: bool,

    /// Memory for cached blocks; 0 disables the cache.
    ///
    /// Keeps blocks that were read, and written blocks until a FLUSH or for some seconds. Reads
    /// longer than 64K and writes longer than 16K are not kept. K, M, G, T are powers of 1024.
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_cache, help_heading = "Resources")]
    pub(crate) cache: u64,

    /// Kernel interface for disk I/O.
    #[arg(long, default_value = "auto", value_parser = backends(), help_heading = "Resources")]
    pub(crate) backend: Backend,

    /// Most requests that each worker has in flight in the kernel.
    ///
    /// Further requests wait: small reads go first, large writes last. At most 16 flushes, trims and
    /// queries of holes are in progress beside these.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Resources")]
    pub(crate) depth: u32,

    /// Number of worker threads; by default one per CPU, at most 4.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Resources")]
    pub(crate) workers: Option<u32>,

    /// Most connections at a time.
    ///
    /// At the limit, a new connection waits for a free place for 5 seconds. Then it takes the place of
    /// the oldest one that has not finished its handshake; if there is none, it is closed. An address
    /// on TCP (a /64 network of IPv6) may have half of them.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536), help_heading = "Clients")]
    pub(crate) max_connections: u32,

    /// Run in the background: the command returns once the server listens.
    ///
    /// Later output of the server is discarded, except for a log in a file (2>>FILE).
    #[arg(long, help_heading = "Process")]
    pub(crate) fork: bool,

    /// Write the server's process id to this file once the server listens.
    ///
    /// The server removes the file when it ends.
    #[arg(long, value_name = "PATH", help_heading = "Process")]
    pub(crate) pid_file: Option<PathBuf>,

    /// Run this shell command, and exit with its exit code when it ends.
    ///
    /// The command starts once the server listens. Its variables uri, unixsocket, port and
    /// exportname tell how to connect. Without --socket and --tcp the server listens on a private
    /// socket.
    #[arg(long, value_name = "COMMAND", conflicts_with = "fork", value_parser = NonEmptyStringValueParser::new(), help_heading = "Process")]
    pub(crate) run: Option<String>,

    /// Exit when the last client disconnects. A client counts once it has finished its handshake.
    #[arg(long, help_heading = "Process")]
    pub(crate) exit_with_last: bool,

    /// Serve metrics for Prometheus on this Unix socket (mode 0600), by HTTP at `/metrics`.
    #[arg(long, value_name = "PATH", help_heading = "Figures")]
    pub(crate) metrics: Option<PathBuf>,
}

/// The options that the demonstration has.
const DEMO: [&str; 5] = ["size", "cache", "backend", "depth", "workers"];

impl Args {
    /// Parses the command line of the process, and ends the process with a message if it is wrong.
    pub(crate) fn parse_or_exit() -> Self {
        let parsed = Self::from_words(std::env::args_os());
        parsed.unwrap_or_else(|error| error.exit())
    }

    /// Parses a command line, and refuses options that could have no effect.
    fn from_words<T: Into<OsString> + Clone>(
        words: impl IntoIterator<Item = T>,
    ) -> Result<Self, clap::Error> {
        let mut command = Self::command();
        let matches = command.try_get_matches_from_mut(words).map_err(without_credentials)?;
        let args = Self::from_arg_matches(&matches)?;
        let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let images = &args.images;
        let (kind, reason) = if args.backend == Some(BackendKind::Aio) && !args.direct {
            let reason = "--backend aio needs --direct: all requests of other images go to threads";
            (ErrorKind::MissingRequiredArgument, reason.into())
        } else if images.is_empty() && args.export_dir.is_none() {
            let ids = matches.ids().map(|id| id.as_str());
            // A group of all options is among the ids.
            let options = ids.filter(|id| command.get_arguments().any(|arg| arg.get_id() == id));
            let given = options.filter(|id| is_given(id)).find(|id| !DEMO.contains(id));
            let Some(option) = given else { return Ok(args) };
            let option = option.replace('_', "-");
            let reason = format!("--{option} needs something to serve: --image or --export-dir");
            (ErrorKind::MissingRequiredArgument, reason)
        } else if args.size.is_some() && images.is_empty() {
            let reason = "--size creates or grows an --image, and there is none";
            (ErrorKind::MissingRequiredArgument, reason.into())
        } else if args.size.is_some()
            && (args.read_only || images.iter().all(|image| image.read_only))
        {
            let reason = "--size creates or grows an image, and all of them are only read";
            (ErrorKind::ArgumentConflict, reason.into())
        } else if args.insecure && args.tcp.is_none() && env::var_os("LISTEN_PID").is_none() {
            let reason = "--insecure is about a TCP address, and there is no --tcp";
            (ErrorKind::MissingRequiredArgument, reason.into())
        } else if args.metrics.is_some() && args.metrics == args.socket {
            let reason = "--metrics and --socket are the same path";
            (ErrorKind::ArgumentConflict, reason.into())
        } else {
            return Ok(args);
        };
        Err(command.error(kind, reason))
    }
}

/// Returns the error of a command line without the credentials of an address that it quotes, such as
/// `s3://KEY:SECRET@BUCKET/VOLUME`: standard error may be a log.
pub(crate) fn without_credentials(error: clap::Error) -> clap::Error {
    let text = error.to_string();
    // Each parser of a value quotes it, too. The text of --help is no error.
    let quoted = text.split_once("://").filter(|_| error.use_stderr());
    let Some((before, rest)) = quoted else { return error };
    let Some((_, behind)) = rest.rsplit_once('@') else { return error };
    let before = before.trim_start_matches("error: "); // which `raw` writes
    clap::Error::raw(error.kind(), format!("{before}://***@{behind}"))
}

/// The backend of `--backend`; `None` lets the engine choose. (clap would make an option of type
/// `Option` optional.)
type Backend = Option<BackendKind>;

fn backends() -> impl TypedValueParser<Value = Backend> {
    let kinds = [
        ("auto", "The first of the following that the system allows", None),
        ("uring", "io_uring", Some(BackendKind::Uring)),
        ("aio", "Linux AIO, of --direct images only", Some(BackendKind::Aio)),
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

fn parse_image_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("an image of 0 bytes has nothing to serve".into()),
        size => Ok(size),
    }
}

fn parse_cache(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if (1..BLOCK as u64).contains(&bytes) {
        return Err(format!("less than a block of {BLOCK} bytes; 0 disables the cache"));
    }
    Ok(bytes)
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|&mode| mode <= 0o777);
    let mode = mode.ok_or_else(|| format!("'{text}' is not an octal mode between 0 and 777"))?;
    if mode & 0o222 == 0 {
        return Err(format!("mode '{text}' lets no client connect: that needs a write permission"));
    }
    Ok(mode)
}

/// Returns the number of a group. Looks up a name with `getgrnam_r`.
fn parse_group(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|&number| number != u32::MAX); // no group: chown(2)
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
        assert!(parse_group("4294967295").is_err(), "chown takes it for the group as it is");
    }

    #[test]
    fn a_port_alone_is_loopback() {
        assert_eq!(parse_tcp("10809").unwrap().to_string(), "127.0.0.1:10809");
        assert_eq!(parse_tcp(":0").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(parse_tcp("0.0.0.0:1").unwrap().to_string(), "0.0.0.0:1");
        assert!(parse_tcp("nowhere").is_err());
    }

    #[test]
    fn credentials_of_an_address_are_not_shown() {
        let address = "s3://KEY:hidden/+=@bucket/v";
        for words in [
            vec!["--image", address],
            vec!["--image", "vol=s3://KEY:hidden@bucket/v?size=1G,readonly"],
            vec!["--image", "vol=s3://KEY?a:hidden@bucket/v"],
            vec!["--direct=s3://KEY:hidden@bucket/v"],
            vec![address],
            vec!["--image", "vol=s3://KEY:hid,den@bucket/v"],
            vec!["--size", address],
        ] {
            let error = Args::from_words([&["x"], &*words].concat()).unwrap_err().to_string();
            let is_named = error.contains("://***@bucket/v");
            assert!(is_named && !error.contains("hid"), "{words:?}: {error}");
        }
    }

    #[test]
    fn options_that_could_have_no_effect_are_refused() {
        let parse = |line: &str| {
            Args::from_words(line.split(' ').map(|word| word.replace('_', " ")))
                .map_err(|error| error.to_string())
        };
        for (line, named) in [
            ("x --socket s", "--socket needs something to serve"),
            ("x --run true", "--run needs something to serve"),
            ("x --pid-file p", "--pid-file needs something to serve"),
            ("x --read-only", "--read-only needs something to serve"),
            ("x --max-connections 5", "--max-connections needs something to serve"),
            ("x --export-dir d --socket s --size 1M", "--size creates or grows an --image"),
            ("x --image a --socket s --size 1M --read-only", "only read"),
            ("x --image a,readonly --socket s --size 1M", "only read"),
            ("x --image a --tcp 0 --socket-mode 666", "--socket"),
            ("x --image a --socket s --socket-mode 444", "write permission"),
            ("x --image a --socket s --insecure", "--insecure"),
            ("x --image a --socket s --backend aio", "needs --direct"),
            ("x --backend aio", "needs --direct"),
            ("x --image a --socket s --metrics s", "same path"),
            ("x --image a --socket s --size 0", "nothing to serve"),
            ("x --image a --socket s --cache 100", "a block of 4096 bytes"),
            ("x --image name= --socket s", "names no file"),
            ("x --image http://host/disk --socket s", "URI"),
            ("x --image vol=nbd+unix:///?socket=s --socket s", "URI"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(named), "{line}: {error}");
        }
        let empty = ["x", "--image", "a", "--run", ""];
        assert!(Args::from_words(empty).unwrap_err().to_string().contains("--run"));
        for line in [
            "x",
            "x --size 1G --cache 0",
            "x --image a --socket s --socket-mode 660 --size 1M",
            "x --image a,readonly --image b --socket s --size 1M",
            "x --image a --tcp 0.0.0.0:1 --insecure --max-connections 2",
            "x --export-dir d --run true --read-only --direct --backend aio",
        ] {
            assert!(parse(line).is_ok(), "{line}: {:?}", parse(line).err());
        }
    }
}
