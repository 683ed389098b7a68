//! Replies that are lost, late, repeated, or wrong.

use std::thread;
use std::time::Duration;

use bufcache::BlockDevice;
use nbd_protocol::{HeaderStyle, ReplyHeader, Request};

use crate::scripted::{Act, Upstream};

const LEN: usize = 64 << 10;

/// A server breaks the protocol once: the operation succeeds over another connection, and the
/// protocol error is counted.
///
/// Of several connections all but the first have simple replies, which contain no offset and no
/// length. So a test of wrong offsets or lengths needs a single connection.
fn survives(act: &Act, extended: bool, connections: usize) {
    let upstream = Upstream::with(LEN, |_| {}, extended);
    let device = upstream.device(|options| options.connections = connections);
    let original = upstream.disk();
    // A single read, so that later requests do not fail because of the wrong reply.
    upstream.once(0, act.clone());
    let mut buf = vec![0; 8192];
    device.read(4096, &mut buf).unwrap();
    assert!(buf == original[4096..12288], "{act:?} {extended}");
    device.write(0, &[7; 4096]).unwrap(); // a repeated reply arrives before the reply of this one
    device.sync().unwrap();
    let stats = device.stats();
    assert_eq!(
        (stats.protocol_errors, stats.losses, stats.poisoned),
        (1, 1, false),
        "{act:?} {extended}"
    );
    assert!(upstream.stable()[..4096] == [7; 4096]);
}

#[test]
fn inv01_replies_that_do_not_fit_end_the_connection() {
    let wrong: [fn(&Request, HeaderStyle) -> Vec<u8>; 8] = [
        // Half of the bytes, marked as complete.
        |request, style| data(request, style, request.offset, request.len / 2, true),
        // A range outside of the request.
        |request, style| data(request, style, request.offset + 512, request.len, true),
        |request, style| data(request, style, u64::MAX - 100, request.len, true),
        // The same bytes twice.
        |request, style| {
            let mut twice = data(request, style, request.offset, request.len / 2, false);
            twice.extend(data(request, style, request.offset, request.len / 2, true));
            twice
        },
        // Success of the READ, without data.
        |request, _| ReplyHeader::simple(request.cookie, Ok(())).as_slice().to_vec(),
        // The success of another command.
        |request, style| ReplyHeader::block_status(request, style, 1, 1).as_slice().to_vec(),
        // No reply at all.
        |_, _| b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
        |request, style| {
            let none = Request { command: nbd_protocol::wire::cmd::READ, ..*request };
            ReplyHeader::done(&none, style).as_slice().to_vec()
        },
    ];
    for reply in wrong {
        for extended in [false, true] {
            survives(&Act::Bytes(reply), extended, 1);
        }
    }
    for extended in [false, true] {
        for connections in [1, 2] {
            survives(&Act::Cookie(0xdead), extended, connections);
            survives(&Act::Twice, extended, connections);
        }
    }
}

fn data(request: &Request, style: HeaderStyle, offset: u64, len: u64, last: bool) -> Vec<u8> {
    let mut bytes = ReplyHeader::data_chunk(request, style, offset, len, last).as_slice().to_vec();
    bytes.resize(bytes.len() + len as usize, 0xee);
    bytes
}

/// A reply that never arrives, while others do, is noticed. A reply that is too late ends no
/// operation.
#[test]
fn inv01_inv02_lost_and_late_replies() {
    for act in [Act::Silent, Act::Late(Duration::from_millis(600))] {
        let upstream = Upstream::new(LEN);
        let device = upstream.device(|options| options.reply = Duration::from_millis(200));
        let original = upstream.disk();
        upstream.once(0, act.clone());
        let mut buf = vec![0; 4096];
        device.read(0, &mut buf).unwrap();
        assert!(buf == original[..4096]);
        upstream.once(0, act.clone());
        device.write(8192, &[5; 4096]).unwrap();
        upstream.once(0, act);
        device.sync().unwrap();
        assert!(upstream.stable()[8192..12288] == [5; 4096]);
        assert!(device.stats().losses >= 3);
    }
}

/// The success of a WRITE whose payload was not sent completely.
#[test]
fn inv01_a_reply_before_the_request_was_sent() {
    const LONG: usize = 16 << 20;
    let upstream = Upstream::new(LONG);
    let device = upstream.device(|options| options.connections = 1);
    upstream.once(
        0,
        Act::Bytes(|request, style| {
            thread::sleep(Duration::from_millis(300)); // in this time the WRITE fills the socket
            let mut bytes = data(request, style, request.offset, request.len, true);
            bytes.extend(ReplyHeader::simple(request.cookie + 1, Ok(())).as_slice());
            bytes
        }),
    );
    thread::scope(|scope| {
        let read = scope.spawn(|| device.read(0, &mut [0; 512]).unwrap());
        thread::sleep(Duration::from_millis(100));
        device.write(0, &vec![8; LONG]).unwrap();
        assert!(upstream.disk().iter().all(|&byte| byte == 8), "it was not written");
        read.join().unwrap();
    });
    assert_eq!(device.stats().protocol_errors, 1);
}

/// The server is slow with a write, so its connection is dropped. The device must wait until the
/// server has ended the write, because the next one over a new connection could be overtaken.
#[test]
fn inv05_an_abandoned_write_does_not_come_later() {
    let upstream = Upstream::new(LEN);
    let device = upstream.device(|options| options.reply = Duration::from_millis(150));
    upstream.once(0, Act::Slow(Duration::from_millis(500)));
    device.write(0, &[1; 4096]).unwrap();
    device.write(0, &[2; 4096]).unwrap();
    thread::sleep(Duration::from_millis(600));
    assert!(upstream.disk()[..4096] == [2; 4096], "the abandoned write came last");
}

/// A server breaks the protocol each time: the operation fails in time.
#[test]
fn inv02_a_server_that_always_breaks_the_protocol_is_given_up() {
    let upstream = Upstream::new(LEN);
    let device = upstream.device(|options| options.reconnect = Duration::from_millis(400));
    upstream.script(|_, _| Act::Cookie(3 << 40));
    let mut buf = [0; 512];
    assert_eq!(device.read(0, &mut buf).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    assert!(buf == [0; 512] && device.stats().protocol_errors > 1);
}

/// A merged read fails only for the operation whose part fails.
#[test]
fn inv01_an_error_is_that_of_its_block_alone() {
    use bufcache::{Cache, GetError};
    let upstream = Upstream::new(LEN);
    let disk = Cache::new(1 << 20).unwrap().attach(upstream.device(|_| {}), 4096).unwrap();
    upstream.script(|_, request| {
        let bad = 3 * 4096;
        let hit = request.offset <= bad && bad < request.offset + request.len;
        if hit { Act::Fail(nbd_protocol::NbdError::Io) } else { Act::Answer }
    });
    disk.readahead(0..8);
    for block in 0..8 {
        match disk.get(block) {
            Err(error) => {
                assert_eq!((error, block), (GetError::Io { errno: libc::EIO, block: 3 }, 3))
            }
            Ok(_) => assert_ne!(block, 3),
        }
    }
}
