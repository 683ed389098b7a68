//! What the server does in the kernel, seen from outside: strace's log.

use crate::lab::*;

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
