//! Reads that the cache answers, and what makes them go to the device again.

use bufcache_test::{Fault, Operation};

use super::waiting::reply;
use super::*;
use crate::admission::SMALL;

const NONE: CommandFlags = CommandFlags::NONE;
/// The protocol's error number of EIO.
const EIO: u32 = 5;

fn caching() -> Lab {
    Lab::caching(Limits { depth: MOST, most: MOST }, MOST + 1, "1M")
}

impl Lab {
    /// Submits a request to the engine that does not belong to the worker.
    fn fill_engine(&self) -> aio_reap::Operation<Vec<u8>> {
        let file = std::fs::File::open(&self.image).unwrap();
        let engine = &self.worker.requests.engine;
        let file = engine.attach(file).unwrap();
        engine.read(&file, vec![0; BLOCK], 0).submit().unwrap()
    }

    /// Sends the replies of requests that the cache answered.
    fn complete_round(&mut self) {
        let engine = Rc::clone(&self.worker.requests.engine);
        self.worker.complete_round(&engine);
    }

    /// Waits until every running operation has ended, except those that the script holds.
    pub(super) fn rest(&mut self) {
        self.complete_round();
        while self.worker.requests.begun() > self.script.in_flight() {
            std::thread::yield_now();
            self.complete_round();
        }
    }

    /// Reads the first `len` bytes. Also returns whether the device was read.
    fn read(&mut self, client: &mut (Id, UnixStream), len: usize) -> (Vec<u8>, bool) {
        self.ask_for(client, cmd::READ, NONE, 1, len);
        let asked = self.script.in_flight() > 0;
        if asked {
            self.complete();
        }
        self.rest();
        let mut bytes = vec![0; 16 + len];
        client.1.read_exact(&mut bytes).expect("the reply");
        assert_eq!(bytes[4..8], [0; 4], "it failed");
        (bytes.split_off(16), asked)
    }

    /// Changes the first block, and returns the error of the request.
    fn change(&mut self, client: &mut (Id, UnixStream), command: u16, flags: CommandFlags) -> u32 {
        self.ask_for(client, command, flags, 2, BLOCK);
        assert_eq!(self.script.in_flight(), 0, "the cache writes");
        self.rest();
        reply(client, 0).1
    }
}

#[test]
fn a_second_read_needs_no_device() {
    let mut lab = caching();
    std::fs::write(&lab.image, [7; 1 << 20]).unwrap();
    let (mut client, mut other) = (lab.client(), lab.client());
    assert_eq!(lab.read(&mut client, BLOCK), (vec![7; BLOCK], true));
    assert_eq!(lab.read(&mut other, BLOCK), (vec![7; BLOCK], false));
    assert_eq!(lab.read(&mut other, 100), (vec![7; 100], false));
    assert_eq!(lab.read(&mut other, BLOCK + 1), (vec![7; BLOCK + 1], true), "one block more");
    assert_eq!(lab.read(&mut client, 2 * BLOCK), (vec![7; 2 * BLOCK], false));
    let counters = lab.worker.requests.counters;
    assert_eq!((counters.reads, counters.hits), (5, 3));
    lab.worker.close(client.0, "a test");
    lab.worker.close(other.0, "a test");
    lab.ends_empty();
}

#[test]
fn long_reads_are_not_kept() {
    let mut lab = caching();
    let mut client = lab.client();
    for len in [SMALL as usize + 1, 2 * SMALL as usize] {
        assert!(lab.read(&mut client, len).1 && lab.read(&mut client, len).1, "{len}");
    }
    assert!(lab.read(&mut client, BLOCK).1, "nor is a part of it");
    assert!(lab.read(&mut client, SMALL as usize).1 && !lab.read(&mut client, SMALL as usize).1);
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_change_is_seen_by_the_next_read() {
    let mut lab = caching();
    let mut client = lab.client();
    let changes = [(cmd::WRITE, 0x5a), (cmd::TRIM, 0), (cmd::WRITE, 0x5a), (cmd::WRITE_ZEROES, 0)];
    for flags in [NONE, CommandFlags::FUA] {
        for (command, byte) in changes {
            assert_eq!(lab.change(&mut client, command, flags), 0);
            // A written block is cached; a discarded one is not.
            let read = lab.read(&mut client, BLOCK);
            assert_eq!(read, (vec![byte; BLOCK], command != cmd::WRITE), "{command}");
            assert!(!lab.read(&mut client, BLOCK).1);
        }
    }
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_read_that_failed_is_not_kept_and_fails_alone() {
    let mut lab = caching();
    let (mut client, mut other) = (lab.client(), lab.client());
    lab.script.on_transfer(Transfer::Fail(libc::EIO));
    lab.ask_for(&mut client, cmd::READ, NONE, 1, 2 * BLOCK);
    lab.ask(&mut other, cmd::READ, NONE); // while the first is in flight
    assert_eq!(lab.script.in_flight(), 2, "no READ waits for another's read");
    lab.complete();
    lab.complete();
    assert_eq!(reply(&mut client, 2 * BLOCK), (1, EIO));
    assert_eq!(reply(&mut other, BLOCK), (0xc0, 0));
    assert!(lab.read(&mut other, BLOCK).1, "whose claim failed is kept by the next");
    assert!(!lab.read(&mut other, BLOCK).1 && lab.read(&mut client, 2 * BLOCK).1);
    lab.worker.close(client.0, "a test");
    lab.worker.close(other.0, "a test");
    lab.ends_empty();
}

/// A read that began before a write may return the old content, and keeps it in the cache. So the
/// write waits for the end of the read, but the worker does not.
#[test]
fn a_write_waits_for_a_read_of_its_block() {
    let mut lab = caching();
    let (mut reader, mut writer) = (lab.client(), lab.client());
    lab.ask(&mut reader, cmd::READ, NONE);
    lab.ask_for(&mut writer, cmd::WRITE, NONE, 2, BLOCK);
    lab.complete_round();
    assert!(lab.worker.requests.begun() > lab.script.in_flight());
    // Other requests continue, even for the same block.
    lab.ask_for(&mut writer, cmd::READ, NONE, 3, BLOCK);
    assert_eq!(lab.script.in_flight(), 2);
    assert!(lab.script.complete_nth(1));
    let engine = Rc::clone(&lab.worker.requests.engine);
    engine.turn();
    lab.complete_round();
    assert_eq!(reply(&mut writer, BLOCK), (3, 0));

    lab.complete(); // the older read
    assert_eq!(reply(&mut reader, BLOCK), (0xc0, 0));
    lab.rest();
    assert_eq!(reply(&mut writer, 0), (2, 0));
    assert_eq!(lab.read(&mut reader, BLOCK), (vec![0x5a; BLOCK], false));
    lab.worker.close(reader.0, "a test");
    lab.worker.close(writer.0, "a test");
    lab.ends_empty();
}

#[test]
fn the_write_of_a_closed_connection_ends_all_the_same() {
    let mut lab = caching();
    let (mut reader, mut writer) = (lab.client(), lab.client());
    lab.ask(&mut reader, cmd::READ, NONE);
    lab.ask_for(&mut writer, cmd::WRITE, NONE, 2, BLOCK);
    lab.worker.close(writer.0, "a test");
    lab.worker.close(reader.0, "a test");
    lab.complete();
    lab.rest();
    assert!(lab.worker.requests.is_idle());
    assert_eq!((lab.closed(), lab.worker.memory.used()), (2, 0));
    let mut client = lab.client();
    assert_eq!(lab.read(&mut client, BLOCK), (vec![0x5a; BLOCK], false));
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

/// The device panics, which the cache takes for an error of the device. Only its request fails, and
/// a sync that panicked poisons the image as one that failed does.
#[test]
fn a_device_that_panics_is_answered_with_eio() {
    let mut lab = caching();
    let mut client = lab.client();
    lab.disk.inject_next(Operation::Discard, Fault::Panic);
    assert_eq!(lab.change(&mut client, cmd::TRIM, NONE), EIO);
    assert_eq!(lab.change(&mut client, cmd::TRIM, NONE), 0);
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), 0);
    lab.disk.inject_next(Operation::Sync, Fault::Panic);
    for _ in 0..2 {
        lab.ask_for(&mut client, cmd::FLUSH, NONE, 1, 0);
        lab.rest();
        assert_eq!(reply(&mut client, 0), (1, EIO));
    }
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

/// A WRITE past the cache panics on a thread of the cache. Its request fails, its buffer is accounted
/// for, and the worker continues to read the image. Changes and FLUSHes fail from then on, also the
/// last sync of the server, whose exit code tells of it.
#[test]
fn a_panic_marks_its_image_as_failed() {
    let mut lab = Lab::on_a_device();
    let mut client = lab.client();
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), 0);
    lab.disk.inject_next(Operation::Write, Fault::Panic);
    assert_eq!(lab.worker.shared.exports.blocks.failed(), Vec::<String>::new());
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), EIO);
    assert_eq!(lab.worker.memory.used(), 0);
    assert_eq!(lab.read(&mut client, BLOCK), (vec![0x5a; BLOCK], true));
    for command in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
        assert_eq!(lab.change(&mut client, command, NONE), EIO, "{command}");
    }
    lab.ask_for(&mut client, cmd::FLUSH, NONE, 1, 0);
    lab.rest();
    assert_eq!(reply(&mut client, 0), (1, EIO), "FLUSH");
    assert_eq!(lab.worker.shared.exports.blocks.failed(), ["a.img"]);
    assert!(lab.worker.shared.exports.sync().is_err(), "the last sync");
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_long_read_sees_what_is_dirty_and_writes_nothing_back() {
    let mut lab = caching();
    let mut client = lab.client();
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), 0);
    lab.ask_for(&mut client, cmd::READ, NONE, 1, 2 * SMALL as usize);
    assert_eq!((lab.script.in_flight(), lab.disk.count(Operation::Write)), (1, 0));
    lab.complete();
    let mut bytes = vec![0; 16 + 2 * SMALL as usize];
    client.1.read_exact(&mut bytes).unwrap();
    assert!(bytes[16..][..BLOCK] == [0x5a; BLOCK] && bytes[16..][BLOCK..].iter().all(|b| *b == 0));
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_request_waits_while_the_engine_has_no_room() {
    // The engine holds one request less than the worker's depth, because of the stranger's.
    let mut lab = Lab::caching(Limits { depth: 1, most: MOST }, 1, "1M");
    let mut client = lab.client();
    let stranger = lab.fill_engine();
    lab.ask(&mut client, cmd::READ, NONE);
    lab.complete_round();
    assert_eq!(lab.script.in_flight(), 1, "the stranger's");
    lab.complete();
    drop(stranger);
    lab.complete_round();
    lab.complete();
    assert_eq!(reply(&mut client, BLOCK), (0xc0, 0));
    assert!(!lab.read(&mut client, BLOCK).1, "it was kept");
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}
