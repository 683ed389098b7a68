//! The features that the server offers, and its limits.

use std::sync::Arc;

use bufcache::{BlockDevice, Cache};
use nbd_protocol::{CommandFlags, TransmissionFlags as Flags, wire::cmd};

use crate::scripted::{Act, Upstream};
use crate::upstream::UpstreamError;

const LEN: usize = 256 << 10;

#[test]
fn inv07_no_request_is_longer_or_finer_than_the_server_says() {
    let limits = |export: &mut nbd_protocol::ExportInfo| {
        (export.min_block, export.preferred_block, export.max_block) = (1024, 4096, 6144);
        export.size = LEN as u64 - 512; // no multiple of the blocks
    };
    for extended in [false, true] {
        let upstream = Upstream::with(LEN, limits, extended);
        let device = Arc::new(upstream.device(|_| {}));
        assert_eq!((device.len(), device.alignment()), (LEN as u64 - 1024, 1024));
        let original = upstream.disk();
        let mut buf = vec![0; LEN];
        assert_eq!(device.read(0, &mut buf).unwrap(), LEN - 1024);
        assert!(buf[..LEN - 1024] == original[..LEN - 1024]);
        device.write(1024, &[3; 40 << 10]).unwrap();
        let cache = Cache::builder(1 << 20).block_sizes(16384, 16384).build().unwrap();
        let disk = cache.attach(Arc::clone(&device), 16384).unwrap();
        disk.create(8).unwrap().fill(4);
        disk.sync().unwrap();
        let stable = upstream.stable();
        assert!(stable[1024..41 << 10] == [3; 40 << 10] && stable[131072..147456] == [4; 16384]);
        for request in upstream.seen() {
            assert!(request.len <= 6144 && request.len % 1024 == 0 && request.offset % 1024 == 0);
        }
    }
}

/// A write is sent in parts, and the power is cut after the first part was answered.
#[test]
fn inv04_the_parts_of_a_long_write_have_one_fate() {
    for number in 1..4 {
        let upstream = Upstream::with(LEN, |export| export.max_block = 4096, false);
        let device = upstream.device(|_| {});
        upstream.once(number, Act::CrashBefore);
        device.write(0, &[6; 16384]).unwrap();
        let mut buf = [0; 16384];
        device.read(0, &mut buf).unwrap();
        assert!(buf == [6; 16384], "cut at part {number}");
    }
}

/// A command is not sent without its flag. It is replaced by another one if possible.
#[test]
fn inv07_only_what_is_offered_is_sent() {
    for missing in [Flags::SEND_FUA, Flags::SEND_WRITE_ZEROES, Flags::SEND_FLUSH | Flags::SEND_FUA]
    {
        let upstream = Upstream::with(LEN, |export| export.flags = export.flags - missing, false);
        let device = upstream.device(|_| {});
        device.write_durable(0, &[1; 512]).unwrap();
        device.sync().unwrap();
        let zeroed = device.zero(4096, 4096);
        let discarded = device.discard(8192, 4096);
        let seen = upstream.seen();
        let has = |command| seen.iter().any(|request| request.command == command);
        let fua = seen.iter().any(|request| request.flags.contains(CommandFlags::FUA));
        assert_eq!(fua, !missing.contains(Flags::SEND_FUA));
        assert_eq!(has(cmd::FLUSH), !missing.contains(Flags::SEND_FLUSH));
        assert!(!has(cmd::TRIM), "what it leaves is not defined");
        if missing.contains(Flags::SEND_WRITE_ZEROES) {
            for result in [zeroed, discarded] {
                assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
            }
        } else {
            assert!(zeroed.is_ok() && discarded.is_ok());
            assert!(upstream.disk()[4096..12288] == [0; 8192]);
        }
    }
}

/// A durable write is a WRITE and a FLUSH. The power is cut at each of the messages.
#[test]
fn inv03_a_durable_write_is_durable_without_fua_too() {
    for fua in [Flags::NONE, Flags::SEND_FUA] {
        for number in 0..3 {
            for act in [Act::CrashBefore, Act::CrashAfter] {
                let missing = Flags::SEND_FUA - fua;
                let upstream =
                    Upstream::with(LEN, |export| export.flags = export.flags - missing, false);
                let device = upstream.device(|_| {});
                device.write(0, &[1; 4096]).unwrap();
                upstream.once(number, act);
                device.write_durable(512, &[2; 1024]).unwrap();
                upstream.crash();
                assert!(upstream.stable()[512..1536] == [2; 1024]);
                let mut buf = [0; 4096];
                device.read(0, &mut buf).unwrap();
                assert!(buf[..512] == [1; 512] && buf[512..1536] == [2; 1024], "{fua:?} {number}");
            }
        }
    }
}

#[test]
fn inv07_a_read_only_export_takes_no_change() {
    let upstream = Upstream::with(LEN, |export| export.flags |= Flags::READ_ONLY, false);
    let device = upstream.device(|_| {});
    assert!(device.is_read_only());
    assert_eq!(device.write(0, &[0; 512]).unwrap_err().raw_os_error(), Some(libc::EROFS));
    assert!(upstream.seen().is_empty());
}

/// Without CAN_MULTI_CONN a flush covers only its own connection, so the device uses one.
#[test]
fn inv03_several_connections_need_can_multi_conn() {
    for (flag, most) in [(Flags::CAN_MULTI_CONN, 8), (Flags::NONE, 1)] {
        let without = |export: &mut nbd_protocol::ExportInfo| {
            export.flags = (export.flags - Flags::CAN_MULTI_CONN) | flag;
        };
        let upstream = Upstream::with(LEN, without, false);
        let device = upstream.device(|_| {});
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while device.stats().connects + 1 < most && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(device.stats().connects + 1, most);
    }
}

/// Long reads beside short ones, answered in any order.
#[test]
fn inv01_long_reads_come_where_they_belong() {
    const LONG: usize = 4 << 20;
    for extended in [false, true] {
        let upstream = Upstream::with(LONG, |_| {}, extended);
        let device = upstream.device(|options| options.connections = 1);
        let disk = upstream.disk();
        upstream.script(|count, _| match count % 3 {
            0 => Act::Late(std::time::Duration::from_millis(count as u64 % 7)),
            _ => Act::Answer,
        });
        std::thread::scope(|scope| {
            for reader in 0..6 {
                let (device, disk) = (&device, &disk);
                scope.spawn(move || {
                    for step in 0..30 {
                        let at = (reader * 100_003 + step * 270_007) % (LONG / 2);
                        let len = [512, 33 << 10, 200_000, 4096, 1 << 20][(reader + step) % 5];
                        let mut buf = vec![0; len];
                        device.read(at as u64, &mut buf).unwrap();
                        assert!(buf == disk[at..at + len], "{len} bytes at {at}");
                    }
                });
            }
        });
        assert_eq!(device.stats().losses, 0);
    }
}

#[test]
fn inv01_extents_are_those_of_the_server() {
    for extended in [false, true] {
        let upstream = Upstream::with(LEN, |_| {}, extended);
        let device = upstream.device(|_| {});
        let extents = device.extents(0..LEN as u64).unwrap();
        let found: Vec<_> = extents.iter().map(|extent| (extent.len, extent.flags)).collect();
        assert_eq!(found, [(LEN as u64 / 2, 0), (LEN as u64 / 2, 3)]);
    }
}

/// Operations on neighbouring ranges that wait, here for a connection, are merged into one request.
#[test]
fn inv07_neighbours_are_merged() {
    let upstream = Upstream::new(LEN);
    let disk = Cache::new(1 << 20).unwrap().attach(upstream.device(|_| {}), 4096).unwrap();
    upstream.refuse(true);
    disk.readahead(0..32);
    upstream.refuse(false);
    for block in 0..32 {
        assert!(disk.get(block).unwrap()[..] == upstream.disk()[block as usize * 4096..][..4096]);
    }
    let reads = upstream.seen().len();
    assert!(reads < 4, "{reads} requests for 32 blocks");
}

#[test]
fn inv02_what_is_no_upstream_is_a_typed_error() {
    let upstream = Upstream::new(LEN);
    let open = |uri: String| {
        crate::upstream::NbdDevice::open(uri.parse().unwrap(), Default::default()).map(drop)
    };
    let socket = upstream.socket();
    let other = format!("nbd+unix:///other?socket={}", socket.display());
    assert!(matches!(open(other), Err(UpstreamError::Protocol(_))));
    let nowhere = format!("nbd+unix:///disk?socket={}.no", socket.display());
    assert!(matches!(open(nowhere), Err(UpstreamError::Connect(_))));
}
