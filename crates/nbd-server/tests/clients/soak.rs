//! Mixed load for a long time, with a client that is killed every second: every byte is what it should be,
//! and the server's memory does not grow.
//!
//! ```text
//! OFFLOCK_STRESS_SECONDS=900 cargo test --release -p offlock-nbd --test clients -- --ignored soak_
//! ```
//!
//! Ignored by default; `OFFLOCK_STRESS_SECONDS` (10) is how long each backend serves.

use std::fs;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use testkit::stress::stress_time;

use crate::client::{Client, MIB, cmd, flag, header};
use crate::image::{self, Random};
use crate::lab::{Backend, Lab, Res, check, per_backend_for};
use crate::server::{Launch, Server};

const CLIENTS: usize = 8;
/// Of each client: its own. All of them are more than the cache holds.
const BLOCKS: usize = 2048;
const BLOCK: usize = 4096;
/// Requests in flight when a client is killed.
const LAST: usize = 16;
/// What a killed client had in flight has come to its end after so long. A disk takes less.
const SETTLED: Duration = Duration::from_secs(10);
/// What the memory may grow by, in percent.
const GROWTH: u64 = 5;

pub(crate) fn trials() -> Vec<Trial> {
    let time = stress_time(10);
    let body = move |lab: &Lab, backend| soak(lab, backend, time);
    let deadline = time + Duration::from_secs(120);
    let trials = per_backend_for(deadline, &Backend::ALL, "soak_mixed_load", &[], body);
    trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect()
}

/// A block that a killed client had in flight.
struct Unsure {
    since: Instant,
    block: usize,
    /// It is the version before, or this.
    version: u32,
}

/// A client and its blocks.
struct Player {
    client: Client,
    random: Random,
    first: usize,
    /// Of each block what it holds; 0 is all zero.
    versions: Vec<u32>,
    last: u32,
    unsure: Vec<Unsure>,
    requests: u64,
}

fn content(block: usize, version: u32) -> Vec<u8> {
    let word = if version == 0 { 0 } else { (block as u64) << 32 | u64::from(version) };
    word.to_le_bytes().repeat(BLOCK / 8)
}

fn soak(lab: &Lab, backend: Backend, time: Duration) -> Res {
    let path = lab.path("a.img");
    image::sparse(&path, (CLIENTS * BLOCKS * BLOCK) as u64)?;
    let server = Launch::new(lab, backend).image(&path).arg("--cache").arg("16M").start()?;
    let began = Instant::now();
    let memory = Mutex::new(Vec::new());
    let players = thread::scope(|scope| -> Res<Vec<Player>> {
        let mut threads = Vec::new();
        for number in 0..CLIENTS {
            let mut player = Player::new(&server, number)?;
            let server = &server;
            let play = move || player.play(server, number, (began, time)).map(|()| player);
            threads.push(scope.spawn(play));
        }
        while began.elapsed() < time {
            thread::sleep(Duration::from_millis(100));
            let now = server.memory("VmRSS")?;
            memory.lock().expect("no panic under the lock").push(now);
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })?;
    let memory = memory.into_inner().expect("no panic under the lock");
    let third = memory.len() / 3;
    let most = |part: &[u64]| part.iter().max().copied().unwrap_or(0);
    // The first third fills the cache, and what is kept for reuse.
    let (before, after) = (most(&memory[third..2 * third]), most(&memory[2 * third..]));
    check!(
        after <= before + before * GROWTH / 100,
        "the server's memory grew from {before} to {after} bytes"
    );
    let mut client = server.client()?;
    for player in &players {
        for at in (0..BLOCKS).step_by(64) {
            let offset = ((player.first + at) * BLOCK) as u64;
            let found = client.read(offset, (64 * BLOCK) as u32)?;
            let found = found.map_err(|error| format!("READ: error {error}"))?;
            player.check(at, &found)?;
        }
    }
    client.flush()?.ok("FLUSH")?;
    client.disconnect()?;
    server.stop()?;
    let there = fs::read(&path)?;
    for (player, bytes) in players.iter().zip(there.chunks(BLOCKS * BLOCK)) {
        player.check(0, bytes)?;
    }
    let requests: u64 = players.iter().map(|player| player.requests).sum();
    let seconds = time.as_secs();
    println!(
        "{}: {seconds} kills, {requests} acknowledged writes, at most {} MiB",
        backend.name(),
        before.max(after) / MIB
    );
    Ok(())
}

impl Player {
    fn new(server: &Server, number: usize) -> Res<Self> {
        Ok(Self {
            client: server.client()?,
            random: Random::new(number as u64 + 1),
            first: number * BLOCKS,
            versions: vec![0; BLOCKS],
            last: 0,
            unsure: Vec::new(),
            requests: 0,
        })
    }

    /// Until the time is over; is killed when its second comes.
    fn play(&mut self, server: &Server, number: usize, (began, time): (Instant, Duration)) -> Res {
        let mut killed = 0;
        while began.elapsed() < time {
            self.request()?;
            let second = began.elapsed().as_secs();
            if second as usize % CLIENTS == number && second > killed {
                killed = second;
                self.be_killed(server)?;
            }
            if self.unsure.first().is_some_and(|unsure| unsure.since.elapsed() > SETTLED) {
                self.look_again()?;
            }
        }
        thread::sleep(if self.unsure.is_empty() { Duration::ZERO } else { SETTLED });
        while !self.unsure.is_empty() {
            self.look_again()?;
        }
        Ok(())
    }

    fn is_unsure(&self, blocks: &std::ops::Range<usize>) -> bool {
        self.unsure.iter().any(|unsure| blocks.contains(&unsure.block))
    }

    /// Some blocks that nothing is in flight of.
    fn choose(&mut self) -> std::ops::Range<usize> {
        loop {
            let most = [1, 1, 16, 64][self.random.below(4) as usize];
            let count = 1 + self.random.below(most) as usize;
            // A part of them is used more than the rest.
            let among = if self.random.below(4) == 0 { BLOCKS } else { BLOCKS / 8 };
            let start = self.random.below((among - count + 1) as u64) as usize;
            if !self.is_unsure(&(start..start + count)) {
                return start..start + count;
            }
        }
    }

    fn next_version(&mut self, blocks: std::ops::Range<usize>) -> Vec<u8> {
        self.last += 1;
        blocks.flat_map(|block| content(self.first + block, self.last)).collect()
    }

    fn request(&mut self) -> Res {
        let blocks = self.choose();
        let offset = ((self.first + blocks.start) * BLOCK) as u64;
        let len = blocks.len() * BLOCK;
        let flags = if self.random.below(64) == 0 { flag::FUA } else { 0 };
        match self.random.below(64) {
            0..28 => {
                let data = self.next_version(blocks.clone());
                self.client.write(offset, &data, flags)?.ok("a write")?;
                self.versions[blocks].fill(self.last);
                self.requests += 1;
            }
            28 => {
                let no_hole = if self.random.below(2) == 0 { flag::NO_HOLE } else { 0 };
                let flags = flags | no_hole;
                self.client.plain(cmd::WRITE_ZEROES, flags, offset, len as u64)?.ok("zeroes")?;
                self.versions[blocks].fill(0);
            }
            29 => {
                // Where the file system cannot, the blocks stay what they are: written over at once.
                self.client.plain(cmd::TRIM, flags, offset, len as u64)?.ok("TRIM")?;
                let data = self.next_version(blocks.clone());
                self.client.write(offset, &data, 0)?.ok("a write after TRIM")?;
                self.versions[blocks].fill(self.last);
            }
            30 => self.client.flush()?.ok("FLUSH")?,
            _ => {
                let found = self.client.read(offset, len as u32)?;
                let found = found.map_err(|error| format!("READ: error {error}"))?;
                self.check(blocks.start, &found)?;
            }
        }
        Ok(())
    }

    /// Vanishes inside a request, with others in flight, and comes back.
    fn be_killed(&mut self, server: &Server) -> Res {
        for nr in 0..LAST {
            let blocks = self.choose();
            let data = self.next_version(blocks.clone());
            let offset = ((self.first + blocks.start) * BLOCK) as u64;
            let mut bytes = header(0, cmd::WRITE, nr as u64, offset, data.len() as u32);
            bytes.extend(&data);
            if nr == LAST - 1 {
                bytes.truncate(bytes.len() / 2);
            }
            self.client.send(&bytes)?;
            let since = Instant::now();
            let version = self.last;
            self.unsure.extend(blocks.map(|block| Unsure { since, block, version }));
        }
        self.client = server.client()?;
        Ok(())
    }

    /// What became of the oldest block that was in flight.
    fn look_again(&mut self) -> Res {
        let Unsure { block, version, .. } = self.unsure.remove(0);
        let offset = ((self.first + block) * BLOCK) as u64;
        let found = self.client.read(offset, BLOCK as u32)?;
        let found = found.map_err(|error| format!("READ: error {error}"))?;
        if found == content(self.first + block, version) {
            self.versions[block] = version;
        }
        self.check(block, &found)
    }

    fn check(&self, from: usize, bytes: &[u8]) -> Res {
        for (at, found) in bytes.chunks(BLOCK).enumerate() {
            let block = from + at;
            let wanted = self.versions[block];
            let there = u32::from_le_bytes(found[..4].try_into().expect("4 bytes"));
            check!(
                found == content(self.first + block, wanted),
                "block {} holds version {there}, wanted {wanted}",
                self.first + block
            );
        }
        Ok(())
    }
}
