//! What a server must not do to an image, and must not stop for: read-only devices, names that a power
//! cut takes, QEMU's locks, a log that is not read, limits, and files past what a cache can number.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd};
use crate::image;
use crate::lab::{Backend, Lab, Res, Tracked, check, fail, trial, wait_until};
use crate::need::{self, Need};
use crate::server::{Launch, Server};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("devices/read_only_is_refused", &[Need::LoopDevice], read_only_device),
        trial("devices/read_only_in_a_folder", &[Need::LoopDevice], read_only_in_folder),
        trial("durability/name_of_a_new_image", &[Need::Strace], new_name),
        trial("locks/qemu_and_a_reader", &[Need::QemuIo], qemu_beside_reader),
        trial("locks/qemu_and_a_writer", &[Need::QemuIo], qemu_beside_writer),
        trial("log/full_pipe_stops_nothing", &[], full_log),
        trial("log/full_standard_output", &[], full_output),
        trial("log/unwritable_standard_output", &[], unwritable_output),
        trial("limits/clients_one_after_another", &[], one_after_another),
        trial("large/growth_past_the_limit", &[], growth_past_the_limit),
        trial("large/without_a_cache", &[], large_without_cache),
        trial("large/a_part", &[], part_of_large),
    ]
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path, options: &[&str]) -> Res<Loop> {
        let mut command = Command::new("losetup");
        let made = command.args(options).args(["-f", "--show"]).arg(file).output()?;
        check!(made.status.success(), "losetup: {}", String::from_utf8_lossy(&made.stderr));
        Ok(Loop(String::from_utf8_lossy(&made.stdout).trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A device that takes no writes is not served as one that does, even if a process may open it for writing.
fn read_only_device(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::with_parts(&image, 4 * MIB, 4, 3)?;
    let device = Loop::new(&image, &["-r"])?;
    let launch = || Launch::new(lab, Backend::Threads);
    let (code, log) = launch().image(&device.0).start_refused()?;
    let says = log.contains("read-only") && log.contains(&*device.0.to_string_lossy());
    check!(code == 1 && says, "exit code {code}:\n{log}");
    let spec = format!("vol={},readonly", device.0.display());
    for server in [launch().image(&device.0).arg("--read-only"), launch().arg("--image").arg(spec)]
    {
        let server = server.start()?;
        let mut client = server.client()?;
        let first = image::bytes_at(&image, 0, 4096)?;
        check!(client.read(0, 4096)? == Ok(first), "it reads other bytes");
        client.write(0, &[1; 4096], 0)?.is(1, "a write")?;
        client.disconnect()?;
        server.stop()?;
    }
    Ok(())
}

/// In a folder such a device is an export for reading only.
fn read_only_in_folder(lab: &Lab) -> Res {
    let (image, dir) = (lab.path("a.img"), lab.path("images"));
    fs::create_dir(&dir)?;
    image::with_parts(&image, 4 * MIB, 4, 3)?;
    let device = Loop::new(&image, &["-r"])?;
    let number = device.0.to_string_lossy().trim_start_matches("/dev/loop").to_string();
    lab.run_ok(Command::new("mknod").arg(dir.join("disk")).args(["b", "7", &number]))?;
    let server = Launch::new(lab, Backend::Threads).arg("--export-dir").arg(&dir).start()?;
    let mut client = server.client_of("disk")?;
    check!(client.export.flags & 2 != 0, "it is said to be writable: {:#x}", client.export.flags);
    client.write(0, &[1; 4096], 0)?.is(1, "a write")?;
    client.disconnect()?;
    server.stop()
}

/// The folder of an image that `--size` creates is synced before the server says that it listens, and
/// the folder of a symbolic link's target is that of the image.
fn new_name(lab: &Lab) -> Res {
    let (other, soft) = (lab.path("other"), lab.path("soft.img"));
    fs::create_dir(&other)?;
    std::os::unix::fs::symlink("other/target.img", &soft)?;
    let dir = lab.dir().canonicalize()?;
    for (image, folder) in [(lab.path("new.img"), dir.clone()), (soft, dir.join("other"))] {
        let log = lab.path("strace.log");
        let out = log.to_string_lossy().into_owned();
        let words = ["strace", "-D", "-f", "-y", "-o", &out, "-e", "trace=fsync,fdatasync,write"];
        let launch = Launch::new(lab, Backend::Threads).through(words).image(&image);
        launch.arg("--size").arg("8M").start()?.stop()?;
        let text = fs::read_to_string(&log)?;
        let listens = text.lines().position(|line| line.contains("listening on"));
        let listens = listens.ok_or("it does not say that it listens")?;
        let wanted = format!("fsync({}", folder.display());
        let synced = |line: &str| {
            line.contains("fsync(") && line.contains(&format!("<{}>", folder.display()))
        };
        let found = text.lines().take(listens).any(synced);
        check!(found, "no {wanted} before it listens:\n{text}");
        fs::remove_file(&log)?;
    }
    Ok(())
}

/// Runs qemu-io on a file; gives whether it got its lock.
fn qemu_io(lab: &Lab, options: &[&str], command: &str, image: &Path) -> Res<bool> {
    let mut qemu = Command::new("qemu-io");
    qemu.args(options).args(["-f", "raw", "-c", command]).arg(image);
    let done = lab.run(&mut qemu, Duration::from_secs(20))?;
    let refused = done.text.contains("lock");
    check!(refused || done.status.success(), "qemu-io: {}\n{}", done.status, done.text);
    Ok(!refused)
}

/// qemu-nbd as a program that keeps a file open.
fn qemu_holds(lab: &Lab, options: &[&str], image: &Path) -> Res<Tracked> {
    let socket = lab.path("q");
    let _ = fs::remove_file(&socket);
    let mut qemu = Command::new("qemu-nbd");
    let qemu = qemu.args(["-t", "-f", "raw", "-k"]).arg(&socket).args(options).arg(image);
    let holder = lab.spawn(qemu)?;
    let is_there = || Client::connect(&socket).ok();
    check!(wait_until(Duration::from_secs(20), is_there).is_some(), "qemu-nbd does not listen");
    Ok(holder)
}

/// Beside a server that only reads, QEMU reads and does not write, whichever comes first.
fn qemu_beside_reader(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let launch = || Launch::new(lab, Backend::Threads).image(&image).arg("--read-only");
    let server = launch().start()?;
    check!(!qemu_io(lab, &[], "write 0 4k", &image)?, "QEMU writes beside a server that reads");
    check!(qemu_io(lab, &["-r"], "read 0 4k", &image)?, "QEMU does not read beside it");
    let second = launch().socket(&lab.path("s2")).start()?;
    second.stop()?;
    server.stop()?;
    check!(qemu_io(lab, &[], "write 0 4k", &image)?, "the lock stays after the server's end");
    let holder = qemu_holds(lab, &[], &image)?;
    let (code, log) = launch().start_refused()?;
    check!(code == 1 && log.contains("in use"), "beside a QEMU that writes: {code}\n{log}");
    drop(holder);
    let holder = qemu_holds(lab, &["-r"], &image)?;
    launch().start()?.stop()?;
    drop(holder);
    Ok(())
}

/// Beside a server that writes, QEMU neither reads nor writes, whichever comes first.
fn qemu_beside_writer(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let launch = || Launch::new(lab, Backend::Threads).image(&image);
    let server = launch().start()?;
    check!(!qemu_io(lab, &[], "write 0 4k", &image)?, "QEMU writes beside it");
    check!(!qemu_io(lab, &["-r"], "read 0 4k", &image)?, "QEMU reads beside it");
    server.stop()?;
    for options in [&[][..], &["-r"]] {
        let holder = qemu_holds(lab, options, &image)?;
        let (code, log) = launch().start_refused()?;
        check!(code == 1 && log.contains("in use"), "beside QEMU {options:?}: {code}\n{log}");
        drop(holder);
    }
    Ok(())
}

/// A log that is not read fills its pipe. Clients are served meanwhile, and SIGTERM ends the server.
fn full_log(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let launch = Launch::new(lab, Backend::Threads).image(&image);
    let mut server = launch.stderr_full()?.start()?;
    let mut early = server.client()?;
    for round in 0..600 {
        let mut client = server.connect()?;
        let talked =
            client.greet().and_then(|_| client.go("vol")).and_then(|()| client.read(0, 512));
        check!(talked.is_ok_and(|read| read.is_ok()), "client {round} is not served");
        client.disconnect()?;
    }
    server.show(); // a page of statistics
    check!(early.read(0, 4096)?.is_ok(), "an early client is not served");
    server.stop()
}

/// Standard output that takes nothing stops nothing either.
fn full_output(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let fifo = lab.path("out");
    lab.run_ok(Command::new("mkfifo").arg(&fifo))?;
    let mut options = OpenOptions::new();
    let held = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&fifo)?;
    while rustix::io::write(&held, &[b'x'; 4096]).is_ok() {}
    let script = format!("exec \"$0\" \"$@\" > {}", fifo.display());
    let launch = Launch::new(lab, Backend::Threads).through(["sh", "-c", &script]).image(&image);
    let mut process = launch.start_silent()?;
    let socket = lab.path("s");
    let client = || Client::connect(&socket).ok();
    let Some(mut client) = wait_until(Duration::from_secs(20), client) else {
        fail!("it does not listen");
    };
    client.greet()?;
    client.go("vol")?;
    check!(client.read(0, 4096)?.is_ok(), "not served");
    client.disconnect()?;
    process.signal(libc::SIGTERM);
    let ended = process.wait_for(Duration::from_secs(20))?;
    check!(ended.is_some_and(|status| status.success()), "after SIGTERM: {ended:?}");
    drop(held);
    Ok(())
}

/// The message names standard output.
fn unwritable_output(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let launch = Launch::new(lab, Backend::Threads);
    let launch = launch.through(["sh", "-c", "exec \"$0\" \"$@\" > /dev/full"]).image(&image);
    let (code, log) = launch.start_refused()?;
    let last = log.lines().last().unwrap_or_default();
    check!(code == 1 && last.contains("standard output"), "exit code {code}:\n{log}");
    Ok(())
}

/// Clients that come one after the other are one at a time: each is served, whatever the limit.
fn one_after_another(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    for option in ["--max-connections", "--max-per-peer"] {
        let launch = Launch::new(lab, Backend::Threads).image(&image).arg(option).arg("1");
        let server = launch.arg("--tcp").arg("127.0.0.1:0").start()?;
        let address = server.listeners.iter().find_map(|l| l.strip_prefix("tcp:"));
        let address = address.ok_or("no TCP address")?.to_string();
        for tcp in [false, true] {
            let mut refused = 0;
            for _ in 0..400 {
                let client = if tcp { Client::connect_tcp(&address) } else { server.connect() };
                let served = client.and_then(|mut client| {
                    client.greet()?;
                    client.go("vol")?;
                    let read = client.read(0, 512)?;
                    client.request(0, cmd::DISC, 0, 0)?;
                    Ok(read.is_ok())
                });
                refused += u32::from(!served.is_ok_and(|served| served));
            }
            check!(refused == 0, "{option} 1, tcp {tcp}: {refused} of 400 were refused");
        }
        // One that stays keeps others out, and no longer than it stays.
        let first = server.client()?;
        let began = Instant::now();
        check!(server.client().is_err(), "{option} 1: a second client beside the first");
        check!(
            began.elapsed() < Duration::from_secs(5),
            "it was refused after {:?}",
            began.elapsed()
        );
        first.disconnect()?;
        check!(wait_until(Duration::from_secs(5), || server.client().ok()).is_some(), "no room");
        server.stop()?;
    }
    Ok(())
}

/// The bytes that blocks of a cache can number.
const CACHE_LIMIT: u64 = 1 << 57;

/// A sparse file of any length, in a file system that has such files.
fn huge(len: u64) -> Res<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::Builder::new().prefix("nbd.").tempdir_in(need::SHM)?;
    let path = dir.path().join("a.img");
    fs::File::create(&path)?.set_len(len)?;
    Ok((dir, path))
}

/// Writes and reads at an offset, and flushes, trims and zeroes there.
fn works_at(client: &mut Client, offset: u64) -> Res {
    let data = vec![0x5a; 8192];
    client.write(offset, &data, 0)?.ok("a write")?;
    check!(client.read(offset, 8192)? == Ok(data), "at {offset}");
    client.flush()?.ok("flush")?;
    client.write(offset, &[7; 512], 1)?.ok("a write with FUA")?;
    client.plain(cmd::TRIM, 0, offset, 4096)?.ok("TRIM")?;
    client.plain(cmd::WRITE_ZEROES, 0, offset + 4096, 4096)?.ok("zeroes")?;
    check!(client.read(offset, 8192)? == Ok(vec![0; 8192]), "zeros at {offset}");
    client.plain(cmd::CACHE, 0, offset, 4096)?.ok("CACHE")?;
    client.flush()?.ok("flush")
}

fn size_of(server: &Server, export: &str) -> Res<u64> {
    let client = server.client_of(export)?;
    let size = client.export.size;
    client.disconnect()?;
    Ok(size)
}

/// A file that grows past what the cache can number grows its export up to there, and all of that works.
fn growth_past_the_limit(lab: &Lab) -> Res {
    let (_dir, path) = huge(MIB)?;
    let mut server = Launch::new(lab, Backend::Threads).image(&path).start()?;
    OpenOptions::new().write(true).open(&path)?.set_len(CACHE_LIMIT + 4096)?;
    server.hang_up();
    let grown = || size_of(&server, "vol").ok().filter(|&size| size > MIB);
    let size = wait_until(Duration::from_secs(20), grown).ok_or("it has not grown")?;
    let mut client = server.client()?;
    works_at(&mut client, size - 8192)?;
    check!(size == CACHE_LIMIT, "{size} bytes");
    check!(server.log().contains("2^57"), "the log does not say so:\n{}", server.log());
    server.still_serves()?;
    server.stop()
}

/// Without a cache the limit is that of the file system.
fn large_without_cache(lab: &Lab) -> Res {
    let (_dir, path) = huge(CACHE_LIMIT + 4096)?;
    let (code, log) = Launch::new(lab, Backend::Threads).image(&path).start_refused()?;
    let names = log.contains("--cache 0") && log.contains(&format!("{CACHE_LIMIT}"));
    check!(code == 1 && names, "with a cache: {code}\n{log}");
    let launch = Launch::new(lab, Backend::Threads).image(&path);
    let mut server = launch.arg("--cache").arg("0").start()?;
    check!(size_of(&server, "vol")? == CACHE_LIMIT + 4096, "{}", size_of(&server, "vol")?);
    works_at(&mut server.client()?, CACHE_LIMIT - 4096)?;
    works_at(&mut server.client()?, 0)?;
    OpenOptions::new().write(true).open(&path)?.set_len(CACHE_LIMIT + MIB)?;
    server.hang_up();
    let grown = || (size_of(&server, "vol").ok()? == CACHE_LIMIT + MIB).then_some(());
    check!(wait_until(Duration::from_secs(20), grown).is_some(), "it has not grown");
    works_at(&mut server.client()?, CACHE_LIMIT + MIB - 8192)?;
    server.stop()
}

/// A part within the limit is served, however long the file is; a part past it is not.
fn part_of_large(lab: &Lab) -> Res {
    let (_dir, path) = huge(CACHE_LIMIT + 4 * MIB)?;
    let part =
        |name: &str, offset: u64| format!("{name}={},offset={offset},size=1M", path.display());
    let launch = || Launch::new(lab, Backend::Threads);
    let launch_both = launch().arg("--image").arg(part("vol", 4096));
    let server = launch_both.arg("--image").arg(part("end", CACHE_LIMIT - MIB)).start()?;
    for name in ["vol", "end"] {
        let mut client = server.client_of(name)?;
        check!(client.export.size == MIB, "{} bytes", client.export.size);
        works_at(&mut client, MIB - 8192)?;
    }
    server.stop()?;
    let (code, log) = launch().arg("--image").arg(part("vol", CACHE_LIMIT)).start_refused()?;
    check!(code == 1 && log.contains("--cache 0"), "{code}\n{log}");
    Ok(())
}
