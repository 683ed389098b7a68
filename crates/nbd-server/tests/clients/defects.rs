//! What a server must not do to an image, and must not stop for: read-only devices, names that a power
//! cut takes, QEMU's locks, a log that is not read, limits, and files past what a cache can number.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("devices/read_only_is_refused", &[Need::LoopDevice], read_only_device),
        trial("durability/name_of_a_new_image", &[Need::Strace], new_name),
        trial("locks/of_qemu", &[Need::QemuIo], qemu_locks),
        trial("log/unread_output_stops_nothing", &[], unread_output),
        trial("log/unwritable_standard_output", &[], unwritable_output),
        trial("limits/clients_one_after_another", &[], one_after_another),
        trial("contact/messages_name_the_file", &[], messages),
        trial("contact/pid_file_replaces_no_image", &[], pid_file),
        trial("contact/too_few_descriptors", &[], too_few_descriptors),
        trial("contact/log_names_the_peer", &[], log_names_peer),
        trial("large/in_a_folder", &[], large_in_folder),
        trial("large/growth_past_the_limit", &[], growth_past_the_limit),
    ])
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

/// A device that takes no writes is not served as one that does, even if a process may open it for writing. In a folder
/// it is an export for reading only.
fn read_only_device(lab: &Lab) -> Res {
    let (image, dir) = (lab.path("a.img"), lab.path("images"));
    image::with_parts(&image, 4 * MIB, 4, 3)?;
    fs::create_dir(&dir)?;
    let device = Loop::new(&image, &["-r"])?;
    let number = device.0.to_string_lossy().trim_start_matches("/dev/loop").to_string();
    lab.run_ok(Command::new("mknod").arg(dir.join("vol")).args(["b", "7", &number]))?;
    let launch = || Launch::threads(lab);
    launch().image(&device.0).refused(1, &["read-only", &device.0.to_string_lossy()])?;
    let spec = format!("vol={},readonly", device.0.display());
    for server in [
        launch().image(&device.0).arg("--read-only"),
        launch().arg("--image").arg(spec),
        launch().arg("--export-dir").arg(&dir),
    ] {
        let server = server.start()?;
        let mut client = server.client()?;
        check!(client.export.flags & 2 != 0, "not read-only: {:#x}", client.export.flags);
        let first = image::bytes_at(&image, 0, 4096)?;
        check!(client.read(0, 4096)? == Ok(first), "it reads other bytes");
        client.write(0, &[1; 4096], 0)?.is(1, "a write")?;
        client.disconnect()?;
        server.stop()?;
    }
    Ok(())
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
        Launch::threads(lab).through(words).image(&image).with("--size 8M").start()?.stop()?;
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
    let done = lab.run(&mut qemu)?;
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
    check!(wait_until(is_there).is_some(), "qemu-nbd does not listen");
    Ok(holder)
}

/// Beside a server that writes, QEMU neither reads nor writes; beside one that only reads, QEMU reads and does not
/// write, and another server reads. The same whichever comes first.
fn qemu_locks(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    for only_reads in [false, true] {
        let launch = || {
            let launch = Launch::threads(lab).image(&image);
            if only_reads { launch.arg("--read-only") } else { launch }
        };
        let server = launch().start()?;
        check!(!qemu_io(lab, &[], "write 0 4k", &image)?, "QEMU writes beside it, {only_reads}");
        let reads = qemu_io(lab, &["-r"], "read 0 4k", &image)?;
        check!(reads == only_reads, "QEMU reads: {reads}, the server: {only_reads}");
        if only_reads {
            launch().socket(&lab.path("s2")).start()?.stop()?;
        }
        server.stop()?;
        check!(qemu_io(lab, &[], "write 0 4k", &image)?, "the lock stays after the server's end");
        for (options, qemu_reads) in [(&[][..], false), (&["-r"], true)] {
            let _holder = qemu_holds(lab, options, &image)?;
            if qemu_reads && only_reads {
                launch().start()?.stop()?;
                continue;
            }
            launch().refused(1, &["in use"])?;
        }
    }
    Ok(())
}

/// A pipe that takes nothing more, and is not read. Once it is dropped, a write to it fails.
fn full_pipe(lab: &Lab, name: &str) -> Res<fs::File> {
    let fifo = lab.path(name);
    lab.run_ok(Command::new("mkfifo").arg(&fifo))?;
    let mut options = OpenOptions::new();
    let held = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&fifo)?;
    while rustix::io::write(&held, &[b'x'; 4096]).is_ok() {}
    Ok(held)
}

/// Standard output or a log that is not read, or a log whose reader has ended, stops nothing: clients are served, enough
/// of them to fill any queue, and SIGTERM ends the server with 0.
fn unread_output(lab: &Lab) -> Res {
    for (stream, has_ended) in [(1, false), (2, false), (2, true)] {
        let (name, socket) = (format!("pipe{stream}{has_ended}"), lab.path("s"));
        let held = full_pipe(lab, &name)?;
        let script = format!("exec \"$0\" \"$@\" {stream}> {}", lab.path(&name).display());
        let launch = Launch::threads(lab).through(["sh", "-c", &script]);
        let mut process = launch.sparse(MIB)?.start_silent()?;
        let early = wait_until(|| Client::connect(&socket).ok());
        let mut early = early.ok_or("it does not listen")?.opened("vol")?;
        let _held = (!has_ended).then_some(held);
        for nr in 0..600 {
            let mut client = Client::connect(&socket)?.opened("vol")?;
            check!(client.read(0, 512)?.is_ok(), "{name}: client {nr} is not served");
            client.disconnect()?;
        }
        check!(early.read(0, 4096)?.is_ok(), "{name}: an early client is not served");
        process.signal(libc::SIGTERM);
        let ended = process.wait_for(PATIENCE)?;
        check!(ended.is_some_and(|status| status.success()), "{name}, after SIGTERM: {ended:?}");
    }
    Ok(())
}

/// The message names standard output.
fn unwritable_output(lab: &Lab) -> Res {
    let launch = Launch::threads(lab).through(["sh", "-c", "exec \"$0\" \"$@\" > /dev/full"]);
    launch.sparse(MIB)?.refused(1, &["standard output"]).map(drop)
}

/// Clients that come one after the other are one at a time: each is served, whatever the limit.
fn one_after_another(lab: &Lab) -> Res {
    let launch = Launch::threads(lab).sparse(MIB)?.with("--max-connections 1");
    let server = launch.with("--tcp 127.0.0.1:0").start()?;
    for tcp in [false, true] {
        for nr in 0..100 {
            let client = if tcp { Client::connect_tcp(server.tcp()?) } else { server.connect() };
            let served = client.and_then(|client| client.opened("vol")).and_then(|mut client| {
                let read = client.read(0, 512)?;
                client.request(0, cmd::DISC, 0, 0)?;
                check!(read.is_ok(), "{}", brief(&read));
                Ok(())
            });
            if let Err(error) = served {
                let (error, log) = (error.message().unwrap_or_default(), server.log());
                fail!("tcp {tcp}, client {nr}: {error}\n{}", tail(&log, 12));
            }
        }
    }
    // One that stays keeps others out, and no longer than it stays.
    let first = server.client()?;
    let second = server.client().err().ok_or("two clients at once")?;
    let second = second.message().unwrap_or_default();
    check!(second.contains("closed"), "the second is not refused: {second}");
    first.disconnect()?;
    server.client()?;
    server.stop()
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
    let mut server = Launch::threads(lab).image(&path).start()?;
    OpenOptions::new().write(true).open(&path)?.set_len(CACHE_LIMIT + 4096)?;
    server.hang_up();
    let grown = || size_of(&server, "vol").ok().filter(|&size| size > MIB);
    let size = wait_until(grown).ok_or("it has not grown")?;
    let mut client = server.client()?;
    works_at(&mut client, size - 8192)?;
    check!(size == CACHE_LIMIT, "{size} bytes");
    server.logged("2^57")?;
    server.serves_to_the_end()
}

/// What is wrong is named, with the remedy that works.
fn messages(lab: &Lab) -> Res {
    let (image, plain) = (lab.path("a.img"), lab.path("plain"));
    image::sparse(&image, MIB)?;
    fs::write(&plain, "text")?;
    let bare = || Launch::bare(lab).with("--backend threads");
    let missing = lab.path("nosuch");
    let served = || Launch::bare(lab).image(&image);
    let new = bare().image(&lab.path("new")).with("--read-only");
    let direct = bare().image(Path::new("/proc/version")).with("--read-only --direct");
    for (socket, launch, words, not) in [
        ("s", served().with("--pid-file /nosuch/pid"), &["pid file", "/nosuch/pid"][..], "image"),
        ("s", bare().arg("--export-dir").arg(&missing), &["folder", "nosuch"], "image"),
        ("s", bare().image(&missing), &["nosuch", "does not exist", "--size"], "folder"),
        ("s", new, &["new", "only reads"], "--size"),
        ("s", direct, &["/proc/version", "O_DIRECT", "--direct"], "Invalid argument"),
        ("plain", served(), &["plain", "no socket"], "in use"),
    ] {
        let log = launch.on_socket(socket).refused(1, words)?;
        check!(!log.contains(not), "{log}");
    }
    check!(!missing.exists(), "an image was created");
    check!(fs::read_to_string(&plain)? == "text", "the file was replaced");
    Ok(())
}

/// An image that is named as the pid file by mistake keeps its bytes; the file of a server that was
/// killed is replaced.
fn pid_file(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::with_parts(&image, MIB, 4, 5)?;
    let before = fs::read(&image)?;
    let launch = || Launch::threads(lab).image(&image).arg("--pid-file");
    launch().arg(&image).refused(1, &["pid file"])?;
    check!(fs::read(&image).is_ok_and(|now| now == before), "the image was replaced");
    let old = lab.path("pid");
    for left in ["12345\n", ""] {
        fs::write(&old, left)?;
        let server = launch().arg(&old).start()?;
        check!(fs::read_to_string(&old)? == format!("{}\n", server.pid()), "another number");
        server.stop()?;
        check!(!old.exists(), "the file is left");
    }
    Ok(())
}

/// A server that could never accept says so, and ends.
fn too_few_descriptors(lab: &Lab) -> Res {
    let limited = |limit: u32| -> Res<Launch<'_>> {
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let launch = Launch::threads(lab).sparse(MIB)?;
        Ok(launch.with("--workers 2").through(["sh".to_string(), "-c".into(), script]))
    };
    let mut served = 0;
    for limit in (12..80).step_by(2) {
        let launch = limited(limit)?.socket(&lab.path(&format!("s{limit}")));
        match launch.start() {
            Ok(server) => {
                let mut client = server.client().map_err(|error| {
                    let error = error.message().unwrap_or_default().to_string();
                    format!("ulimit -n {limit}: it starts and serves nothing: {error}")
                })?;
                check!(client.read(0, 4096)?.is_ok(), "ulimit -n {limit}: a read");
                server.logged("below --max-connections")?;
                client.disconnect()?;
                server.stop()?;
                served += 1;
                if served == 3 {
                    break;
                }
            }
            Err(error) => {
                let text = error.message().unwrap_or_default();
                let says = text.contains("ulimit -n") || text.contains("Too many open files");
                check!(says, "ulimit -n {limit}: no reason:\n{text}");
            }
        }
    }
    check!(served == 3, "it serves with no limit below 80");
    Ok(())
}

fn log_names_peer(lab: &Lab) -> Res {
    let server = Launch::threads(lab).sparse(MIB)?.start()?;
    server.client()?.disconnect()?;
    let me = format!("peer=pid {}", std::process::id());
    let lines = |log: &str| log.lines().filter(|line| line.contains(&me)).count();
    let both = || (lines(&server.log()) == 2).then_some(());
    check!(wait_until(both).is_some(), "no {me}:\n{}", server.log());
    server.logged("tls=false")?;
    server.stop()
}

/// Of a folder, a client is told that the export is too large, and not that there is none. As an image it is refused.
fn large_in_folder(lab: &Lab) -> Res {
    let (dir, path) = huge(CACHE_LIMIT + 4096)?;
    Launch::threads(lab).image(&path).refused(1, &[&CACHE_LIMIT.to_string()])?;
    let server = Launch::threads(lab).arg("--export-dir").arg(dir.path()).start()?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let mut client = server.greeted()?;
    client.send_option(opt::GO, &info_data(name))?;
    let (kind, text) = client.option_reply(opt::GO)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    check!(kind == rep::ERR_UNKNOWN && text.contains("too large"), "{kind:#x}: {text}");
    check!(!server.descriptors()?.contains(&path), "a file that is refused stays open");
    server.logged("the cache can number")?;
    server.stop()
}
