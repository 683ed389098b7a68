//! The power of the server and of its upstream is cut at any moment. Every flushed write must be on
//! the upstream's disk.

use std::time::Duration;

use bufcache::{Cache, Device};
use nbd_protocol::{Request, wire::cmd};

use crate::scripted::{Act, Upstream};

const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
const SECTOR: usize = 512;

/// For each block the number of its last write; 0 if there was none.
type Versions = [u32; BLOCKS];

/// The history of the workload, by the moments of the recorder.
#[derive(Default)]
struct History {
    /// From each moment on, the disk has these versions or newer ones.
    durable: Vec<(u64, Versions)>,
    /// The versions written by each moment, the newest last.
    written: Vec<(u64, Versions)>,
}

/// Writes blocks, has the cache write them back, and makes all or one of them durable.
fn work(upstream: &Upstream, disk: &Device, seed: u32) -> History {
    let mut history = History::default();
    let (mut versions, mut durable) = ([0; BLOCKS], [0; BLOCKS]);
    let mut random = seed;
    for step in 1..=150_u32 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let block = (random >> 20) as usize % BLOCKS;
        match random >> 28 {
            0 | 1 => {
                disk.sync().unwrap();
                durable = versions;
            }
            2 => {
                disk.write_through(block as u64..block as u64 + 1).unwrap();
                durable[block] = versions[block];
            }
            3 | 4 => disk.flush().unwrap(),
            _ => {
                let mut guard = disk.create(block as u64).unwrap();
                guard
                    .chunks_exact_mut(4)
                    .for_each(|word| word.copy_from_slice(&step.to_le_bytes()));
                versions[block] = step;
            }
        }
        let now = upstream.recorded(|recorder| recorder.moments());
        history.durable.push((now, durable));
        history.written.push((now, versions));
    }
    history
}

/// Returns the first sector that a power cut may leave older than it was flushed, or with a content
/// that was never written.
fn fault(upstream: &Upstream, history: &History, seed: u32) -> Option<String> {
    let original = upstream.recorded(|recorder| recorder.after_power_cut(0, |_, _| 0)).unwrap();
    let moments = upstream.recorded(|recorder| recorder.moments());
    for moment in 0..=moments {
        let durable = history.durable.iter().rev().find(|(at, _)| *at <= moment);
        let durable = durable.map_or([0; BLOCKS], |(_, versions)| *versions);
        for choice in 0..3 {
            let mut random = seed.wrapping_add(moment as u32);
            let choose = |_, versions: usize| match choice {
                0 => 0,
                1 => versions,
                _ => {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (random >> 16) as usize % versions
                }
            };
            let disk = upstream.recorded(|recorder| recorder.after_power_cut(moment, choose));
            let disk = disk.unwrap();
            for (at, sector) in disk.chunks_exact(SECTOR).enumerate() {
                let block = at * SECTOR / BLOCK;
                let version = match sector == &original[at * SECTOR..][..SECTOR] {
                    true => 0,
                    false => u32::from_le_bytes(sector[..4].try_into().unwrap()),
                };
                let is_whole =
                    version == 0 || sector.chunks_exact(4).all(|word| word == &sector[..4]);
                let was_written = history.written.iter().any(|(_, all)| all[block] == version);
                if version < durable[block] || !is_whole || !was_written {
                    return Some(format!(
                        "moment {moment} of {moments}, sector {at}: {version}, flushed {}",
                        durable[block]
                    ));
                }
            }
        }
    }
    None
}

fn run(seed: u32, script: impl FnMut(usize, &Request) -> Act + Send + 'static) -> Option<String> {
    let upstream = Upstream::recording(BLOCKS * BLOCK);
    upstream.script(script);
    let disk = Cache::new(8 * BLOCK).unwrap().attach(upstream.device(|_| {}), BLOCK).unwrap();
    let history = work(&upstream, &disk, seed);
    fault(&upstream, &history, seed)
}

#[test]
fn inv03_a_flushed_write_survives_a_cut_at_any_moment() {
    for seed in 1..=4 {
        assert_eq!(run(seed, |_, _| Act::Answer), None, "seed {seed}");
    }
}

/// Connections are lost, so that changes are sent again, and some replies are late.
#[test]
fn inv03_inv05_a_flushed_write_survives_a_cut_after_losses() {
    for (seed, period) in [(1, 7), (2, 11), (3, 13)] {
        let mut left = 6;
        let script = move |count: usize, _: &Request| match (count + 1) % period {
            0 if left > 0 => {
                left -= 1;
                if left % 2 == 0 { Act::CloseAfter } else { Act::CloseBefore }
            }
            3 => Act::Late(Duration::from_millis(1)),
            _ => Act::Answer,
        };
        assert_eq!(run(seed, script), None, "seed {seed}");
    }
}

/// The test notices an upstream that answers a FLUSH or a durable write without carrying it out.
#[test]
fn inv03_a_flush_that_is_not_done_is_found() {
    let script = |_: usize, request: &Request| match request.command {
        cmd::FLUSH => Act::Pretend,
        _ => Act::Answer,
    };
    assert!(run(1, script).is_some());
}
