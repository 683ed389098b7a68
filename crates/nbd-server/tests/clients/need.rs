//! What a trial needs from the machine, looked for at run time.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use aio_reap::{BackendKind, Engine};
use rustix::fs::{FallocateFlags, fallocate, statfs};
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::process::geteuid;

/// Something that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    QemuIo,
    QemuImg,
    NbdInfo,
    NbdCopy,
    Curl,
    /// A local S3 server.
    Moto,
    OpenSsl,
    /// fio with its nbd engine.
    Fio,
    /// strace, and permission to trace one's own children.
    Strace,
    /// The kernel accepts `io_uring_setup`.
    Uring,
    /// The kernel accepts `io_setup`, and O_DIRECT works where the images lie.
    Aio,
    /// O_DIRECT works where the images lie.
    Direct,
    /// A private mount name space with a small tmpfs in it (root, or user name spaces).
    SmallTmpfs,
    /// A writable file system that punches holes but cannot zero a range in place: tmpfs.
    NoZeroRange,
    /// The images lie on a file system that punches holes and zeroes ranges.
    PunchAndZero,
    /// Socket buffers past the system's limit (root).
    LargeSocketBuffer,
    /// Loop devices (root).
    LoopDevice,
}

impl Need {
    /// Why this machine cannot do it; `None` if it can.
    fn missing(self) -> Option<String> {
        match self {
            Need::QemuIo => tool("qemu-io", "qemu-utils"),
            Need::QemuImg => tool("qemu-img", "qemu-utils"),
            Need::NbdInfo => tool("nbdinfo", "libnbd-bin"),
            Need::OpenSsl => tool("openssl", "openssl"),
            Need::Curl => tool("curl", "curl"),
            Need::Moto => tool("moto_server", "")
                .map(|_| "moto_server is not installed: pip install 'moto[server]'".into()),
            Need::NbdCopy => tool("nbdcopy", "libnbd-bin"),
            Need::Fio => tool("fio", "fio").or_else(fio_without_nbd),
            Need::Strace => tool("strace", "strace").or_else(ptrace_refused),
            Need::Uring => backend_missing(BackendKind::Uring),
            Need::Aio => backend_missing(BackendKind::Aio).or_else(|| Need::Direct.missing()),
            Need::Direct => (!direct_works(image_root()))
                .then(|| format!("no O_DIRECT on the file system of {}", image_root().display())),
            Need::SmallTmpfs => small_tmpfs_missing(),
            Need::NoZeroRange => no_zero_range_missing(),
            Need::PunchAndZero => punch_and_zero_missing(),
            Need::LargeSocketBuffer => large_socket_buffer_missing(),
            Need::LoopDevice => tool("mknod", "coreutils").or_else(loop_device_missing),
        }
    }
}

/// The first of `needs` that this machine lacks, in words.
pub(crate) fn first_missing(needs: &[Need]) -> Option<String> {
    needs.iter().find_map(|n| n.missing())
}

/// True if a missing client, privilege or backend is a failure rather than an ignored trial.
pub(crate) fn require_all() -> bool {
    std::env::var_os("OFFLOCK_REQUIRE_ALL").is_some_and(|v| v == "1")
}

/// Where temporary directories go: the system's, or the build's if only that one does O_DIRECT.
pub(crate) fn image_root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let system = std::env::temp_dir();
        let build = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        if !direct_works(&system) && direct_works(&build) { build } else { system }
    })
}

fn tool(program: &str, package: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    (!found).then(|| format!("{program} is not installed: apt-get install -y {package}"))
}

fn fio_without_nbd() -> Option<String> {
    let out = Command::new("fio").arg("--enghelp=nbd").output().ok()?;
    let known = out.status.success() && String::from_utf8_lossy(&out.stdout).contains("uri");
    (!known).then(|| "this fio has no nbd engine: apt-get install -y fio".to_string())
}

fn ptrace_refused() -> Option<String> {
    let out = Command::new("strace").args(["-o", "/dev/null", "true"]).output().ok()?;
    (!out.status.success()).then(|| {
        format!("strace may not trace here: {}", String::from_utf8_lossy(&out.stderr).trim())
    })
}

fn backend_missing(kind: BackendKind) -> Option<String> {
    let made = Engine::builder().backend(kind).build();
    made.err().map(|error| format!("{kind} is refused here: {error}"))
}

fn direct_works(dir: &Path) -> bool {
    let Ok(probe) = tempfile::NamedTempFile::new_in(dir) else { return false };
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(probe.path()).is_ok()
}

/// The start of a command line that runs the rest in a mount name space of its own.
pub(crate) fn unshare_mounts() -> Vec<&'static str> {
    if geteuid().is_root() {
        vec!["unshare", "--mount", "--propagation", "private"]
    } else {
        vec!["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"]
    }
}

fn small_tmpfs_missing() -> Option<String> {
    let words = unshare_mounts();
    let out = Command::new(words[0])
        .args(&words[1..])
        .args(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/tmp"])
        .output();
    match out {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(format!(
            "no private mounts here (root is needed): {}",
            String::from_utf8_lossy(&out.stderr).trim()
        )),
        Err(e) => Some(format!("unshare: {e}: apt-get install -y util-linux")),
    }
}

/// Where tmpfs is mounted on nearly every Linux.
pub(crate) const SHM: &str = "/dev/shm";

fn fallocate_in(dir: &Path, mode: FallocateFlags) -> io::Result<()> {
    let file = tempfile::tempfile_in(dir)?;
    file.set_len(8192)?;
    Ok(fallocate(&file, mode | FallocateFlags::KEEP_SIZE, 0, 4096)?)
}

fn no_zero_range_missing() -> Option<String> {
    if !statfs(SHM).is_ok_and(|info| info.f_type == libc::TMPFS_MAGIC) {
        return Some(format!("{SHM} is not tmpfs"));
    }
    match fallocate_in(Path::new(SHM), FallocateFlags::ZERO_RANGE) {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => None,
        Err(e) => Some(format!("{SHM} cannot be used: {e}")),
        Ok(()) => Some("tmpfs of this kernel can zero a range: nothing here is slow".to_string()),
    }
}

fn punch_and_zero_missing() -> Option<String> {
    let dir = image_root();
    [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE].into_iter().find_map(|mode| {
        let error = fallocate_in(dir, mode).err()?;
        Some(format!("the file system of {} lacks fallocate {mode:?}: {error}", dir.display()))
    })
}

fn loop_device_missing() -> Option<String> {
    let found = Command::new("losetup").arg("-f").output();
    let works = geteuid().is_root() && found.is_ok_and(|found| found.status.success());
    (!works).then(|| "no loop devices here (root is needed)".to_string())
}

fn large_socket_buffer_missing() -> Option<String> {
    let forced = UnixStream::pair()
        .and_then(|(socket, _)| Ok(set_socket_send_buffer_size_force(socket, 32 << 20)?));
    forced.err().map(|e| format!("a send buffer of 32 MiB is refused here (root is needed): {e}"))
}
