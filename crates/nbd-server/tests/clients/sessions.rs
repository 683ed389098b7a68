//! The list of sessions: counted when asked for, and told to end when the server does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::client::{Client, MIB};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, fail, per_backend, tail, wait_until};
use crate::server::{Launch, Server};

/// The server's limit for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = per_backend(&Backend::ALL, "metrics_count_every_session", &[], counts);
    trials.extend(per_backend(&Backend::ALL, "sigterm_ends_every_session", &[], ends));
    trials
}

fn start(lab: &Lab, backend: Backend, more: &[&str]) -> Res<Server> {
    let image = lab.path("a.img");
    image::sparse(&image, 16 * MIB)?;
    let launch = Launch::new(lab, backend).image(&image).metrics().arg("--workers").arg("2");
    more.iter().fold(launch, |launch, &arg| launch.arg(arg)).start()
}

/// Reads until told to stop.
fn read_on(mut client: Client, reads: &AtomicU64, stop: &AtomicBool) -> Res {
    // Ordering: Relaxed; the reader stops some time later, and nothing else depends on it.
    while !stop.load(Ordering::Relaxed) {
        check!(client.read(0, 4096)?.is_ok(), "a read meanwhile");
        reads.fetch_add(1, Ordering::Relaxed);
    }
    client.disconnect()
}

/// Runs `body` while two clients read all the time; each must be served throughout.
fn beside_readers<T>(server: &mut Server, body: impl FnOnce(&mut Server) -> Res<T>) -> Res<T> {
    let (reads, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let clients = [server.client()?, server.client()?];
    thread::scope(|scope| {
        let (reads, stop) = (&reads, &stop);
        let readers = clients.map(|client| scope.spawn(|| read_on(client, reads, stop)));
        let result = body(server);
        let before = reads.load(Ordering::Relaxed);
        let served = wait_until(|| (reads.load(Ordering::Relaxed) > before + 100).then_some(()));
        stop.store(true, Ordering::Relaxed); // see `read_on`
        for reader in readers {
            reader.join().expect("a reader does not panic")?;
        }
        check!(served.is_some(), "the readers are not served any more");
        result
    })
}

/// Every session is counted by the metrics, those with an export too; and none any more once it is gone.
fn counts(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend, &[])?;
    let open = "export_connections{export=\"vol\"}";
    let mut clients = Vec::new();
    for reads in 1..=20 {
        let mut client = server.client()?;
        for _ in 0..reads {
            check!(client.read(0, 512 * reads)?.is_ok(), "a read");
        }
        clients.push(client);
    }
    let began = Instant::now();
    let mut early = server.connect()?; // has not said what it wants
    early.read_greeting()?;
    beside_readers(&mut server, |server| {
        for _ in 0..10 {
            let (all, open) = (server.figure("connections")?, server.figure(open)?);
            // On a busy machine the time for the handshake may be over before the page is made.
            let may_be_gone = u64::from(began.elapsed() >= HANDSHAKE);
            check!(open == 22 && (23 - may_be_gone..=23).contains(&all), "{open} of {all}");
        }
        Ok(())
    })?;
    drop(early);
    clients.into_iter().try_for_each(Client::disconnect)?;
    let gone = wait_until(|| {
        let left = [server.figure("connections").ok()?, server.figure(open).ok()?];
        (left == [0, 0]).then_some(())
    });
    check!(gone.is_some(), "some are left: {:?}", server.figures()?);
    server.still_serves()?;
    server.stop()
}

/// At SIGTERM each of many sessions is told to end, wherever it stands, and ends by itself. A connection that
/// comes meanwhile is admitted before or not at all.
fn ends(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend, &["--max-connections", "1000"])?;
    let mut clients = Vec::new();
    for n in 0..300 {
        let mut client = if n % 10 == 0 { server.connect()? } else { server.client()? };
        if n % 10 == 0 {
            client.read_greeting()?;
        } else if n % 10 == 1 {
            check!(client.read(0, 4096)?.is_ok(), "a read");
        }
        clients.push(client);
    }
    let socket = server.socket().to_path_buf();
    let greetings = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&greetings);
    let came = thread::spawn(move || -> u64 {
        let mut refused = 0;
        // Until the socket is gone; a connection that was not accepted is reset then.
        while let Ok(mut client) = Client::connect(&socket) {
            match client.read_greeting() {
                Ok(_) => drop(count.fetch_add(1, Ordering::Relaxed)), // waited for below
                Err(_) => refused += 1,
            }
            client.stream.set_read_timeout(Some(Duration::from_millis(1))).ok();
            client.closed().ok();
        }
        refused
    });
    let some = wait_until(|| (greetings.load(Ordering::Relaxed) > 2).then_some(()));
    check!(some.is_some(), "no client is let in beside the others");
    server.terminate();
    for client in &mut clients {
        check!(client.closed()? == 0, "bytes that were not asked for");
    }
    server.finished()?;
    let refused = came.join().expect("no panic");

    let log = server.log();
    check!(!log.contains("while the server stopped"), "one did not end:\n{}", tail(&log, 20));
    // On a slow machine, some of those that were only greeted are gone by then.
    let late = log.matches("no handshake within").count() as u64;
    let told =
        log.lines().find_map(|line| line.split_once("told to end sessions=")?.1.parse().ok());
    let Some(told) = told else { fail!("no session was told:\n{}", tail(&log, 20)) };
    let most = 300 + greetings.load(Ordering::Relaxed) + refused;
    check!((300 - late.min(30)..=most).contains(&told), "{told} were told, of 300 to {most}");
    Ok(())
}
