//! A FLUSH, and any command with FUA, is answered only after the data was synced; a plain write
//! is answered without (the control that shows these trials can fail).

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd, flag};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, per_backend};
use crate::need::Need;
use crate::server::Launch;
use crate::trace::{Strace, strace};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let needs = &[Need::Strace];
    // strace does not see what the ring does; there the same code asks the same engine.
    let seen = &[Backend::Aio, Backend::Threads];
    let cached = |lab: &Lab, backend| strace_it(lab, backend, true);
    trials.extend(per_backend(seen, "strace_sync_before_reply", needs, cached));
    let uncached = |lab: &Lab, backend| strace_it(lab, backend, false);
    trials.extend(per_backend(seen, "strace_uncached_sync_before_reply", needs, uncached));
    trials
}

/// The commands, in order: name, type, flags, offset, length, and whether a sync must come first.
const STEPS: [(&str, u16, u16, u64, u32, bool); 7] = [
    ("write", cmd::WRITE, 0, 0, 8192, false),
    ("flush", cmd::FLUSH, 0, 0, 0, true),
    ("fua_write", cmd::WRITE, flag::FUA, MIB, 8192, true),
    ("read", cmd::READ, 0, MIB, 4096, false),
    ("fua_zeroes", cmd::WRITE_ZEROES, flag::FUA, 0, 8192, true),
    ("fua_trim", cmd::TRIM, flag::FUA, MIB, 8192, true),
    ("last_write", cmd::WRITE, 0, 2 * MIB, 8192, false),
];

/// Runs one step alone on its connection; gives its cookie.
pub(crate) fn step(client: &mut Client, kind: u16, flags: u16, offset: u64, len: u32) -> Res<u64> {
    let cookie = client.request(flags, kind, offset, len)?;
    if kind == cmd::WRITE {
        client.send(&vec![0x5a; len as usize])?;
    }
    client.answer(cookie)?.ok("a step")?;
    if kind == cmd::READ {
        client.recv_vec(len as usize)?;
    }
    Ok(cookie)
}

fn strace_it(lab: &Lab, backend: Backend, cached: bool) -> Res {
    let (image, log) = (lab.path("a.img"), lab.path("strace.log"));
    image::sparse(&image, 16 * MIB)?;
    let launch = Launch::new(lab, backend).image(&image).through(strace(&log));
    let server = launch.arg("--cache").arg(if cached { "64M" } else { "0" }).start()?;
    let mut client = server.client()?;
    let mut cookies = Vec::new();
    for (_, kind, flags, offset, len, _) in STEPS {
        cookies.push(step(&mut client, kind, flags, offset, len)?);
    }
    server.stop()?;

    let trace = Strace::read(&log)?;
    for ((name, kind, flags, _, _, synced), cookie) in STEPS.into_iter().zip(cookies) {
        let window = trace.between(kind, flags, cookie)?;
        let sync = window.last_sync();
        if !synced {
            check!(sync.is_none(), "{name}: a sync before its reply\n{}", window.text());
            let written = window.first_write().is_some();
            let expected = kind == cmd::WRITE && !cached;
            check!(written == expected, "{name}: written: {written}\n{}", window.text());
            continue;
        }
        let Some(sync) = sync else {
            crate::lab::fail!("{name}: no sync before its reply\n{}", window.text());
        };
        // Without a cache the write before it has written.
        if kind != cmd::FLUSH || cached {
            let written = window.first_write();
            check!(written.is_some_and(|w| w <= sync), "{name}: synced first\n{}", window.text());
        }
    }
    let end = trace.after_sigterm()?;
    let (written, sync) = (end.first_write(), end.last_sync());
    check!(sync.is_some(), "no sync after SIGTERM\n{}", end.text());
    check!(!cached || written.is_some_and(|w| Some(w) <= sync), "not written\n{}", end.text());
    Ok(())
}
