//! Connections that go from one worker to another, step by step.

use std::time::Duration;

use super::*;

const NONE: CommandFlags = CommandFlags::NONE;

/// Two workers that wait for as long as it takes.
fn team() -> [Lab; 2] {
    let mut team = Lab::team(2, Limits { depth: MOST, most: MOST }, MOST + 1, "0");
    for lab in &mut team {
        lab.worker.rebalancer.rules.patience = Duration::from_secs(1000);
    }
    team.try_into().ok().expect("two")
}

impl Lab {
    /// One round, whether there is something to do or not.
    fn go_on(&mut self) {
        let engine = Rc::clone(&self.worker.requests.engine);
        self.worker.again = true;
        self.worker.round(&engine, &mut Vec::with_capacity(256)).unwrap();
    }

    fn give(&mut self, client: &(Id, UnixStream), to: usize) {
        self.worker.begin_move(client.0, to);
    }

    fn has(&self, client: &(Id, UnixStream)) -> bool {
        self.worker.slot_of(client.0).is_some()
    }

    fn moves(&self) -> (u64, u64) {
        (self.worker.moves.arrived, self.worker.moves.departed)
    }
}

fn read(cookie: u64) -> Vec<u8> {
    let command = cmd::READ;
    Request { flags: NONE, command, cookie, offset: 0, len: BLOCK as u64 }
        .encode(HeaderStyle::Simple)
        .unwrap()
        .as_slice()
        .to_vec()
}

/// The cookies of so many replies to reads or to other requests, which went well.
fn replies(client: &mut (Id, UnixStream), count: usize, len: usize) -> Vec<u64> {
    client.1.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut cookies = Vec::new();
    for _ in 0..count {
        let mut reply = vec![0; 16 + len];
        client.1.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        cookies.push(u64::from_be_bytes(reply[8..16].try_into().unwrap()));
    }
    cookies
}

#[test]
fn a_connection_moves_once_all_its_requests_are_answered() {
    let [mut old, mut new] = team();
    let mut client = old.client();
    old.ask(&mut client, cmd::READ, NONE);
    old.give(&client, 1);
    assert!(old.has(&client), "the device has a request of it");
    client.1.write_all(&read(0xc1)).unwrap();
    old.go_on();
    assert_eq!(old.script.in_flight(), 1, "no other is begun");
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);
    old.go_on();
    assert!(!old.has(&client) && !new.has(&client), "it is on its way");
    assert_eq!(
        (old.worker.conns.len(), old.worker.load.connections(), new.worker.load.connections()),
        (0, 0, 1)
    );

    // What comes for it here finds nothing, also when another has its place.
    let mut other = old.client();
    old.worker.ready(client.0, epoll::EventFlags::IN | epoll::EventFlags::HUP);
    old.worker.queue_send(client.0);
    old.worker.close(client.0, "a test");
    old.worker.end(client.0);
    assert!(old.has(&other) && old.worker.load.connections() == 1);

    new.go_on();
    assert!(new.has(&client));
    new.go_on();
    new.go_on();
    assert_eq!((new.script.in_flight(), old.script.in_flight()), (1, 0));
    new.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc1]);
    assert_eq!((old.moves(), new.moves()), ((0, 1), (1, 0)));
    old.ask(&mut other, cmd::READ, NONE);
    old.complete();
    assert_eq!(replies(&mut other, 1, BLOCK), [0xc0]);

    // And back, where its place is another.
    new.give(&client, 0);
    old.go_on();
    assert!(old.has(&client) && !new.has(&client) && old.has(&other));
    client.1.write_all(&read(0xc2)).unwrap();
    old.go_on();
    old.go_on();
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc2]);
    drop(client);
    old.go_on();
    old.worker.close(other.0, "a test");
    Lab::all_end_empty(vec![old, new]);
}

/// The payload that has begun is received here, and what follows it is begun there.
#[test]
fn received_bytes_move_with_the_connection() {
    let [mut old, mut new] = team();
    let mut client = old.client();
    let write = Request { flags: NONE, command: cmd::WRITE, cookie: 0, offset: 0, len: 4096 };
    client.1.write_all(write.encode(HeaderStyle::Simple).unwrap().as_slice()).unwrap();
    client.1.write_all(&[0x5a; 1000]).unwrap();
    old.worker.ready(client.0, epoll::EventFlags::IN);
    old.give(&client, 1);
    assert!(old.has(&client), "a payload has begun");
    let mut rest = vec![0x5a; 3096];
    rest.extend((1..=3).flat_map(read));
    client.1.write_all(&rest).unwrap();
    old.go_on();
    assert_eq!(old.script.in_flight(), 1, "the write alone");
    assert_eq!(old.worker.conns[0].unread.len(), 3 * 28);
    old.complete();
    old.go_on();
    assert!(!old.has(&client) && old.worker.memory.used() == 0);
    for _ in 0..3 {
        new.go_on();
    }
    assert_eq!(new.script.in_flight(), 3);
    (0..3).for_each(|_| new.complete());
    assert_eq!(replies(&mut client, 1, 0), [0]);
    client.1.set_nonblocking(false).unwrap();
    let mut reply = vec![0; 16 + BLOCK];
    for cookie in 1..=3 {
        client.1.read_exact(&mut reply).unwrap();
        assert_eq!((reply[15], &reply[16..]), (cookie, &[0x5a; BLOCK][..]));
    }
    new.worker.close(client.0, "a test");
    Lab::all_end_empty(vec![old, new]);
}

#[test]
fn a_connection_that_is_late_stays_and_is_served() {
    let [mut old, new] = team();
    let mut client = old.client();
    old.worker.rebalancer.rules.patience = Duration::ZERO;
    old.ask(&mut client, cmd::READ, NONE);
    client.1.write_all(&read(0xc1)).unwrap();
    old.give(&client, 1);
    for _ in 0..3 {
        old.go_on();
    }
    assert_eq!(old.script.in_flight(), 2, "the next is begun here");
    (0..2).for_each(|_| old.complete());
    assert_eq!(replies(&mut client, 2, BLOCK), [0xc0, 0xc1]);
    assert_eq!((old.moves(), new.worker.load.connections()), ((0, 0), 0));

    // A patient worker is woken by the end of that patience, not by the device.
    old.worker.rebalancer.rules.patience = Duration::from_millis(20);
    old.ask(&mut client, cmd::READ, NONE);
    old.give(&client, 1);
    let engine = Rc::clone(&old.worker.requests.engine);
    while old.worker.conns[0].moving {
        old.worker.round(&engine, &mut Vec::with_capacity(256)).unwrap();
    }
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);

    // One that ends meanwhile is not in the way of another.
    old.ask(&mut client, cmd::READ, NONE);
    old.worker.rebalancer.rules.patience = Duration::from_secs(1000);
    old.give(&client, 1);
    old.worker.close(client.0, "a test");
    old.complete();
    old.go_on();
    let other = old.client();
    old.give(&other, 1);
    assert!(!old.has(&other) && old.moves().1 == 1);
    let mut new = new;
    new.go_on();
    new.worker.close(other.0, "a test");
    Lab::all_end_empty(vec![old, new]);
}

/// They are in buffers of this worker.
#[test]
fn no_connection_moves_before_its_replies_have_left() {
    let [mut old, mut new] = team();
    let mut client = old.client();
    let mut asked = 0;
    while old.worker.conns[0].out.is_empty() {
        old.ask(&mut client, cmd::READ, NONE);
        old.complete(); // until the socket takes no more
        asked += 1;
    }
    old.give(&client, 1);
    old.go_on();
    assert!(old.has(&client) && old.worker.memory.used() > 0);
    let mut answered = 0;
    while old.has(&client) {
        answered += replies(&mut client, 1, BLOCK).len();
        old.go_on();
    }
    assert_eq!(old.worker.memory.used(), 0);
    assert_eq!(replies(&mut client, asked - answered, BLOCK).len(), asked - answered);
    new.go_on();
    new.worker.close(client.0, "a test");
    Lab::all_end_empty(vec![old, new]);
}

#[test]
fn a_blocked_connection_moves_and_obeys_the_new_limits() {
    let [mut old, mut new] = team();
    let (mut hog, mut client) = (old.client(), old.client());
    for _ in 0..MOST {
        old.ask(&mut hog, cmd::READ, NONE);
    }
    old.ask(&mut client, cmd::READ, NONE);
    assert!(old.worker.blocked.contains(&client.0));
    old.give(&client, 1);
    assert!(!old.has(&client) && !old.worker.blocked.contains(&client.0));
    new.go_on();
    new.go_on();
    new.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);
    (0..MOST).for_each(|_| old.complete());
    assert_eq!(replies(&mut hog, MOST, BLOCK), [0xc0; MOST]);
    old.worker.close(hog.0, "a test");
    new.worker.close(client.0, "a test");
    Lab::all_end_empty(vec![old, new]);
}

/// The server tells the worker that it knows of, and then all. Whatever comes first, the client
/// hears of the end.
#[test]
fn an_end_beside_a_move_reaches_the_client() {
    for case in 0..5 {
        let [mut old, mut new] = team();
        let mut client = old.client();
        if case == 0 {
            old.ask(&mut client, cmd::READ, NONE); // so it only begins to leave, and the end comes first
        }
        client.1.write_all(&read(0xc1)).unwrap(); // not begun: it hears nothing of that
        old.give(&client, 1);
        if case == 1 {
            new.go_on(); // it is there, and the server heard of it
        }
        let mut told = Vec::new();
        old.registry.end(|client| told.push((client.worker(), client.id))).unwrap();
        assert_eq!(told, [(usize::from(case == 1), client.0)]);
        let tell = |lab: &mut Lab| lab.worker.end(client.0);
        match case {
            0 => tell(&mut old),
            1 => tell(&mut new),
            2 => {
                tell(&mut old); // too late
                new.go_on();
                old.worker.stop();
            }
            3 => {
                new.worker.stop(); // which comes before the client does
                assert!(!new.worker.has_stopped(), "one is on its way");
                tell(&mut old);
                old.worker.stop();
                assert!(old.worker.has_stopped());
            }
            _ => {
                old.worker.stop();
                assert!(old.worker.has_stopped());
                new.go_on();
                tell(&mut old);
            }
        }
        old.worker.stop();
        new.go_on();
        new.worker.stop();
        if case == 0 {
            old.complete();
            assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);
        }
        client.1.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // A request that was not received resets a Unix socket.
        let end = client.1.read(&mut [0; 1]);
        let reset = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset;
        assert!(end.as_ref().map_or_else(reset, |&count| count == 0), "case {case}: {end:?}");
        assert!(old.worker.has_stopped() && new.worker.has_stopped());
        Lab::all_end_empty(vec![old, new]);
    }
}

#[test]
fn no_connection_moves_to_a_stopped_worker_or_during_a_stop() {
    let [mut old, mut new] = team();
    let mut client = old.client();
    new.worker.stop();
    assert!(new.worker.has_stopped());
    old.give(&client, 1);
    assert!(old.has(&client));
    old.ask(&mut client, cmd::READ, NONE);
    (0..2).for_each(|_| old.go_on());
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);

    drop(new.worker); // and its end of the inbox
    old.give(&client, 1);
    old.go_on();
    assert_eq!((old.has(&client), old.moves()), (true, (0, 0)));
    old.ask(&mut client, cmd::READ, NONE);
    old.worker.stop(); // what is in flight is answered
    old.give(&client, 1);
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);
    assert!(old.worker.has_stopped());
    old.ends_empty();
}

/// A worker whose thread has failed, and one that cannot watch the socket.
#[test]
fn a_move_that_fails_loses_no_connection_but_to_a_full_system() {
    let [mut old, new] = team();
    let mut client = old.client();
    drop(new.worker);
    old.give(&client, 1);
    assert_eq!((old.has(&client), old.worker.load.connections(), old.moves()), (true, 1, (0, 0)));
    old.ask(&mut client, cmd::READ, NONE);
    old.go_on();
    old.go_on();
    old.complete();
    assert_eq!(replies(&mut client, 1, BLOCK), [0xc0]);
    old.worker.close(client.0, "a test");
    old.ends_empty();

    let [mut old, mut new] = team();
    let mut client = old.client();
    let socket = &old.worker.conns[0].socket;
    let nothing = epoll::EventData::new_u64(0);
    epoll::add(&new.worker.epoll, socket, nothing, epoll::EventFlags::empty()).unwrap();
    old.give(&client, 1);
    new.go_on();
    assert_eq!(client.1.read(&mut [0; 1]).unwrap(), 0, "closed");
    Lab::all_end_empty(vec![old, new]);
}

#[test]
fn one_of_two_busy_connections_moves_and_the_last_stays() {
    let [mut old, mut new] = team();
    let mut clients = [old.client(), old.client()];
    old.worker.rebalancer.rules.period = Duration::ZERO;
    let age = |lab: &mut Lab| lab.worker.load.end_round(Duration::from_secs(1000)); // more than has passed
    old.go_on();
    age(&mut old);
    old.ask(&mut clients[0], cmd::READ, NONE);
    old.complete();
    old.go_on();
    assert_eq!(old.worker.conns.len(), 2, "one alone is busy");
    assert_eq!(old.worker.conns[0].cost, 0, "the loads were compared");
    age(&mut old);
    old.ask(&mut clients[0], cmd::READ, NONE);
    old.complete();
    old.ask(&mut clients[1], cmd::READ, NONE);
    old.complete();
    new.worker.load.end_round(Duration::from_secs(1000));
    old.go_on();
    assert_eq!(old.worker.conns.len(), 2, "the other is no less busy");
    age(&mut old);
    for client in &mut clients {
        old.ask(client, cmd::READ, NONE);
        old.complete();
    }
    old.go_on();
    assert_eq!(
        (old.worker.conns.len(), old.worker.load.connections(), new.worker.load.connections()),
        (1, 1, 1)
    );
    new.go_on();
    assert_eq!((old.moves(), new.moves()), ((0, 1), (1, 0)));
    for client in &clients {
        let lab = if old.has(client) { &mut old } else { &mut new };
        lab.worker.close(client.0, "a test");
    }
    Lab::all_end_empty(vec![old, new]);
}

impl Lab {
    /// More time than has passed.
    fn works_for_long(&mut self) {
        self.worker.load.end_round(Duration::from_secs(1000));
    }
}

/// What a worker is at counts when it is over: before that it would seem to be idle.
#[test]
fn no_connection_moves_to_a_worker_that_stands_still() {
    let [mut old, mut new] = team();
    let mut clients = [old.client(), old.client()];
    old.worker.rebalancer.rules.period = Duration::ZERO;
    old.go_on();
    let mut look = |old: &mut Lab| {
        old.works_for_long();
        for client in &mut clients {
            old.ask(client, cmd::READ, NONE);
            old.complete();
        }
        old.go_on();
        old.worker.conns.len()
    };
    new.worker.load.begin_round();
    assert_eq!((look(&mut old), look(&mut old)), (2, 2), "it opens an image, say");
    new.worker.load.end_round(Duration::ZERO);
    assert_eq!(look(&mut old), 1);
    new.go_on();
    for client in &clients {
        let lab = if old.has(client) { &mut old } else { &mut new };
        lab.worker.close(client.0, "a test");
    }
    Lab::all_end_empty(vec![old, new]);
}

#[test]
fn two_busy_workers_do_not_both_move_to_one() {
    for busy in [false, true] {
        let limits = Limits { depth: MOST, most: MOST };
        let mut team = Lab::team(3, limits, MOST + 1, "0");
        let mut clients = Vec::new();
        for lab in &mut team[..2] {
            lab.worker.rebalancer.rules.patience = Duration::from_secs(1000);
            lab.worker.rebalancer.rules.period = Duration::ZERO;
            clients.push([lab.client(), lab.client()]);
            lab.go_on();
        }
        for (nth, (lab, clients)) in team.iter_mut().zip(&mut clients).enumerate() {
            lab.works_for_long();
            for client in clients.iter_mut() {
                lab.ask(client, cmd::READ, NONE);
                lab.complete();
            }
            if busy && nth == 0 {
                // It begins to leave, and the other one goes while it waits for its replies.
                clients.iter_mut().for_each(|client| lab.ask(client, cmd::READ, NONE));
            }
            lab.go_on();
        }
        if busy {
            assert_eq!(team[0].moves(), (0, 0));
            (0..2).for_each(|_| team[0].complete());
            team[0].go_on();
        }
        let left = [0, 1].map(|nth: usize| team[nth].moves().1);
        assert_eq!(left, [u64::from(!busy), u64::from(busy)]);
        assert!(team[0].worker.conns.iter().all(|(_, conn)| !conn.moving));
        team[2].go_on();
        for client in clients.iter().flatten() {
            let lab = team.iter_mut().find(|lab| lab.has(client)).expect("one of them has it");
            lab.worker.close(client.0, "a test");
        }
        Lab::all_end_empty(team);
    }
}
