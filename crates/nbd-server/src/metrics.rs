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
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::{debug, error, warn};

use crate::diagnostics;
use crate::listeners::{Access, ListenError, SocketFile, listen_unix};
use crate::notifier::{eventfd, notify};
use crate::report::{Reporter, ServerReport};
use crate::requests::Counters;
use crate::waits;

/// Most clients at a time.
const AT_ONCE: usize = 64;
/// Longest request that is read. Browsers send less.
const LONGEST: usize = 16 << 10;

/// The thread that serves the metrics. Dropping this stops it.
pub(crate) struct Metrics {
    stop: Arc<OwnedFd>,
    thread: Option<thread::JoinHandle<()>>,
    _file: SocketFile,
}

impl Metrics {
    pub(crate) fn start(path: &Path, reporter: Reporter) -> Result<Self, ListenError> {
        let (socket, file) = listen_unix(path, Access::OWNER)?;
        let listener = UnixListener::from(OwnedFd::from(socket));
        let stop = eventfd()?;
        let stopped = Arc::clone(&stop);
        let run = move || {
            if let Err(error) = serve(&listener, &stopped, &|| text(&reporter.report())) {
                error!(%error, "the metrics are no longer served");
            }
        };
        let thread = thread::Builder::new().name("metrics".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread), _file: file })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        notify(&self.stop);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            warn!("a thread of the metrics panicked");
        }
    }
}

/// Accepts clients until `stop` is readable.
fn serve(
    listener: &UnixListener,
    stop: &OwnedFd,
    page: &(impl Fn() -> String + Sync),
) -> Result<(), Errno> {
    // After a failure no client is accepted for a while: usually the process is out of descriptors.
    let pause = Timespec::try_from(waits::METRICS).unwrap_or_default(); // it fits
    thread::scope(|scope| {
        // The oldest is the first.
        let mut clients = VecDeque::<(Weak<Client>, thread::ScopedJoinHandle<'_, ()>)>::new();
        let ended = loop {
            let mut polled = [stop.as_fd(), listener.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut polled, None) {
                Err(Errno::INTR) => continue,
                Err(error) => break Err(error),
                Ok(_) if !polled[0].revents().is_empty() => break Ok(()),
                Ok(_) => {}
            }
            clients.retain(|(_, thread)| !thread.is_finished());
            let accepted = match listener.accept() {
                // Here, because the failure of a spawn, after which there is a pause, has the same kind.
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                accepted => Some(accepted.and_then(|(stream, _)| {
                    if clients.len() == AT_ONCE {
                        let silent = clients.iter().position(|(one, _)| !has_asked(one));
                        clients.remove(silent.unwrap_or(0)).iter().for_each(|(one, _)| close(one));
                    }
                    // Closed with the end of its thread.
                    let its = Arc::new(Client { stream, has_asked: false.into() });
                    let client = Arc::downgrade(&its);
                    // A panic is counted and in the log; the scope would add its own.
                    let run = move || {
                        let answered = catch_unwind(AssertUnwindSafe(|| its.answer(page)));
                        if let Ok(Err(error)) = answered {
                            debug!(%error, "a client of the metrics was not answered");
                        }
                    };
                    let thread = thread::Builder::new().name("metrics".into());
                    Ok((client, thread.spawn_scoped(scope, run)?))
                })),
            };
            match accepted {
                Some(Ok(client)) => clients.push_back(client),
                Some(Err(error)) => {
                    warn!(%error, "cannot accept a client of the metrics");
                    let _ = poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&pause));
                }
                None => {}
            }
        };
        clients.iter().for_each(|(one, _)| close(one));
        ended
    })
}

struct Client {
    stream: UnixStream,
    /// Its request is whole. Ordering: Relaxed, all; a hint.
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
        // No time left is an error of what sets it.
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
        // The kernel takes the time for each of its buffers, so a write is of one.
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
fn text(report: &ServerReport) -> String {
    let mut page = Page(String::new());
    page.one("workers", "Worker threads that serve connections.", report.workers);
    page.one("connections", "Open connections of clients.", report.connections);
    let dropped = "Lines of the log that were dropped because standard error did not take them.";
    page.one("log_dropped_total", dropped, diagnostics::dropped());
    let open = report.open.iter().map(|(name, open)| (&**name, open));
    page.metric(("export_connections", "export"), "Connections that have this export open.", open);
    let panics = "Panics of the server's code. Each is in the log.";
    page.one("panics_total", panics, diagnostics::panics());
    let failed = report.failed.iter().map(|name| (&**name, 1));
    let help = "1 for an image that takes no changes any more, because its code panicked.";
    page.metric(("image_failed", "export"), help, failed);
    requests(&mut page, &report.counters);
    cache(&mut page, report);
    engines(&mut page, report);
    #[cfg(feature = "objects")]
    for (nr, (name, help)) in crate::volume::Requests::FIGURES.into_iter().enumerate() {
        let values = report.volumes.iter().map(|(export, figures)| (&**export, figures[nr]));
        page.metric((name, "export"), help, values);
    }
    page.0
}

fn requests(page: &mut Page, counters: &Counters) {
    let Counters { reads, read_bytes, hits, writes, written_bytes, flushes, .. } = *counters;
    let Counters { other, errors, failures, .. } = *counters;
    let types = [("read", reads), ("write", writes), ("flush", flushes), ("other", other)];
    page.metric(("requests_total", "type"), "Accepted requests of clients, by type.", types);
    let bytes = [("read", read_bytes), ("written", written_bytes)];
    page.metric(("bytes_total", "direction"), "Bytes of read and write requests.", bytes);
    page.one("read_hits_total", "Reads that were answered from the cache.", hits);
    page.one("errors_total", "Requests of clients that were refused or failed.", errors);
    let failed = "Requests that failed because of an error of an image.";
    page.one("image_errors_total", failed, failures);
}

fn cache(page: &mut Page, report: &ServerReport) {
    let Some(cache) = &report.cache else { return };
    let gets = [("hit", cache.hits), ("miss", cache.misses), ("busy", cache.busy)];
    page.metric(("cache_gets_total", "result"), "Lookups of blocks in the cache.", gets);
    for (name, help, value) in [
        ("evictions_total", "Blocks that were evicted from the cache.", cache.evictions),
        ("blocks_read_total", "Blocks that the cache read from images.", cache.reads),
        ("blocks_written_total", "Blocks that the cache wrote to images.", cache.written),
        ("syncs_total", "Syncs of images to stable storage.", cache.syncs),
        ("bytes", "Bytes of memory that cached blocks use.", cache.bytes as u64),
        ("dirty_bytes", "Bytes of cached blocks not written to an image yet.", cache.dirty as u64),
        ("capacity_bytes", "Capacity of the cache in bytes.", cache.capacity as u64),
    ] {
        page.one(&format!("cache_{name}"), help, value);
    }
}

fn engines(page: &mut Page, report: &ServerReport) {
    if let Some(engine) = &report.engine {
        for (name, help, value) in [
            ("requests_total", "I/O requests that the engines accepted.", engine.accepted),
            ("completed_total", "I/O requests that the engines completed.", engine.completed),
            ("submissions_total", "Submissions of I/O requests to the kernel.", engine.submissions),
        ] {
            page.one(&format!("engine_{name}"), help, value);
        }
    }
    page.one("waiting", "Requests that wait until their worker may start them.", report.waiting);
    let begun = report.begun.iter().map(|(name, begun)| (&**name, begun));
    page.metric(("in_flight", "export"), "Requests in progress, by image.", begun);
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

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

    /// Serves a page while `clients` runs, and returns what [`serve`] did.
    fn serving<T>(
        page: impl Fn() -> String + Sync,
        clients: impl FnOnce(&dyn Fn() -> UnixStream) -> T,
    ) -> (thread::Result<Result<(), Errno>>, T) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let stop = eventfd().unwrap();
        thread::scope(|scope| {
            let server = scope.spawn(|| serve(&listener, &stop, &page));
            let done = clients(&|| UnixStream::connect(&path).unwrap());
            notify(&stop);
            (server.join(), done)
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
        let (served, (displaced, text)) = serving(page, |connect| {
            let mut first = connect();
            first.write_all(ASKED).unwrap();
            asked.recv().unwrap();
            let mut crowd: Vec<_> = (0..2 * AT_ONCE).map(|_| connect()).collect();
            let displaced = answered(crowd.swap_remove(0));
            drop(go_on);
            (displaced, answered(first))
        });
        assert_eq!((served.unwrap(), displaced.as_str()), (Ok(()), ""));
        assert!(text.ends_with("x 1\n"), "{text:?}");
    }

    #[test]
    fn a_panic_of_a_client_is_one_panic() {
        let (served, text) = serving(
            || panic!("of a test"),
            |connect| {
                let mut client = connect();
                client.write_all(ASKED).unwrap();
                answered(client)
            },
        );
        assert_eq!(text, "");
        assert!(served.is_ok(), "the thread that accepts panicked, too");
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
