//! Reads from memory: what the device is not asked for, and what is never older than it may be.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{MIB, cmd};
use crate::durability::step;
use crate::image;
use crate::lab::{Backend, Lab, Res, check, per_backend, wait_until};
use crate::need::Need;
use crate::server::Launch;
use crate::trace::Strace;

const BLOCK: u64 = 4096;

pub(crate) fn trials() -> Vec<Trial> {
    let all = &Backend::ALL;
    let mut trials = Vec::new();
    trials.extend(per_backend(all, "cache_hits_ask_no_device", &[], hits));
    trials.extend(per_backend(all, "cache_tiny_under_many_clients", &[], tiny));
    trials.extend(per_backend(all, "cache_hits_call_only_the_socket", &[Need::Strace], hit_calls));
    trials
}

fn launch<'a>(lab: &'a Lab, backend: Backend, image: &Path, cache: &str) -> Launch<'a> {
    let launch = Launch::new(lab, backend).image(image);
    ["--workers", "2", "--cache", cache].into_iter().fold(launch, Launch::arg).metrics()
}

/// What was read once is not read again, whoever asks: neither by the server's own count, nor by the
/// image, which another process changes meanwhile.
fn hits(lab: &Lab, backend: Backend) -> Res {
    let path = lab.path("a.img");
    let file = image::with_parts(&path, 8 * MIB, 64, 31)?;
    let server = launch(lab, backend, &path, "4M").start()?;
    let (mut first, mut second) = (server.client()?, server.client()?);
    let there = image::bytes_at(&path, 0, 1 << 16)?;
    check!(first.read(0, 1 << 16)? == Ok(there.clone()), "a miss");
    let reads = server.figure("cache_blocks_read_total")?;
    check!(reads == 16, "{reads} blocks were read, wanted 16");
    if backend != Backend::Aio {
        // With --direct the file's own cache would come between.
        file.write_all_at(&[0x99; 1 << 16], 0)?;
    }
    for client in [&mut first, &mut second] {
        check!(client.read(0, 1 << 16)? == Ok(there.clone()), "a hit");
        // With --direct it has to be aligned.
        let part = if backend == Backend::Aio { 4096..12_288 } else { 100..5100 };
        let (offset, len) = (part.start as u64, part.len() as u32);
        check!(client.read(offset, len)? == Ok(there[part].to_vec()), "a part of it");
    }
    let again = server.figure("cache_blocks_read_total")?;
    let answered = server.figure("read_hits_total")?;
    check!(again == reads, "{} blocks were read again", again - reads);
    check!(answered == 4, "{answered} requests were answered from memory, wanted 4");
    // Longer ones pass it by.
    let long = first.read(0, (1 << 16) + 4096)?.map_err(|e| format!("a long one: error {e}"))?;
    check!(backend == Backend::Aio || long[0] == 0x99, "a long request was answered from memory");
    first.disconnect()?;
    second.disconnect()?;
    server.stop()
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
    let server = launch(lab, backend, &path, "4M").through(words).start()?;
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

/// Four buffers, and many clients that read and write: everybody gets an answer, and none that is older
/// than what was answered before it was asked for.
fn tiny(lab: &Lab, backend: Backend) -> Res {
    const BLOCKS: u64 = 12;
    let path = lab.path("a.img");
    image::sparse(&path, MIB)?;
    let server = launch(lab, backend, &path, "16K").start()?;
    let stop = AtomicBool::new(false);
    // By block: the last value that was answered. Each has one writer.
    let answered: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let reads = AtomicU64::new(0);
    thread::scope(|scope| -> Res {
        let mut threads = Vec::new();
        for writer in 0..3 {
            let mut client = server.client()?;
            let (answered, stop) = (&answered, &stop);
            threads.push(scope.spawn(move || -> Res {
                for value in 1_u64.. {
                    let block = (value * 3 + writer) % BLOCKS;
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let data = value.to_le_bytes().repeat(BLOCK as usize / 8);
                    client.write(block * BLOCK, &data, 0)?.ok("a write")?;
                    answered[block as usize].store(value, Ordering::Release);
                }
                Ok(())
            }));
        }
        for reader in 0..8_u64 {
            let mut client = server.client()?;
            let (answered, stop, reads) = (&answered, &stop, &reads);
            threads.push(scope.spawn(move || -> Res {
                for round in 0.. {
                    let block = (round * 5 + reader) % BLOCKS;
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let least = answered[block as usize].load(Ordering::Acquire);
                    let back = client.read(block * BLOCK, BLOCK as u32)?;
                    let back = back.map_err(|error| format!("a read: error {error}"))?;
                    let value = u64::from_le_bytes(back[..8].try_into().expect("8 bytes"));
                    check!(value >= least, "block {block}: {value}, after {least} was answered");
                    reads.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }));
        }
        thread::sleep(Duration::from_millis(500));
        wait_until(|| (reads.load(Ordering::Relaxed) > 100).then_some(()));
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    check!(reads.load(Ordering::Relaxed) > 100, "only {reads:?} reads");
    server.stop()
}
