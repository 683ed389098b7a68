//! Clients and servers that end under load: nothing acknowledged is lost, and other clients are served.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use libtest_mimic::Trial;

use crate::client::{Answer, Client, MIB, cmd, header};
use crate::image::{self, Random};
use crate::images::fio;
use crate::lab::{Backend, Lab, PATIENCE, Res, check, fail, per_backend, wait_until};
use crate::need::Need;
use crate::server::Launch;

pub(crate) fn trials() -> Vec<Trial> {
    let all = &Backend::ALL;
    let mut trials = Vec::new();
    trials.extend(per_backend(all, "client_killed_under_load", &[Need::Fio], client_killed));
    trials.extend(per_backend(all, "sigterm_loses_no_acknowledged_write", &[], sigterm));
    trials
}

/// kill -9 of a fio with 64 writes in flight. A bystander's reads and writes go on, and the dead
/// client's descriptors are released. In the end the tables of contexts are empty.
fn client_killed(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 64 * MIB)?;
    let mut server = Launch::new(lab, backend).image(&image).metrics().start()?;
    let socket = server.socket().to_path_buf();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));

    // The cache's threads keep rings of their own.
    let sockets = || -> Res<usize> {
        let all = server.descriptors()?;
        Ok(all.iter().filter(|path| path.to_string_lossy().starts_with("socket:")).count())
    };
    let outcome: Res = thread::scope(|scope| {
        let bystander = scope.spawn(|| bystander(&socket, &stop, &rounds));
        let started = wait_until(|| (rounds.load(Ordering::Relaxed) > 0).then_some(()));
        let result = (|| {
            check!(started.is_some(), "the bystander is not served at all");
            let quiet = sockets()?;
            for _ in 0..2 {
                let before = fs::metadata(&image)?.blocks();
                // The first 16 MiB belong to the bystander.
                let load =
                    ["--rw=randwrite", "--bs=16k", "--iodepth=16", "--numjobs=4", "--thread"];
                let end = ["--time_based", "--runtime=60", "--offset=16M", "--size=48M"];
                let mut command = fio(&server, &[&load[..], &end[..]].concat());
                command.current_dir(lab.dir()).stdout(std::process::Stdio::null());
                let mut victim = lab.spawn(&mut command)?;
                let busy = wait_until(|| {
                    let more = fs::metadata(&image).ok()?.blocks() > before + 256;
                    let connected = sockets().ok()? >= quiet + 4;
                    (more && connected).then_some(())
                });
                check!(busy.is_some(), "fio wrote nothing");
                victim.signal(libc::SIGKILL);
                victim.wait_for(PATIENCE)?;
                let seen = rounds.load(Ordering::Relaxed);
                let goes_on =
                    wait_until(|| (rounds.load(Ordering::Relaxed) > seen + 20).then_some(()));
                check!(goes_on.is_some(), "the other client stalled after the kill");
                let released = wait_until(|| (sockets().ok()? <= quiet).then_some(()));
                check!(released.is_some(), "sockets of the dead client stay open");
                // Punch its part, so that the second round can be seen to write again.
                let mut client = server.client()?;
                client.plain(cmd::TRIM, 0, 16 * MIB, 48 * MIB)?.ok("TRIM")?;
                client.disconnect()?;
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let other = bystander.join().expect("returns its failures");
        result.and(other)
    });
    outcome?;
    let empty = wait_until(|| {
        let figures = server.figures().ok()?;
        let in_flight = figures.keys().any(|name| name.starts_with("offlock_nbd_in_flight"));
        (figures.get("offlock_nbd_connections") == Some(&0.0) && !in_flight).then_some(())
    });
    check!(empty.is_some(), "contexts of dead clients are left: {:?}", server.figures()?);
    server.still_serves()?;
    server.stop()
}

/// Writes and reads back 4 KiB blocks in the first 16 MiB until told to stop.
fn bystander(socket: &Path, stop: &AtomicBool, rounds: &AtomicU64) -> Res {
    let mut client = Client::connect(socket)?;
    client.greet()?;
    client.go("vol")?;
    let mut random = Random::new(7);
    while !stop.load(Ordering::Relaxed) {
        let offset = 4096 * random.below(4096);
        let data = random.bytes(4096);
        client.write(offset, &data, 0)?.ok("the bystander's write")?;
        let back = client.read(offset, 4096)?;
        check!(back.as_ref() == Ok(&data), "the bystander read back other bytes");
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    client.disconnect()
}

const WRITERS: u64 = 3;
/// Blocks of 4 KiB that each writer cycles through.
const BLOCKS: u64 = 2048;
const DEPTH: usize = 16;

/// What one writer knows: per block, the last version sent and the last one acknowledged.
struct Record {
    sent: Vec<u32>,
    acknowledged: Vec<u32>,
}

/// The content of version `version` of block `block`; version 0 is all zero.
fn content(block: u64, version: u32) -> Vec<u8> {
    if version == 0 {
        return vec![0; 4096];
    }
    let mut bytes = Random::new(block << 32 | u64::from(version)).bytes(4096);
    bytes[..4].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Three writers, 16 writes in flight each; SIGTERM. The server ends with 0, and every block
/// holds its acknowledged version or one sent later, whole.
fn sigterm(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, WRITERS * BLOCKS * 4096)?;
    let mut server = Launch::new(lab, backend).image(&image).start()?;
    let total = AtomicU64::new(0);
    let mut clients = Vec::new();
    for _ in 0..WRITERS {
        clients.push(server.client()?);
    }
    let records: Vec<Res<Record>> = thread::scope(|scope| {
        let start = |(first, client)| {
            let total = &total;
            scope.spawn(move || write_until_closed(client, first * BLOCKS, total))
        };
        let writers: Vec<_> = (0u64..).zip(clients).map(start).collect();
        // Past one full cycle, so that overwrites are under way.
        wait_until(|| (total.load(Ordering::Relaxed) > WRITERS * BLOCKS * 5 / 4).then_some(()));
        server.terminate();
        writers.into_iter().map(|w| w.join().expect("returns its failures")).collect()
    });
    server.finished()?;

    let file = fs::File::open(&image)?;
    let mut acknowledged = 0;
    for (writer, record) in (0u64..).zip(records) {
        let record = record?;
        for i in 0..BLOCKS {
            let block = writer * BLOCKS + i;
            let (low, high) = (record.acknowledged[i as usize], record.sent[i as usize]);
            let mut found = vec![0; 4096];
            file.read_exact_at(&mut found, block * 4096)?;
            let version = u32::from_le_bytes(found[..4].try_into().expect("4 bytes"));
            check!(
                (low..=high).contains(&version),
                "block {block} holds version {version}; acknowledged {low}, sent {high}"
            );
            check!(found == content(block, version), "block {block}: version {version} is torn");
            acknowledged += u64::from(low > 0);
        }
    }
    check!(acknowledged > BLOCKS, "only {acknowledged} blocks were acknowledged: no load");
    Ok(())
}

/// Keeps `DEPTH` writes in flight until the server closes; then reads the replies still there.
fn write_until_closed(mut client: Client, first: u64, total: &AtomicU64) -> Res<Record> {
    let mut record =
        Record { sent: vec![0; BLOCKS as usize], acknowledged: vec![0; BLOCKS as usize] };
    let (mut next, mut in_flight, mut open) = (0, 0, true);
    loop {
        while open && in_flight < DEPTH {
            let i = next % BLOCKS;
            let block = first + i;
            let version = record.sent[i as usize] + 1;
            let mut bytes =
                header(0, cmd::WRITE, block << 32 | u64::from(version), block * 4096, 4096);
            bytes.extend(content(block, version));
            record.sent[i as usize] = version;
            open = client.send(&bytes).is_ok();
            (next, in_flight) = (next + 1, in_flight + 1);
        }
        let mut head = [0; 16];
        match std::io::Read::read_exact(&mut client.stream, &mut head) {
            Ok(()) => {}
            Err(e)
                if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&e.kind()) =>
            {
                return Ok(record);
            }
            Err(e) => fail!("the server neither answers nor closes after SIGTERM: {e}"),
        }
        let (answer, cookie) = crate::client::parse_simple(&head)?;
        if answer == Answer(crate::client::err::ESHUTDOWN) {
            in_flight -= 1;
            open = false; // refused because it is going down: not acknowledged
            continue;
        }
        answer.ok("a write under load")?;
        let i = ((cookie >> 32) - first) as usize;
        record.acknowledged[i] = record.acknowledged[i].max(cookie as u32);
        in_flight -= 1;
        total.fetch_add(1, Ordering::Relaxed);
    }
}
