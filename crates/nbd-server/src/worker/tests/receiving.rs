//! Which payloads are received straight into the buffer of a WRITE.

use super::*;

/// Returns a WRITE: its header and payload.
fn write(len: usize) -> Vec<u8> {
    let (flags, command) = (CommandFlags::NONE, cmd::WRITE);
    let request = Request { flags, command, cookie: 0xc0, offset: 0, len: len as u64 };
    let mut bytes = request.encode(HeaderStyle::Simple).unwrap().as_slice().to_vec();
    bytes.resize(bytes.len() + len, 0x5a);
    bytes
}

impl Lab {
    /// Sends bytes to the worker. Returns whether the worker then expects long WRITEs from the
    /// client.
    fn send(&mut self, (id, client): &mut (Id, UnixStream), bytes: &[u8]) -> bool {
        client.write_all(bytes).unwrap();
        self.worker.ready(*id, epoll::EventFlags::IN);
        let conn = &self.worker.conns.open[self.worker.slot_of(*id).unwrap()];
        conn.writes_long()
    }
}

#[test]
fn a_payload_is_received_in_place_by_its_length_and_not_by_what_is_missing() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let long = write(64 << 10);
    assert!(!lab.send(&mut client, &long[..20]), "a part of a header");
    for part in [20..8 << 10, 8 << 10..48 << 10, 48 << 10..60 << 10, 60 << 10..long.len()] {
        assert!(lab.send(&mut client, &long[part.clone()]), "{part:?}");
    }
    assert_eq!(lab.script.in_flight(), 1);
    assert!(lab.send(&mut client, &long[..28]));
    assert!(lab.send(&mut client, &long[28..]));
    assert_eq!(lab.script.in_flight(), 2);

    let short = write(BLOCK);
    assert!(!lab.send(&mut client, &short[..BLOCK / 2]));
    assert!(!lab.send(&mut client, &short[BLOCK / 2..]));
    assert!(!lab.send(&mut client, &short.repeat(2)));
    assert_eq!(lab.worker.conns.open[lab.worker.slot_of(client.0).unwrap()].active, 5);
    lab.worker.close(client.0, "a test");
    while lab.script.in_flight() > 0 {
        lab.complete();
    }
    lab.rest();
    lab.ends_empty();
}
