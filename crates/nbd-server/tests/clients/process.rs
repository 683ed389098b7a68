//! The server as a process: in the background, with a command, with its last client; and the permissions of its socket.

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::lab::*;

const ENOSPC: u32 = 28;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("process/fork", &[], fork),
        trial("process/fork_that_fails", &[], fork_that_fails),
        trial("process/run", &[Need::NbdInfo], run),
        trial("process/run_is_ended_with_the_server", &[], run_is_ended),
        trial("process/exit_with_last", &[], exit_with_last),
        trial("process/client_without_image", &[], client_without_image),
        trial("process/socket_access", &[], socket_access),
        trial("process/hang_up_grows_exports", &[Need::NbdInfo], hang_up),
    ])
}

fn launch(launch: Launch<'_>) -> Res<Launch<'_>> {
    Ok(launch.sparse(MIB)?.with("--backend threads"))
}

/// The command ends once clients can connect; the server goes on until a signal, without a terminal, and
/// leaves neither its socket nor its file.
fn fork(lab: &Lab) -> Res {
    let (pid_file, socket) = (lab.path("pid"), lab.path("s"));
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--fork");
    let (code, said, log) = server.arg("--pid-file").arg(&pid_file).run_to_end()?;
    check!(code == 0, "exit code {code}:\n{log}");
    check!(said == format!("listening on unix:{}\n", socket.display()), "it said {said:?}");
    let pid: u32 = fs::read_to_string(&pid_file)?.trim().parse()?;
    let served = || -> Res {
        let mut client = Client::connect(&socket)?.opened("vol")?;
        client.write(0, &[7; 4096], 0)?.ok("write")?;
        // Its session is its own, and what it prints goes nowhere, but its log to the file that it has.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<_> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        check!(fields[3] == pid.to_string(), "session {} of {pid}", fields[3]);
        let leads_to = |fd: u32| fs::read_link(format!("/proc/{pid}/fd/{fd}"));
        for fd in 0..2 {
            check!(leads_to(fd)?.as_os_str() == "/dev/null", "descriptor {fd}: {:?}", leads_to(fd));
        }
        let log = leads_to(2)?;
        let logged = || fs::read_to_string(&log).ok()?.contains("negotiated").then_some(());
        check!(wait_until(logged).is_some(), "{}", log.display());
        client.disconnect()
    };
    let served = served();
    stop_forked(&pid_file)?;
    served?;
    check!(!socket.exists(), "the socket is left");
    check!(fs::read(lab.path("a.img"))?[..4096] == [7; 4096], "the write is lost");

    // A pipe is given up: a reader waits for its end.
    let piped = ["sh", "-c", "\"$0\" \"$@\" 2>&1 >/dev/null | cat"];
    let server = launch(Launch::bare(lab).on_socket("s"))?.through(piped).arg("--fork");
    let (code, _, log) = server.arg("--pid-file").arg(&pid_file).run_to_end()?;
    stop_forked(&pid_file)?;
    check!(code == 0, "exit code {code}:\n{log}");
    Ok(())
}

/// Stops a server that `--fork` has left in the background.
pub(crate) fn stop_forked(pid_file: &Path) -> Res {
    let pid = fs::read_to_string(pid_file)?.trim().parse()?;
    signal(pid, libc::SIGTERM);
    if wait_until(|| (!pid_file.exists()).then_some(())).is_none() {
        signal(pid, libc::SIGKILL);
        fail!("it goes on after SIGTERM");
    }
    Ok(())
}

/// What the server says and its exit code are those of the command.
fn fork_that_fails(lab: &Lab) -> Res {
    let missing = lab.path("nosuch.img");
    let server = Launch::bare(lab).on_socket("s").image(&missing).arg("--fork");
    let (code, said, log) = server.run_to_end()?;
    check!(code == 1 && said.is_empty(), "exit code {code}, {said:?}");
    check!(log.contains("nosuch.img"), "no reason:\n{log}");
    let (code, _, log) = launch(Launch::bare(lab))?.arg("--fork").run_to_end()?;
    check!(code == 2 && log.contains("--socket"), "exit code {code}:\n{log}");
    Ok(())
}

/// The command finds the server, without `--socket` too; its end and its exit code are the server's.
fn run(lab: &Lab) -> Res {
    let script = "nbdinfo --size \"$uri\"; echo \"$exportname $unixsocket\"; exit 7";
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--run").arg(script);
    let (code, said, log) = server.run_to_end()?;
    check!(code == 7, "exit code {code}:\n{log}");
    let wanted = format!("{MIB}\nvol {}\n", lab.path("s").display());
    check!(said == wanted, "the command said {said:?}");

    // It gets no variables of sockets that were handed over. Standard output is its own; the log says where the server
    // listens.
    let script = "nbdinfo --size \"$uri\"; env | grep -c ^LISTEN_; true";
    let server = launch(Launch::bare(lab))?.arg("--run").arg(script);
    let handed = ["env", "LISTEN_PID=1", "LISTEN_FDS=1", "LISTEN_FDNAMES=x"];
    let (code, said, log) = server.through(handed).run_to_end()?;
    check!(code == 0 && said == format!("{MIB}\n0\n"), "{code}, {said:?}:\n{log}");
    let (_, socket) = log.split_once("unix:").ok_or("no word where it listens")?;
    let folder = socket.split_once("/nbd.sock").map(|(folder, _)| folder);
    check!(folder.is_some_and(|folder| !fs::exists(folder).unwrap_or(true)), "left: {folder:?}");

    let server = launch(Launch::bare(lab))?.arg("--run").arg("kill -9 $$");
    check!(server.run_to_end()?.0 == 137, "the exit code of a signal");

    // The program that starts the server may ignore the ends of its children.
    let server = launch(Launch::bare(lab))?.through(["env", "--ignore-signal=CHLD"]);
    let server = server.arg("--run").arg("exit 5");
    check!(server.run_to_end()?.0 == 5, "the exit code while SIGCHLD is ignored");
    Ok(())
}

/// A server that is told to end has its command end, too.
fn run_is_ended(lab: &Lab) -> Res {
    let pid_file = lab.path("pid");
    let script = format!("echo $$ >{}; exec sleep 300", pid_file.display());
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--run").arg(script);
    let mut server = server.start_silent()?;
    let pid = wait_until(|| {
        fs::read_to_string(&pid_file).ok().and_then(|text| text.trim().parse::<u32>().ok())
    });
    let Some(pid) = pid else { fail!("the command did not start") };
    server.signal(libc::SIGTERM);
    let ended = server.wait_for(PATIENCE)?;
    check!(ended.is_some_and(|status| status.success()), "after SIGTERM: {ended:?}");
    eventually("the command ends", || !Path::new(&format!("/proc/{pid}")).exists())
}

/// Neither a probe of the socket nor one client of two ends the server; the last client does.
fn exit_with_last(lab: &Lab) -> Res {
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--exit-with-last");
    let mut server = server.start()?;
    drop(server.connect()?);
    let (first, second) = (server.client()?, server.client()?);
    first.disconnect()?;
    thread::sleep(Duration::from_millis(100));
    server.still_runs()?;
    second.disconnect()?;
    server.finished()?;
    check!(!lab.path("s").exists(), "the socket is left");

    // A client that waits for a place gets that of the last one.
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--exit-with-last");
    let mut server = server.with("--max-connections 1").start()?;
    let (first, second) = (server.client()?, server.connect()?);
    first.disconnect()?;
    second.opened("vol")?.disconnect()?;
    server.finished()?;
    Ok(())
}

/// With `--exit-with-last`, a client whose image cannot be attached does not end the server.
fn client_without_image(lab: &Lab) -> Res {
    let server = launch(Launch::bare(lab).on_socket("s"))?.arg("--exit-with-last");
    let mut server = server.start()?;
    let mut refused = server.greeted()?;
    // The worker duplicates the descriptor of the image, which now fails. A limit below the number of descriptors
    // that a thread polls would also fail its poll.
    let pid = Pid::from_raw(server.pid() as i32);
    let limit = |limit| prlimit(pid, Resource::Nofile, limit);
    let is_free = |fd: &u64| {
        !Path::new(&format!("/proc/{}/fd", server.pid())).join(fd.to_string()).is_symlink()
    };
    let current = (0..).find(is_free);
    let before = limit(Rlimit { current, ..getrlimit(Resource::Nofile) })?;
    check!(refused.go("vol").is_err(), "the export was opened without a descriptor");
    drop(refused);
    server.logged("connection closed")?;
    thread::sleep(Duration::from_millis(100));
    server.still_runs()?;
    limit(before)?;
    server.client()?.disconnect()?;
    server.finished()
}

fn socket_access(lab: &Lab) -> Res {
    let server = launch(Launch::bare(lab).on_socket("s"))?.start()?;
    let mode = fs::metadata(server.socket())?.mode() & 0o777;
    check!(mode == 0o600, "the socket has mode {mode:o}");
    let wanted = format!("unix:{}", server.socket().display());
    check!(server.listeners == [wanted], "it says it listens on {:?}", server.listeners);
    server.stop()?;
    check!(!lab.path("s").exists(), "the socket file is left after a clean end");
    let group = fs::metadata(lab.dir())?.gid().to_string(); // one that this user is in
    let server = launch(Launch::bare(lab).on_socket("s"))?.with("--socket-mode 660");
    let server = server.arg("--socket-group").arg(&group).start()?;
    let meta = fs::metadata(server.socket())?;
    check!(meta.mode() & 0o777 == 0o660, "mode {:o}", meta.permissions().mode());
    check!(meta.gid().to_string() == group, "group {}, not {group}", meta.gid());
    server.client()?.disconnect()?;
    server.stop()?;
    for (option, value) in [("--socket-mode", "888"), ("--socket-group", "no-such-group")] {
        let server = launch(Launch::bare(lab).on_socket("s"))?.arg(option).arg(value);
        server.refused(2, &[value])?;
    }
    let command = Command::new("id").arg("-u").output()?;
    if command.stdout != b"0\n" {
        // A group that the user is not in: the server ends and leaves no socket.
        let server = launch(Launch::bare(lab).on_socket("s"))?.with("--socket-group 0");
        server.refused(1, &["not permitted"])?;
        check!(!lab.path("s").exists(), "the socket is left");
    }
    Ok(())
}

/// At SIGHUP an export grows with its file by whole blocks; connections keep the size that they were told.
fn hang_up(lab: &Lab) -> Res {
    for cache in ["0", "1M"] {
        let image = lab.path("a.img");
        image::sparse(&image, MIB)?;
        let launch = Launch::bare(lab).on_socket("s").image(&image).arg("--cache").arg(cache);
        let other = lab.path("b.img");
        image::sparse(&other, MIB)?;
        let launch = launch.arg("--image").arg(format!("other={}", other.display()));
        let uneven = lab.path("c.img");
        image::sparse(&uneven, 5000)?;
        let mut server = launch.image_as("uneven", &uneven).start()?;
        let mut old = server.client()?;
        let odd = 100; // bytes behind the last whole block
        for path in [&image, &uneven] {
            fs::OpenOptions::new().write(true).open(path)?.set_len(3 * MIB + odd)?;
        }
        let uri = server.uri("");
        let size = |export: &str| -> Res<u64> {
            let uri = uri.replace("///", &format!("///{export}"));
            let said = lab.run_ok(Command::new("nbdinfo").arg("--size").arg(uri))?;
            Ok(said.trim().parse()?)
        };
        check!(size("vol")? == MIB, "it has grown without a SIGHUP");
        server.hang_up();
        let grown = || size("vol").ok().filter(|&size| size == 3 * MIB);
        check!(wait_until(grown).is_some(), "{} bytes", size("vol")?);
        check!(size("uneven")? == 5000, "one without whole blocks has grown");

        let mut client = server.client()?;
        let data = vec![0x5a; 64 << 10];
        let last = 3 * MIB - data.len() as u64;
        check!(client.read(last, 4096)? == Ok(vec![0; 4096]), "the new part has no zeros");
        for offset in [MIB - 4096, 2 * MIB + 17, last] {
            client.write(offset, &data, 0)?.ok("a write")?;
            check!(client.read(offset, data.len() as u32)?.as_ref() == Ok(&data), "at {offset}");
        }
        client.write(last + 4096, &data, 0)?.is(ENOSPC, "a write behind the end")?;
        client.plain(cmd::TRIM, 0, 2 * MIB, 512 << 10)?.ok("TRIM")?;
        old.write(MIB, &data, 0)?.is(ENOSPC, "a write of a connection that knows the old size")?;
        check!(old.read(MIB - 4096, 4096)? == Ok(data[..4096].to_vec()), "by the old connection");
        client.flush()?.ok("flush")?;
        check!(image::bytes_at(&image, last, data.len())? == data, "it is not written");
        check!(fs::metadata(&image)?.len() == 3 * MIB + odd, "the server changed the size");
        server.still_serves()?;
        // A file that became shorter keeps its size. The first look may reach the other file
        // before this one; once the second has begun, the first has seen both.
        fs::OpenOptions::new().write(true).open(&image)?.set_len(MIB)?;
        for len in [2 * MIB, 3 * MIB] {
            fs::OpenOptions::new().write(true).open(&other)?.set_len(len)?;
            server.hang_up();
            let grown = || size("other").ok().filter(|&size| size == len);
            check!(wait_until(grown).is_some(), "{} bytes", size("other")?);
        }
        check!(size("vol")? == 3 * MIB, "it has shrunk");
        server.stop()?;
    }
    Ok(())
}
