//! The staging ring alone: what takes three threads, and is too much for loom with a queue around it.

use offlock_sync::Arc;

use super::payload::{spawn, thoroughly};

#[path = "../../src/staging.rs"]
#[expect(dead_code, reason = "the models use a part of it")]
mod staging;

use staging::{Cursor, Next, Ring};

const SLOTS: usize = 4;

/// Creates an empty ring with room for all its slots.
fn ring() -> (Arc<Ring<u64, u32>>, Cursor) {
    let (ring, cursor) = (Ring::new(SLOTS).unwrap(), Cursor::new(true));
    ring.set_room(&cursor, 0, SLOTS);
    ring.refresh();
    (Arc::new(ring), cursor)
}

/// Sends a message, if there is room as far as this thread knows.
fn send(ring: &Ring<u64, u32>, value: u64) -> bool {
    let Some(position) = ring.claim() else { return false };
    // SAFETY: the position has just been claimed.
    unsafe { ring.publish(position, value, 0) };
    true
}

/// Takes the next message.
fn take(ring: &Ring<u64, u32>, cursor: &mut Cursor) -> u64 {
    assert_eq!(ring.next(cursor, u64::MAX), Next::Message(0));
    // SAFETY: this thread alone uses the cursor, and there is a message.
    unsafe { ring.take(cursor) }
}

/// The sender between a hole and the send that has returned has reported the hole, or none is there.
#[test]
fn inv21_a_hole_is_reported_to_the_sender_behind() {
    thoroughly(|| {
        let (ring, cursor) = ring();
        let senders = [1, 2].map(|value| spawn(&ring, move |ring| assert!(send(ring, value))));
        assert!(send(&ring, 3));
        assert_ne!(ring.next(&cursor, u64::MAX), Next::Nothing, "a message was sent before");
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

/// A sender stops between its claim and its publication. The sender behind it reports the hole, and a
/// third one, which finds that one published, does not: its own receive waits all the same.
#[test]
fn inv21_a_hole_reported_by_another_sender_is_seen() {
    thoroughly(|| {
        let (ring, cursor) = ring();
        // A failed exchange in a claim would yield, and after that loom shows the newest value only.
        assert_eq!([(); 3].map(|()| ring.claim()), [0, 1, 2].map(Some));
        // SAFETY: the position was claimed for this thread, which alone publishes it.
        let sender = spawn(&ring, |ring| unsafe { ring.publish(1, 1, 0) });
        // SAFETY: the position was claimed, and is published here only.
        unsafe { ring.publish(2, 2, 0) };
        assert_eq!(ring.next(&cursor, u64::MAX), Next::Hole, "a message was sent before");
        sender.join().unwrap();
    });
}

/// One sender learns of the room from the receiver, and the other one from the first.
#[test]
fn inv24_two_senders_reuse_slots() {
    thoroughly(|| {
        let (ring, mut cursor) = ring();
        (0..SLOTS as u64).for_each(|value| assert!(send(&ring, value)));
        let senders = [false, true].map(|refreshes| {
            spawn(&ring, move |ring| (!refreshes || ring.refresh()) && send(ring, 4))
        });
        assert_eq!(take(&ring, &mut cursor), 0);
        ring.set_room(&cursor, 0, SLOTS);
        let sent = senders.map(|sender| sender.join().unwrap());
        assert!(!(sent[0] && sent[1]), "there was room for one");
        for value in 1..SLOTS as u64 {
            assert_eq!(take(&ring, &mut cursor), value);
        }
        if sent[0] || sent[1] {
            assert_eq!(take(&ring, &mut cursor), 4);
        }
    });
}

/// A claim is before the end of the shut ring, or fails.
#[test]
fn inv22_a_claim_races_the_shut() {
    thoroughly(|| {
        let (ring, mut cursor) = ring();
        let senders = [1, 2].map(|value| spawn(&ring, move |ring| send(ring, value)));
        ring.shut(&mut cursor);
        let drained = cursor.is_drained();
        let sent: usize = senders.map(|sender| usize::from(sender.join().unwrap())).iter().sum();
        assert_eq!(drained, sent == 0);
        (0..sent).for_each(|_| assert_ne!(take(&ring, &mut cursor), 0));
        assert!(cursor.is_drained());
        assert_eq!(ring.next(&cursor, u64::MAX), Next::Nothing);
        ring.reopen(&mut cursor);
        ring.set_room(&cursor, 0, SLOTS);
        assert!(ring.refresh() && send(&ring, 3));
        assert_eq!(take(&ring, &mut cursor), 3);
    });
}

/// A ring whose drain has met a hole is opened again, beside a sender that claims: no message is lost.
#[test]
fn inv22_a_ring_with_a_hole_is_opened() {
    thoroughly(|| {
        let (ring, mut cursor) = ring();
        assert_eq!(ring.claim(), Some(0));
        // SAFETY: the position was claimed for this thread, which alone publishes it.
        let stopped = spawn(&ring, |ring| unsafe { ring.publish(0, 1, 0) });
        let sender = spawn(&ring, |ring| send(ring, 2));
        ring.shut(&mut cursor);
        let opened = ring.next(&cursor, u64::MAX) == Next::Hole;
        if opened {
            ring.open_undrained(&mut cursor);
            assert!(send(&ring, 3));
        }
        stopped.join().unwrap();
        let sent = 1 + u64::from(sender.join().unwrap()) + u64::from(opened);
        ring.shut(&mut cursor);
        let taken: u64 = (0..sent).map(|_| take(&ring, &mut cursor)).sum();
        assert_eq!(taken, [1, 3, 6][sent as usize - 1] + u64::from(opened && sent == 2));
        assert!(cursor.is_drained());
    });
}

/// A ring is opened that was shut for more positions than a sequence number tells apart.
#[test]
fn inv21_a_sender_sees_the_stamps_of_the_positions_sent_under_the_lock() {
    thoroughly(|| {
        let (ring, mut cursor) = (Ring::new(SLOTS).unwrap(), Cursor::new(true));
        ring.start_at(&mut cursor, 3 << 30);
        ring.set_room(&cursor, 0, SLOTS);
        ring.refresh();
        let ring = Arc::new(ring);
        let [first, second] = [1, 2].map(|value| spawn(&ring, move |ring| send(ring, value)));
        ring.reopen(&mut cursor);
        if first.join().unwrap() {
            assert_ne!(ring.next(&cursor, u64::MAX), Next::Nothing, "a message was sent before");
        }
        second.join().unwrap();
    });
}
