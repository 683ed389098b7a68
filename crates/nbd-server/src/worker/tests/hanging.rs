//! Images whose device hangs, beside an image whose device answers.

use super::waiting::reply;
use super::*;

const NONE: CommandFlags = CommandFlags::NONE;

/// Makes a server of `count` images. Their requests go to the script, except those that the cache
/// answers.
fn images(count: usize, cache: &str, limits: Limits) -> Lab {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..count).map(|nr| dir.path().join(format!("{nr}.img"))).collect();
    let mut args = vec!["offlock-nbd", "--cache", cache, "--size", "1M"];
    for path in &paths {
        args.extend(["--image", path.to_str().unwrap()]);
    }
    Lab::serving(&args, (paths[0].clone(), dir), limits, limits.depth + 1, true)
}

/// One image answers nothing, from the engine or from the queue. Requests of a second image begin
/// nevertheless.
#[test]
fn an_image_that_hangs_leaves_slots_and_room_to_others() {
    const DEPTH: usize = 64;
    const LEN: usize = 16; // so that a socket holds all replies
    let mut lab = images(2, "0", Limits { depth: DEPTH, most: 4 * DEPTH });
    let mut hung = lab.client_of(0);
    let mut asked = 0;
    while !lab.worker.conns.blocked.contains(&hung.0) {
        lab.ask_for(&mut hung, cmd::READ, NONE, 3, LEN);
        asked += 1;
    }
    let (held, waiting) = (lab.script.in_flight(), lab.worker.report().waiting);
    assert!((DEPTH / 2..DEPTH).contains(&held), "{held} in flight");
    assert!(held + waiting == asked && asked < 4 * DEPTH, "{waiting} wait");

    let mut other = lab.client_of(1);
    lab.ask_for(&mut other, cmd::READ, NONE, 7, LEN);
    assert_eq!(lab.script.in_flight(), held + 1, "it does not wait");
    assert_eq!(lab.worker.report().waiting, waiting);
    // The script completes its oldest requests, those of the hung image. Each is followed by the
    // image's next one.
    for _ in 0..held {
        lab.complete();
    }
    lab.complete();
    let read = |client: &mut _| reply(client, LEN);
    assert_eq!(read(&mut other), (7, 0));
    for _ in 0..asked {
        if lab.script.in_flight() > 0 {
            lab.complete();
        }
        assert_eq!(read(&mut hung), (3, 0));
    }
    for client in [hung, other] {
        lab.worker.close(client.0, "a test");
    }
    lab.ends_empty();
}

/// More slow TRIMs than places are requested. A READ gets a place nevertheless, and all requests
/// are answered.
#[test]
fn blocking_operations_leave_slots_to_reads() {
    const DEPTH: usize = 32;
    const TRIMS: u64 = 40;
    let mut lab = Lab::with(Limits { depth: DEPTH, most: 4 * DEPTH }, DEPTH + 1);
    let (mut client, mut closed) = (lab.client(), lab.client());
    lab.disk.inject(Operation::Discard, .., Fault::Delay(std::time::Duration::from_millis(20)));
    for cookie in 0..TRIMS {
        lab.ask_for(&mut client, cmd::TRIM, NONE, cookie, BLOCK);
        lab.ask_for(&mut closed, cmd::TRIM, NONE, cookie, BLOCK);
    }
    lab.ask_for(&mut client, cmd::READ, NONE, TRIMS, 16);
    assert_eq!(lab.script.in_flight(), 1, "the READ waits");
    lab.worker.close(closed.0, "a test");
    lab.complete();
    lab.rest();
    let mut answered: Vec<u64> = (0..=TRIMS)
        .map(|_| {
            let mut header = [0; 16];
            client.1.read_exact(&mut header).unwrap();
            let cookie = u64::from_be_bytes(header[8..].try_into().unwrap());
            client.1.read_exact(&mut [0; 16][..if cookie == TRIMS { 16 } else { 0 }]).unwrap();
            cookie
        })
        .collect();
    answered.sort_unstable();
    assert!(answered.into_iter().eq(0..=TRIMS));
    lab.worker.close(client.0, "a test");
    lab.ends_empty();
}
