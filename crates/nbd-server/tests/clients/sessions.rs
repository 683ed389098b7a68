//! The list of sessions: counted when asked for, and told to end when the server does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::client::{Client, MIB};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, fail, per_backend, tail, trial, wait_until};
use crate::server::{Launch, Server};

/// The server's limit for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = per_backend(&Backend::ALL, "sigusr1_counts_every_session", &[], shows);
    trials.push(trial("sessions/sigusr1_flood", &[], flood));
    trials.extend(per_backend(&Backend::ALL, "sigterm_ends_every_session", &[], ends));
    trials
}

fn start(lab: &Lab, backend: Backend, more: &[&str]) -> Res<Server> {
    let image = lab.path("a.img");
    image::sparse(&image, 16 * MIB)?;
    let launch = Launch::new(lab, backend).image(&image).arg("--workers").arg("2");
    more.iter().fold(launch, |launch, &arg| launch.arg(arg)).start()
}

/// What the server printed of its list of sessions, once.
#[derive(Debug)]
struct Page {
    open: u64,
    adds: u64,
    removals: u64,
    /// In percent.
    cpu_hits: f64,
}

/// All the pages in a log.
fn pages(log: &str) -> Res<Vec<Page>> {
    let mut pages = Vec::new();
    for text in log.split("server     2 workers").skip(1) {
        let Some(end) = text.find("\nrequests   ") else { continue }; // it is being written
        pages.push(page(&text[..end])?);
    }
    Ok(pages)
}

fn page(text: &str) -> Res<Page> {
    let mut open = None;
    let mut lines = text.lines();
    for line in lines.by_ref() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["open", "'vol':", count] => open = Some(count.parse()?),
            ["list", "of", "sessions"] => break,
            _ => {}
        }
    }
    let (head, counts) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let heads: Vec<&str> = head.split_whitespace().take(4).collect();
    check!(heads == ["adds", "removals", "cpu", "hits"], "no table of hits:\n{text}");
    let counts: Vec<&str> = counts.split_whitespace().collect();
    let [adds, removals, cpu_hits, ..] = counts[..] else { fail!("an empty table:\n{text}") };
    let Some(open) = open else { fail!("no export:\n{text}") };
    let (adds, removals) = (adds.parse()?, removals.parse()?);
    Ok(Page { open, adds, removals, cpu_hits: cpu_hits.parse()? })
}

/// Asks for a page and waits for it.
fn ask(server: &mut Server) -> Res<Page> {
    let before = pages(&server.log())?.len();
    server.show();
    let found = wait_until(|| match pages(&server.log()) {
        Ok(mut pages) if pages.len() > before => pages.pop().map(Ok),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    found.unwrap_or_else(|| fail!("nothing was shown:\n{}", tail(&server.log(), 20)))
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

/// Every session is counted on the page, those with an export too; and none any more once it is gone.
fn shows(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend, &[])?;
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
            let page = ask(server)?;
            // On a busy machine the time for the handshake may be over before the page is made.
            let may_be_gone = u64::from(began.elapsed() >= HANDSHAKE);
            let known = 23 - may_be_gone..=23;
            let counts = page.open == 22 && known.contains(&(page.adds - page.removals));
            check!(counts, "counts: {page:?}");
        }
        Ok(())
    })?;
    drop(early);
    clients.into_iter().try_for_each(Client::disconnect)?;
    let gone = wait_until(|| {
        ask(&mut server).ok().filter(|page| page.open == 0 && page.adds == page.removals)
    });
    let Some(page) = gone else { fail!("some are left:\n{}", tail(&server.log(), 20)) };
    check!((page.open, page.adds, page.removals) == (0, 23, 23), "{page:?}");
    check!((0.0..=100.0).contains(&page.cpu_hits), "{page:?}");
    server.still_serves()?;
    server.stop()
}

/// However often the signal comes, clients are served; and the last one is answered.
fn flood(lab: &Lab) -> Res {
    let mut server = start(lab, Backend::Threads, &[])?;
    beside_readers(&mut server, |server| {
        for _ in 0..2000 {
            server.show();
        }
        ask(server)
    })?;
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
