//! The server's statistics for Prometheus: its text format, by HTTP on a Unix socket.
//!
//! ```text
//!  curl --unix-socket PATH http://localhost/metrics
//! ```
//!
//! One thread accepts clients, and each client has a thread of its own. At [`AT_ONCE`] clients a new one takes the
//! place of the oldest that has not asked or, if all have, of the oldest. So silent clients do not delay others. The
//! socket is created and removed like that of `--socket`.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use socket2::Socket;
use tracing::{debug, warn};

use crate::diagnostics;
use crate::listeners::{ListenError, SocketFile, listen_unix};
use crate::registry::{by_export, by_name};
use crate::waits;
use crate::worker::{Inbox, Message, Shared, WorkerReport};

/// Most clients at a time.
const AT_ONCE: usize = 64;
/// Longest request that is read. Browsers send less.
const LONGEST: usize = 16 << 10;

/// After a failure no client is accepted for a while: usually the process is out of descriptors.
const PAUSE: Duration = Duration::from_secs(1);

/// Asks the workers for their figures.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) workers: Vec<Inbox>,
    pub(crate) shared: Shared,
    /// How long to wait for the reports of the workers.
    pub(crate) patience: Duration,
}

impl Reporter {
    /// Asks every worker for its figures and waits for them. Leaves out workers that have ended or
    /// do not answer within the patience, so that a hanging worker does not block the caller.
    pub(crate) fn reports(&self) -> Vec<WorkerReport> {
        let (sender, receiver) = mpsc::channel();
        for inbox in &self.workers {
            inbox.send(Message::Report(sender.clone()));
        }
        drop(sender);
        let since = Instant::now();
        let left = || self.patience.saturating_sub(since.elapsed());
        std::iter::from_fn(|| receiver.recv_timeout(left()).ok()).collect()
    }
}

/// The thread that serves the metrics. Dropping this stops it.
pub(crate) struct Metrics {
    listener: Socket,
    thread: Option<thread::JoinHandle<()>>,
    _file: SocketFile,
}

impl Metrics {
    pub(crate) fn start(path: &Path, reporter: Reporter) -> Result<Self, ListenError> {
        let (listener, file) = listen_unix(path, 0o600, None)?;
        listener.set_nonblocking(false)?;
        let accepts = UnixListener::from(OwnedFd::from(listener.try_clone()?));
        let run = move || serve(&accepts, &|| text(&reporter));
        let thread = thread::Builder::new().name("metrics".into()).spawn(run)?;
        Ok(Self { listener, thread: Some(thread), _file: file })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        let _ = self.listener.shutdown(Shutdown::Both); // ends the accept
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            warn!("a thread of the metrics panicked");
        }
    }
}

/// Accepts clients until the listener is shut down.
fn serve(listener: &UnixListener, page: &(impl Fn() -> String + Sync)) {
    // The oldest is the first.
    let mut clients = VecDeque::<Weak<Client>>::new();
    thread::scope(|scope| {
        loop {
            let accepted = match listener.accept() {
                Err(error) if error.kind() == ErrorKind::InvalidInput => break, // shut down
                accepted => accepted,
            };
            clients.retain(|client| client.strong_count() > 0);
            let served = accepted.and_then(|(stream, _)| {
                if clients.len() == AT_ONCE {
                    let silent = clients.iter().position(|client| !has_asked(client));
                    clients.remove(silent.unwrap_or(0)).iter().for_each(close);
                }
                // Closed with the end of its thread.
                let its = Arc::new(Client { stream, has_asked: false.into() });
                clients.push_back(Arc::downgrade(&its));
                // The hook has counted and logged a panic. Uncaught, it would also panic the scope.
                let run = move || {
                    let answered = catch_unwind(AssertUnwindSafe(|| its.answer(page)));
                    if let Ok(Err(error)) = answered {
                        debug!(%error, "a client of the metrics was not answered");
                    }
                };
                thread::Builder::new().name("metrics".into()).spawn_scoped(scope, run).map(drop)
            });
            if let Err(error) = served {
                warn!(%error, "cannot accept a client of the metrics");
                thread::sleep(PAUSE);
            }
        }
        clients.iter().for_each(close);
    });
}

struct Client {
    stream: UnixStream,
    /// The request was received completely. Ordering: Relaxed, all; a hint.
    has_asked: AtomicBool,
}

/// Ends the thread of a client, which finds the end of its input.
fn close(client: &Weak<Client>) {
    // Fails if the client has closed it.
    let _ = client.upgrade().map(|client| client.stream.shutdown(Shutdown::Both));
}

fn has_asked(client: &Weak<Client>) -> bool {
    client.upgrade().is_some_and(|client| client.has_asked.load(Ordering::Relaxed))
}

impl Client {
    /// Receives a request within [`waits::METRICS`], and sends the response within it.
    fn answer(&self, page: impl FnOnce() -> String) -> io::Result<()> {
        let mut stream = &self.stream;
        // If no time is left, setting the timeout fails, because it is zero.
        let left = |since: Instant| Some(waits::METRICS.saturating_sub(since.elapsed()));
        let (mut request, mut bytes, since) = (Vec::new(), [0; 4096], Instant::now());
        while !is_whole(&request) && request.len() < LONGEST {
            stream.set_read_timeout(left(since))?;
            match stream.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => request.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.has_asked.store(is_whole(&request), Ordering::Relaxed);
        let response = respond(&request, page);
        let since = Instant::now();
        // The kernel applies the timeout to each of its buffers, so each write fills at most one.
        for part in response.chunks(4096) {
            stream.set_write_timeout(left(since))?;
            stream.write_all(part)?;
        }
        Ok(())
    }
}

/// Returns whether the head of a request is complete: an empty line ends it.
fn is_whole(request: &[u8]) -> bool {
    request.windows(4).any(|four| four == b"\r\n\r\n")
        || request.windows(2).any(|two| two == b"\n\n")
}

/// Returns the response to a request.
fn respond(request: &[u8], page: impl FnOnce() -> String) -> Vec<u8> {
    let line = request.split(|&byte| byte == b'\r' || byte == b'\n').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).unwrap_or_default().split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let sane = is_whole(request) && version.is_some_and(|version| version.starts_with("HTTP/1."));
    let path = target.and_then(|target| target.split('?').next());
    let (status, body) = match (sane, method, path) {
        (false, ..) => ("400 Bad Request", "this is no HTTP request\n".into()),
        (true, Some("GET" | "HEAD"), Some("/metrics" | "/")) => ("200 OK", page()),
        (true, Some("GET" | "HEAD"), _) => ("404 Not Found", "there is /metrics only\n".into()),
        _ => ("405 Method Not Allowed", "GET and HEAD only\n".into()),
    };
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let mut response = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    if method != Some("HEAD") {
        response += &body;
    }
    response.into_bytes()
}

/// A page in the text format of Prometheus.
struct Page(String);

impl Page {
    /// Adds a metric, with one value per value of `label`, or a single value if `label` is empty.
    /// It is a counter if its name ends in `_total`, otherwise a gauge.
    fn metric<'a, V: Display>(
        &mut self,
        (name, label): (&str, &str),
        help: &str,
        values: impl IntoIterator<Item = (&'a str, V)>,
    ) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        self.0 += &format!("# HELP offlock_nbd_{name} {help}\n# TYPE offlock_nbd_{name} {kind}\n");
        for (of, value) in values {
            self.0 += &match label {
                "" => format!("offlock_nbd_{name} {value}\n"),
                label => format!("offlock_nbd_{name}{{{label}=\"{}\"}} {value}\n", escaped(of)),
            };
        }
    }

    fn one(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric((name, ""), help, [("", value)]);
    }
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Returns the page with all metrics. The counters start at zero when the server starts.
pub(crate) fn text(reporter: &Reporter) -> String {
    let workers = reporter.reports();
    let Shared { exports, connections, registry } = &reporter.shared;
    let sum = |figure: fn(&WorkerReport) -> u64| workers.iter().map(figure).sum::<u64>();
    let mut page = Page(String::new());
    page.one("workers", "Worker threads that serve connections.", workers.len());
    page.one("connections", "Open connections of clients.", connections.stats().live);
    let dropped = "Lines of the log that were dropped because standard error did not take them.";
    page.one("log_dropped_total", dropped, diagnostics::dropped());
    let open = by_export(registry, exports);
    let open = open.iter().map(|(name, open)| (&**name, open));
    page.metric(("export_connections", "export"), "Connections that have this export open.", open);
    let panics = "Panics of the server's code. Each is in the log.";
    page.one("panics_total", panics, diagnostics::panics());
    let failed = exports.blocks.failed();
    let failed = failed.iter().map(|name| (&**name, 1));
    let help = "1 for an image that takes no changes any more, because its code panicked.";
    page.metric(("image_failed", "export"), help, failed);

    // A counter that goes down for a while would pass for a restart.
    if workers.len() == reporter.workers.len() {
        let types = [
            ("read", sum(|worker| worker.counters.reads)),
            ("write", sum(|worker| worker.counters.writes)),
            ("flush", sum(|worker| worker.counters.flushes)),
            ("other", sum(|worker| worker.counters.other)),
        ];
        page.metric(("requests_total", "type"), "Accepted requests of clients, by type.", types);
        let read = sum(|worker| worker.counters.read_bytes);
        let written = sum(|worker| worker.counters.written_bytes);
        let bytes = [("read", read), ("written", written)];
        page.metric(("bytes_total", "direction"), "Bytes of read and write requests.", bytes);
        let hits = sum(|worker| worker.counters.hits);
        page.one("read_hits_total", "Reads that were answered from the cache.", hits);
        let errors = sum(|worker| worker.counters.errors);
        page.one("errors_total", "Requests of clients that were refused or failed.", errors);
        let failures = sum(|worker| worker.counters.failures);
        let help = "Requests that failed because of an error of an image.";
        page.one("image_errors_total", help, failures);
        let accepted = sum(|worker| worker.engine.accepted);
        page.one("engine_requests_total", "I/O requests that the engines accepted.", accepted);
        let completed = sum(|worker| worker.engine.completed);
        page.one("engine_completed_total", "I/O requests that the engines completed.", completed);
        let submissions = sum(|worker| worker.engine.submissions);
        let help = "Submissions of I/O requests to the kernel.";
        page.one("engine_submissions_total", help, submissions);
    }

    if let Some(cache) = exports.blocks.stats() {
        let gets = [("hit", cache.hits), ("miss", cache.misses), ("busy", cache.busy)];
        page.metric(("cache_gets_total", "result"), "Lookups of blocks in the cache.", gets);
        let dirty = "Bytes of cached blocks not written to an image yet.";
        for (name, help, value) in [
            ("evictions_total", "Blocks that were evicted from the cache.", cache.evictions),
            ("blocks_read_total", "Blocks that the cache read from images.", cache.reads),
            ("blocks_written_total", "Blocks that the cache wrote to images.", cache.written),
            ("syncs_total", "Syncs of images to stable storage.", cache.syncs),
            ("bytes", "Bytes of memory that cached blocks use.", cache.bytes as u64),
            ("dirty_bytes", dirty, cache.dirty as u64),
            ("capacity_bytes", "Capacity of the cache in bytes.", cache.capacity as u64),
        ] {
            page.one(&format!("cache_{name}"), help, value);
        }
    }

    let waiting = sum(|worker| worker.waiting as u64);
    page.one("waiting", "Requests that wait until their worker may start them.", waiting);
    let begun = by_name(workers.iter().flat_map(|worker| worker.begun.iter().cloned()));
    let begun = begun.iter().map(|(name, begun)| (&**name, begun));
    page.metric(("in_flight", "export"), "Requests in progress, by image.", begun);
    #[cfg(feature = "objects")]
    for (nr, (name, help)) in crate::volume::Requests::FIGURES.into_iter().enumerate() {
        let values =
            exports.volumes().map(|(name, volume)| (name, volume.requests().figures()[nr]));
        page.metric((name, "export"), help, values);
    }
    page.0
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn said(request: &str) -> String {
        String::from_utf8(respond(request.as_bytes(), || "x 1\n".into())).unwrap()
    }

    #[test]
    fn requests_are_answered_by_their_first_line() {
        for (request, status, body) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200 OK", "x 1\n"),
            ("GET /metrics?all=1 HTTP/1.0\n\n", "200 OK", "x 1\n"),
            ("GET / HTTP/1.0\r\n\r\n", "200 OK", "x 1\n"),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK", ""),
            ("GET /metricsx HTTP/1.1\r\n\r\n", "404 Not Found", "there is /metrics only\n"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed", "GET and HEAD only\n"),
            ("GET /metrics HTTP/1.1\r\n", "400 Bad Request", "this is no HTTP request\n"),
            ("GET /metrics\r\n\r\n", "400 Bad Request", "this is no HTTP request\n"),
            ("\r\n\r\n", "400 Bad Request", "this is no HTTP request\n"),
            ("", "400 Bad Request", "this is no HTTP request\n"),
        ] {
            let said = said(request);
            let (head, found) = said.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(&format!("HTTP/1.0 {status}\r\n")), "{request:?}: {head}");
            assert_eq!(found, body, "{request:?}");
            assert_eq!(head.contains("Allow:"), status.starts_with("405"));
            assert!(body.is_empty() || head.contains(&format!("Content-Length: {}", body.len())));
        }
    }

    const ASKED: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

    /// Serves a page while `clients` runs.
    fn serving<T>(
        page: impl Fn() -> String + Sync,
        clients: impl FnOnce(&dyn Fn() -> UnixStream) -> T,
    ) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let stop = Socket::from(listener.try_clone().unwrap());
        thread::scope(|scope| {
            let server = scope.spawn(|| serve(&listener, &page));
            let done = clients(&|| UnixStream::connect(&path).unwrap());
            stop.shutdown(Shutdown::Both).unwrap();
            server.join().expect("the thread that accepts panicked, too");
            done
        })
    }

    fn answered(mut stream: UnixStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_crowd_displaces_no_client_that_has_asked() {
        let (is_asked, asked) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (is_asked, may_go_on) = (Mutex::new(is_asked), Mutex::new(may_go_on));
        let page = || {
            is_asked.lock().unwrap().send(()).unwrap();
            let _ = may_go_on.lock().unwrap().recv();
            "x 1\n".into()
        };
        let (displaced, text) = serving(page, |connect| {
            let mut first = connect();
            first.write_all(ASKED).unwrap();
            asked.recv().unwrap();
            let mut crowd: Vec<_> = (0..2 * AT_ONCE).map(|_| connect()).collect();
            let displaced = answered(crowd.swap_remove(0));
            drop(go_on);
            (displaced, answered(first))
        });
        assert_eq!(displaced, "");
        assert!(text.ends_with("x 1\n"), "{text:?}");
    }

    #[test]
    fn a_panic_of_a_client_is_one_panic() {
        let text = serving(
            || panic!("of a test"),
            |connect| {
                let mut client = connect();
                client.write_all(ASKED).unwrap();
                answered(client)
            },
        );
        assert_eq!(text, "");
    }

    /// Each of its reads is in time, and all together take longer.
    #[test]
    fn a_client_that_reads_slowly_is_closed() {
        let (ours, mut its) = UnixStream::pair().unwrap();
        its.write_all(ASKED).unwrap();
        let client = Client { stream: ours, has_asked: false.into() };
        let answered = thread::spawn(move || client.answer(|| "x".repeat(2 << 20)));
        while !answered.is_finished() {
            let _ = its.read_exact(&mut [0; 4096]); // the end may come first
            thread::sleep(Duration::from_millis(50));
        }
        let error = answered.join().unwrap().expect_err("it was answered");
        assert!(error.kind() != ErrorKind::BrokenPipe, "{error}");
    }

    #[test]
    fn labels_are_escaped() {
        let mut page = Page(String::new());
        page.metric(("a", "export"), "Help.", [("a\\b\"c\nd", 1)]);
        let wanted = "# HELP offlock_nbd_a Help.\n# TYPE offlock_nbd_a gauge\n\
                      offlock_nbd_a{export=\"a\\\\b\\\"c\\nd\"} 1\n";
        assert_eq!(page.0, wanted);
    }
}
