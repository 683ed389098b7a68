//! A FLUSH, and any command with FUA, is answered only after the data was synced; a plain write
//! is answered without (the control that shows these trials can fail).

use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd, flag};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, per_backend};
use crate::need::Need;
use crate::server::Launch;
use crate::trace::{Event, Strace, TracePoints, strace};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let needs = &[Need::Strace];
    // strace does not see what the ring does.
    let seen = &[Backend::Aio, Backend::Threads];
    let cached = |lab: &Lab, backend| strace_it(lab, backend, true);
    trials.extend(per_backend(seen, "strace_sync_before_reply", needs, cached));
    let uncached = |lab: &Lab, backend| strace_it(lab, backend, false);
    trials.extend(per_backend(seen, "strace_uncached_sync_before_reply", needs, uncached));
    let needs = &[Need::TracePoints];
    let cached = |lab: &Lab, backend| trace_ring(lab, backend, true);
    trials.extend(per_backend(&[Backend::Uring], "ring_sync_before_reply", needs, cached));
    let uncached = |lab: &Lab, backend| trace_ring(lab, backend, false);
    trials.extend(per_backend(
        &[Backend::Uring],
        "ring_uncached_sync_before_reply",
        needs,
        uncached,
    ));
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

fn trace_ring(lab: &Lab, backend: Backend, cached: bool) -> Res {
    let cache = if cached { "64M" } else { "0" };
    let launch = Launch::new(lab, backend).sparse(16 * MIB)?.arg("--cache").arg(cache);
    let mut server = launch.start()?;
    let mut client = server.client()?;
    let points = TracePoints::start(server.pid())?;
    for (name, kind, flags, offset, len, synced) in STEPS {
        points.mark("sent")?;
        step(&mut client, kind, flags, offset, len)?;
        points.mark("answered")?;
        // What the server does after the reply (waiting again) stays out of the next window.
        std::thread::sleep(Duration::from_millis(20));
        let events = points.between("sent", "answered")?;
        let replied = reply_position(&events);
        let Some(replied) = replied else {
            crate::lab::fail!("{name}: no reply was sent? {events:#?}");
        };
        let is_sync = |e: &Event| *e == Event::Sync || operation(e) == Some("FSYNC");
        let sync = events[..replied].iter().position(is_sync);
        if !synced {
            let anywhere = events.iter().any(is_sync);
            check!(!anywhere, "{name}: an fdatasync in the ring\n{events:#?}");
        } else {
            let Some(sync) = sync else {
                crate::lab::fail!("{name}: no fdatasync before its reply\n{events:#?}");
            };
            check!(
                events[sync] == Event::Sync || completes(&events[sync..replied]),
                "{name}: its fdatasync had not ended when the reply was sent\n{events:#?}"
            );
        }
        // With a cache a FLUSH, or a thread of the cache, writes.
        if kind == cmd::WRITE && !cached {
            let in_ring = |e: &Event| operation(e).is_some_and(|o| o.starts_with("WRITE"));
            let write = events.iter().position(in_ring);
            let Some(write) = write.filter(|write| *write < replied) else {
                crate::lab::fail!("{name}: the ring saw no write before its reply\n{events:#?}");
            };
            if flags & flag::FUA != 0 {
                let until = sync.unwrap_or(replied);
                let before = write < until && completes(&events[write..until]);
                check!(before, "{name}: fdatasync began before the write ended\n{events:#?}");
            }
        }
    }
    points.mark("term")?;
    server.terminate();
    server.finished()?;
    points.mark("ended")?;
    let end = points.between("term", "ended")?;
    let synced = end.iter().any(|e| *e == Event::Sync || operation(e) == Some("FSYNC"));
    check!(synced, "no fdatasync after SIGTERM {end:?}");
    Ok(())
}

fn operation(event: &Event) -> Option<&str> {
    match event {
        Event::Submit { operation, .. } => Some(operation),
        _ => None,
    }
}

/// True if the request that `events` starts with completes without an error in `events`.
fn completes(events: &[Event]) -> bool {
    let Some(Event::Submit { request: ours, .. }) = events.first() else { return false };
    events.iter().any(
        |e| matches!(e, Event::Complete { request, result } if request == ours && *result >= 0),
    )
}

/// The last system call that sends on a socket; a plain `write` only if there is no other, since
/// it also rings eventfds.
fn reply_position(events: &[Event]) -> Option<usize> {
    let last = |plain: bool| {
        events.iter().rposition(|e| matches!(e, Event::Send { call } if (call == "write") == plain))
    };
    last(false).or_else(|| last(true))
}
