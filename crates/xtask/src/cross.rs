//! The libraries' tests on another architecture and on other kernels, under emulation.
//!
//! `cross` runs them on aarch64 under qemu-user, which has no rseq. `guest` boots a kernel of Debian with the
//! test programs in its initial file system, so rseq and membarrier are those of that kernel. An emulator
//! has the memory model of this machine: `litmus` checks the orderings.
//!
//! No rustup target is needed. Debian has a compiler, `rustc-web`, and its standard library for arm64. They are
//! unpacked below the target folder, with the kernels.

use std::fs;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

use crate::debian::Debian;
use crate::process::{At, Cmd, Error, Result, folder, write};
use crate::tools::need;
use crate::workspace::{Crate, TestBinary, Workspace, packages, scratch};

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Where Debian's cross packages have the libraries of the target.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";

/// The `api` tests that qemu-user cannot run: it has no `pwritev2`, and takes a quarter of an hour for them.
const NATIVE_ONLY: &str = "bufcache";
/// Tests that qemu-user cannot run: two start their program again, and one reads what the kernel knows of its
/// memory.
const NOT_EMULATED: &str = "--skip inv14_with_rseq_switched_off --skip inv07_forgotten_references \
                            --skip inv18_words_of_different_cpus_share_no_huge_page";
/// The crates whose tests need the file system of a disk, or files of this repository, which a guest does not have.
/// Their unit tests run there.
const ON_DISK: [&str; 3] = ["aio-reap", "bufcache", "nbd-protocol"];

/// Runs the unit tests and the `api` tests of these crates on aarch64.
pub(crate) fn cross(ws: &Workspace, crates: &[Crate]) -> Result<()> {
    need(ws, &[("qemu-aarch64", "qemu-user")])?;
    let mut failed = Vec::new();
    for package in crates {
        let targets = if package.name == NATIVE_ONLY { "--lib" } else { "--lib --test api" };
        let cargo = cross_cargo(ws)?.args(packages(slice::from_ref(package))).words(targets);
        let runner = format!("qemu-aarch64 -L {SYSROOT}");
        let cargo = cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        // No rseq and no io_uring: these tests may find less than `OFFLOCK_REQUIRE_ALL` asks for.
        let cargo = cargo.base_env("OFFLOCK_REQUIRE_ALL", None);
        if cargo.words("--no-fail-fast --").words(NOT_EMULATED).run().is_err() {
            failed.push(&*package.name);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Error::new(format!("failed: {failed:?}"))) }
}

/// `cargo test` with the compiler and the linker for aarch64.
fn cross_cargo(ws: &Workspace) -> Result<Cmd> {
    need(ws, &[(LINKER, "gcc-aarch64-linux-gnu")])?;
    let own = Debian::open(ws, "amd64", None)?;
    own.unpack(&own.files, &["rustc-web"])?;
    Debian::open(ws, "arm64", None)?.unpack(&own.files, &["libstd-rust-web-dev"])?;
    Ok(ws
        .cargo("test --locked --target")
        .arg(TARGET)
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join("cross").into()))
        .base_env("RUSTC", Some(own.files.join("usr/bin/rustc").into()))
        .base_env("LD_LIBRARY_PATH", Some(own.files.join("usr/lib/x86_64-linux-gnu").into()))
        .base_env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", Some(LINKER.into())))
}

/// What a guest is made of.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    architecture: &'static str,
    /// The suite of Debian that has the kernel: that of this machine if none is named.
    suite: Option<&'static str>,
    kernel: &'static str,
    /// The emulator, and the package that has it.
    emulator: (&'static str, &'static str),
    options: &'static str,
    console: &'static str,
    /// The place of the dynamic loader in the guest, and the folder here that has it and the libraries.
    loader: &'static str,
    libraries: &'static str,
    strip: &'static str,
}

const AARCH64: &str = "aarch64";

pub(crate) const GUESTS: [Machine; 2] = [
    Machine {
        name: AARCH64,
        architecture: "arm64",
        suite: None,
        kernel: "linux-image-arm64",
        emulator: ("qemu-system-aarch64", "qemu-system-arm"),
        options: "-machine virt -cpu max",
        console: "ttyAMA0",
        loader: "lib/ld-linux-aarch64.so.1",
        libraries: "/usr/aarch64-linux-gnu/lib",
        strip: "aarch64-linux-gnu-strip",
    },
    Machine {
        name: "x86-64",
        architecture: "amd64",
        suite: Some("unstable"),
        kernel: "linux-image-amd64",
        emulator: ("qemu-system-x86_64", "qemu-system-x86"),
        // One emulating thread: QEMU 7.2 crashes a kernel that patches its code beside other CPUs.
        options: "-machine q35 -accel tcg,thread=single -cpu max",
        console: "ttyS0",
        loader: "lib64/ld-linux-x86-64.so.2",
        libraries: "/lib/x86_64-linux-gnu",
        strip: "strip",
    },
];

/// Boots a guest that runs the unit tests, the `api` tests and the stress tests of these crates. Each stress test
/// takes `seconds`.
pub(crate) fn guest(ws: &Workspace, crates: &[Crate], guest: &str, seconds: u32) -> Result<()> {
    let machine = GUESTS.into_iter().find(|machine| machine.name == guest);
    let machine = machine.expect("the command line takes the names of `GUESTS` only");
    need(ws, &[machine.emulator, ("cpio", "cpio")])?;
    let cargo = if guest == AARCH64 { cross_cargo(ws)? } else { ws.cargo("test --locked") };
    let binaries = TestBinary::build(cargo.words("--lib --tests").args(packages(crates)))?;
    let scratch = scratch()?;
    let archive = file_system(ws, &machine, scratch.path(), &binaries, seconds)?;
    let said = boot(ws, &machine, scratch.path(), &archive)?;
    print!("{said}");
    if said.contains("guest: FAILED") || !said.contains("guest: END") {
        return Err(Error::new("a test failed in the guest, or the guest did not reach its end"));
    }
    Ok(())
}

/// Makes the initial file system: a shell, the libraries, the stripped test programs, and a script that runs them.
fn file_system(
    ws: &Workspace,
    machine: &Machine,
    scratch: &Path,
    binaries: &[TestBinary],
    seconds: u32,
) -> Result<PathBuf> {
    let own = Debian::open(ws, machine.architecture, None)?;
    own.unpack(&own.files, &["busybox-static"])?;
    let root = scratch.join("root");
    for name in ["bin", "proc", "sys", "dev", "tmp", "lib", "lib64", "tests"] {
        folder(root.join(name))?;
    }
    copy(&own.files.join("bin/busybox"), &root.join("bin/busybox"))?;
    let libraries = Path::new(machine.libraries);
    let loader = Path::new(machine.loader).file_name().unwrap_or_default();
    copy(&libraries.join(loader), &root.join(machine.loader))?;
    for name in ["libc.so.6", "libm.so.6", "libgcc_s.so.1"] {
        copy(&libraries.join(name), &root.join("lib").join(name))?;
    }
    let mut script = format!(
        "#!/bin/busybox sh\nset +e\nalias b=/bin/busybox\nb mount -t proc none /proc\nb mount -t sysfs none /sys\n\
         b mount -t devtmpfs none /dev\nb mount -t tmpfs none /tmp\nb ifconfig lo up\n\
         export OFFLOCK_REQUIRE_ALL=1 OFFLOCK_STRESS_SECONDS={seconds} TMPDIR=/tmp\ncd /tmp\nb uname -a\n\
         run() {{ echo \"+ $*\"; \"$@\" || echo \"guest: FAILED: $*\"; }}\n"
    );
    for binary in binaries {
        let crate_name = binary.package.file_name().unwrap_or_default().to_string_lossy();
        let place = format!("tests/{crate_name}-{}", binary.name);
        let is_stress = binary.library || binary.name == "api" || binary.name.contains("stress");
        let is_on_disk = ON_DISK.iter().any(|name| crate_name == *name) && !binary.library;
        if is_on_disk || !(is_stress || binary.name == "descriptors") {
            continue;
        }
        let strip = ws.cmd(machine.strip).arg("-o").arg(root.join(&place));
        strip.arg(&binary.executable).run()?;
        script += &format!("run /{place} --test-threads=4\n");
        if is_stress {
            // An emulated CPU may have no store buffer, which `stress_inv19` must see.
            let options = "--ignored --test-threads=1 --skip stress_inv19 stress_";
            script += &format!("run /{place} {options}\n");
        }
    }
    write(root.join("init"), script + "echo 'guest: END'\nb poweroff -f\n")?;
    let pack = "chmod +x init && find . | cpio --quiet -o -H newc > ../root.cpio";
    ws.cmd("sh").words("-c").arg(pack).dir(&root).run()?;
    Ok(scratch.join("root.cpio"))
}

/// Boots a kernel of Debian with this file system. Returns what the guest prints.
fn boot(ws: &Workspace, machine: &Machine, scratch: &Path, archive: &Path) -> Result<String> {
    let debian = Debian::open(ws, machine.architecture, machine.suite)?;
    debian.unpack(&debian.files, &[machine.kernel])?;
    // `boot/vmlinuz-VERSION`; of newer suites `usr/lib/modules/VERSION/vmlinuz`.
    let find =
        format!("find {0}/boot {0}/usr/lib/modules -name 'vmlinuz*'", debian.files.display());
    let found = ws.cmd("sh").arg("-c").arg(format!("{find} 2>/dev/null; true")).output()?;
    let kernel = found.lines().next().ok_or_else(|| Error::new("the package has no kernel"))?;
    let log = scratch.join("log");
    ws.cmd(machine.emulator.0)
        .words(machine.options)
        .words("-smp 4 -m 4G -display none -nic none -no-reboot -monitor none -serial")
        .arg(format!("file:{}", log.display()))
        .words("-kernel")
        .arg(kernel)
        .words("-initrd")
        .arg(archive)
        .words("-append")
        .arg(format!("console={} panic=-1 quiet", machine.console))
        .limit(Duration::from_secs(3600))
        .run()?;
    Ok(String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned())
}

/// Copies a file, or what a link leads to.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).at(from)
}
