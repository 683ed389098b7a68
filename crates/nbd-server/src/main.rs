//! A network block device server on real disk images, built from this workspace's crates.
//!
//! Run:     cargo run --release --bin offlock-nbd
//! Prints:  one page: throughput, latency, bytes verified
//!
//! With `--image` it serves images until it is stopped. `--help` lists the other options.
//!
//! ```text
//!  main: accept, ─► worker: epoll ─► requests ─► commands ─┬─► aio-reap engine ─► image
//!  signals          (conn,           (tasks,     (futures) └─► bufcache (blocks)
//!  (server,          intake)          admission)
//!   registry)
//! ```

mod admission;
mod args;
mod blocks;
mod commands;
mod conn;
mod connection_limits;
mod demo;
mod diagnostics;
mod export;
mod extents;
mod files;
mod image_spec;
mod listeners;
mod memory;
mod metrics;
mod notifier;
mod open_images;
mod process;
mod registry;
mod requests;
mod server;
mod tasks;
mod tls;
mod values;
#[cfg(feature = "objects")]
mod volume;
mod waits;
mod worker;

use std::env;
use std::error::Error;
use std::fs::{self, Permissions};
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

#[cfg(feature = "objects")]
use clap::Parser;
use clap::{CommandFactory, error::ErrorKind};
use rustix::process::{Resource, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;
use tracing::{info, warn};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::Args;
use crate::demo::DemoOptions;
use crate::diagnostics::LogWriter;
use crate::image_spec::ImageSpec;
use crate::process::{Forked, PidFile, RunCommand, Starter};
use crate::server::{Server, ServerError};

fn main() -> ExitCode {
    #[cfg(feature = "objects")]
    if let Some(status) = snapshots() {
        return status;
    }
    set_signals();
    let handed_over = listeners::handed_over();
    let args = Args::parse_or_exit();
    // SAFETY: the process has one thread: nothing before starts another one.
    let starter = match args.fork.then(|| unsafe { Starter::fork() }) {
        Some(Ok(Forked::Started(code))) => return code,
        Some(Ok(Forked::Server(starter))) => Ok(Some(starter)),
        Some(Err(error)) => Err(error),
        None => Ok(None),
    };
    let demo = args.images.is_empty() && args.export_dir.is_none();
    let default = if demo { LevelFilter::WARN } else { LevelFilter::INFO };
    start_log(default);
    diagnostics::report_panics();
    raise_descriptor_limit();
    let done = match (starter, handed_over) {
        (Err(error), _) => Err(error.into()),
        (_, Err(error)) => Err(error.into()),
        (_, Ok(handed_over)) if demo => demonstrate(args, &handed_over),
        (Ok(starter), Ok(handed_over)) => serve(args, handed_over, starter),
    };
    let code = done.unwrap_or_else(|error| {
        // If the log takes nothing, the exit code still reports the failure.
        let _ = LogWriter.write(format!("offlock-nbd: {error}\n").as_bytes());
        match error.downcast_ref() {
            Some(ServerError::Ended(_)) => ExitCode::from(3),
            _ => ExitCode::FAILURE,
        }
    });
    diagnostics::flush(); // after a panic of this thread, the hook has flushed
    code
}

/// Carries out `offlock-nbd snapshot ...`. `None` for another command line.
#[cfg(feature = "objects")]
fn snapshots() -> Option<ExitCode> {
    let mut words = env::args_os().skip(1).peekable();
    words.next_if(|word| word == "snapshot")?;
    let name = std::iter::once("offlock-nbd snapshot".into());
    let parsed = volume::snapshot::SnapshotArgs::try_parse_from(name.chain(words));
    let args = parsed.unwrap_or_else(|error| args::without_credentials(error).exit());
    start_log(LevelFilter::WARN);
    let done = args.run().map_err(|error| error.to_string()).and_then(print);
    let failed = done.inspect_err(|error| {
        let _ = LogWriter.write(format!("offlock-nbd: {error}\n").as_bytes());
    });
    diagnostics::flush();
    Some(if failed.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Sets the log up, with the level of `OFFLOCK_LOG` or else `default`.
fn start_log(default: LevelFilter) {
    let wanted = env::var("OFFLOCK_LOG").ok().filter(|text| !text.is_empty());
    let filter = wanted
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(default));
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(|| LogWriter)
        .with_ansi(io::stderr().is_terminal())
        .log_internal_errors(false);
    tracing_subscriber::registry().with(layer).with(filter).init();
}

/// Raises the limit of open descriptors to the maximum, because each connection needs one.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit); // on failure fewer connections fit
}

/// Descriptors that the server must have left to serve one client: its socket, and its image in two
/// workers.
const LEAST_DESCRIPTORS: u64 = 4;

/// Fails if the started server has too few descriptors left to serve a client. Warns if these are
/// fewer than `most` connections need.
fn check_descriptors(most: u32) -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let used = match fs::read_dir("/proc/self/fd") {
        Ok(open) => open.count() as u64 - 1, // without that of the folder
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => limit,
        Err(_) => return Ok(()), // without /proc it is not known
    };
    let left = limit.saturating_sub(used);
    if left < LEAST_DESCRIPTORS {
        return Err(format!(
            "the limit of {limit} open descriptors (ulimit -n) is too low: the server has {used} open, and \
             could accept no connection"
        ));
    }
    if left < most.into() {
        warn!(limit, used, most, "the limit of open descriptors is below --max-connections");
    }
    Ok(())
}

/// Ignores SIGXFSZ, so that a write beyond the file size limit (`ulimit -f`) fails with EFBIG and
/// does not end the process. Does not ignore SIGCHLD, as a program may that started this one: then
/// the kernel keeps no exit status of a child.
fn set_signals() {
    for (signal, action) in [(libc::SIGXFSZ, libc::SIG_IGN), (libc::SIGCHLD, libc::SIG_DFL)] {
        // SAFETY: neither is a handler, so no code of this process runs in signal context.
        unsafe { libc::signal(signal, action) };
    }
}

/// Serves the images until a signal arrives, the command of `--run` ends, or, with
/// `--exit-with-last`, the last client leaves. SIGHUP lets exports grow with their files.
fn serve(
    mut args: Args,
    handed_over: Vec<OwnedFd>,
    starter: Option<Starter>,
) -> Result<ExitCode, Box<dyn Error>> {
    let mut own_folder = None;
    if args.socket.is_none() && args.tcp.is_none() && handed_over.is_empty() {
        if args.run.is_none() {
            let missing = "--image and --export-dir need --socket or --tcp, or sockets handed over to this \
                           process (LISTEN_PID), to be reached by";
            diagnostics::flush(); // `exit` drops nothing
            Args::command().error(ErrorKind::MissingRequiredArgument, missing).exit();
        }
        let folder = own_folder.insert(private_folder()?);
        args.socket = Some(folder.path().join("nbd.sock"));
    }
    // Any thread may receive the signal; the handler writes a byte to the pipe.
    let (stop, notify) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, notify.try_clone()?)?;
    }
    let grow = Signals::new([SIGHUP])?;
    let mut server = Server::start(&args, handed_over)?;
    server.grow_at(grow)?;
    check_descriptors(args.max_connections)?;
    let _pid_file = args.pid_file.as_deref().map(PidFile::create).transpose()?;
    let addresses = server.addresses();
    if args.run.is_none() {
        let lines = addresses.iter().map(|address| format!("listening on {address}\n"));
        print(lines.collect())?;
    } else {
        // Standard output is the command's: it may be captured.
        addresses.iter().for_each(|address| info!(address, "listening"));
    }
    diagnostics::flush(); // later output of a server in the background is discarded
    starter.map_or(Ok(()), Starter::report)?;
    let export = server.default_export();
    let run = |command: &String| RunCommand::start(command, &addresses, &export, args.tls, notify);
    let command = args.run.as_ref().map(run).transpose()?;
    let ended = server.accept_until(stop.as_fd());
    let code = command.and_then(|command| command.end());
    info!("stopping");
    server.stop()?; // before `ended`: its error names the cause if a worker failed
    ended?;
    Ok(code.map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// Writes to standard output.
fn print(text: String) -> Result<(), String> {
    diagnostics::print(text).map_err(|error| format!("cannot write to standard output: {error}"))
}

/// Size of the demonstration's image, in bytes.
const DEMO_SIZE: u64 = 256 << 20;

/// Serves a temporary image to the built-in client, and prints the results.
fn demonstrate(mut args: Args, handed_over: &[OwnedFd]) -> Result<ExitCode, Box<dyn Error>> {
    if !handed_over.is_empty() {
        return Err(
            "sockets were handed over, and there is nothing to serve: --image or --export-dir"
                .into(),
        );
    }
    let folder = private_folder()?;
    let socket = folder.path().join("nbd.sock");
    let size = args.size.unwrap_or(DEMO_SIZE);
    let path = folder.path().join("demo.img");
    args.images = vec![ImageSpec { name: "demo".into(), path, ..ImageSpec::default() }];
    args.size = Some(size);
    args.socket = Some(socket.clone());
    let (stop, notify) = UnixStream::pair()?;
    let mut server = Server::start(&args, vec![])?;
    let client = std::thread::spawn(move || {
        let report = demo::run(&socket, &DemoOptions::default());
        drop(notify); // the other end becomes readable
        report.map_err(|error| error.to_string())
    });
    server.accept_until(stop.as_fd())?;
    let report = client.join().map_err(|_| "the client panicked")??;
    let (cache, image) = (args.cache >> 20, size >> 20);
    let hit_rate = server.hit_rate() * 100.0;
    print(format!(
        "offlock-nbd has served {report}\n  \
         cached:   {cache} MiB for an image of {image} MiB; {hit_rate:.0} % of the reads were answered from there\n\n\
         To serve an image of your own, see --help:\n    \
         offlock-nbd --image disk.img --size 1G --socket /tmp/disk.sock\n"
    ))?;
    server.stop()?;
    Ok(ExitCode::SUCCESS)
}

/// Makes a folder that only this user can enter, and that is removed when it is dropped.
fn private_folder() -> io::Result<TempDir> {
    let only_the_user = Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix("offlock-nbd-").permissions(only_the_user).tempdir()
}
