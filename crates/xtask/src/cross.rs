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
use std::time::Duration;

use clap::ValueEnum;

use crate::debian::Debian;
use crate::process::{Cmd, Error, Result, write};
use crate::workspace::{Crate, Scratch, TestBinary, Workspace, is_command, packages};

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Where Debian's cross packages have the libraries of the target.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";

/// A guest: its architecture and its kernel.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Guest {
    /// aarch64, with the kernel of the Debian release of this machine
    Aarch64,
    /// x86_64, with the newest kernel that Debian has
    #[value(name = "x86-64")]
    X86_64,
}

/// The `api` tests that qemu-user cannot run: it has no `pwritev2`, and takes a quarter of an hour for them.
const NATIVE_ONLY: &str = "bufcache";
/// Tests that qemu-user cannot run: two start their program again, and one reads what the kernel knows of its
/// memory.
const NOT_EMULATED: &str = "--skip inv14_with_rseq_switched_off --skip inv07_forgotten_references \
                            --skip inv18_words_of_different_cpus_share_no_huge_page";
/// The crates whose tests need the file system of a disk, or files of this repository, which a guest does not have.
/// Their unit tests run there.
const ON_DISK: [&str; 3] = ["aio-reap", "bufcache", "nbd-protocol"];

/// Runs the unit tests and the `api` tests of these crates on aarch64. `words` are arguments of the test programs.
pub(crate) fn cross(ws: &Workspace, crates: &[Crate], words: &[String]) -> Result<()> {
    need(ws, &[("qemu-aarch64", "qemu-user")])?;
    let binaries = TestBinary::build(cross_cargo(ws, crates)?)?;
    let is_wanted = |binary: &&TestBinary| {
        binary.library || binary.name == "api" && !binary.package.ends_with(NATIVE_ONLY)
    };
    let mut failed = Vec::new();
    for binary in binaries.iter().filter(is_wanted) {
        let emulator = ws.cmd("qemu-aarch64").words("-L").arg(SYSROOT).arg(&binary.executable);
        // No rseq and no io_uring: these tests may find less than `OFFLOCK_REQUIRE_ALL` asks for.
        let emulator = emulator.base_env("OFFLOCK_REQUIRE_ALL", None).dir(&binary.package);
        let folder = Some(binary.package.clone().into());
        let emulator = emulator.base_env("CARGO_MANIFEST_DIR", folder).args(words);
        if emulator.words(NOT_EMULATED).run().is_err() {
            failed.push(format!("{} {}", binary.package.display(), binary.name));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Error::new(failed.join("\n"))) }
}

/// `cargo test` of these crates with the compiler and the linker for aarch64.
fn cross_cargo(ws: &Workspace, crates: &[Crate]) -> Result<Cmd> {
    need(ws, &[(LINKER, "gcc-aarch64-linux-gnu")])?;
    let own = Debian::open(ws, "amd64", None)?;
    let library = own.dependency("libstd-rust-web-dev", "libstd-rust-web-")?;
    let llvm = own.dependency(&library, "libllvm")?;
    own.unpack(&["rustc-web", "libstd-rust-web-dev", &library, &llvm])?;
    let arm = Debian::open(ws, "arm64", None)?;
    arm.unpack_into(&own.files, "libstd-rust-web-dev")?;
    Ok(ws
        .cargo("test --locked --lib --tests --target")
        .arg(TARGET)
        .args(packages(crates))
        .base_env("CARGO_TARGET_DIR", Some(ws.target.join("cross").into()))
        .base_env("RUSTC", Some(own.files.join("usr/bin/rustc").into()))
        .base_env("LD_LIBRARY_PATH", Some(own.files.join("usr/lib/x86_64-linux-gnu").into()))
        .base_env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", Some(LINKER.into())))
}

/// Boots a guest that runs the unit tests, the `api` tests and the stress tests of these crates. Each stress test
/// takes `seconds`.
pub(crate) fn guest(ws: &Workspace, crates: &[Crate], guest: Guest, seconds: u32) -> Result<()> {
    let (architecture, suite, kernel, emulator, package) = match guest {
        Guest::Aarch64 => {
            ("arm64", None, "linux-image-arm64", "qemu-system-aarch64", "qemu-system-arm")
        }
        Guest::X86_64 => (
            "amd64",
            Some("unstable"),
            "linux-image-amd64",
            "qemu-system-x86_64",
            "qemu-system-x86",
        ),
    };
    need(ws, &[(emulator, package), ("cpio", "cpio")])?;
    let cargo = match guest {
        Guest::Aarch64 => cross_cargo(ws, crates)?,
        Guest::X86_64 => ws.cargo("test --locked --lib --tests").args(packages(crates)),
    };
    let binaries = TestBinary::build(cargo)?;

    let own = Debian::open(ws, architecture, None)?;
    own.unpack(&["busybox-static"])?;
    let debian = Debian::open(ws, architecture, suite)?;
    let image = debian.dependency(kernel, "linux-image-")?;
    let version = image.trim_start_matches("linux-image-");
    debian.unpack(&[&image])?;
    let mut kernel = debian.files.join(format!("boot/vmlinuz-{version}"));
    if !kernel.exists() {
        debian.unpack(&[&format!("linux-binary-{version}")])?; // of newer suites
        kernel = debian.files.join(format!("usr/lib/modules/{version}/vmlinuz"));
    }

    let scratch = Scratch::new("guest")?;
    let root = scratch.path.join("root");
    for folder in ["bin", "proc", "sys", "dev", "tmp", "lib", "lib64", "tests"] {
        create(&root.join(folder))?;
    }
    copy(&own.files.join("bin/busybox"), &root.join("bin/busybox"))?;
    let (loader, libraries) = match guest {
        Guest::Aarch64 => ("lib/ld-linux-aarch64.so.1", Path::new(SYSROOT).join("lib")),
        Guest::X86_64 => ("lib64/ld-linux-x86-64.so.2", PathBuf::from("/lib/x86_64-linux-gnu")),
    };
    let name = Path::new(loader).file_name().unwrap_or_default();
    copy(&libraries.join(name), &root.join(loader))?;
    for name in ["libc.so.6", "libm.so.6", "libgcc_s.so.1"] {
        copy(&libraries.join(name), &root.join("lib").join(name))?;
    }
    let mut script = format!(
        "#!/bin/busybox sh\nset +e\nalias b=/bin/busybox\nb mount -t proc none /proc\nb mount -t sysfs none /sys\n\
         b mount -t devtmpfs none /dev\nb mount -t tmpfs none /tmp\nb ifconfig lo up\n\
         export OFFLOCK_REQUIRE_ALL=1 OFFLOCK_STRESS_SECONDS={seconds} TMPDIR=/tmp\ncd /tmp\nb uname -a\n\
         run() {{ echo \"+ $*\"; \"$@\" || echo \"guest: FAILED: $*\"; }}\n"
    );
    for binary in &binaries {
        let crate_name = binary.package.file_name().unwrap_or_default().to_string_lossy();
        let place = format!("tests/{crate_name}-{}", binary.name);
        let is_stress = binary.library || binary.name.contains("stress");
        let is_on_disk = ON_DISK.iter().any(|name| crate_name == *name) && !binary.library;
        if is_on_disk || !(is_stress || ["api", "descriptors"].contains(&binary.name.as_str())) {
            continue;
        }
        ws.cmd(if guest == Guest::Aarch64 { "aarch64-linux-gnu-strip" } else { "strip" })
            .arg("-o")
            .arg(root.join(&place))
            .arg(&binary.executable)
            .run()?;
        script += &format!("run /{place} --test-threads=4\n");
        if is_stress {
            script += &format!("run /{place} --ignored --test-threads=1 stress_\n");
        }
    }
    script += "echo 'guest: END'\nb poweroff -f\n";
    write(root.join("init"), script)?;
    let archive = scratch.path.join("root.cpio");
    ws.cmd("sh")
        .words("-c")
        .arg("chmod +x init && find . | cpio --quiet -o -H newc > ../root.cpio")
        .dir(&root)
        .run()?;

    let log = scratch.path.join("log");
    let (machine, console) = match guest {
        Guest::Aarch64 => ("-machine virt -cpu max", "ttyAMA0"),
        // One emulating thread: QEMU 7.2 crashes a kernel that patches its code beside other CPUs.
        Guest::X86_64 => ("-machine q35 -accel tcg,thread=single -cpu max", "ttyS0"),
    };
    ws.cmd(emulator)
        .words(machine)
        .words("-smp 4 -m 4G -display none -nic none -no-reboot -monitor none -serial")
        .arg(format!("file:{}", log.display()))
        .words("-kernel")
        .arg(kernel)
        .words("-initrd")
        .arg(&archive)
        .words("-append")
        .arg(format!("console={console} panic=-1 quiet"))
        .limit(Duration::from_secs(3600))
        .run()?;
    let said = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    print!("{said}");
    if said.contains("guest: FAILED") || !said.contains("guest: END") {
        return Err(Error::new("a test failed in the guest, or the guest did not reach its end"));
    }
    Ok(())
}

/// Returns an error that names the packages of the commands that are missing.
fn need(ws: &Workspace, commands: &[(&str, &str)]) -> Result<()> {
    let missing = commands.iter().filter(|(command, _)| !is_command(command));
    let missing: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if missing.is_empty() { Ok(()) } else { crate::tools::install_packages(ws, &missing) }
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| Error::io(folder.display(), error))
}

/// Copies a file, or what a link leads to.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(|_| ()).map_err(|error| Error::io(from.display(), error))
}
