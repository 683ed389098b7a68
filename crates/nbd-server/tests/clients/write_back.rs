//! Writes that stay in memory for a while: read by all at once, durable when they have to be, and never
//! forgotten.

use testkit::stress::stress_time;

use crate::disk::on_small_disk;
use crate::lab::*;

const BLOCK: u64 = 4096;

pub(crate) fn trials() -> Vec<Trial> {
    // What is trimmed has to be zeros there.
    let punches = &[Need::PunchAndZero];
    // OFFLOCK_STRESS_SECONDS=900 cargo test --release -p offlock-nbd --test clients -- --ignored soak_
    let time = stress_time(10);
    let deadline = time + Duration::from_secs(120);
    let long = move |lab: &Lab, backend| soak(lab, backend, time);
    let strace = &[Need::Strace];
    all([
        per_backend(ALL, "write_back_mix_with_few_blocks", punches, mix),
        per_backend(BUFFERED, "write_back_on_a_full_disk", &[Need::SmallTmpfs], full_disk),
        ignored(per_backend_for(deadline, ALL, "soak_mixed_load", punches, long)),
        trial("write_back/failed_sync", strace, |lab| failed_sync(lab, "1M")),
        trial("write_back/failed_sync_without_a_cache", strace, |lab| failed_sync(lab, "0")),
    ])
}

fn launch<'a>(lab: &'a Lab, backend: Backend, image: &Path, cache: &str) -> Launch<'a> {
    let launch = Launch::new(lab, backend).image(image);
    ["--workers", "2", "--cache", cache].into_iter().fold(launch, Launch::arg)
}

/// Each client does everything to a part of its own, where it knows every byte, over two connections, with a cache of four
/// blocks between all of them. The last block of the image is not whole.
fn mix(lab: &Lab, backend: Backend) -> Res {
    const CLIENTS: u64 = 6;
    const PART: u64 = 100 * BLOCK;
    const TAIL: u64 = 1536;
    let path = lab.path("a.img");
    image::sparse(&path, CLIENTS * PART + TAIL)?;
    let server = launch(lab, backend, &path, "16K").with("--tcp 0").start()?;
    let models = thread::scope(|scope| -> Res<Vec<Vec<u8>>> {
        let mut threads = Vec::new();
        for part in 0..CLIENTS {
            // Two workers have them.
            let mut clients = [server.client()?, server.tcp_client()?];
            let len = PART + if part == CLIENTS - 1 { TAIL } else { 0 };
            threads.push(scope.spawn(move || {
                let (mut model, mut random) = (vec![0; len as usize], Random::new(part + 3));
                play(&mut clients, backend, part * PART, &mut model, &mut random)?;
                Ok(model)
            }));
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })?;
    let whole = models.concat();
    let mut client = server.client()?;
    let size = client.export.size as usize;
    let found = client.read(0, size as u32)?;
    check!(found == Ok(whole[..size].to_vec()), "all of it: {}", brief(&found));
    client.disconnect()?;
    server.stop()?;
    let found = fs::read(&path)?;
    check!(found[..size] == whole[..size] && found.len() == whole.len(), "the image");
    Ok(())
}

/// Random requests to the bytes from `start` on, which are those of `model`, through one connection or the other.
fn play(
    clients: &mut [Client; 2],
    backend: Backend,
    start: u64,
    model: &mut [u8],
    random: &mut Random,
) -> Res {
    let unit = if backend == Backend::Aio { 512 } else { 1 };
    // With --direct it may be larger.
    let unit = clients[0].export.blocks.map_or(unit, |(least, _, _)| unit.max(least.into()));
    let end = (model.len() as u64).min(clients[0].export.size - start) / unit * unit;
    let noise = random.bytes((101 * BLOCK) as usize);
    for round in 0..150 {
        let [client, other] = clients;
        let (client, other) = if random.below(2) == 0 { (client, other) } else { (other, client) };
        let offset = random.below(end / unit) * unit;
        let most = [1, 9, 40, 100][random.below(4) as usize] * BLOCK;
        let count = (1 + random.below(most / unit)) * unit;
        let count = count.min(end - offset);
        let at = start + offset;
        let fua = if random.below(12) == 0 { flag::FUA } else { 0 };
        let mine = &mut model[offset as usize..][..count as usize];
        match random.below(9) {
            0..=3 => {
                mine.copy_from_slice(&noise[random.below(BLOCK) as usize..][..count as usize]);
                client.write(at, mine, fua)?.ok("a write")?;
            }
            4 => {
                let flags = if random.below(2) == 0 { flag::NO_HOLE } else { 0 };
                mine.fill(0);
                client.plain(cmd::WRITE_ZEROES, flags | fua, at, count)?.ok("zeroes")?;
            }
            5 => {
                // Parts of blocks at its ends stay.
                let till = at + count;
                let from = at.next_multiple_of(BLOCK);
                let to = if till == client.export.size { till } else { till / BLOCK * BLOCK };
                if from < to {
                    mine[(from - at) as usize..(to - at) as usize].fill(0);
                }
                client.plain(cmd::TRIM, fua, at, count)?.ok("TRIM")?;
            }
            6 if random.below(3) == 0 => client.flush()?.ok("FLUSH")?,
            7 => {
                // A READ beside a WRITE finds each byte as it was before or after it; a later READ finds all of it.
                let old = mine.to_vec();
                mine.copy_from_slice(&noise[random.below(BLOCK) as usize..][..count as usize]);
                let cookie = other.request(0, cmd::READ, at, count as u32)?;
                client.write(at, mine, fua)?.ok("a write beside a read")?;
                other.answer(cookie)?.ok("a read beside a write")?;
                let beside = other.recv_vec(count as usize)?;
                let found = client.read(at, count as u32)?.unwrap_or_default();
                let mut bytes = std::iter::zip(&old, &*mine).zip(&beside);
                let either = bytes.all(|((old, new), byte)| byte == old || byte == new);
                check!(either && found == mine, "round {round}, {at}, {count}: beside {either}");
            }
            _ => {
                let found = client.read(at, count as u32)?;
                let same = found.as_ref().is_ok_and(|found| found == mine);
                check!(same, "round {round}, {at}, {count}: {}", brief(&found));
            }
        }
    }
    Ok(())
}

/// Runs [`play`] for a long time. Each second the connection of a client is closed inside a WRITE, with others in
/// flight: each of these is performed whole or not at all, and not undone later. The server's memory does not grow.
fn soak(lab: &Lab, backend: Backend, time: Duration) -> Res {
    const CLIENTS: u64 = 8;
    const PART: u64 = 8 * MIB; // all of them are more than the cache holds
    /// The number of blocks behind the part of each client. It writes them right before its connection is closed, the
    /// last one by a request that is cut off.
    const LAST: u64 = 16;
    const EACH: u64 = PART + LAST * BLOCK;
    /// What the memory may grow by, in percent.
    const GROWTH: u64 = 5;
    let path = lab.path("a.img");
    image::sparse(&path, CLIENTS * EACH)?;
    let server = launch(lab, backend, &path, "16M").start()?;
    let (began, kills) = (Instant::now(), AtomicU64::new(0));
    let content = |at: u64, version: u64| {
        let word = if version == 0 { 0 } else { at << 32 | version };
        word.to_le_bytes().repeat(BLOCK as usize / 8)
    };
    // `had` has the known version of each of the last blocks. A block has this version, or that of the last kill.
    let look = |found: &[u8], at: u64, had: &mut [u64], killed: u64| -> Res {
        for (nr, (block, had)) in found.chunks(BLOCK as usize).zip(had).enumerate() {
            let at = at + nr as u64 * BLOCK;
            if block == content(at, killed) && nr as u64 != LAST - 1 {
                *had = killed;
            }
            check!(block == content(at, *had), "block {nr} at {at}: not {had} or {killed}");
        }
        Ok(())
    };
    let play_on = |number: u64| -> Res<(Vec<u8>, Vec<u64>, u64)> {
        let (start, mut model) = (number * EACH, vec![0; PART as usize]);
        let mut clients = [server.client()?, server.client()?];
        let (mut random, mut killed, mut due) = (Random::new(number + 1), 0, number + 1);
        let (at, mut had) = (start + PART, vec![0; LAST as usize]);
        while began.elapsed() < time {
            play(&mut clients, backend, start, &mut model, &mut random)?;
            let second = began.elapsed().as_secs();
            if second < due {
                continue;
            }
            // By then the WRITEs in flight at this kill have long ended.
            due = second + CLIENTS;
            kills.fetch_add(1, Ordering::Relaxed);
            let found = clients[1].read(at, (LAST * BLOCK) as u32)?;
            look(&found.unwrap_or_default(), at, &mut had, killed)?;
            killed = second;
            for nr in 0..LAST {
                let at = at + nr * BLOCK;
                let mut bytes = header(0, cmd::WRITE, nr, at, BLOCK as u32);
                bytes.extend(content(at, killed));
                let cut = if nr == LAST - 1 { bytes.len() / 2 } else { bytes.len() };
                clients[0].send(&bytes[..cut])?;
            }
            clients[0] = server.client()?;
        }
        Ok((model, had, killed))
    };
    let (models, memory) = thread::scope(|scope| -> Res<(Vec<_>, Vec<u64>)> {
        let play_on = &play_on;
        let threads: Vec<_> =
            (0..CLIENTS).map(|number| scope.spawn(move || play_on(number))).collect();
        let mut memory = Vec::new();
        while began.elapsed() < time {
            thread::sleep(Duration::from_millis(100));
            memory.push(server.memory("VmRSS")?);
        }
        let models = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        Ok((models.collect::<Res<_>>()?, memory))
    })?;
    // The first third fills the cache, and what is kept for reuse.
    let most = |third: &[u64]| third.iter().max().copied().unwrap_or(0);
    let thirds: Vec<u64> = memory.chunks(memory.len().div_ceil(3)).map(most).collect();
    let grown = thirds[2] > thirds[1] + thirds[1] * GROWTH / 100;
    check!(!grown, "the server's memory grew from {} to {} bytes", thirds[1], thirds[2]);
    server.stop()?;
    let there = fs::read(&path)?;
    for (number, (model, mut had, killed)) in (0..).zip(models) {
        let (part, last) =
            there[(number * EACH) as usize..][..EACH as usize].split_at(PART as usize);
        check!(part == model, "the part of client {number}");
        look(last, number * EACH + PART, &mut had, killed)?;
    }
    println!("{}: {kills:?} kills, at most {} MiB", backend.name(), thirds[2] / MIB);
    Ok(())
}

/// A full disk refuses long writes, and what it has acknowledged reads back. A FLUSH reports short writes that
/// found no room when they were written back. They stay readable, and are written once there is room.
fn full_disk(lab: &Lab, backend: Backend) -> Res {
    let mount = lab.path("small");
    let words = on_small_disk(&mount, "4m")?;
    let image = mount.join("a.img");
    let launch = Launch::new(lab, backend).image(&image).with("--size 64M").through(words);
    let mut server = launch.with("--cache 64M").start()?;
    let (mut client, mut other) = (server.client()?, server.client()?);
    let mut filled = 0;
    let piece = |nr: u64| vec![1 + nr as u8; MIB as usize];
    let full = loop {
        match client.write(filled * MIB, &piece(filled), 0)? {
            Answer(0) => filled += 1,
            full => break full,
        }
        check!(filled < 8, "8 MiB fit on a disk of 4 MiB");
    };
    full.is(err::ENOSPC, "a long write to a full disk")?;
    for nr in 0..filled {
        check!(other.read(nr * MIB, MIB as u32)? == Ok(piece(nr)), "MiB {nr} reads back wrong");
    }
    let zeroes = client.plain(cmd::WRITE_ZEROES, flag::NO_HOLE, 48 * MIB, 8 * MIB)?;
    zeroes.is(err::ENOSPC, "allocating zeroes, full disk")?;
    client.flush()?.ok("FLUSH of what is written")?;
    let data = |nr: u64| vec![nr as u8 + 2; 8192];
    for nr in 0..100 {
        client.write(32 * MIB + nr * 8192, &data(nr), 0)?.ok("a write to memory")?;
    }
    client.flush()?.is(err::ENOSPC, "FLUSH")?;
    other.flush()?.is(err::ENOSPC, "FLUSH by another")?;
    other.write(48 * MIB, &data(0), flag::FUA)?.is(err::ENOSPC, "FUA")?;
    for nr in 0..100 {
        let found = other.read(32 * MIB + nr * 8192, 8192)?;
        check!(found == Ok(data(nr)), "write {nr}: {}", brief(&found));
    }
    let long = other.read(32 * MIB, 100 * 8192)?.map_err(|e| format!("a read: error {e}"))?;
    check!(long.chunks(8192).zip(0..).all(|(part, nr)| part == data(nr)), "a long read");
    client.plain(cmd::TRIM, 0, 0, 2 * MIB)?.ok("TRIM")?;
    client.flush()?.ok("FLUSH once there is room")?;
    other.flush()?.ok("and one more")?;
    client.write(60 * MIB, &vec![1; 4 * MIB as usize], 0)?.is(err::ENOSPC, "more than there is")?;
    // What cannot be made durable at the end is said, and is the exit code.
    let mut nr = 0;
    while client.flush()?.0 == 0 {
        for _ in 0..8 {
            client.write(16 * MIB + nr * 8192, &[9; 8192], 0)?.ok("a write to memory")?;
            nr += 1;
        }
        check!(nr < 1024, "8 MiB fit on a disk of 4 MiB");
    }
    drop((client, other));
    server.terminate();
    let status = server.ended()?;
    check!(status.code() == Some(1), "lost data, but it ended with {status}");
    let said = server.log();
    check!(said.contains("durable"), "the end does not say that data was lost:\n{said}");
    Ok(())
}

/// An fdatasync fails, once. The kernel says so once; from then on the server says it to every client, on every worker,
/// and when it ends. With a cache nothing is written from then on: what is cached is read, and what may be lost is not.
fn failed_sync(lab: &Lab, cache: &str) -> Res {
    let (path, log) = (lab.path("a.img"), lab.path("strace.log"));
    image::with_parts(&path, 4 * MIB, 8, 51)?;
    let before = image::bytes_at(&path, 2 * MIB, 8192)?;
    let log = log.to_str().expect("temporary paths are UTF-8");
    let words = ["strace", "-D", "-f", "-o", log, "-e", "trace=fdatasync,fsync"];
    // strace counts by thread: one error for each thread that syncs.
    let words = words.into_iter().chain(["-e", "inject=fdatasync,fsync:error=EIO:when=1"]);
    // Depth 1 is one thread of the pool for each worker, so no worker's second sync would fail.
    let launch = launch(lab, Backend::Threads, &path, cache).with("--depth 1");
    let mut server = launch.through(words).start()?;
    // Connections go to the workers in turn.
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(server.client()?);
    }
    let data = vec![0x77; 8192];
    let long = vec![0x78; 128 << 10];
    clients[0].write(0, &data, 0)?.ok("a write before")?;
    clients[0].write(MIB, &long, 0)?.ok("a long write before")?;
    clients[0].flush()?.is(err::EIO, "the FLUSH whose fdatasync failed")?;
    for (nr, client) in clients.iter_mut().enumerate() {
        let what = |what| format!("{what}, connection {nr}");
        client.flush()?.is(err::EIO, &what("FLUSH"))?;
        let cached = cache != "0";
        for flags in [0, flag::FUA].into_iter().filter(|&flags| cached || flags == flag::FUA) {
            client.write(0, &data, flags)?.is(err::EIO, &what("a write"))?;
            client.write(3 * MIB, &long, flags)?.is(err::EIO, &what("a long write"))?;
            client.plain(cmd::TRIM, flags, 0, 4096)?.is(err::EIO, &what("TRIM"))?;
            client.plain(cmd::WRITE_ZEROES, flags, 0, 4096)?.is(err::EIO, &what("zeroes"))?;
        }
        check!(client.read(2 * MIB, 8192)? == Ok(before.clone()), "a read of what is not lost");
        if !cached {
            client.write(2 * MIB, &before, 0)?.ok("a plain write afterwards")?;
            continue;
        }
        check!(client.read(0, 8192)? == Ok(data.clone()), "a cached read");
        let lost = client.read(MIB, 8192)?;
        check!(lost == Err(err::EIO), "a read of what may be lost: {}", brief(&lost));
        let lost = client.read(MIB - 8192, 128 << 10)?;
        check!(lost == Err(err::EIO), "a long one: {}", brief(&lost));
    }
    server.client()?.flush()?.is(err::EIO, "FLUSH on a connection made afterwards")?;
    drop(clients);
    server.terminate();
    let status = server.ended()?;
    check!(status.code() == Some(1), "lost data, but it ended with {status}");
    let said = server.log();
    check!(said.contains("durable"), "the end does not say that data was lost:\n{said}");
    let calls = fs::read_to_string(log)?;
    let injected = calls.matches("(INJECTED)").count();
    check!(injected == 1, "{injected} errors came from the kernel, wanted 1:\n{calls}");
    Ok(())
}
