//! Standard error and standard output, which may take nothing: the pipe of a log that is not read
//! is full at some time, and a terminal can be stopped.
//!
//! ```text
//!  any thread ─► a queue, or a count of dropped lines if it is full ─► one thread ─► standard error
//! ```
//!
//! No other thread writes to standard error, so the log stops neither a worker, nor the main thread
//! that accepts connections, nor the end of the server.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::PanicHookInfo;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tracing::warn;

use crate::waits;

/// Most lines in the queue: a burst of connections.
const MOST: usize = 1024;

/// Lines that were dropped since the server started.
static DROPPED: AtomicU64 = AtomicU64::new(0);
/// Panics since the server started, also those that a crate turned into an error of a request.
static PANICS: AtomicU64 = AtomicU64::new(0);

enum Entry {
    Text(Vec<u8>),
    /// Everything before it was written.
    Flush(Sender<()>),
}

/// The log: standard error. A write never blocks, and never fails.
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = Entry::Text(bytes.to_vec());
        if QUEUE.as_ref().is_none_or(|queue| queue.try_send(text).is_err()) {
            // Ordering: Relaxed, all; a count that publishes nothing.
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The queue of the thread that writes the log, which the first use starts. `None` if the system has no
/// thread for it.
static QUEUE: LazyLock<Option<SyncSender<Entry>>> = LazyLock::new(|| {
    let (sender, receiver) = mpsc::sync_channel(MOST);
    let spawned = thread::Builder::new().name("log".into()).spawn(move || run(&receiver));
    spawned.ok().map(|_| sender)
});

fn run(queue: &Receiver<Entry>) {
    let stderr = io::stderr();
    let mut told = 0;
    for entry in queue {
        match entry {
            Entry::Text(text) => {
                #[cfg(feature = "objects")]
                let text = crate::volume::without_credentials(text);
                write(stderr.as_fd(), &text).unwrap_or_default(); // it may be closed
            }
            Entry::Flush(done) => drop(done.send(())), // its sender may have given up
        }
        let dropped = dropped();
        if dropped > told {
            let lines = dropped - told;
            let note =
                format!("{lines} lines were dropped here: standard error did not take them\n");
            write(stderr.as_fd(), note.as_bytes()).unwrap_or_default();
            told = dropped;
        }
    }
}

/// Returns the number of dropped lines since the server started.
pub(crate) fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Returns the number of panics since the server started.
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Waits until the log is written, or for a second if standard error takes nothing.
pub(crate) fn flush() {
    let Some(queue) = &*QUEUE else { return };
    let (done, written) = mpsc::channel();
    let since = Instant::now();
    let mut entry = Entry::Flush(done);
    while let Err(TrySendError::Full(refused)) = queue.try_send(entry) {
        if since.elapsed() >= waits::OUTPUT {
            return;
        }
        entry = refused;
        thread::sleep(Duration::from_millis(1));
    }
    let _ = written.recv_timeout(waits::OUTPUT.saturating_sub(since.elapsed())); // then without it
}

/// Writes to standard output on a thread of its own, and waits a second for it. If the output takes
/// nothing for that long, the server goes on without it.
pub(crate) fn print(text: String) -> io::Result<()> {
    let (done, result) = mpsc::channel();
    let print = move || done.send(write(io::stdout().as_fd(), text.as_bytes()));
    thread::Builder::new().name("stdout".into()).spawn(print)?;
    result.recv_timeout(waits::OUTPUT).unwrap_or_else(|_| {
        warn!("standard output takes nothing");
        Ok(())
    })
}

/// Writes all bytes. Waits if the descriptor takes none now, even if it is non-blocking.
fn write(to: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                rustix::event::poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Has panics counted, and reported by the log, because the standard hook blocks while standard
/// error takes nothing. A panic of the main thread ends the process, so that thread waits until its
/// report is written, as [`flush`] does.
pub(crate) fn report_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let _ = LogWriter.write(describe(info).as_bytes()); // never fails
        if thread::current().name() == Some("main") {
            flush();
        }
    }));
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let thread = thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let payload = info.payload();
    let reason = payload.downcast_ref::<&str>().copied();
    let reason = reason.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let reason = reason.unwrap_or("no message");
    let mut text = format!("thread '{name}' panicked at {place}:\n{reason}\n");
    let trace = Backtrace::capture(); // if RUST_BACKTRACE asks for it
    if trace.status() == BacktraceStatus::Captured {
        text += &trace.to_string();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_described_with_its_thread_and_place() {
        let (sender, receiver) = mpsc::channel();
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| drop(sender.send(describe(info)))));
        let thread = thread::Builder::new().name("it".into()).spawn(|| panic!("for a test"));
        assert!(thread.unwrap().join().is_err());
        std::panic::set_hook(hook);
        let text = receiver.into_iter().find(|text| text.contains("thread 'it'")).unwrap();
        assert!(text.contains("diagnostics.rs:") && text.contains("for a test"), "{text}");
    }

    #[test]
    fn a_write_waits_for_a_full_pipe_and_passes_all_bytes() {
        let (mut reader, writer) = io::pipe().unwrap();
        let flags = rustix::fs::fcntl_getfl(&writer).unwrap() | rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&writer, flags).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(|at| (at / 7) as u8).collect();
        let expected = bytes.clone();
        let thread = thread::spawn(move || write(writer.as_fd(), &bytes));
        let mut found = Vec::new();
        io::Read::read_to_end(&mut reader, &mut found).unwrap();
        assert!(thread.join().unwrap().is_ok() && found == expected);
    }

    /// The variable that makes [`child_that_panics`] the process of a test.
    const CHILD: &str = "OFFLOCK_TEST_PANICS";

    /// A process whose main thread panics and ends, while standard error is full.
    #[test]
    fn child_that_panics() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        report_panics();
        let _ = LogWriter.write(&[b'.'; 1 << 20]);
        let thread = thread::Builder::new().name("main".into()).spawn(|| panic!("the last line"));
        assert!(thread.unwrap().join().is_err());
        std::process::exit(3);
    }

    #[test]
    fn a_panic_of_the_main_thread_is_written_before_the_process_ends() {
        use std::process::{Command, Stdio};

        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "diagnostics::tests::child_that_panics"]).env(CHILD, "1");
        let child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(Duration::from_millis(100)); // so that the pipe is full when the thread panics
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3));
        assert!(text.contains("the last line"), "{} bytes", text.len());
    }
}
