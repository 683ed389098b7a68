//! Requests beyond the engine's depth.

use super::*;
use crate::admission::SMALL;

/// The length of the shortest large transfer.
const LARGE: usize = SMALL as usize + BLOCK;
const NONE: CommandFlags = CommandFlags::NONE;

/// Makes a lab whose engine works on one request at a time.
fn narrow() -> Lab {
    Lab::with(Limits { depth: 1, most: 32 }, 1)
}

impl Lab {
    fn waiting(&self) -> usize {
        self.worker.report().waiting
    }
}

/// Returns the cookie and the error of the next reply, which is that of a READ of `len` bytes or
/// has no payload.
pub(super) fn reply((_, client): &mut (Id, UnixStream), len: usize) -> (u64, u32) {
    let mut header = [0; 16];
    client.read_exact(&mut header).expect("a reply");
    let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
    if error == 0 {
        client.read_exact(&mut vec![0; len]).expect("its payload");
    }
    (u64::from_be_bytes(header[8..].try_into().unwrap()), error)
}

#[test]
fn queued_requests_are_admitted_by_class_and_in_order_within_it() {
    let mut lab = narrow();
    let mut client = lab.client();
    let asked = [
        (cmd::WRITE, LARGE),
        (cmd::WRITE, LARGE),
        (cmd::READ, LARGE),
        (cmd::CACHE, LARGE),
        (cmd::TRIM, BLOCK),
        (cmd::WRITE, SMALL as usize),
        (cmd::READ, BLOCK),
        (cmd::READ, SMALL as usize),
        (cmd::FLUSH, 0),
    ];
    for (nr, (command, len)) in asked.into_iter().enumerate() {
        lab.ask_for(&mut client, command, NONE, nr as u64, len);
        assert_eq!((lab.script.in_flight(), lab.waiting()), (1, nr), "one at a time");
    }
    // The first request was in the engine before the others came.
    for nr in [0, 8, 6, 7, 4, 5, 2, 3, 1] {
        let (command, len) = asked[nr];
        if !matches!(command, cmd::TRIM | cmd::FLUSH) {
            assert_eq!(lab.script.in_flight(), 1, "a free place is taken at once");
            lab.complete();
        }
        lab.rest();
        let len = if command == cmd::READ { len } else { 0 };
        assert_eq!(reply(&mut client, len), (nr as u64, 0));
    }
    assert_eq!(lab.waiting(), 0);
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_large_write_is_not_held_up_for_ever() {
    let mut lab = narrow();
    let mut client = lab.client();
    lab.ask_for(&mut client, cmd::READ, NONE, 0, BLOCK);
    lab.ask_for(&mut client, cmd::WRITE, NONE, 1, LARGE);
    // Two classes wait. Each gets one in this many places in turn.
    let most = 2 * crate::admission::AGEING.get() as u64;
    for nr in 2.. {
        lab.ask_for(&mut client, cmd::READ, NONE, nr, BLOCK);
        lab.complete();
        let mut header = [0; 16];
        client.1.read_exact(&mut header).unwrap();
        if header[8..] == 1u64.to_be_bytes() {
            break;
        }
        client.1.read_exact(&mut [0; BLOCK]).unwrap();
        assert!(nr - 2 <= most, "it was overtaken by {} reads", nr - 2);
    }
    for _ in 0..2 {
        lab.complete();
        reply(&mut client, BLOCK);
    }
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn below_the_depth_nothing_waits() {
    let mut lab = Lab::with(Limits { depth: 3, most: 32 }, 3);
    let mut client = lab.client();
    for _ in 0..20 {
        for _ in 0..3 {
            lab.ask(&mut client, cmd::READ, NONE);
        }
        assert_eq!(lab.script.in_flight(), 3);
        (0..3).for_each(|_| lab.complete());
        (0..3).for_each(|_| assert_eq!(reply(&mut client, BLOCK), (0xc0, 0)));
    }
    assert_eq!(lab.waiting(), 0);
    lab.ask(&mut client, cmd::READ, NONE);
    lab.worker.close(client.0, "a test");
    lab.complete();
    lab.ends_empty();
}

#[test]
fn the_buffers_of_queued_requests_come_back_at_the_close() {
    let mut lab = narrow();
    let (mut first, mut second) = (lab.client(), lab.client());
    lab.ask(&mut first, cmd::READ, NONE);
    for _ in 0..3 {
        lab.ask(&mut first, cmd::READ, NONE);
        lab.ask(&mut second, cmd::WRITE, NONE);
        lab.ask_for(&mut first, cmd::WRITE, NONE, 1, LARGE);
    }
    assert_eq!(lab.waiting(), 9);
    lab.worker.close(first.0, "a test");
    assert_eq!(lab.waiting(), 3);
    assert_eq!(lab.worker.memory.used(), 4 * BLOCK, "one is in the engine, three are the other's");
    lab.complete();
    assert_eq!(lab.closed(), 1, "the one that was in the engine");
    for _ in 0..3 {
        lab.complete();
        assert_eq!(reply(&mut second, 0), (0xc0, 0));
    }
    lab.worker.close(second.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_request_of_many_steps_goes_on_after_the_close() {
    let mut lab = narrow();
    let mut client = lab.client();
    std::fs::write(&lab.image, vec![0xee; 1 << 20]).unwrap();
    // If the file system cannot make zeros, they are written.
    for operation in [Operation::Discard, Operation::Zero] {
        lab.disk.inject(operation, .., Fault::Error(libc::EOPNOTSUPP));
    }
    lab.ask_for(&mut client, cmd::WRITE_ZEROES, NONE, 1, LARGE + 100);
    lab.ask_for(&mut client, cmd::READ, NONE, 2, BLOCK);
    assert_eq!(lab.waiting(), 1, "the read");
    lab.worker.close(client.0, "a test");
    assert_eq!(lab.waiting(), 0, "it went");
    while !lab.worker.requests.is_idle() {
        lab.rest();
        if lab.script.in_flight() > 0 {
            lab.complete(); // the partial block at the end
        }
    }
    let image = std::fs::read(&lab.image).unwrap();
    assert!(image[..LARGE + 100].iter().all(|&byte| byte == 0), "it was not done to the end");
    assert!(image[LARGE + 100..].iter().all(|&byte| byte == 0xee));
    lab.ends_empty();
}

#[test]
fn the_server_does_not_end_before_what_waits_is_answered() {
    let mut lab = narrow();
    let mut client = lab.client();
    for nr in 0..4 {
        lab.ask_for(&mut client, cmd::READ, NONE, nr, BLOCK);
    }
    lab.registry.end(|_| ()).unwrap();
    lab.worker.end(client.0);
    lab.worker.stop();
    for nr in 0..4 {
        assert!(!lab.worker.has_stopped() && !lab.worker.requests.is_idle());
        lab.complete();
        assert_eq!(reply(&mut client, BLOCK), (nr, 0));
    }
    assert_eq!(client.1.read(&mut [0; 1]).unwrap(), 0, "the end");
    assert!(lab.worker.has_stopped());
    lab.ends_empty();
}

#[test]
fn a_flush_that_waited_while_another_failed_does_not_succeed() {
    let mut lab = narrow();
    let mut client = lab.client();
    lab.disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    // Both are sent before the worker receives, and the delay keeps the first from ending before
    // the second is seen.
    lab.disk.inject_next(Operation::Sync, Fault::Delay(Duration::from_millis(200)));
    for cookie in 0..2 {
        let flush = Request { flags: NONE, command: cmd::FLUSH, cookie, offset: 0, len: 0 };
        client.1.write_all(flush.encode(HeaderStyle::Simple).unwrap().as_slice()).unwrap();
    }
    lab.worker.ready(client.0, epoll::EventFlags::IN);
    assert_eq!(lab.waiting(), 1);
    lab.rest();
    for nr in 0..2 {
        assert_eq!(reply(&mut client, 0), (nr, 5), "EIO");
    }
    assert_eq!(lab.disk.count(Operation::Sync), 1, "the kernel reported what it lost already");
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}
