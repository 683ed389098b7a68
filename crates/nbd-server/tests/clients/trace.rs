//! What the server does in the kernel, seen from outside: strace's log, and the io_uring trace
//! points for what strace cannot see.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::client::REQUEST_MAGIC;
use crate::lab::{Res, check, wait_until};
use crate::need::TRACEFS;

/// The words that run a command under strace. With `-D` the command keeps the pid that was
/// spawned and strace is its grandchild, so signals reach the command.
pub(crate) fn strace(log: &Path) -> Vec<String> {
    let calls = "read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg,\
                 fdatasync,fsync,pwrite64,pwritev,pwritev2,io_submit,fallocate";
    let log = log.to_str().expect("temporary paths are UTF-8");
    let words = ["strace", "-D", "-f", "-xx", "-s", "64", "-o", log, "-e"];
    words.into_iter().map(String::from).chain([format!("trace={calls}")]).collect()
}

/// strace's log of a server that has ended.
pub(crate) struct Strace(Vec<String>);

impl Strace {
    pub(crate) fn read(log: &Path) -> Res<Strace> {
        let ended = wait_until(|| {
            let text = fs::read_to_string(log).ok()?;
            let last = text.lines().last()?;
            last.contains("+++ exited with").then(|| text.lines().map(String::from).collect())
        });
        Ok(Strace(ended.ok_or("strace did not log the server's end")?))
    }

    fn position(&self, from: usize, wanted: impl Fn(&str) -> bool) -> Option<usize> {
        (from..self.0.len()).find(|&i| wanted(&self.0[i]))
    }

    /// What happened between the receipt of the request and the sending of its reply.
    pub(crate) fn between(&self, kind: u16, flags: u16, cookie: u64) -> Res<Window<'_>> {
        let request = hex(&[
            &REQUEST_MAGIC.to_be_bytes(),
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
        ]);
        let reply = hex(&[&0x6744_6698_u32.to_be_bytes(), &[0; 4], &cookie.to_be_bytes()]);
        let start = self.position(0, |l| l.contains(&request));
        let start = start.ok_or_else(|| format!("request {cookie:#x} is not in strace's log"))?;
        let end = self.position(start, |l| l.contains(&reply));
        let end = end.ok_or_else(|| format!("the reply to {cookie:#x} is not in strace's log"))?;
        Ok(Window(&self.0[start + 1..end]))
    }

    /// What a thread called from the receipt of one request, without that, to that of another. Both are
    /// named by their type and cookie.
    pub(crate) fn calls(&self, first: (u16, u64), last: (u16, u64)) -> Res<Vec<&str>> {
        let receipt = |(kind, cookie): (u16, u64)| {
            let flags = [0; 2];
            let magic = REQUEST_MAGIC.to_be_bytes();
            let wanted = hex(&[&magic, &flags, &kind.to_be_bytes(), &cookie.to_be_bytes()]);
            let found = self.position(0, |line| line.contains(&wanted));
            found.ok_or_else(|| format!("request {cookie:#x} is not in strace's log"))
        };
        let (first, last) = (receipt(first)?, receipt(last)?);
        let thread = |line: &str| line.split_whitespace().next().map(String::from);
        let worker = thread(&self.0[first]);
        check!(thread(&self.0[last]) == worker, "another thread got the last request");
        let lines = self.0[first + 1..=last].iter().filter(|line| thread(line) == worker);
        Ok(lines.filter_map(|line| called(line)).collect())
    }

    /// What happened after SIGTERM.
    pub(crate) fn after_sigterm(&self) -> Res<Window<'_>> {
        let start = self.position(0, |l| l.contains("--- SIGTERM"));
        Ok(Window(&self.0[start.ok_or("no SIGTERM in strace's log")?..]))
    }
}

/// A stretch of strace's log.
pub(crate) struct Window<'a>(&'a [String]);

impl Window<'_> {
    /// The line of the last completed sync of data, or submission of one to Linux AIO.
    pub(crate) fn last_sync(&self) -> Option<usize> {
        self.0.iter().rposition(|l| {
            let called = l.contains("fdatasync(") || l.contains("fsync(");
            let resumed = l.contains("fdatasync resumed") || l.contains("fsync resumed");
            let queued = l.contains("io_submit(") && l.contains("SYNC");
            let with_write = l.contains("RWF_DSYNC") || l.contains("RWF_SYNC");
            (called || resumed) && l.ends_with("= 0") || queued || with_write
        })
    }

    /// The line of the first write to a file.
    pub(crate) fn first_write(&self) -> Option<usize> {
        let calls = ["pwrite64(", "pwritev(", "pwritev2(", "CMD_PWRITE", "fallocate("];
        self.0.iter().position(|l| calls.iter().any(|c| l.contains(c)))
    }

    pub(crate) fn text(&self) -> String {
        self.0.join("\n")
    }
}

/// The call that a line of strace's log is about, if it is the first about it.
fn called(line: &str) -> Option<&str> {
    let (name, _) = line.split_once(' ')?.1.trim_start().split_once('(')?;
    name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_').then_some(name)
}

/// Bytes as `strace -xx` prints them.
fn hex(parts: &[&[u8]]) -> String {
    parts.concat().iter().map(|b| format!("\\x{b:02x}")).collect()
}

/// A private instance of the kernel's tracer, with the io_uring and socket events of one process.
pub(crate) struct TracePoints {
    dir: PathBuf,
    pid: u32,
    /// The threads that the server was seen to have.
    threads: RefCell<BTreeSet<String>>,
}

/// Of these, the events of the server's threads count, and of the kernel's workers `iou-wrk-<thread>` for them. The
/// server's cache begins threads when it needs them, so the events of other processes are left out afterwards.
const EVENTS: [&str; 8] = [
    "io_uring/io_uring_submit_req",
    "io_uring/io_uring_complete",
    "syscalls/sys_enter_sendto",
    "syscalls/sys_enter_sendmsg",
    "syscalls/sys_enter_writev",
    "syscalls/sys_enter_write",
    "syscalls/sys_enter_fdatasync",
    "syscalls/sys_enter_fsync",
];

impl TracePoints {
    pub(crate) fn start(pid: u32) -> Res<TracePoints> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("instances/offlock-{}-{number}", std::process::id());
        let dir = Path::new(TRACEFS).join(name);
        fs::create_dir(&dir)?;
        let points = TracePoints { dir, pid, threads: RefCell::default() };
        points.look_for_threads();
        points.set("trace_clock", "mono")?;
        points.set("buffer_size_kb", "4096")?;
        for event in EVENTS {
            points.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(points)
    }

    /// Notes the server's threads, unless it has ended.
    fn look_for_threads(&self) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return };
        let names = tasks.filter_map(|task| Some(task.ok()?.file_name().to_string_lossy().into()));
        self.threads.borrow_mut().extend(names);
    }

    /// Whether a line of the trace, `<command>-<thread> [cpu] ..`, is the server's, or a mark.
    fn is_ours(&self, line: &str) -> bool {
        let Some((task, _)) = line.split_once(" [") else { return false };
        let Some((command, thread)) = task.trim().rsplit_once('-') else { return false };
        let threads = self.threads.borrow();
        threads.contains(thread)
            || command.strip_prefix("iou-wrk-").is_some_and(|of| threads.contains(of))
    }

    fn set(&self, file: &str, value: &str) -> Res {
        let path = self.dir.join(file);
        fs::write(&path, value).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(())
    }

    /// Puts a mark into the trace.
    pub(crate) fn mark(&self, text: &str) -> Res {
        self.set("trace_marker", &format!("offlock:{text}\n"))
    }

    /// The events between two marks, oldest first; forgets everything up to now.
    pub(crate) fn between(&self, from: &str, to: &str) -> Res<Vec<Event>> {
        let text = fs::read_to_string(self.dir.join("trace"))?;
        self.set("trace", "\n")?; // opening it for writing empties it
        let find = |mark: &str| {
            let wanted = format!("offlock:{mark}");
            text.lines().position(|l| l.trim_end().ends_with(&wanted))
        };
        let (Some(start), Some(end)) = (find(from), find(to)) else {
            crate::lab::fail!("the marks {from} and {to} are not both in the trace");
        };
        check!(start < end, "the mark {to} is before {from} in the trace");
        self.look_for_threads();
        let lines = text.lines().skip(start).take(end - start).filter(|line| self.is_ours(line));
        Ok(lines.filter_map(Event::parse).collect())
    }
}

impl Drop for TracePoints {
    fn drop(&mut self) {
        for event in EVENTS {
            let _ = self.set(&format!("events/{event}/enable"), "0");
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// One event of the server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A request was handed to the ring: its address and operation.
    Submit { request: String, operation: String },
    /// A request of the ring ended.
    Complete { request: String, result: i64 },
    /// A system call that can send on a socket.
    Send { call: String },
    /// A thread syncs by itself, not through the ring.
    Sync,
}

impl Event {
    fn parse(line: &str) -> Option<Event> {
        let word = |after: &str| {
            let rest = line.split_once(after)?.1;
            Some(rest.split([',', ' ', '(']).next().unwrap_or(rest).to_string())
        };
        if line.contains(": io_uring_submit_req: ") {
            return Some(Event::Submit { request: word(" req ")?, operation: word(" opcode ")? });
        }
        if line.contains(": io_uring_complete: ") {
            let result = word(" result ")?.parse().ok()?;
            return Some(Event::Complete { request: word(" req ")?, result });
        }
        let call = word(": sys_")?;
        if call == "fdatasync" || call == "fsync" {
            return Some(Event::Sync);
        }
        Some(Event::Send { call })
    }
}
