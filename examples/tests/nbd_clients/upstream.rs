//! An export of another server as an image. The other server is one of ours, whose cache loses what was not flushed
//! when it is killed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::client::{Client, MIB};
use crate::image::{self, Random};
use crate::lab::{Lab, Res, check, signal, trial};
use crate::need::Need;
use crate::server::{Launch, Server};

const EIO: u32 = 5;
const BLOCK: usize = 4096;
const BLOCKS: usize = 256;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("upstream/copies", &[Need::NbdCopy], copies),
        trial("upstream/both_killed", &[], both_killed),
        trial("upstream/both_killed_under_load", &[], both_killed_under_load),
        trial("upstream/gone", &[], gone),
        trial("upstream/refused", &[], refused),
    ]
}

fn back(lab: &Lab) -> Res<Server> {
    Launch::bare(lab).image(&lab.path("a.img")).on_socket("back").start()
}

fn uri(lab: &Lab) -> PathBuf {
    format!("nbd+unix:///vol?socket={}", lab.path("back").display()).into()
}

fn front(lab: &Lab, cache: &str) -> Res<Server> {
    let launch = Launch::bare(lab).image(&uri(lab)).on_socket("front");
    launch.arg("--cache").arg(cache).arg("--reconnect").arg("20").start()
}

/// nbdcopy copies out and in, holes and all; parts of blocks are written; with and without a cache.
fn copies(lab: &Lab) -> Res {
    for cache in ["0", "1M", "64M"] {
        let (path, out) = (lab.path("a.img"), lab.path("out.img"));
        image::with_parts(&path, 8 * MIB + 512, 64, 9)?;
        let (back, front) = (back(lab)?, front(lab, cache)?);
        let out_text = out.to_str().expect("temporary paths are UTF-8");
        let copy = |from: &str, to: &str| lab.run_ok(Command::new("nbdcopy").args([from, to]));
        copy(&front.uri("vol"), out_text)?;
        check!(fs::read(&out)? == fs::read(&path)?, "--cache {cache}: nbdcopy read other bytes");

        let mut client = front.client()?;
        let mut expected = fs::read(&path)?;
        for (at, len) in [(1000, 3000), (5000, 200_000), (expected.len() - 700, 700)] {
            let data = vec![at as u8 | 1; len];
            client.write(at as u64, &data, 0)?.ok("write")?;
            expected[at..at + len].copy_from_slice(&data);
            check!(client.read(at as u64, len as u32)? == Ok(data), "--cache {cache}: at {at}");
        }
        client.plain(4, 0, 2 * MIB, MIB)?.ok("trim")?; // of whole blocks: it leaves the ends of others
        client.plain(6, 1, 4 * MIB + 100, MIB)?.ok("write zeroes")?; // with FUA
        for from in [2 * MIB, 4 * MIB + 100] {
            let from = from as usize;
            expected[from..from + MIB as usize].fill(0);
        }
        client.flush()?.ok("flush")?;
        let all = client.read(0, expected.len() as u32)?;
        check!(all == Ok(expected.clone()), "--cache {cache}: something else is read back");
        client.disconnect()?;
        front.stop()?;
        back.stop()?;
        check!(fs::read(&path)? == expected, "--cache {cache}: the image has something else");
    }
    Ok(())
}

/// The upstream is killed and started again between writes, flushes and reads, and in the end both are: every read
/// was right, and every flushed write is there.
fn both_killed(lab: &Lab) -> Res {
    for cache in ["0", "1M"] {
        let path = lab.path("a.img");
        image::sparse(&path, MIB)?;
        let (mut behind, front) = (back(lab)?, front(lab, cache)?);
        let mut client = front.client()?;
        let (mut now, mut flushed) = (vec![0; MIB as usize], Vec::new());
        for round in 1..=6_u8 {
            for block in (round as usize..256).step_by(11) {
                let data = vec![round; BLOCK];
                client.write((block * BLOCK) as u64, &data, 0)?.ok("write")?;
                now[block * BLOCK..][..BLOCK].copy_from_slice(&data);
            }
            if round % 2 == 0 {
                client.flush()?.ok("flush")?;
                flushed.clone_from(&now);
            }
            behind = kill_and_start(lab, behind)?;
            check!(
                client.read(0, MIB as u32)? == Ok(now.clone()),
                "--cache {cache}, round {round}"
            );
        }
        client.write(0, &[0xff; BLOCK], 0)?.ok("write")?; // is not flushed, and may be there
        client.flush()?.ok("flush")?;
        flushed[..BLOCK].fill(0xff);
        let (front, behind) = (front, behind);
        for server in [&front, &behind] {
            signal(server.pid(), libc::SIGKILL);
        }
        drop((front, behind));
        check!(fs::read(&path)? == flushed, "--cache {cache}: a flushed write is missing");
    }
    Ok(())
}

fn kill_and_start(lab: &Lab, server: Server) -> Res<Server> {
    signal(server.pid(), libc::SIGKILL);
    drop(server);
    back(lab)
}

/// Versions of the blocks that a client has written.
struct Versions {
    last: u32,
    now: [u32; BLOCKS],
    flushed: [u32; BLOCKS],
}

impl Versions {
    /// Writes and flushes until the server has gone.
    fn write(&mut self, mut client: Client, seed: u64) -> Res {
        let mut random = Random::new(seed);
        loop {
            let block = random.below(BLOCKS as u64) as usize;
            self.last += 1;
            self.now[block] = self.last;
            let word = self.last << 8 | block as u32;
            let data = word.to_le_bytes().repeat(BLOCK / 4);
            let Ok(answer) = client.write((block * BLOCK) as u64, &data, 0) else { return Ok(()) };
            answer.ok("write")?;
            if random.below(12) == 0 {
                let Ok(answer) = client.flush() else { return Ok(()) };
                answer.ok("flush")?;
                self.flushed = self.now;
            }
        }
    }

    /// Checks that each block has its flushed version, or a newer one that was sent.
    fn check(&mut self, image: &[u8], round: usize) -> Res {
        for (at, sector) in image.chunks_exact(512).enumerate() {
            let block = at * 512 / BLOCK;
            let word = u32::from_le_bytes(sector[..4].try_into()?);
            let (version, flushed, now) = (word >> 8, self.flushed[block], self.now[block]);
            let is_whole = sector.chunks_exact(4).all(|part| part == &sector[..4]);
            let belongs = word == 0 || word & 0xff == block as u32;
            check!(
                is_whole && belongs && (flushed..=now).contains(&version),
                "round {round}, sector {at}: {word:#x}, flushed {flushed}, sent {now}"
            );
        }
        let words = image.chunks_exact(BLOCK).map(|block| block[..4].try_into());
        for (block, word) in words.enumerate() {
            self.flushed[block] = u32::from_le_bytes(word?) >> 8; // the file keeps what it has now
        }
        self.now = self.flushed;
        Ok(())
    }
}

/// Both are killed while a write or a flush is in flight. In half of the rounds the upstream was killed just before and
/// has started again, so that the server sends changes again.
fn both_killed_under_load(lab: &Lab) -> Res {
    let path = lab.path("a.img");
    image::sparse(&path, (BLOCKS * BLOCK) as u64)?;
    let mut versions = Versions { last: 0, now: [0; BLOCKS], flushed: [0; BLOCKS] };
    let mut random = Random::new(26);
    for round in 0..16 {
        let (mut behind, front) = (back(lab)?, front(lab, ["0", "1M"][round % 2])?);
        let (client, seed) = (front.client()?, random.next());
        let mut pause = |most| thread::sleep(Duration::from_millis(1 + random.below(most)));
        let before = versions.last;
        let history = &mut versions;
        thread::scope(|scope| -> Res {
            let writer = scope.spawn(move || history.write(client, seed));
            pause(50);
            if round % 4 > 1 {
                behind = kill_and_start(lab, behind)?;
                pause(120); // the server connects again within 50 ms
            }
            for server in [&behind, &front] {
                signal(server.pid(), libc::SIGKILL);
            }
            drop((behind, front));
            writer.join().expect("returns its failures")
        })?;
        check!(versions.last > before, "round {round}: nothing was written");
        versions.check(&fs::read(&path)?, round)?;
    }
    Ok(())
}

/// Without the upstream requests fail in time, and another export is served as before.
fn gone(lab: &Lab) -> Res {
    let (path, other) = (lab.path("a.img"), lab.path("b.img"));
    image::sparse(&path, MIB)?;
    image::sparse(&other, MIB)?;
    let back = back(lab)?;
    let launch = Launch::bare(lab).image(&uri(lab)).image_as("other", &other).on_socket("front");
    let front = launch.arg("--reconnect").arg("1").start()?;
    let mut client = front.client()?;
    check!(client.read(0, 512)? == Ok(vec![0; 512]), "it is there");
    back.stop()?;
    let since = Instant::now();
    check!(client.read(512 << 10, 512)? == Err(EIO), "a read without an upstream");
    client.write(0, &[1; BLOCK], 0)?.ok("write, to the cache")?;
    client.flush()?.is(EIO, "a flush without an upstream")?;
    check!(since.elapsed() < Duration::from_secs(20), "it took {:?}", since.elapsed());
    let mut second = front.client_of("other")?;
    second.write(0, &[2; BLOCK], 0)?.ok("write to another export")?;
    second.flush()?.ok("flush of another export")?;
    Ok(())
}

fn refused(lab: &Lab) -> Res {
    let (code, said) = Launch::bare(lab).image(&uri(lab)).on_socket("front").start_refused()?;
    check!(code == 1 && said.contains("cannot connect"), "{code}: {said}");
    Ok(())
}
