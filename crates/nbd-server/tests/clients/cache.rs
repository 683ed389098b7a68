//! Reads from memory: what the device is not asked for, and what is never older than it may be.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{Client, MIB, brief, cmd, err, flag};
use crate::durability::step;
use crate::image;
use crate::lab::{Backend, Lab, Res, check, fail, per_backend, trial, wait_until};
use crate::need::Need;
use crate::server::Launch;
use crate::trace::Strace;

const BLOCK: u64 = 4096;

pub(crate) fn trials() -> Vec<Trial> {
    let all = &Backend::ALL;
    let mut trials = Vec::new();
    trials.extend(per_backend(all, "cache_hits_ask_no_device", &[], hits));
    trials.extend(per_backend(
        all,
        "cache_changes_are_seen_by_all",
        &[Need::PunchAndZero],
        changes,
    ));
    trials.extend(per_backend(all, "cache_odd_image", &[], odd_image));
    trials.extend(per_backend(all, "cache_failed_reads_are_not_kept", &[], failed_reads));
    trials.extend(per_backend(all, "cache_tiny_under_many_clients", &[], tiny));
    trials.extend(per_backend(all, "cache_hits_call_only_the_socket", &[Need::Strace], hit_calls));
    trials.push(trial("cache/none", &[], none));
    trials.push(trial("cache/two_names_of_a_file", &[], two_names));
    trials.push(trial("cache/eio_of_the_device", &[Need::Strace], device_fails));
    trials.push(trial("cache/refused", &[], refused));
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

/// A change that was answered is seen through every connection, those of the other worker included.
fn changes(lab: &Lab, backend: Backend) -> Res {
    let path = lab.path("a.img");
    image::with_parts(&path, 4 * MIB, 32, 32)?;
    let server = launch(lab, backend, &path, "1M").start()?;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(server.client()?);
    }
    let mut model = image::bytes_at(&path, 0, 1 << 16)?;
    for round in 0..60_u64 {
        for client in &mut clients {
            check!(client.read(0, 1 << 16)? == Ok(model.clone()), "before change {round}");
        }
        // Aligned for --direct, and for TRIM, which leaves parts of blocks; of a part of a block the others.
        let by = if backend == Backend::Aio || round % 4 == 3 { BLOCK } else { 512 };
        let (offset, len) = (round * 7 % 11 * by, (round % 3 + 1) * by);
        let fua = if round % 5 == 0 { flag::FUA } else { 0 };
        let changed = &mut model[offset as usize..][..len as usize];
        let client = &mut clients[round as usize % 3];
        changed.fill(if round % 4 < 2 { round as u8 + 1 } else { 0 });
        let answer = match round % 4 {
            0 | 1 => client.write(offset, changed, fua)?,
            2 => client.plain(cmd::WRITE_ZEROES, fua, offset, len)?,
            _ => client.plain(cmd::TRIM, fua, offset, len)?,
        };
        answer.ok("a change")?;
        for (i, client) in clients.iter_mut().enumerate() {
            let back = client.read(offset, len as u32)?;
            let wanted = model[offset as usize..][..len as usize].to_vec();
            check!(back == Ok(wanted), "change {round}, connection {i}: {}", brief(&back));
        }
    }
    // More than the table of the cache has places for.
    for client in &mut clients {
        check!(client.read(0, 4096)?.is_ok(), "a read");
    }
    clients[0].plain(cmd::WRITE_ZEROES, 0, 0, 4 * MIB)?.ok("zeroes all over")?;
    for client in &mut clients {
        check!(client.read(0, 1 << 16)? == Ok(vec![0; 1 << 16]), "after zeroes all over");
    }
    server.stop()
}

/// An image whose last block is not whole, read at its end again and again.
fn odd_image(lab: &Lab, backend: Backend) -> Res {
    const LEN: u64 = 5 * BLOCK + 1536;
    let path = lab.path("a.img");
    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 3) as u8).collect();
    std::fs::write(&path, &bytes)?;
    let server = launch(lab, backend, &path, "1M").start()?;
    let mut client = server.client()?;
    // With --direct it may be rounded down.
    let (size, by) = match client.export.blocks {
        Some((least, _, _)) => (client.export.size, u64::from(least.max(1))),
        None => fail!("no block sizes"),
    };
    check!(size <= LEN && size > LEN - BLOCK, "{size} bytes of {LEN}");
    for round in 0..3 {
        for (from, to) in [(0, size), (size - by, size), (BLOCK, size), (size - size % BLOCK, size)]
        {
            let back = client.read(from, (to - from) as u32)?;
            let wanted = bytes[from as usize..to as usize].to_vec();
            check!(back == Ok(wanted), "round {round}, {from}..{to}: {}", brief(&back));
        }
        if round == 1 {
            client.write(size - by, &vec![0xee; by as usize], 0)?.ok("the last bytes")?;
            let back = client.read(size - by, by as u32)?;
            check!(back == Ok(vec![0xee; by as usize]), "the last bytes: {}", brief(&back));
            let old = &bytes[(size - by) as usize..size as usize];
            client.write(size - by, old, 0)?.ok("the last bytes as they were")?;
        }
    }
    let past = client.read(size - by, 2 * by as u32)?;
    check!(past == Err(err::EINVAL), "past the end: {}", brief(&past));
    let answered = server.figure("read_hits_total")?;
    check!(answered >= 7, "{answered} requests were answered from memory");
    client.disconnect()?;
    check!(std::fs::metadata(&path)?.len() == LEN, "the image is of another size now");
    server.stop()
}

/// What cannot be read from the image now is EIO, and is there for a later READ.
fn failed_reads(lab: &Lab, backend: Backend) -> Res {
    let path = lab.path("a.img");
    let file = image::with_parts(&path, 4 * MIB, 16, 33)?;
    let all = image::bytes_at(&path, 0, 1 << 16)?;
    let server = launch(lab, backend, &path, "1M").start()?;
    let (mut client, mut other) = (server.client()?, server.client()?);
    file.set_len(8192)?;
    for _ in 0..2 {
        for client in [&mut client, &mut other] {
            let gone = client.read(4096, 16384)?;
            check!(gone == Err(err::EIO), "across the new end: {}", brief(&gone));
            check!(client.read(0, 8192)? == Ok(all[..8192].to_vec()), "before the new end");
        }
    }
    file.write_all_at(&all, 0)?;
    file.set_len(4 * MIB)?;
    for client in [&mut client, &mut other] {
        check!(client.read(0, 1 << 16)? == Ok(all.clone()), "after it grew back");
    }
    client.disconnect()?;
    server.stop()
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

/// `--cache 0`: every read goes to the image.
fn none(lab: &Lab) -> Res {
    let path = lab.path("a.img");
    let file = image::sparse(&path, MIB)?;
    let server = launch(lab, Backend::Threads, &path, "0").start()?;
    let mut client = server.client()?;
    for byte in [1, 2, 3] {
        file.write_all_at(&[byte; 8192], 4096)?;
        check!(client.read(4096, 8192)? == Ok(vec![byte; 8192]), "not what the image has");
    }
    let figures = server.figures()?;
    check!(!figures.contains_key("offlock_nbd_cache_bytes"), "there is a cache: {figures:?}");
    client.disconnect()?;
    server.stop()
}

/// One file under two names, one of them by a link: a write to one is seen in the other.
fn two_names(lab: &Lab) -> Res {
    let (path, link) = (lab.path("a.img"), lab.path("link.img"));
    image::sparse(&path, MIB)?;
    std::fs::hard_link(&path, &link)?;
    let launch = launch(lab, Backend::Threads, &path, "1M").image_as("two", &link);
    let server = launch.start()?;
    let mut one = server.client()?;
    let mut two = server.connect()?;
    two.greet()?;
    two.go("two")?;
    for byte in 1..20 {
        for client in [&mut one, &mut two] {
            check!(client.read(0, 4096)? == Ok(vec![byte - 1; 4096]), "before write {byte}");
        }
        let writer: &mut Client = if byte % 2 == 0 { &mut one } else { &mut two };
        writer.write(0, &[byte; 4096], 0)?.ok("a write")?;
    }
    one.disconnect()?;
    two.disconnect()?;
    server.stop()
}

/// The device fails one read: its request gets EIO, others do not, and the block is read by the next.
fn device_fails(lab: &Lab) -> Res {
    let (path, log) = (lab.path("a.img"), lab.path("strace.log"));
    image::with_parts(&path, MIB, 4, 34)?;
    let there = image::bytes_at(&path, 0, 8192)?;
    let log = log.to_str().expect("temporary paths are UTF-8");
    let only = path.to_str().expect("temporary paths are UTF-8");
    let words = ["strace", "-D", "-f", "-o", log, "-P", only, "-e", "trace=pread64,preadv,preadv2"];
    let words = words.into_iter().chain(["-e", "inject=pread64,preadv,preadv2:error=EIO:when=1"]);
    // Depth 1 is one thread for each worker, which fails once; and one worker.
    let launch = Launch::new(lab, Backend::Threads).image(&path).through(words);
    let options = ["--workers", "1", "--depth", "1"];
    let server = options.into_iter().fold(launch, Launch::arg).start()?;
    let (mut client, mut other) = (server.client()?, server.client()?);
    let gone = client.read(0, 8192)?;
    check!(gone == Err(err::EIO), "the read that failed: {}", brief(&gone));
    check!(other.read(0, 8192)? == Ok(there.clone()), "the next");
    check!(client.read(0, 8192)? == Ok(there), "and the one after it");
    client.disconnect()?;
    other.disconnect()?;
    server.stop()?;
    let calls = std::fs::read_to_string(log)?;
    let reads = calls.lines().filter(|line| line.contains("pread") && line.contains('=')).count();
    // The one that failed was tried by the worker first, and by its thread then.
    check!(reads == 3, "{reads} reads of the image, wanted those that failed and one:\n{calls}");
    Ok(())
}

/// A cache that cannot be is refused with the reason.
fn refused(lab: &Lab) -> Res {
    let path = lab.path("a.img");
    File::create(&path)?.set_len(MIB)?;
    for (cache, word) in [("100", "100"), ("8388608T", "too large"), ("many", "many")] {
        let (code, log) = launch(lab, Backend::Threads, &path, cache).start_refused()?;
        check!(code != 0 && log.contains(word) && !log.contains("panicked"), "{cache}:\n{log}");
    }
    Ok(())
}
