//! The whole server, run in this process.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use clap::Parser;
use nbd_protocol::{CommandFlags, HeaderStyle, Request, wire::cmd};
use signal_hook::consts::SIGUSR2;
use tempfile::TempDir;
use testkit::wait_until;

use super::*;
use crate::metrics;

const BLOCK: usize = 4096;
/// A server that is silent for this long has failed.
const SILENCE: Duration = Duration::from_secs(60);

/// Starts a server, and a thread that runs `clients`. Stops the server when they end or ask for it.
/// Also returns the final content of the image.
fn serve<T: Send>(options: &[&str], clients: impl FnOnce(&Lab) -> T + Send) -> (T, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let (socket, image) = (dir.path().join("s"), dir.path().join("a.img"));
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let mut args = vec!["offlock-nbd".into(), "--socket".into(), path(&socket)];
    args.extend(["--image".into(), path(&image)]);
    args.extend(options.iter().map(|&option| option.into()));
    let mut server = Server::start(&Args::parse_from(args), vec![]).unwrap();
    server.grow_at(Signals::new([SIGUSR2]).unwrap()).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let Shared { registry, connections, .. } = server.shared.clone();
    let workers = server.reporter.workers.clone();
    let reporter = server.reporter.clone();
    let lab = Lab { socket, stop: stopped, reporter, dir };
    let result = thread::scope(|scope| {
        let lab = &lab;
        let clients = scope.spawn(|| {
            let _stop = Stop(lab); // stops the server even if `clients` panics
            clients(lab)
        });
        server.accept_until(stop.as_fd()).unwrap();
        server.stop().unwrap();
        clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    registry.validate();
    assert!(registry.is_empty() && connections.is_empty(), "a connection is left");
    assert!(workers.iter().all(|worker| worker.load.connections() == 0), "or counted");
    (result, std::fs::read(image).unwrap())
}

struct Lab {
    socket: PathBuf,
    stop: UnixStream,
    reporter: Reporter,
    dir: TempDir,
}

struct Stop<'l>(&'l Lab);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Lab {
    fn stop(&self) {
        let _ = (&self.stop).write_all(&[0]); // fails if the server has stopped
    }
}

/// Returns a client with the default export open.
fn client(lab: &Lab) -> UnixStream {
    let mut stream = UnixStream::connect(&lab.socket).unwrap();
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3_u32.to_be_bytes()).unwrap(); // fixed newstyle, no zeroes
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap(); // EXPORT_NAME, ""
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// Reads cached blocks, many requests at a time, until told to stop.
fn read_on(stream: &mut UnixStream, stop: &AtomicBool) {
    const AT_ONCE: usize = 64;
    let (flags, command) = (CommandFlags::NONE, cmd::READ);
    let request = Request { flags, command, cookie: 0, offset: 0, len: BLOCK as u64 };
    let requests = request.encode(HeaderStyle::Simple).unwrap().as_slice().repeat(AT_ONCE);
    let mut replies = vec![0; AT_ONCE * (16 + BLOCK)];
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&requests).unwrap();
        stream.read_exact(&mut replies).unwrap();
    }
}

#[test]
fn a_connection_goes_to_the_worker_that_is_less_busy() {
    let options = ["--workers", "2", "--size", "1M", "--backend", "threads", "--cache", "4M"];
    serve(&options, |lab| {
        let placed = || [0, 1].map(|worker| lab.reporter.workers[worker].load.connections());
        let mut busy = client(lab);
        let _idle = client(lab);
        assert_eq!(placed(), [1, 1], "they are placed in turn");
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader = scope.spawn(|| read_on(&mut busy, &stop));
            let is_busy = |worker: usize| {
                let load = &lab.reporter.workers[worker].load;
                load.get() > load.connections()
            };
            let differ = || is_busy(0) && !is_busy(1);
            // On a busy machine the reader may pause, and its worker's work be forgotten meanwhile.
            loop {
                wait_until(differ);
                let another = client(lab);
                let now = placed();
                let still_differ = differ();
                drop(another);
                if still_differ {
                    assert_eq!(now, [1, 2]);
                    break;
                }
                wait_until(|| placed() == [1, 1]);
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap();
        });
    });
}

#[cfg(feature = "objects")]
#[test]
fn a_volume_that_ends_is_the_end_of_a_server_without_clients() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let image = ["--image", "memory:///v?size=1M", "--workers", "1"];
    let args = [&["offlock-nbd", "--socket", socket.to_str().unwrap()], &image[..]].concat();
    let mut server = Server::start(&Args::parse_from(args), vec![]).unwrap();
    let exports = Arc::clone(&server.shared.exports);
    let (stop, stopped) = UnixStream::pair().unwrap();
    let accepted = thread::spawn(move || {
        let accepted = server.accept_until(stop.as_fd());
        accepted.and_then(|()| server.stop())
    });
    thread::sleep(Duration::from_millis(20)); // by now it waits for a client
    exports.volumes().for_each(|(_, volume)| volume.end_by("of a test"));
    wait_until(|| accepted.is_finished());
    drop(stopped);
    let error = accepted.join().unwrap().unwrap_err();
    assert!(matches!(&error, ServerError::Ended(all) if all == &["'v': of a test"]), "{error}");
}

#[test]
fn a_worker_that_does_not_answer_keeps_no_figures_from_us() {
    serve(&["--workers", "2", "--size", "1M"], |lab| {
        let mut reporter = lab.reporter.clone();
        reporter.patience = SILENCE;
        assert_eq!(reporter.reports().len(), 2);
        let (dead, _inbox) = Inbox::new(Instant::now()).unwrap();
        reporter.workers.push(dead);
        reporter.patience = Duration::from_millis(10);
        assert!(reporter.reports().len() <= 2);
        let page = metrics::text(&reporter);
        assert!(page.contains("in_flight") && !page.contains("requests_total"), "{page}");
    });
}

#[test]
fn a_client_can_connect_while_a_look_for_longer_files_hangs() {
    serve(&["--workers", "1", "--size", "1M"], |lab| {
        let exports = &lab.reporter.shared.exports;
        let len = || exports.fixed[0].image.len();
        let image = std::fs::File::options().write(true).open(lab.dir.path().join("a.img"));
        image.unwrap().set_len(2 << 20).unwrap();
        let held = exports.images.hold();
        signal_hook::low_level::raise(SIGUSR2).unwrap();
        let _clients = [client(lab), client(lab)]; // one may be accepted already
        assert_eq!(len(), 1 << 20, "the look is held");
        drop(held);
        wait_until(|| len() == 2 << 20);
    });
}
