//! What the system takes away: the reader of the log, the durability of a write, a backend.

use std::fs;

use libtest_mimic::Trial;

use crate::client::{MIB, cmd, err, flag};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, trial};
use crate::need::Need;
use crate::server::Launch;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("faults/stderr_closed", &[], stderr_closed),
        trial("faults/failed_sync_is_remembered", &[Need::Strace], failed_sync),
        trial("faults/uring_refused_falls_back", &[], uring_refused),
        trial("faults/uring_refused_and_forced", &[], uring_forced),
    ]
}

/// Nobody reads the log any more: the server goes on, and ends with 0.
fn stderr_closed(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 4 * MIB)?;
    let launch = Launch::new(lab, Backend::Threads).image(&image);
    let mut server = launch.stderr_closed().start()?;
    let mut client = server.client()?;
    let data = vec![0x3d; 8192];
    client.write(4096, &data, 0)?.ok("write")?;
    check!(client.read(4096, 8192)? == Ok(data), "other bytes than written");
    // Things to log: a refused request, and one that vanishes.
    client.plain(cmd::TRIM, 0, 8 * MIB, 4096)?.is(err::EINVAL, "TRIM past the end")?;
    drop(client);
    server.still_serves()?;
    check!(server.log().is_empty(), "its standard error was not closed: {}", server.log());
    server.stop()
}

/// The first fdatasync fails. The kernel says so once; from then on the server says it to every
/// client, on every worker, and when it ends. So it does without a cache; `write_back` has one.
fn failed_sync(lab: &Lab) -> Res {
    let (image, log) = (lab.path("a.img"), lab.path("strace.log"));
    image::sparse(&image, 4 * MIB)?;
    let log = log.to_str().expect("temporary paths are UTF-8");
    let words = ["strace", "-D", "-f", "-o", log, "-e", "trace=fdatasync,fsync"];
    // strace counts by thread: one error for each thread that syncs.
    let words = words.into_iter().chain(["-e", "inject=fdatasync,fsync:error=EIO:when=1"]);
    // Depth 1 is one thread of the pool for each worker, so no worker's second sync would fail.
    let options = ["--workers", "2", "--depth", "1", "--cache", "0"];
    let launch = Launch::new(lab, Backend::Threads).image(&image).through(words);
    let mut server = options.into_iter().fold(launch, Launch::arg).start()?;
    // Connections go to the workers in turn.
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(server.client()?);
    }
    let data = vec![0x77; 8192];
    clients[0].write(0, &data, 0)?.ok("a write before")?;
    clients[0].flush()?.is(err::EIO, "the FLUSH whose fdatasync failed")?;
    for (i, client) in clients.iter_mut().enumerate() {
        client.flush()?.is(err::EIO, &format!("a later FLUSH, connection {i}"))?;
        let fua = client.write(MIB, &data, flag::FUA)?;
        fua.is(err::EIO, &format!("a later FUA write, connection {i}"))?;
        let zeroes = client.plain(cmd::WRITE_ZEROES, flag::FUA, 2 * MIB, 4096)?;
        zeroes.is(err::EIO, &format!("later FUA zeroes, connection {i}"))?;
        client.write(3 * MIB, &data, 0)?.ok("a plain write afterwards")?;
        check!(client.read(3 * MIB, 8192)? == Ok(data.clone()), "a read afterwards");
    }
    let mut late = server.client()?;
    late.flush()?.is(err::EIO, "FLUSH on a connection made afterwards")?;
    drop((clients, late));
    server.terminate();
    let status = server.ended()?;
    check!(status.code() == Some(1), "lost data, but it ended with {status}");
    let said = server.log();
    check!(said.contains("durable"), "the end does not say that data was lost:\n{said}");
    // One error from the kernel: all the others were the server's memory of it.
    let calls = fs::read_to_string(log)?;
    let injected = calls.matches("(INJECTED)").count();
    check!(injected == 1, "{injected} errors came from the kernel, wanted 1:\n{calls}");
    Ok(())
}

/// Where the kernel refuses io_uring, `auto` takes another backend and says why.
fn uring_refused(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 4 * MIB)?;
    let launch = Launch::bare(lab).arg("--image").arg(format!("vol={}", image.display()));
    let launch = launch.arg("--backend").arg("auto").without_uring();
    let mut server = launch.on_socket("s").start()?;
    let log = server.logged("not permitted")?;
    let named = log.lines().any(|l| l.contains("uring") && l.contains("not permitted"));
    check!(named, "no line names io_uring and the reason:\n{log}");
    check!(!log.contains("backend=uring"), "it runs on io_uring all the same:\n{log}");
    server.still_serves()?;
    let mut client = server.client()?;
    client.flush()?.ok("FLUSH")?;
    client.plain(cmd::WRITE_ZEROES, 0, MIB, MIB)?.ok("zeroes")?;
    client.disconnect()?;
    server.stop()
}

/// Where the kernel refuses io_uring, `--backend uring` is refused with the reason.
fn uring_forced(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 4 * MIB)?;
    let launch = Launch::new(lab, Backend::Uring).image(&image).without_uring();
    let (code, log) = launch.start_refused()?;
    check!(code == 1, "exit code {code}, wanted 1:\n{log}");
    let clear = log.lines().any(|l| l.contains("uring") && l.contains("not permitted"));
    check!(clear, "no message names io_uring and the reason:\n{log}");
    check!(!log.contains("panicked"), "a panic:\n{log}");
    Ok(())
}
