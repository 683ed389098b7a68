//! Errors and short transfers of real system calls, injected by strace. The results and the bytes
//! must be correct in spite of them.
//!
//! Each case runs [`child`], or another test that is ignored, in its own process under strace. If there is no strace, or tracing is
//! forbidden, the tests print that and are skipped.
#![cfg(not(offlock_model))]

#[path = "common/readable.rs"]
mod readable;

use std::env;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use aio_reap::{AlignedBuf, BackendKind, Engine};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 6;

/// One injection.
struct Case<'a> {
    backend: &'a str,
    /// The system call, and the change that strace makes.
    inject: &'a str,
    /// Whether strace changes only calls that name the file.
    by_path: bool,
    /// The errors that requests end with, and their numbers.
    failed: &'a [(i32, usize)],
    /// The parts that strace's log must contain, in this order.
    log: &'a [&'a str],
}

fn strace_works() -> bool {
    let works = Command::new("strace").args(["-qq", "-o", "/dev/null", "true"]).status();
    let works = works.is_ok_and(|status| status.success());
    if !works {
        assert!(env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "strace does not work here");
        eprintln!("skipped: strace does not work here");
    }
    works
}

impl Case<'_> {
    fn run(&self) {
        self.run_child("child");
    }

    fn run_child(&self, child: &str) {
        if !strace_works() {
            return;
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (file, log) = (dir.path().join("file"), dir.path().join("log"));
        // The bytes are in the file before, because a write that strace makes short moves no bytes.
        fs::write(&file, content().concat()).unwrap();
        let call = self.inject.split(':').next().unwrap();
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-s", "0", "-o"]).arg(&log);
        strace.arg("-e").arg(format!("trace={call}"));
        strace.arg("-e").arg(format!("inject={}", self.inject));
        if self.by_path {
            strace.arg("-P").arg(&file);
        }
        strace.arg(env::current_exe().unwrap());
        strace.args(["--exact", child, "--ignored", "--nocapture"]);
        strace.env("INJECTED_FILE", &file).env("INJECTED_BACKEND", self.backend);
        let output = strace.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let log = fs::read_to_string(&log).unwrap();
        let context = format!("{} on {}:\n{said}\n{log}", self.inject, self.backend);
        assert!(output.status.success(), "{context}\n{}", String::from_utf8_lossy(&output.stderr));
        if said.contains("refused:") {
            assert!(env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "{context}");
            eprintln!("skipped: {} is refused", self.backend);
            return;
        }
        let mut failed: Vec<&str> = said.lines().filter(|line| line.contains("failed:")).collect();
        for &(errno, times) in self.failed {
            let line = format!("failed: {errno}");
            let before = failed.len();
            failed.retain(|said| !said.ends_with(&line));
            assert_eq!(before - failed.len(), times, "{context}");
        }
        assert!(failed.is_empty(), "{context}");
        let mut rest = &log[..];
        for part in self.log {
            let at = rest.find(part).unwrap_or_else(|| panic!("no {part} there: {context}"));
            rest = &rest[at + part.len()..];
        }
        assert_eq!(fs::read(&file).unwrap(), content().concat(), "{context}");
    }
}

fn uring<'a>(inject: &'a str, log: &'a [&'a str]) -> Case<'a> {
    Case { backend: "io_uring", inject, by_path: false, failed: &[], log }
}

/// Returns the content of a block.
fn content() -> Vec<Vec<u8>> {
    (1..=BLOCKS as u8).map(|byte| vec![byte; BLOCK]).collect()
}

/// Returns the engine and the file of a test that strace runs, or `None` in any other run.
fn traced() -> Option<(Engine, PathBuf)> {
    let path = env::var_os("INJECTED_FILE")?;
    let kind = match env::var("INJECTED_BACKEND").unwrap().as_str() {
        "io_uring" => BackendKind::Uring,
        "aio" => BackendKind::Aio,
        _ => BackendKind::Threads,
    };
    let built = Engine::builder().backend(kind).threads(1).build();
    built.map_err(|error| println!("refused: {error}")).ok().map(|engine| (engine, path.into()))
}

/// Writes each block and reads it back, one request at a time, and syncs the file in the end. Prints the
/// errors.
#[test]
#[ignore = "what the other tests trace"]
fn child() {
    let Some((engine, path)) = traced() else { return };
    let open = |flags| {
        let mut options = fs::File::options();
        options.read(true).write(true).custom_flags(flags).open(&path)
    };
    let direct = if engine.backend() == BackendKind::Aio { libc::O_DIRECT } else { 0 };
    let Ok(file) = open(direct) else { return println!("refused: O_DIRECT") };
    let file = engine.attach(file).unwrap();
    for (block, bytes) in (0..).zip(content()) {
        let mut buf = AlignedBuf::zeroed(BLOCK, BLOCK);
        buf.copy_from_slice(&bytes);
        // The buffer of the read has the bytes before, because a read that strace makes short moves
        // no bytes.
        let (written, buf) =
            engine.write(&file, buf, block * BLOCK as u64).submit().unwrap().wait();
        let (read, buf) = engine.read(&file, buf, block * BLOCK as u64).submit().unwrap().wait();
        for result in [written, read] {
            match result {
                Ok(moved) => assert_eq!(moved, BLOCK),
                Err(error) => println!("\nfailed: {}", error.errno()),
            }
        }
        assert_eq!(&buf[..], &bytes[..]);
    }
    for sync in [engine.fdatasync(&file), engine.fsync(&file)] {
        if let (Err(error), _) = sync.submit().unwrap().wait() {
            println!("\nfailed: {}", error.errno());
        }
    }
    assert!(engine.validate().is_idle());
}

#[test]
fn inv12_interrupted_system_calls_are_made_again_up_to_a_limit() {
    let case = |inject: &str, failed: &[_], log: &[_]| {
        Case { backend: "threads", inject, by_path: true, failed, log }.run();
    };
    case("pwritev:error=EINTR:when=1..16", &[], &["INJECTED", "= 4096"]);
    case("preadv:error=EINTR:when=3..4", &[], &["= 4096", "INJECTED", "INJECTED", "= 4096"]);
    case("pwritev:error=EAGAIN:when=2..4", &[], &["= 4096", "INJECTED", "= 4096"]);
    // 17 in a row are more than the limit of 16 retries.
    case("pwritev:error=EINTR:when=1..17", &[(libc::EINTR, 1)], &["INJECTED", "= 4096"]);
    case("fdatasync:error=EINTR:when=1..16", &[], &["INJECTED", "= 0"]);
    case("fsync:error=EINTR:when=1..2", &[], &["INJECTED", "INJECTED", "= 0"]);
}

/// An error fails only its own request.
#[test]
fn inv03_a_failed_system_call_fails_one_request() {
    for (inject, errno) in [
        ("pwritev:error=EIO:when=2", libc::EIO),
        ("preadv:error=EIO:when=6", libc::EIO),
        ("pwritev:error=ENOSPC:when=1", libc::ENOSPC),
        // A sync that failed is not made again: the kernel tells of an error once.
        ("fdatasync:error=EIO:when=1", libc::EIO),
    ] {
        let failed: &'static [_] =
            if errno == libc::EIO { &[(libc::EIO, 1)] } else { &[(libc::ENOSPC, 1)] };
        Case { backend: "threads", inject, by_path: true, failed, log: &[] }.run();
    }
    // Linux AIO fails the request at the head of the submission.
    let (inject, failed) = ("io_submit:error=EIO:when=3..4", &[(libc::EIO, 2)]);
    Case { backend: "aio", inject, by_path: false, failed, log: &[] }.run();
}

/// A short transfer is continued where it stopped.
#[test]
fn inv11_short_system_calls_are_continued() {
    for (inject, log) in [
        ("pwritev:retval=100:when=1", ["1, 0)", "100 (INJECTED)", "1, 100)", "= 3996"]),
        ("pwritev:retval=4095:when=2", ["1, 4096)", "4095 (INJECTED)", "1, 8191)", "= 1\n"]),
        ("preadv:retval=1:when=3", ["1, 8192)", "1 (INJECTED)", "1, 8193)", "= 4095"]),
    ] {
        Case { backend: "threads", inject, by_path: true, failed: &[], log: &log }.run();
    }
}

/// If submissions and sleeps fail for a while, no request is lost, and no request fails.
#[test]
fn inv04_refused_submissions_and_sleeps_are_made_again() {
    // The first two enters of an io_uring belong to its set-up.
    let injected: &[&str] = &["(INJECTED)"];
    for (backend, inject, log) in [
        ("io_uring", "io_uring_setup:error=EINVAL:when=1..2", injected), // knows fewer flags
        ("io_uring", "io_uring_enter:error=EAGAIN:when=3..7", injected),
        ("io_uring", "io_uring_enter:error=EBUSY:when=3+3", injected),
        ("io_uring", "io_uring_enter:error=EINTR:when=3+2", injected),
        ("aio", "io_submit:error=EAGAIN:when=1..5", injected),
        ("aio", "io_submit:error=EINTR:when=2..3", injected),
        ("threads", "ppoll:error=EINTR:when=1+2", &[]), // it may not need to sleep
    ] {
        Case { backend, inject, by_path: false, failed: &[], log }.run();
    }
}

/// Cancels a read that waits for its pipe.
#[test]
#[ignore = "what another test traces"]
fn cancelling_child() {
    let Some((engine, _)) = traced() else { return };
    let (reader, _writer) = std::io::pipe().unwrap();
    let read = engine.read(&engine.attach(reader).unwrap(), vec![0], 0).submit().unwrap();
    assert!(read.cancel());
    engine.wait(Some(Duration::from_secs(60))).unwrap();
    assert!(read.is_done(), "the cancellation never reached the kernel");
    assert_eq!(read.wait().0.unwrap_err().errno(), libc::ECANCELED);
    assert!(engine.validate().is_idle());
}

/// The enter that passes a cancellation to the kernel fails.
#[test]
fn inv04_a_cancellation_without_room_is_submitted_again() {
    for inject in ["io_uring_enter:error=EAGAIN:when=3", "io_uring_enter:error=EAGAIN:when=3..8"] {
        uring(inject, &["(INJECTED)", "= 1"]).run_child("cancelling_child");
    }
}

/// Sends a no-op while a read waits for its pipe.
#[test]
#[ignore = "what another test traces"]
fn child_beside_a_slow_read() {
    let Some((engine, _)) = traced() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    let read = engine.read(&engine.attach(reader).unwrap(), vec![0], 0).submit().unwrap();
    let nop = engine.nop().submit().unwrap();
    let start = Instant::now();
    engine.wait(Some(Duration::from_secs(60))).unwrap();
    assert!(nop.is_done(), "the no-op waits for the read");
    // The delays from the second one on: 0.2, 0.4, 0.8 .. ms.
    assert!(start.elapsed() >= Duration::from_millis(50), "it does not sleep between the attempts");
    nop.wait().0.unwrap();
    drop(writer);
    assert_eq!(read.wait().0.unwrap(), 0);
    assert!(engine.validate().is_idle());
}

/// A submission that found no room is made again, although the only request in flight never completes.
#[test]
fn inv04_a_submission_is_made_again_beside_a_slow_request() {
    let inject = "io_uring_enter:error=EAGAIN:when=3..13";
    uring(inject, &["(INJECTED)", "(INJECTED)", "= 1"]).run_child("child_beside_a_slow_read");
}

/// Sleeps until a read in the kernel is done. The kernel refuses the sleep.
#[test]
#[ignore = "what another test traces"]
fn sleeping_child() {
    let Some((engine, _)) = traced() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    let read = engine.read(&engine.attach(reader).unwrap(), vec![0], 0).submit().unwrap();
    engine.turn();
    // Ends the sleep of an engine that ignores the error.
    let (ended, has_ended) = mpsc::channel::<()>();
    let later = thread::spawn(move || {
        _ = has_ended.recv_timeout(Duration::from_secs(10));
        drop(writer);
    });
    assert_eq!(engine.wait(None).unwrap_err().raw_os_error(), Some(libc::EBADFD));
    drop(ended);
    later.join().unwrap();
    assert_eq!(read.wait().0.unwrap(), 0);
    assert!(engine.validate().is_idle());
}

/// Only a transient error of a sleep is retried.
#[test]
fn a_wait_returns_the_error_of_its_sleep() {
    uring("io_uring_enter:error=EBADFD:when=3", &["= 1", "(INJECTED)"]).run_child("sleeping_child");
}

/// Looks at the engine's descriptor, which cannot watch the backend's at first.
#[test]
#[ignore = "what another test traces"]
fn watching_child() {
    let Some((engine, _)) = traced() else { return };
    assert!(readable::readable(&engine, Duration::ZERO), "no turn tries again");
    engine.turn();
    assert!(!readable::readable(&engine, Duration::ZERO), "an idle engine is readable for good");
}

/// A turn lets the engine's descriptor watch the backend's if the kernel had no room for it before.
#[test]
fn a_descriptor_that_epoll_refused_is_added_again() {
    // The first two are the kick and the timer. Linux AIO has two of its own.
    for (backend, call) in [("io_uring", 3), ("threads", 3), ("aio", 3), ("aio", 4)] {
        let inject = &format!("epoll_ctl:error=ENOSPC:when={call}");
        Case { backend, inject, by_path: false, failed: &[], log: &["(INJECTED)", "= 0"] }
            .run_child("watching_child");
    }
}
