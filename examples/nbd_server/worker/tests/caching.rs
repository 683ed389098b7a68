//! Reads that are answered from memory, and what makes them go to the device again.

use super::waiting::reply;
use super::*;
use crate::admission::SMALL;

const NONE: CommandFlags = CommandFlags::NONE;
/// EIO.
const EIO: u32 = 5;

fn caching() -> Lab {
    Lab::caching(Limits { depth: MOST, most: MOST }, MOST + 1, "1M")
}

impl Lab {
    /// What was answered without the device is sent.
    fn settle(&mut self) {
        let engine = Rc::clone(&self.worker.requests.engine);
        self.worker.settle(&engine);
    }

    /// Reads the first `len` bytes; whether the device was asked.
    fn read(&mut self, client: &mut (Id, UnixStream), len: usize) -> (Vec<u8>, bool) {
        self.ask_for(client, cmd::READ, NONE, 1, len);
        let asked = self.script.in_flight() > 0;
        if asked {
            self.complete();
        } else {
            self.settle();
        }
        let mut bytes = vec![0; 16 + len];
        client.1.read_exact(&mut bytes).expect("the reply");
        assert_eq!(bytes[4..8], [0; 4], "it failed");
        (bytes.split_off(16), asked)
    }

    /// Something that changes the first bytes; its error.
    fn change(&mut self, client: &mut (Id, UnixStream), command: u16, flags: CommandFlags) -> u32 {
        self.ask_for(client, command, flags, 2, BLOCK);
        while self.script.in_flight() > 0 {
            self.complete();
        }
        reply(client, 0).1
    }
}

#[test]
fn what_was_read_is_read_again_without_the_device() {
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
fn what_is_too_long_is_not_kept() {
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
            assert_eq!(lab.read(&mut client, BLOCK), (vec![byte; BLOCK], true), "{command}");
            assert!(!lab.read(&mut client, BLOCK).1);
        }
    }
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn zeros_that_have_to_be_written_are_seen_by_the_next_read() {
    let mut lab = caching();
    let mut client = lab.client();
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), 0);
    assert!(lab.read(&mut client, BLOCK).1 && !lab.read(&mut client, BLOCK).1);
    for _ in 0..2 {
        lab.script.on_transfer(Transfer::Fail(libc::EOPNOTSUPP)); // to punch, and to zero a range
    }
    assert_eq!(lab.change(&mut client, cmd::WRITE_ZEROES, NONE), 0);
    assert_eq!(lab.read(&mut client, BLOCK), (vec![0; BLOCK], true));
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn a_change_that_failed_may_have_changed_something() {
    let mut lab = caching();
    let mut client = lab.client();
    assert!(lab.read(&mut client, BLOCK).1);
    lab.script.on_transfer(Transfer::Fail(libc::EIO));
    assert_eq!(lab.change(&mut client, cmd::WRITE, NONE), EIO);
    assert!(lab.read(&mut client, BLOCK).1);
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
    assert_eq!(lab.script.in_flight(), 2, "nobody waits for another's read");
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

/// A read that began before a write may bring what was before, and keeps it when the write has ended:
/// the write is not answered before that is forgotten.
#[test]
fn a_write_is_answered_once_an_older_read_is_forgotten() {
    let mut lab = caching();
    let (mut reader, mut writer) = (lab.client(), lab.client());
    lab.ask(&mut reader, cmd::READ, NONE);
    lab.ask_for(&mut writer, cmd::WRITE, NONE, 2, BLOCK);
    assert!(lab.script.complete_nth(1), "the write");
    let engine = Rc::clone(&lab.worker.requests.engine);
    engine.turn();
    lab.worker.settle(&engine);
    assert!(lab.worker.requests.is_forgetting() && !lab.worker.requests.is_idle());
    writer.1.set_nonblocking(true).unwrap();
    assert!(writer.1.read(&mut [0; 1]).is_err(), "it is answered");
    // Others go on meanwhile, the same block included.
    lab.ask_for(&mut writer, cmd::READ, NONE, 3, BLOCK);
    assert_eq!(lab.script.in_flight(), 2);
    assert!(lab.script.complete_nth(1));
    engine.turn();
    lab.worker.settle(&engine);
    writer.1.set_nonblocking(false).unwrap();
    assert_eq!(reply(&mut writer, BLOCK), (3, 0));

    lab.complete(); // the older read
    assert_eq!(reply(&mut reader, BLOCK), (0xc0, 0));
    assert_eq!(reply(&mut writer, 0), (2, 0));
    assert_eq!(lab.read(&mut reader, BLOCK), (vec![0x5a; BLOCK], true));
    lab.worker.close(reader.0, "a test");
    lab.worker.close(writer.0, "a test");
    lab.ends_empty();
}

#[test]
fn who_is_closed_meanwhile_is_forgotten_for_all_the_same() {
    let mut lab = caching();
    let (mut reader, mut writer) = (lab.client(), lab.client());
    lab.ask(&mut reader, cmd::READ, NONE);
    lab.ask_for(&mut writer, cmd::WRITE, NONE, 2, BLOCK);
    assert!(lab.script.complete_nth(1), "the write");
    let engine = Rc::clone(&lab.worker.requests.engine);
    engine.turn();
    lab.worker.settle(&engine);
    lab.worker.close(writer.0, "a test");
    lab.worker.close(reader.0, "a test");
    lab.complete();
    assert!(lab.worker.requests.is_idle());
    assert_eq!((lab.counters(), lab.worker.memory.used()), ((2, 0), 0));
    let mut client = lab.client();
    assert_eq!(lab.read(&mut client, BLOCK), (vec![0x5a; BLOCK], true));
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}

#[test]
fn what_the_engine_refuses_is_not_claimed_for_ever() {
    // The engine holds one request less than the worker thinks.
    let mut lab = Lab::caching(Limits { depth: 1, most: MOST }, 1, "1M");
    let mut client = lab.client();
    let buf = lab.worker.memory.take(BLOCK, &mut Account::default()).unwrap();
    lab.worker.requests.forge(7, buf);
    lab.ask(&mut client, cmd::READ, NONE);
    lab.settle();
    assert!(reply(&mut client, BLOCK).1 != 0);
    lab.complete();
    assert!(lab.read(&mut client, BLOCK).1 && !lab.read(&mut client, BLOCK).1);
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}
