//! The publish-subscribe server of examples/pubsub: real connections to a server in this process.

#[path = "pubsub/harness.rs"]
mod harness;
#[expect(dead_code, reason = "its `main`")]
#[path = "../pubsub.rs"]
mod pubsub;

use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::harness::{Running, numbered, on, on_runtime, options, told_dropped};
use crate::pubsub::{FAREWELL, MAX_LINE, MAX_TOPICS, Options, RESERVED, URGENT};

#[test]
fn every_command_has_one_answer() {
    on_runtime(async {
        let server = Running::start(options(), pending()).await?;
        let mut peer = server.connect().await?;
        peer.expect("SUB a", "OK SUB a").await?;
        peer.expect("SUB a", "ERR already subscribed").await?;
        peer.expect("UNSUB b", "ERR not subscribed").await?;
        for line in ["", "hello", "SUB", "SUB a b", "UNSUB", "PUB 1 a", "PUB 10 a t", "QUIT now"] {
            let usage = "ERR expected: SUB topic, UNSUB topic, PUB 0..9 topic text, or QUIT";
            peer.expect(line, usage).await?;
        }
        peer.expect("PUB x a t", "ERR the priority is not a digit").await?;
        peer.expect("PUB 1 b to nobody\r", "OK PUB 0 0").await?;
        for topic in 1..MAX_TOPICS {
            peer.expect(&format!("SUB {topic}"), &format!("OK SUB {topic}")).await?;
        }
        peer.expect("SUB one-more", "ERR more than 16 topics").await?;
        peer.stream.write_all(b"PUB 1 a \xff\n").await?;
        assert_eq!(peer.line().await?, "ERR the line is not UTF-8");
        let longest = format!("PUB 1 none {}", "x".repeat(MAX_LINE - 12));
        peer.expect(&longest, "OK PUB 0 0").await?;
        peer.send(&format!("{longest}x")).await?;
        assert_eq!(peer.rest().await?, ["ERR the line is longer than 4096 bytes", "BYE"]);
        Ok(())
    });
}

/// Each client subscribes to all topics, then all publish at once.
#[test]
fn concurrent_clients_get_each_message_once_and_in_order() {
    const CLIENTS: usize = 8;
    const MESSAGES: usize = 50;
    on(Builder::new_multi_thread().worker_threads(2), async {
        let (end, ended) = oneshot::channel::<()>();
        // Places for all messages and answers, so that nothing is dropped however slow a client is.
        let options = Options { messages: (CLIENTS + 1) * MESSAGES, ..options() };
        let server = Running::start(options, async { ended.await.unwrap() }).await?;
        let mut peers = Vec::new();
        for _ in 0..CLIENTS {
            let mut peer = server.connect().await?;
            peer.expect("SUB all", "OK SUB all").await?;
            peers.push(peer);
        }
        let ids: Vec<_> = peers.iter().map(|peer| peer.id.clone()).collect();
        let mut tasks = JoinSet::new();
        for mut peer in peers {
            let ids = ids.clone();
            tasks.spawn(async move {
                for number in 0..MESSAGES {
                    peer.send(&format!("PUB 5 all {number}")).await?;
                }
                let (mut answers, mut next) = (0, vec![0; CLIENTS]);
                while answers < MESSAGES || next.iter().any(|&next| next < MESSAGES) {
                    let line = peer.line().await?;
                    if line == format!("OK PUB {CLIENTS} 0") {
                        answers += 1;
                        continue;
                    }
                    let words: Vec<_> = line.split(' ').collect();
                    let ["MSG", "all", "5", from, number] = words[..] else { panic!("{line}") };
                    let from = ids.iter().position(|id| id == from).expect("the id of a client");
                    assert_eq!(number, next[from].to_string(), "from {}", ids[from]);
                    next[from] += 1;
                }
                peer.send("QUIT").await?;
                assert_eq!(peer.rest().await?, ["BYE"]);
                io::Result::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        end.send(()).unwrap();
        let broker = server.ended().await?;
        let messages = (CLIENTS * MESSAGES) as i64;
        assert_eq!((broker.published.sum(), broker.dropped.sum()), (messages, 0));
        assert_eq!(broker.queued.sum(), messages * CLIENTS as i64);
        Ok(())
    });
}

#[test]
fn a_slow_client_loses_the_newest_messages_and_gets_urgent_ones_first() {
    on_runtime(async {
        let (end, ended) = oneshot::channel::<()>();
        let server = Running::start(options(), async { ended.await.unwrap() }).await?;
        let mut slow = server.connect_slow().await?;
        let mut publisher = server.connect().await?;
        slow.expect("SUB t", "OK SUB t").await?;
        let (mut queued, mut dropped) = publisher.flood("t").await?;

        // The queue is full of ordinary messages; urgent ones have places of their own.
        let mut urgent = Vec::new();
        for number in 0..RESERVED as u64 {
            let priority = URGENT + number as u32 % 2;
            publisher.expect(&format!("PUB {priority} t {number}"), "OK PUB 1 0").await?;
            urgent.push((priority, number));
        }
        publisher.expect("PUB 9 t none", "OK PUB 0 1").await?;
        (queued, dropped) = (queued + RESERVED as u64, dropped + 1);

        // The slow client delays no other client, and its answers have places too.
        publisher.expect("SUB u", "OK SUB u").await?;
        slow.send("SUB u").await?;
        slow.send("QUIT").await?;
        let lines = slow.rest().await?;
        let messages: Vec<_> = lines.iter().filter_map(|line| numbered(line)).collect();
        assert_eq!((messages.len() as u64, told_dropped(&lines)), (queued, dropped));
        assert_eq!(lines.last().unwrap(), "BYE");

        // What waited in the queue when the client began to read came by priority, and the older first.
        let first = messages.iter().position(|(priority, _)| *priority >= URGENT).unwrap();
        let answer = lines.iter().position(|line| line == "OK SUB u").unwrap();
        assert!(answer < lines.iter().position(|line| line.starts_with("MSG t 9")).unwrap());
        let mut waited = messages[first..].to_vec();
        assert_eq!(waited.len(), options().messages + RESERVED);
        waited.sort_by_key(|(priority, number)| (std::cmp::Reverse(*priority), *number));
        assert_eq!(messages[first..], waited);
        urgent.sort_by_key(|(priority, number)| (std::cmp::Reverse(*priority), *number));
        assert_eq!(messages[first..][..RESERVED], urgent);

        end.send(()).unwrap();
        let broker = server.ended().await?;
        assert_eq!((broker.queued.sum(), broker.dropped.sum()), (queued as i64, dropped as i64));
        Ok(())
    });
}

#[test]
fn nothing_follows_an_unsubscribe() {
    on_runtime(async {
        let server = Running::start(options(), pending()).await?;
        let (mut slow, mut publisher) = (server.connect_slow().await?, server.connect().await?);
        slow.expect("SUB t", "OK SUB t").await?;
        slow.expect("SUB kept", "OK SUB kept").await?;
        publisher.expect("PUB 0 kept for the end", "OK PUB 1 0").await?;
        assert_eq!(slow.line().await?, format!("MSG kept 0 {} for the end", publisher.id));
        let (queued, _) = publisher.flood("t").await?;
        publisher.expect("PUB 9 kept still", "OK PUB 1 0").await?;

        slow.send("UNSUB t").await?;
        let mut lines = Vec::new();
        while lines.last().is_none_or(|line| line != "OK UNSUB t") {
            lines.push(slow.line().await?);
        }
        // The message of `kept` may come first: the kernel takes a line more at a probe of its window.
        let before = lines.iter().filter(|line| line.starts_with("MSG t ")).count() as u64;
        assert_eq!(before, queued - options().messages as u64, "the queued ones are not delivered");
        publisher.expect("PUB 9 t late", "OK PUB 0 0").await?;
        slow.send("QUIT").await?;
        let rest = slow.rest().await?;
        let still = format!("MSG kept 9 {} still", publisher.id);
        assert!(lines.iter().chain(&rest).any(|line| *line == still), "{rest:?}");
        assert!(!rest.iter().any(|line| line.starts_with("MSG t ")), "{rest:?}");

        // A subscriber that is gone without UNSUB is no subscriber either.
        let mut gone = server.connect().await?;
        gone.expect("SUB t", "OK SUB t").await?;
        drop(gone);
        publisher.until_no_subscriber("t").await?;
        Ok(())
    });
}

#[test]
fn a_client_too_many_is_refused_and_ids_are_not_reused() {
    on_runtime(async {
        let server = Running::start(Options { clients: 1, ..options() }, pending()).await?;
        let mut first = server.connect().await?;
        let mut refused = server.connect_raw().await?;
        assert_eq!(refused.rest().await?, ["ERR the table has 1 contexts, which is its limit"]);
        first.expect("SUB t", "OK SUB t").await?;
        first.send("QUIT").await?;
        assert_eq!(first.rest().await?, ["BYE"]);
        loop {
            let mut next = server.connect_raw().await?;
            let line = next.line().await?;
            if let Some(id) = line.strip_prefix("HELLO ") {
                assert_ne!(id, first.id);
                return Ok(());
            }
            sleep(Duration::from_millis(5)).await; // the server has not removed the first one yet
        }
    });
}

#[test]
fn ctrl_c_tells_subscribers_and_waits_for_no_slow_client() {
    on_runtime(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let interrupted = async move { interrupt.recv().await.expect("a signal comes") };
        let server = Running::start(options(), interrupted).await?;
        let (mut stuck, mut reader) = (server.connect_slow().await?, server.connect().await?);
        let mut publisher = server.connect().await?;
        stuck.expect("SUB t", "OK SUB t").await?;
        publisher.flood("t").await?; // `stuck` reads no more
        reader.expect("SUB news", "OK SUB news").await?;
        publisher.expect("PUB 1 news last", "OK PUB 1 0").await?;

        let (start, address) = (Instant::now(), server.address);
        kill_process(getpid(), Signal::INT)?;
        let message = format!("MSG news 1 {} last", publisher.id);
        assert_eq!(reader.rest().await?, [&message, "BYE"]);
        assert_eq!(publisher.rest().await?, ["BYE"]);
        server.ended().await?;
        assert!(start.elapsed() >= FAREWELL, "the stuck client had its time");
        assert!(TcpStream::connect(address).await.is_err(), "nothing listens any more");
        Ok(())
    });
}

#[test]
fn a_topic_without_subscribers_is_freed() {
    on_runtime(async {
        let (end, ended) = oneshot::channel::<()>();
        let server = Running::start(options(), async { ended.await.unwrap() }).await?;
        let (mut first, mut second) = (server.connect().await?, server.connect().await?);
        first.expect("SUB t", "OK SUB t").await?;
        second.expect("SUB t", "OK SUB t").await?;
        second.expect("UNSUB t", "OK UNSUB t").await?;
        second.expect("PUB 1 t x", "OK PUB 1 0").await?; // the topic is there for the other
        end.send(()).unwrap();
        assert!(server.ended().await?.topics.read().is_empty());
        Ok(())
    });
}
