//! The servers: ours and its peers, each with its good settings, on one image.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harness::{Process, profile, profile_dir, target_dir};

use crate::light;

/// Our server on the page cache.
pub(crate) const OURS: &str = "offlock";
/// Our server past the page cache.
pub(crate) const OURS_DIRECT: &str = "offlock --direct";
/// QEMU's server on the page cache, with its fastest engine.
pub(crate) const QEMU: &str = "qemu-nbd io_uring";
/// QEMU's server past the page cache.
pub(crate) const DIRECT_PEER: &str = "qemu-nbd native";
/// nbdkit's file plugin, 16 threads per connection (its default).
pub(crate) const NBDKIT: &str = "nbdkit file";

/// The servers that have an image of their own, ours first.
pub(crate) const NAMES: [&str; 3] = [OURS, QEMU, NBDKIT];

/// The time that a server may take until it greets its clients.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server that greets its clients.
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) socket: PathBuf,
    pub(crate) process: Process,
    log: PathBuf,
}

impl Server {
    /// fio's name for it.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Has the server make everything durable that its clients have written.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let output = Command::new("qemu-io")
            .args(["-f", "raw", "-c", "flush", &self.uri()])
            .stdin(Stdio::null())
            .output()?;
        let said = || io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned());
        output.status.success().then_some(()).ok_or_else(said)
    }

    /// An error if it has ended, with the last thing that it said.
    pub(crate) fn check(&mut self) -> io::Result<()> {
        let Some(status) = self.process.try_wait()? else {
            return Ok(());
        };
        let said = fs::read_to_string(&self.log)?;
        let said = said.lines().rfind(|line| !line.is_empty()).unwrap_or("it said nothing");
        Err(io::Error::other(format!("the server ended ({status}): {said}")))
    }
}

/// The paths that the servers need.
pub(crate) struct Site<'a> {
    /// Our server's program, if it could be built.
    pub(crate) program: Option<PathBuf>,
    /// The image that all serve, read-only; or the first part of the names of the images that each has for
    /// itself, and writes.
    pub(crate) image: &'a Path,
    /// Each server writes an image of its own.
    pub(crate) writable: bool,
    /// A directory with a short name: a socket's path has at most 107 bytes.
    pub(crate) sockets: &'a Path,
    /// The CPU that the servers share.
    pub(crate) cpu: usize,
}

impl Site<'_> {
    /// Starts every server that there is, and prints a line for each that there is not.
    pub(crate) fn start_all(&self) -> Vec<Server> {
        let past_it = if self.writable { &[][..] } else { &[OURS_DIRECT, DIRECT_PEER] };
        let names: Vec<_> = NAMES.iter().chain(past_it).copied().collect();
        let start = |(number, name)| match self.start(name, number) {
            Ok(server) => Some(server),
            Err(error) => {
                println!("# missing: {name}: {error}");
                None
            }
        };
        names.into_iter().enumerate().filter_map(|(n, name)| start((n, name))).collect()
    }

    /// Reads all of the image through each server on the page cache, so that what it keeps is there, and compares
    /// it. Servers that fail are left out.
    pub(crate) fn warm(&self, servers: &mut Vec<Server>, client: usize) {
        servers.retain(|server| {
            let warmed = match server.name {
                OURS_DIRECT | DIRECT_PEER => Ok(()),
                _ => light::warm(&server.socket, self.image, client),
            };
            warmed.inspect_err(|error| println!("# missing: {}: {error}", server.name)).is_ok()
        });
    }

    fn start(&self, name: &'static str, number: usize) -> io::Result<Server> {
        let socket = self.sockets.join(format!("{number}.sock"));
        // nbdkit leaves its socket, and a second one of that name would not start.
        let _is_new = fs::remove_file(&socket);
        self.launch(name, self.command(name, &socket)?, socket)
    }

    /// Our server with its default cache, and with these images.
    pub(crate) fn start_ours(&self, images: &[PathBuf]) -> io::Result<Server> {
        let socket = self.sockets.join("images.sock");
        let missing = || io::Error::other("it was not built");
        let mut command = Command::new(self.program.as_ref().ok_or_else(missing)?);
        for image in images {
            command.arg("--image").arg(image);
        }
        command.arg("--socket").arg(&socket);
        self.launch(OURS, command, socket)
    }

    fn launch(
        &self,
        name: &'static str,
        mut command: Command,
        socket: PathBuf,
    ) -> io::Result<Server> {
        let log = socket.with_extension("log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let process = Process::spawn(&mut command, self.cpu)?; // "No such file" if it is not installed
        let mut server = Server { name, socket, process, log };
        let start = Instant::now();
        while !greets(&server.socket) {
            server.check()?;
            if start.elapsed() > PATIENCE {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it greets no client"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// The image that a server is to write.
    pub(crate) fn image_of(&self, name: &str) -> PathBuf {
        if !self.writable {
            return self.image.to_owned();
        }
        let number = NAMES.iter().position(|other| *other == name);
        self.image.with_extension(number.unwrap_or(usize::MAX).to_string())
    }

    fn command(&self, name: &str, socket: &Path) -> io::Result<Command> {
        let image = &self.image_of(name);
        let qemu = |cache: &str, aio: &str| {
            let mut command = Command::new("qemu-nbd");
            command.args(["--persistent", "--shared=0", "--format=raw", "--discard=unmap"]);
            command.args((!self.writable).then_some("--read-only"));
            command.args([format!("--cache={cache}"), format!("--aio={aio}")]);
            command.arg("--socket").arg(socket).arg(image);
            command
        };
        Ok(match name {
            QEMU => qemu("writeback", "io_uring"),
            DIRECT_PEER => qemu("none", "native"),
            NBDKIT => {
                let mut command = Command::new("nbdkit");
                command.args((!self.writable).then_some("--read-only"));
                command.args(["--foreground", "--unix"]).arg(socket);
                // `cargo xtask benches` unpacks a newer nbdkit than the one whose plugins are installed.
                command.arg(env::var_os("OFFLOCK_NBDKIT_FILE").unwrap_or_else(|| "file".into()));
                command.arg(image);
                command
            }
            _ => {
                let missing = || io::Error::other("it was not built");
                let mut command = Command::new(self.program.as_ref().ok_or_else(missing)?);
                command.arg("--image").arg(image).arg("--socket").arg(socket);
                if !self.writable {
                    // qemu-nbd refuses an image that another process has locked, even for reading.
                    command.args(["--read-only", "--no-lock"]);
                }
                if self.writable {
                    // the cache of a server that was told nothing
                } else if name == OURS_DIRECT {
                    command.args(["--direct", "--cache", "0"]); // its peer has no cache, either
                } else {
                    command.args(["--cache", "1100M"]); // all of the image, as in the page cache
                }
                command
            }
        })
    }
}

/// Whether a server stands behind the socket. To be let in is not enough: qemu-nbd listens before it
/// opens its image, and may yet fail.
pub(crate) fn greets(socket: &Path) -> bool {
    let greeting = || -> io::Result<[u8; 8]> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut magic = [0; 8];
        stream.read_exact(&mut magic)?;
        Ok(magic)
    };
    greeting().is_ok_and(|magic| &magic == b"NBDMAGIC")
}

/// Builds our server as this bench was built, and returns its program.
pub(crate) fn build_ours() -> io::Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // `--workspace`: with fewer packages dependencies have other features, and are compiled anew.
    command.args(["build", "--workspace", "--bin", "offlock-nbd", "--profile"]).arg(profile());
    command.arg("--target-dir").arg(target_dir()?).current_dir(env!("CARGO_MANIFEST_DIR"));
    if !command.status()?.success() {
        return Err(io::Error::other("cargo build --bin offlock-nbd failed"));
    }
    Ok(profile_dir()?.join("offlock-nbd"))
}
