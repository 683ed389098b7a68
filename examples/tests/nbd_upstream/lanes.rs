//! Reads over lanes, connections that belong to the calling thread. They see every answered change,
//! whatever is lost.

use std::future::Future as _;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bufcache::BlockDevice;
use nbd_protocol::{NbdError, Request, TransmissionFlags as Flags, wire::cmd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::scripted::{Act, Upstream};
use crate::upstream::{Lanes, NbdDevice, UpstreamOptions};

const BLOCK: usize = 4096;
const LEN: usize = 64 * BLOCK;
const LIMIT: Duration = Duration::from_secs(20);

/// Reads as a worker does.
fn read(lanes: &Lanes, device: &NbdDevice, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
    let mut future = pin!(device.read_async(offset, vec![0; len]));
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Poll::Ready((result, bytes)) =
            future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            return match result {
                Ok(count) => Ok(bytes[..count].to_vec()),
                Err(error) => Err(error.raw_os_error().unwrap()),
            };
        }
        assert!(Instant::now() < deadline, "a read does not end");
        lanes.send();
        let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        poll(&mut [PollFd::new(lanes, PollFlags::IN)], Some(&millisecond)).unwrap();
        lanes.turn();
        lanes.expire(Instant::now());
    }
}

/// Makes a device with two connections and a lane that is up, which is the third connection.
fn up(upstream: &Upstream, lanes: &Lanes) -> NbdDevice {
    up_with(upstream, lanes, |options| options.reply = Duration::from_millis(300))
}

fn up_with(
    upstream: &Upstream,
    lanes: &Lanes,
    change: impl FnOnce(&mut UpstreamOptions),
) -> NbdDevice {
    let device = without_lane(upstream, change);
    come_up(lanes, &device);
    assert!(matches!(upstream.reads()[..], [_, _, 1]), "{:?}", upstream.reads());
    device
}

fn without_lane(upstream: &Upstream, change: impl FnOnce(&mut UpstreamOptions)) -> NbdDevice {
    let device = upstream.device(|options| {
        options.connections = 2;
        change(options);
    });
    while device.stats().connects == 0 {
        std::thread::yield_now();
    }
    device
}

/// Reads until a lane is used.
fn come_up(lanes: &Lanes, device: &NbdDevice) {
    let (before, deadline) = (device.stats().lane_requests, Instant::now() + LIMIT);
    while device.stats().lane_requests == before {
        assert!(Instant::now() < deadline, "no lane comes up");
        read(lanes, device, 0, 512).unwrap();
    }
}

#[test]
fn inv04_a_lane_reads_what_was_written_over_other_connections() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    let before = upstream.reads();
    for round in 1..=20_u8 {
        let at = u64::from(round) * 512;
        device.write(at, &[round; BLOCK]).unwrap();
        assert_eq!(read(&lanes, &device, at, BLOCK).unwrap(), [round; BLOCK]);
    }
    assert_eq!(
        read(&lanes, &device, LEN as u64 - 512, BLOCK).unwrap(),
        upstream.disk()[LEN - 512..]
    );
    assert_eq!(read(&lanes, &device, LEN as u64, 512).unwrap(), []);
    let after = upstream.reads();
    assert_eq!(after[..2], before[..2], "all reads take the lane");
    assert_eq!(after[2], before[2] + 21);
}

/// Fails if a lane connects or is used before the journal was sent again.
#[test]
fn inv04_inv05_after_a_loss_at_a_lane_every_read_is_right() {
    for act in [
        Act::CloseBefore,
        Act::CloseAfter,
        Act::CloseWithin(9),
        Act::CloseWithin(100),
        Act::CrashBefore,
        Act::CrashAfter,
    ] {
        let upstream = Upstream::new(LEN);
        let lanes = Lanes::start().unwrap();
        let device = up(&upstream, &lanes);
        for round in 1..=6_u8 {
            for block in 0..8 {
                device.write(2 * block * BLOCK as u64, &[round; BLOCK]).unwrap();
            }
            upstream.once(0, act.clone());
            for block in 0..8 {
                let found = read(&lanes, &device, 2 * block * BLOCK as u64, BLOCK).unwrap();
                assert_eq!(found, [round; BLOCK], "{act:?}, round {round}, block {block}");
            }
            come_up(&lanes, &device);
        }
        assert!(device.stats().losses >= 6 && !device.stats().poisoned);
    }
}

/// The power of the upstream is cut while a lane is idle.
#[test]
fn inv05_a_lane_waits_for_the_journal() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    for block in 0..16 {
        device.write(2 * block * BLOCK as u64, &[1; BLOCK]).unwrap();
    }
    upstream.script(|_, request| match request.command {
        cmd::WRITE if request.offset == 0 => Act::Slow(Duration::from_millis(200)),
        _ => Act::Answer,
    });
    upstream.crash();
    for block in 0..16 {
        let found = read(&lanes, &device, 2 * block * BLOCK as u64, BLOCK).unwrap();
        assert_eq!(found, [1; BLOCK], "the read saw what the upstream had lost");
    }
}

/// The device loses a connection, and the lane's connection stays up.
#[test]
fn inv05_a_loss_elsewhere_ends_the_use_of_a_lane() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    device.write(0, &[1; BLOCK]).unwrap();
    let before = upstream.reads();
    // Sending the journal takes a while.
    upstream.script(|_, request| match request.command {
        cmd::WRITE => Act::Slow(Duration::from_millis(300)),
        _ => Act::Answer,
    });
    upstream.close(0);
    while device.stats().losses == 0 {
        std::thread::yield_now();
    }
    assert_eq!(read(&lanes, &device, 0, BLOCK).unwrap(), [1; BLOCK]);
    assert_eq!(upstream.reads()[2], before[2], "the lane was used after the loss");
    come_up(&lanes, &device);
}

/// A buffer whose first access blocks the device's thread.
struct Slow(Vec<u8>, mpsc::Sender<()>, mpsc::Receiver<()>);

impl Deref for Slow {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Slow {
    fn deref_mut(&mut self) -> &mut [u8] {
        let _ = (self.1.send(()), self.2.recv()); // blocks once: later the test has dropped its end
        &mut self.0
    }
}

/// The server has restarted and lost a write. Until the device's thread notices the restart,
/// neither the old lane nor a new one may be used.
#[test]
fn inv04_inv05_a_lane_waits_until_the_device_knows_of_a_loss() {
    for is_up in [true, false] {
        let upstream = Upstream::new(LEN);
        let lanes = Lanes::start().unwrap();
        let device = if is_up { up(&upstream, &lanes) } else { without_lane(&upstream, |_| {}) };
        device.write(0, &[1; BLOCK]).unwrap();
        let (started, starts) = mpsc::channel();
        let (ends, ended) = mpsc::channel();
        std::thread::scope(|scope| {
            let buf = Slow(vec![0; 512], started, ended);
            scope.spawn(|| {
                // This thread has no lanes.
                let mut read = pin!(device.read_async(LEN as u64 - 512, buf));
                while read.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                    std::thread::yield_now();
                }
            });
            starts.recv().unwrap(); // from now on the device's thread is blocked
            upstream.crash();
            let mut reads = Vec::new();
            for _ in 0..50 {
                let mut read = Box::pin(device.read_async(0, vec![0; BLOCK]));
                assert!(read.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                reads.push(read);
                lanes.send();
                std::thread::sleep(Duration::from_millis(5));
                lanes.turn();
            }
            drop(ends);
            for mut read in reads {
                let found = loop {
                    match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        Poll::Ready((_, bytes)) => break bytes,
                        Poll::Pending => _ = lanes.turn(),
                    }
                    std::thread::yield_now();
                };
                assert!(found == [1; BLOCK], "a lane read what the upstream had lost, {is_up}");
            }
        });
    }
}

/// The journal cannot be sent again, and need not be, because a lane carries no changes.
#[test]
fn inv05_inv06_the_loss_of_a_lane_alone_sends_no_journal_and_poisons_nothing() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up_with(&upstream, &lanes, |options| options.keep = 3 * BLOCK);
    // The upstream never answers the device's own flushes.
    upstream.script(|_, request| match request.command {
        cmd::FLUSH => Act::Silent,
        _ => Act::Answer,
    });
    for block in 0..8 {
        device.write(2 * block * BLOCK as u64, &[block as u8; BLOCK]).unwrap();
    }
    upstream.seen();
    for losses in 1..=3 {
        upstream.close(1 + losses as usize);
        read(&lanes, &device, 0, BLOCK).unwrap(); // the lane notices its loss
        while device.stats().losses < losses {
            std::thread::yield_now();
        }
        come_up(&lanes, &device);
        for block in 0..8 {
            let found = read(&lanes, &device, 2 * block * BLOCK as u64, BLOCK).unwrap();
            assert_eq!(found, [block as u8; BLOCK]);
        }
    }
    let stats = device.stats();
    assert!(!stats.poisoned && stats.replayed == 0, "{stats}");
    assert!(upstream.seen().iter().all(|request| request.command != cmd::WRITE));
    device.write(0, &[9; BLOCK]).unwrap();
}

/// Writes every other one of 16 blocks.
fn write_all(device: &NbdDevice, round: u8) {
    for block in 0..8 {
        device.write(2 * block * BLOCK as u64, &[round; BLOCK]).unwrap();
    }
}

/// Checks the blocks that [`write_all`] wrote.
fn all_have(lanes: &Lanes, device: &NbdDevice, round: u8) {
    for block in 0..8 {
        let found = read(lanes, device, 2 * block * BLOCK as u64, BLOCK).unwrap();
        assert_eq!(found, [round; BLOCK], "round {round}, block {block}");
    }
}

/// The server ends and loses its data while the device probes its connections after the loss of a
/// lane.
#[test]
fn inv04_inv05_a_server_that_ends_after_a_lane_is_recovered_from() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up_with(&upstream, &lanes, |_| {});
    for round in 1..=5_u8 {
        write_all(&device, round);
        while device.stats().connects < 2 * u64::from(round) - 1 {
            std::thread::yield_now(); // after a pause, if it answered nothing
        }
        let (connected, losses) = (upstream.reads().len(), device.stats().losses);
        upstream.script(|count, request| match (count, request.len) {
            (0, _) => Act::CloseBefore, // the lane
            (_, 1) => Act::Silent,      // a probe
            _ => Act::Answer,
        });
        while device.stats().losses == losses {
            read(&lanes, &device, 512, 512).unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        read(&lanes, &device, 512, 512).unwrap();
        assert_eq!(upstream.reads().len(), connected, "a lane connects before the probes' answers");
        upstream.script(|_, _| Act::Answer);
        upstream.crash();
        all_have(&lanes, &device, round);
        come_up(&lanes, &device);
    }
    let stats = device.stats();
    assert!(stats.replayed >= 5 && !stats.poisoned, "{stats}");
}

/// The server loses its data and the other connections while a lane reads.
#[test]
fn inv04_inv05_a_server_that_ends_before_a_lane_is_recovered_from() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up_with(&upstream, &lanes, |_| {});
    for round in 1..=5_u8 {
        write_all(&device, round);
        upstream.once(0, Act::CrashOthers(Duration::from_millis(20)));
        all_have(&lanes, &device, round);
        come_up(&lanes, &device);
    }
    let stats = device.stats();
    assert!(stats.replayed >= 5 && !stats.poisoned, "{stats}");
}

/// After a wrong reply, an error and silence the device's thread repeats the read.
#[test]
fn inv01_inv02_what_a_lane_cannot_read_is_asked_for_again() {
    let other_error = |_: &Request, _| [0x67, 0x44, 0x66, 0x98].repeat(4);
    for (act, losses, protocol_errors) in [
        (Act::Fail(NbdError::Io), 0, 0),
        (Act::Fail(NbdError::Shutdown), 0, 0),
        (Act::Cookie(7), 1, 1),
        (Act::Bytes(other_error), 1, 1),
        (Act::Silent, 1, 0),
    ] {
        let upstream = Upstream::new(LEN);
        let lanes = Lanes::start().unwrap();
        let device = up(&upstream, &lanes);
        let original = upstream.disk();
        upstream.once(0, act.clone());
        assert_eq!(read(&lanes, &device, 512, BLOCK).unwrap(), original[512..][..BLOCK], "{act:?}");
        let stats = device.stats();
        assert_eq!((stats.losses, stats.protocol_errors), (losses, protocol_errors), "{act:?}");
    }
}

#[test]
fn inv02_an_error_that_stays_is_the_result() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    upstream.script(|_, request| match request.command {
        cmd::READ => Act::Fail(NbdError::Io),
        _ => Act::Answer,
    });
    assert_eq!(read(&lanes, &device, 0, BLOCK), Err(libc::EIO));
}

/// After a failed flush, data that it should have made durable cannot be read over a lane either.
#[test]
fn inv06_a_poisoned_device_has_no_lanes() {
    let upstream = Upstream::new(LEN);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.once(0, Act::Fail(NbdError::NoSpc));
    device.sync().unwrap_err();
    let before = upstream.reads();
    assert_eq!(read(&lanes, &device, 0, 512), Err(libc::EIO));
    assert!(read(&lanes, &device, BLOCK as u64, 512).is_ok());
    assert_eq!(upstream.reads()[2..], before[2..]);
}

/// Long reads are sent in parts. Reads beyond the depth of a connection wait.
#[test]
fn inv07_a_lane_keeps_to_the_limits_of_the_server() {
    let limits = |export: &mut nbd_protocol::ExportInfo| {
        (export.min_block, export.preferred_block, export.max_block) = (512, 4096, 6144);
    };
    let upstream = Upstream::with(LEN, limits, true);
    let lanes = Lanes::start().unwrap();
    let device = up(&upstream, &lanes);
    upstream.seen();
    assert!(read(&lanes, &device, 512, LEN - 512).unwrap() == upstream.disk()[512..]);
    let seen = upstream.seen();
    assert!(seen.iter().all(|request| request.len <= 6144) && seen.len() >= LEN / 6144);
}

/// A successful handshake does not prove that a server works: pauses grow until a connection has
/// answered a request.
#[test]
fn a_server_that_drops_connections_is_not_asked_without_a_pause() {
    const PAUSES: usize = 5; // 50 + 100 + 200 + 400 + 800 ms
    for (first, connections) in [(0, 2), (2, 1)] {
        let upstream = Upstream::new(LEN);
        let lanes = Lanes::start().unwrap();
        let device = up_with(&upstream, &lanes, |options| {
            options.reconnect = Duration::from_millis(1500);
        });
        upstream.script(move |_, _| Act::CloseFrom(first));
        let (before, begun) = (upstream.reads().len(), Instant::now());
        while begun.elapsed() < Duration::from_millis(1500) {
            assert_eq!(read(&lanes, &device, 0, 512).is_ok(), first > 0);
        }
        let attempts = upstream.reads().len() - before;
        // Each connection that was up is first made again without a pause.
        let most = connections * (PAUSES + 2);
        assert!((2..=most).contains(&attempts), "{attempts} attempts, {most} at most");
        upstream.script(|_, _| Act::Answer);
        come_up(&lanes, &device);
    }
}

/// If the server's connections share no cache, a read over another connection may miss a write.
#[test]
fn inv04_a_server_that_shares_no_cache_gets_no_lane() {
    let alone = |export: &mut nbd_protocol::ExportInfo| {
        export.flags = export.flags - Flags::CAN_MULTI_CONN;
    };
    let upstream = Upstream::with(LEN, alone, false);
    let lanes = Lanes::start().unwrap();
    let device = upstream.device(|_| {});
    for _ in 0..20 {
        read(&lanes, &device, 0, 512).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(upstream.reads(), [20]);
}
