//! Lost connections, and power cuts of the upstream, at every message.

use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use bufcache::{BlockDevice, Cache, Device};

use crate::scripted::{Act, Upstream};
use crate::upstream::{NbdDevice, UpstreamOptions};

const BLOCK: usize = 4096;
const BLOCKS: usize = 24;

/// The byte that each block was last filled with; 0 if it was not written.
type Model = [u8; BLOCKS];

fn expected(upstream: &[u8], block: usize, value: u8) -> Vec<u8> {
    match value {
        0 => upstream[block * BLOCK..][..BLOCK].to_vec(),
        value => vec![value; BLOCK],
    }
}

/// Writes, flushes, evicts and reads blocks, and compares every read. Returns the contents.
fn work(device: &Device, original: &[u8]) -> Model {
    let mut model = [0; BLOCKS];
    let mut random = 1_u32;
    for step in 1..=60_u8 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let block = (random >> 20) as usize % BLOCKS;
        match step % 10 {
            3 => device.flush().unwrap(),
            6 => {
                device.flush().unwrap();
                (0..BLOCKS as u64).for_each(|block| _ = device.invalidate(block).unwrap());
            }
            8 => device.sync().unwrap(),
            1 | 4 | 7 => {
                let guard = device.get(block as u64).unwrap();
                assert!(
                    guard[..] == expected(original, block, model[block])[..],
                    "step {step}, block {block}"
                );
            }
            _ => {
                device.create(block as u64).unwrap().fill(step);
                model[block] = step;
            }
        }
    }
    device.sync().unwrap();
    model
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

fn attach(device: NbdDevice) -> (Arc<NbdDevice>, Device) {
    let raw = Arc::new(device);
    let cache = Cache::new(1 << 20).unwrap();
    let device = cache.attach(Arc::clone(&raw), BLOCK).unwrap();
    (raw, device)
}

/// Returns the number of messages of the workload without a fault.
fn messages() -> usize {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let (_, device) = attach(upstream.device(|_| {}));
    work(&device, &upstream.disk());
    upstream.count()
}

/// Has `act` happen at each message in turn. Every read must be right, and a later power cut must
/// not lose flushed data.
fn at_each_message(act: &Act, extended: bool) {
    for number in 0..messages() + 2 {
        let upstream = Upstream::with(BLOCKS * BLOCK, |_| {}, extended);
        let original = upstream.disk();
        let reply = match act {
            Act::Silent => Duration::from_millis(100),
            _ => UpstreamOptions::default().reply,
        };
        let (raw, device) = attach(upstream.device(|options| options.reply = reply));
        upstream.once(number, act.clone());
        let model = work(&device, &original);
        upstream.crash();
        let stable = upstream.stable();
        for (block, &value) in model.iter().enumerate() {
            assert!(
                stable[block * BLOCK..][..BLOCK] == expected(&original, block, value)[..],
                "{act:?} at message {number}: block {block} is not what was flushed"
            );
        }
        assert!(!raw.stats().poisoned);
    }
}

#[test]
fn inv04_a_lost_connection_at_each_message() {
    at_each_message(&Act::CloseBefore, false);
    at_each_message(&Act::CloseAfter, true);
    at_each_message(&Act::CloseWithin(9), false);
}

#[test]
fn inv01_inv04_a_lost_or_wrong_answer_at_each_message() {
    at_each_message(&Act::Silent, false);
    at_each_message(&Act::Twice, false);
    at_each_message(&Act::Cookie(1 << 40), true);
}

/// Fails if the journal is not sent again, or a read is sent before it.
#[test]
fn inv03_inv04_a_power_cut_at_each_message() {
    at_each_message(&Act::CrashBefore, false);
    at_each_message(&Act::CrashAfter, false);
}

/// The power is cut every few messages, so that cuts also interrupt a recovery.
#[test]
fn inv05_power_cuts_during_recovery() {
    for period in [7, 11, 16] {
        let upstream = Upstream::new(BLOCKS * BLOCK);
        let original = upstream.disk();
        let (raw, device) = attach(upstream.device(|_| {}));
        let mut left = 12;
        upstream.script(move |count, _| {
            let crashes = count % period == period - 1 && left > 0;
            left -= usize::from(crashes);
            match (crashes, left % 2) {
                (false, _) => Act::Answer,
                (true, 0) => Act::CrashBefore,
                (true, _) => Act::CrashAfter,
            }
        });
        let model = work(&device, &original);
        upstream.crash();
        for (block, &value) in model.iter().enumerate() {
            assert!(
                upstream.stable()[block * BLOCK..][..BLOCK]
                    == expected(&original, block, value)[..]
            );
        }
        assert!(raw.stats().losses > 3);
    }
}

/// A write is in flight while the journal has an older version of its block. The newer version must
/// remain.
#[test]
fn inv05_an_older_version_never_overtakes() {
    for act in [Act::CrashAfter, Act::CrashBefore, Act::CloseAfter] {
        let upstream = Upstream::new(BLOCKS * BLOCK);
        let device = upstream.device(|_| {});
        device.write(0, &[1; BLOCK]).unwrap();
        upstream.once(0, act);
        device.write(512, &[2; 1024]).unwrap();
        upstream.crash();
        let mut buf = [0; BLOCK];
        device.read(0, &mut buf).unwrap();
        assert!(buf[..512] == [1; 512] && buf[512..1536] == [2; 1024] && buf[1536..] == [1; 2560]);
        device.sync().unwrap();
        assert!(upstream.stable()[..BLOCK] == buf);
    }
}

/// Waits until `count` connections were made, including the first.
fn wait_for_connections(device: &NbdDevice, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while device.stats().connects + 1 < count {
        assert!(Instant::now() < deadline, "no connection");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const SLOW: Duration = Duration::from_millis(300);

/// A connection is lost while a change is in flight on another one. The journal has an older
/// version of the block, and must not be sent before the change is answered.
#[test]
fn inv05_the_journal_waits_for_changes_in_flight() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.connections = 2);
    wait_for_connections(&device, 2);
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.once(0, Act::Slow(SLOW));
    std::thread::scope(|scope| {
        let newer = scope.spawn(|| device.write(0, &[2; BLOCK]).unwrap());
        std::thread::sleep(SLOW / 3);
        upstream.close(1);
        newer.join().unwrap();
    });
    device.sync().unwrap();
    assert!(upstream.stable()[..BLOCK] == [2; BLOCK]);
}

/// A future is dropped during its write. The write must have ended before the blocks can be written
/// again.
#[test]
fn inv04_a_write_that_is_given_up_does_not_come_later() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|_| {});
    upstream.once(0, Act::Slow(SLOW));
    let mut write = Box::pin(device.write_async(0, &[1; BLOCK]));
    assert!(write.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(write);
    assert!(upstream.disk()[..BLOCK] == [1; BLOCK], "it is in flight");
    device.write(0, &[2; BLOCK]).unwrap();
    assert!(upstream.disk()[..BLOCK] == [2; BLOCK]);
}

/// A read must not overtake the journal on another connection.
#[test]
fn inv05_reads_wait_until_the_journal_is_answered() {
    let upstream = Upstream::new(2 * BLOCKS * BLOCK);
    let device = upstream.device(|options| options.connections = 2);
    for block in 0..BLOCKS as u64 {
        device.write(2 * block * BLOCK as u64, &[1; BLOCK]).unwrap(); // not neighbours, so not merged
    }
    upstream.script(|_, request| match request.command {
        nbd_protocol::wire::cmd::WRITE if request.offset == 0 => Act::Slow(SLOW),
        _ => Act::Answer,
    });
    upstream.crash();
    let mut buf = [0; BLOCK];
    device.read(0, &mut buf).unwrap();
    assert!(buf == [1; BLOCK], "the read saw what the upstream had lost");
}

/// A flush does not cover a write that is sent while the flush is in flight.
#[test]
fn inv03_a_flush_covers_what_was_answered_before_it_was_sent() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|_| {});
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.once(0, Act::Late(SLOW));
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| device.sync().unwrap());
        std::thread::sleep(SLOW / 3);
        device.write(BLOCK as u64, &[2; BLOCK]).unwrap();
        flush.join().unwrap();
    });
    upstream.crash();
    let mut buf = [0; BLOCK];
    device.read(BLOCK as u64, &mut buf).unwrap();
    assert!(buf == [2; BLOCK]);
}

/// A flush is repeated if its server lost the writes of a connection that was lost during the
/// flush.
#[test]
fn inv03_a_flush_counts_only_if_no_connection_was_lost() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.connections = 2);
    wait_for_connections(&device, 2);
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.once(0, Act::CrashOthers(SLOW));
    device.sync().unwrap();
    upstream.crash();
    assert!(upstream.stable()[..BLOCK] == [1; BLOCK]);
}

/// The flush is answered after the loss is noticed, but before the journal is sent, which waits for
/// a change.
#[test]
fn inv03_a_flush_of_before_a_loss_leaves_the_journal() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.connections = 2);
    wait_for_connections(&device, 2);
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.script(|count, _| match count {
        0 => Act::Late(3 * SLOW),
        1 => Act::CrashOthers(SLOW),
        _ => Act::Answer,
    });
    std::thread::scope(|scope| {
        let late = scope.spawn(|| device.write(BLOCK as u64, &[2; BLOCK]));
        while upstream.count() == 0 {
            std::thread::yield_now();
        }
        device.sync().unwrap();
        late.join().unwrap().unwrap();
    });
    upstream.crash();
    assert!(upstream.stable()[..BLOCK] == [1; BLOCK]);
}

/// The upstream loses unflushed data after the journal has dropped bytes.
#[test]
fn inv06_inv08_past_the_limit_of_the_journal_a_lost_connection_poisons() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.keep = 3 * BLOCK);
    // The upstream never answers the device's own flushes.
    upstream.script(|_, request| if request.len == 0 { Act::Silent } else { Act::Answer });
    for block in 0..8 {
        device.write(block * BLOCK as u64, &[9; BLOCK]).unwrap();
    }
    upstream.crash();
    upstream.script(|_, _| Act::Answer);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !device.stats().poisoned {
        assert!(Instant::now() < deadline, "it was not noticed");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(errno(device.sync()), Some(libc::EIO));
    assert_eq!(errno(device.write(0, &[1; 512])), Some(libc::EIO));
    assert_eq!(errno(device.read(0, &mut [0; 512])), Some(libc::EIO), "it may be lost");
    assert_eq!(device.read(8 * BLOCK as u64, &mut [0; 512]).unwrap(), 512, "it was never written");
}

/// The device flushes in time by itself, so that a stream of writes without a flush survives.
#[test]
fn inv08_the_device_flushes_before_the_journal_is_full() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.keep = 8 * BLOCK);
    for block in 0..BLOCKS as u64 {
        device.write(block * BLOCK as u64, &[block as u8; BLOCK]).unwrap();
    }
    assert!(upstream.seen().iter().any(|request| request.len == 0), "no flush");
    upstream.crash();
    for block in 0..BLOCKS as u64 {
        let mut buf = [0; BLOCK];
        device.read(block * BLOCK as u64, &mut buf).unwrap();
        assert!(buf == [block as u8; BLOCK]);
    }
    assert!(!device.stats().poisoned);
}

/// A refused flush is like a failed fsync: no later flush may succeed.
#[test]
fn inv06_a_failed_flush_poisons() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|_| {});
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.once(0, Act::Fail(nbd_protocol::NbdError::NoSpc));
    assert_eq!(errno(device.sync()), Some(libc::ENOSPC));
    assert_eq!(errno(device.sync()), Some(libc::ENOSPC));
    assert_eq!(errno(device.zero(0, 512)), Some(libc::ENOSPC));
    assert_eq!(errno(device.read(0, &mut [0; 512])), Some(libc::EIO));
    assert!(device.read(BLOCK as u64, &mut [0; 512]).is_ok());
}

/// Without an upstream, operations fail in time. Answered changes are sent again once it is back,
/// but after a failed flush the device stays poisoned.
#[test]
fn inv02_inv06_a_gone_upstream_fails_operations_in_time() {
    let upstream = Upstream::new(BLOCKS * BLOCK);
    let device = upstream.device(|options| options.reconnect = Duration::from_millis(300));
    device.write(0, &[1; BLOCK]).unwrap();
    upstream.refuse(true);
    let since = Instant::now();
    assert_eq!(errno(device.read(0, &mut [0; 512])), Some(libc::ENOTCONN));
    assert_eq!(errno(device.write(0, &[2; 512])), Some(libc::ENOTCONN));
    assert!(since.elapsed() < Duration::from_secs(5));
    upstream.refuse(false);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut buf = [0; BLOCK];
    while device.read(0, &mut buf).is_err() {
        assert!(Instant::now() < deadline, "it does not connect again");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(buf == [1; BLOCK], "an unanswered write that failed is not sent again");
    device.sync().unwrap();
    assert!(upstream.stable()[..BLOCK] == [1; BLOCK]);

    upstream.refuse(true);
    device.write(0, &[3; 512]).unwrap_err();
    assert_eq!(errno(device.sync()), Some(libc::ENOTCONN));
    upstream.refuse(false);
    assert_eq!(errno(device.sync()), Some(libc::ENOTCONN), "poisoned");
}
