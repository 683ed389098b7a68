//! The system calls of the server: a FLUSH, and any command with FUA, is answered only after the data was synced; a
//! plain write is answered without (the control that shows these trials can fail). A hit calls only the socket.

use crate::lab::*;
use crate::trace::{Strace, strace};

pub(crate) fn trials() -> Vec<Trial> {
    let needs = &[Need::Strace];
    // strace does not see what the ring does; there the same code asks the same engine.
    let seen = &[Backend::Aio, Backend::Threads];
    let cached = |lab: &Lab, backend| strace_it(lab, backend, true);
    let uncached = |lab: &Lab, backend| strace_it(lab, backend, false);
    all([
        per_backend(seen, "strace_sync_before_reply", needs, cached),
        per_backend(seen, "strace_uncached_sync_before_reply", needs, uncached),
        per_backend(ALL, "cache_hits_call_only_the_socket", needs, hit_calls),
    ])
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
fn step(client: &mut Client, kind: u16, flags: u16, offset: u64, len: u32) -> Res<u64> {
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
            fail!("{name}: no sync before its reply\n{}", window.text());
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

/// Calls of a worker that answers from memory: it receives, asks whether its clients are busy, sends, and
/// looks what comes next. The last two are calls where the kernel keeps no time for user space.
const OF_A_HIT: [&str; 8] = [
    "recvfrom",
    "ioctl",
    "sendmsg",
    "epoll_wait",
    "epoll_pwait",
    "epoll_pwait2",
    "clock_gettime",
    "getcpu",
];

/// Hits in a row wake no thread and wait for none: no lock is asked of the kernel, no other thread is
/// told, no memory is fetched. A miss is seen to do more.
fn hit_calls(lab: &Lab, backend: Backend) -> Res {
    const HITS: usize = 100;
    const LEN: u32 = 8192;
    let (path, log) = (lab.path("a.img"), lab.path("strace.log"));
    image::with_parts(&path, MIB, 4, 35)?;
    let words = ["strace", "-D", "-f", "-xx", "-s", "64", "-o"];
    let words = words.into_iter().chain(log.to_str());
    let launch = Launch::new(lab, backend).image(&path).through(words).with("--workers 2");
    let server = launch.with("--cache 4M").start()?;
    let mut client = server.client()?;
    let mut rows = Vec::new();
    for kind in [cmd::READ, cmd::WRITE] {
        for _ in 0..4 {
            step(&mut client, kind, 0, 0, LEN)?; // not yet there, or not yet dirty
        }
        for _ in 0..=HITS {
            rows.push((kind, step(&mut client, kind, 0, 0, LEN)?));
        }
    }
    rows.push((cmd::READ, step(&mut client, cmd::READ, 0, MIB / 2, LEN)?)); // a miss
    rows.push((cmd::READ, step(&mut client, cmd::READ, 0, 0, LEN)?));
    client.disconnect()?;
    server.stop()?;

    let trace = Strace::read(&log)?;
    let mut calls = Vec::new();
    for pair in rows.windows(2) {
        calls.push(trace.calls(pair[0], pair[1])?);
    }
    let is_more = |calls: &[&str]| calls.iter().any(|call| !OF_A_HIT.contains(call));
    let count = |calls: &[&str], name: &str| calls.iter().filter(|&&call| call == name).count();
    let (reads, writes) = (&calls[..HITS], &calls[HITS + 1..][..HITS]);
    for calls in reads {
        check!(!is_more(calls), "more than a READ needs: {calls:?}");
        let one_each = ["recvfrom", "sendmsg"].iter().all(|name| count(calls, name) == 1);
        check!(one_each, "not one for each: {calls:?}");
    }
    // What the client has read is asked for only when it may matter.
    let asked: usize = reads.iter().map(|calls| count(calls, "ioctl")).sum();
    check!(asked <= HITS / 2, "{asked} ioctls for {HITS} READs");
    // A block that is just being written back is waited for.
    let alone = writes.iter().filter(|calls| !is_more(calls)).count();
    check!(alone > HITS / 2, "{alone} of {HITS} WRITEs needed no more: {writes:?}");
    let miss = &calls[2 * HITS + 2];
    check!(is_more(miss), "a miss does no more than a hit: {miss:?}");
    Ok(())
}
