//! What the system takes away: the reader of the log, the durability of a write, a backend.

use libtest_mimic::Trial;

use crate::client::{MIB, cmd, err};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, trial};
use crate::server::Launch;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("faults/stderr_closed", &[], stderr_closed),
        trial("faults/uring_refused_falls_back", &[], uring_refused),
        trial("faults/uring_refused_and_forced", &[], uring_forced),
    ]
}

/// Nobody reads the log any more: the server goes on, and ends with 0.
fn stderr_closed(lab: &Lab) -> Res {
    let launch = Launch::new(lab, Backend::Threads).sparse(4 * MIB)?;
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
    let launch = Launch::new(lab, Backend::Uring).sparse(4 * MIB)?.without_uring();
    let (code, log) = launch.start_refused()?;
    check!(code == 1, "exit code {code}, wanted 1:\n{log}");
    let clear = log.lines().any(|l| l.contains("uring") && l.contains("not permitted"));
    check!(clear, "no message names io_uring and the reason:\n{log}");
    check!(!log.contains("panicked"), "a panic:\n{log}");
    Ok(())
}
