//! The server whole, in this process: its workers are told to give each other the connections all
//! the time.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use clap::Parser;
use nbd_protocol::{CommandFlags, HeaderStyle, Request, wire::cmd};
use radix_ctx::Id;
use tempfile::TempDir;

use super::*;
use crate::demo::{self, DemoOptions};

const BLOCK: usize = 4096;
/// Of each client.
const BLOCKS: usize = 32;
/// A server that does nothing for so long does nothing any more.
const SILENCE: Duration = Duration::from_secs(60);

/// Starts a server, and a thread for `clients`; stops it when they have ended, or want that. Also
/// returns what the image is in the end.
fn serve<T: Send>(options: &[&str], clients: impl FnOnce(&Lab) -> T + Send) -> (T, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let (socket, image) = (dir.path().join("s"), dir.path().join("a.img"));
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let mut args = vec!["nbd_server".into(), "--socket".into(), path(&socket)];
    args.extend(["--image".into(), path(&image)]);
    args.extend(options.iter().map(|&option| option.into()));
    let mut server = Server::start(&Args::parse_from(args), vec![]).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let (registry, connections) = (Arc::clone(&server.registry), Arc::clone(&server.connections));
    let workers = server.reporter.workers.clone();
    let reporter = server.reporter.clone();
    let lab = Lab { socket, stop: stopped, reporter, _dir: dir };
    let result = thread::scope(|scope| {
        let lab = &lab;
        let clients = scope.spawn(|| {
            let _stop = Stop(lab); // also if it panics
            clients(lab)
        });
        let period = Some(Duration::MAX);
        let wakeups = Wakeups { stop: stop.as_fd(), show: None, grow: None, period };
        server.accept_until(wakeups, |_| {}).unwrap();
        server.stop().unwrap();
        clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert!(registry.is_empty() && connections.is_empty(), "a connection is left");
    assert!(workers.iter().all(|worker| worker.load.close()), "or counted");
    (result, std::fs::read(image).unwrap())
}

struct Lab {
    socket: PathBuf,
    stop: UnixStream,
    reporter: Reporter,
    _dir: TempDir,
}

struct Stop<'l>(&'l Lab);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Lab {
    fn stop(&self) {
        let _ = (&self.stop).write_all(&[0]); // it may have stopped
    }

    fn moves(&self) -> u64 {
        let moves = self.reporter.report().moves;
        moves.iter().map(|(_, moves)| moves.arrived).sum()
    }

    /// Runs `body` while connections are given to workers at random.
    fn storm<T>(&self, body: impl FnOnce() -> T) -> T {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = 1_u64;
                let mut below = |bound: usize| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 33) as usize % bound
                };
                let workers = &self.reporter.workers;
                // Ordering: Relaxed; it ends some time later, and nothing else depends on it.
                while !done.load(Ordering::Relaxed) {
                    for (id, worker) in self.reporter.registry.sessions() {
                        workers[worker].send(Message::MoveTo(id, below(workers.len())));
                    }
                    thread::sleep(Duration::from_micros(below(2000) as u64));
                }
            });
            let result = body();
            done.store(true, Ordering::Relaxed);
            result
        })
    }
}

/// A client that has the default export open.
fn client(lab: &Lab) -> UnixStream {
    let mut stream = UnixStream::connect(&lab.socket).unwrap();
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap(); // fixed newstyle, no zeroes
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap(); // EXPORT_NAME, ""
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

fn request(command: u16, cookie: u64, block: usize) -> Vec<u8> {
    let (flags, offset) = (CommandFlags::NONE, (block * BLOCK) as u64);
    let len = if command == cmd::FLUSH { 0 } else { BLOCK as u64 };
    Request { flags, command, cookie, offset, len }
        .encode(HeaderStyle::Simple)
        .unwrap()
        .as_slice()
        .to_vec()
}

/// The client of the demonstration checks every byte, and that each reply is of one of its
/// requests.
#[test]
fn connections_that_move_all_the_time_lose_no_request_and_no_byte() {
    for options in [&["--cache", "0"], &["--cache", "2M"]] {
        let options = [&["--workers", "3", "--size", "8M", "--backend", "threads"], &options[..]];
        let (moves, _) = serve(&options.concat(), |lab| {
            let mut seed = 0;
            while lab.moves() < 100 {
                seed += 1;
                let options = DemoOptions {
                    depth: 16,
                    mixed: Duration::ZERO,
                    at_least: 500,
                    seed,
                    progress: false,
                    ..DemoOptions::default()
                };
                let report = lab.storm(|| demo::run(&lab.socket, &options)).unwrap();
                assert!(report.image_verified);
            }
            lab.moves()
        });
        assert!(moves >= 100);
    }
}

/// Writes its blocks with higher and higher numbers, many at a time, until the server ends; then
/// says of each block the last that was answered and the last that was sent.
fn write_on(mut stream: UnixStream, first: usize, written: &AtomicBool) -> Vec<(u64, u64)> {
    let mut blocks = vec![(0, 0); BLOCKS];
    let mut number = 0_u64;
    loop {
        number += 1;
        let mut batch = Vec::new();
        for (block, (_, sent)) in blocks.iter_mut().enumerate() {
            batch.extend(request(cmd::WRITE, block as u64, first + block));
            batch.extend(number.to_le_bytes().repeat(BLOCK / 8));
            *sent = number;
        }
        if stream.write_all(&batch).is_err() {
            break; // what was answered before has been read
        }
        let mut expected: BTreeSet<usize> = (0..BLOCKS).collect();
        while !expected.is_empty() {
            let mut reply = [0; 16];
            match stream.read_exact(&mut reply) {
                Ok(()) => {}
                Err(error) => {
                    let late =
                        matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
                    assert!(!late, "{} are not answered", expected.len());
                    return blocks;
                }
            }
            assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
            let block = u64::from_be_bytes(reply[8..].try_into().unwrap()) as usize;
            assert!(expected.remove(&block), "a second reply to {block}");
            blocks[block].0 = number;
        }
        written.store(true, Ordering::Relaxed);
    }
    blocks
}

#[test]
fn a_server_that_stops_while_connections_move_has_what_it_answered() {
    for round in 0..10 {
        let cache = if round % 2 == 0 { "0" } else { "4M" };
        let options = ["--workers", "3", "--size", "1M", "--backend", "threads", "--cache", cache];
        let (blocks, image) = serve(&options, |lab| {
            let written: [_; 4] = std::array::from_fn(|_| AtomicBool::new(false));
            thread::scope(|scope| {
                let clients = written.iter().enumerate().map(|(nth, written)| {
                    let stream = client(lab);
                    scope.spawn(move || write_on(stream, nth * BLOCKS, written))
                });
                let clients: Vec<_> = clients.collect();
                lab.storm(|| {
                    let all = || written.iter().all(|written| written.load(Ordering::Relaxed));
                    while !all() || lab.moves() < 10 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    lab.stop();
                    let blocks = clients.into_iter().flat_map(|client| client.join().unwrap());
                    blocks.collect::<Vec<_>>()
                })
            })
        });
        for (block, (answered, sent)) in blocks.into_iter().enumerate() {
            let bytes = &image[block * BLOCK..][..BLOCK];
            let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert!((answered..=sent).contains(&found), "{found} in {block}, not {answered}");
            assert!(bytes == found.to_le_bytes().repeat(BLOCK / 8), "a part of {block}");
        }
    }
}

/// Reads what is in the cache, many requests at a time, until told to stop.
fn read_on(stream: &mut UnixStream, stop: &AtomicBool) {
    const AT_ONCE: usize = 64;
    let requests: Vec<u8> =
        (0..AT_ONCE).flat_map(|cookie| request(cmd::READ, cookie as u64, cookie)).collect();
    let mut replies = vec![0; AT_ONCE * (16 + BLOCK)];
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&requests).unwrap();
        stream.read_exact(&mut replies).unwrap();
        let mut expected: BTreeSet<usize> = (0..AT_ONCE).collect();
        for reply in replies.chunks(16 + BLOCK) {
            assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
            assert!(expected.remove(&usize::from(reply[15])), "a second reply to {}", reply[15]);
        }
    }
}

#[test]
fn one_of_two_busy_connections_of_a_worker_moves_to_the_idle_one() {
    let options = ["--workers", "2", "--size", "1M", "--backend", "threads", "--cache", "4M"];
    serve(&options, |lab| {
        let sessions = || lab.reporter.registry.sessions();
        let at =
            |id| sessions().into_iter().find(|session| session.0 == id).expect("it is there").1;
        let mut clients: Vec<(Id, UnixStream)> = Vec::new();
        for _ in 0..4 {
            let stream = client(lab);
            let known = |id| clients.iter().any(|client| client.0 == id);
            let id = sessions().into_iter().map(|session| session.0).find(|&id| !known(id));
            clients.push((id.expect("one more"), stream));
        }
        let first = at(clients[0].0);
        let (mut busy, mut idle): (Vec<_>, Vec<_>) =
            clients.into_iter().partition(|&(id, _)| at(id) == first);
        assert_eq!((busy.len(), idle.len()), (2, 2), "they are placed in turn");
        let ids = [busy[0].0, busy[1].0];
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers = busy.iter_mut().map(|(_, stream)| scope.spawn(|| read_on(stream, &stop)));
            let readers: Vec<_> = readers.collect();
            let since = Instant::now();
            while at(ids[0]) == at(ids[1]) && since.elapsed() < 2 * SILENCE {
                thread::sleep(Duration::from_millis(5));
            }
            stop.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        assert_eq!((at(ids[0]) != at(ids[1]), lab.moves() > 0), (true, true));
        for (_, stream) in busy.iter_mut().chain(&mut idle) {
            stream.write_all(&request(cmd::READ, 1, 1)).unwrap();
            stream.read_exact(&mut [0; 16 + BLOCK]).unwrap();
        }
    });
}

#[test]
fn a_worker_that_does_not_answer_keeps_no_figures_from_us() {
    serve(&["--workers", "2", "--size", "1M"], |lab| {
        let mut reporter = lab.reporter.clone();
        assert_eq!(reporter.report().workers, 2);
        let (dead, _inbox) = Inbox::new().unwrap();
        reporter.workers.push(dead);
        reporter.patience = Duration::from_millis(10);
        assert!(reporter.report().workers <= 2);
    });
}
