//! A server under test: found next to this binary, started, watched, stopped.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::ExitStatus;

use crate::lab::*;
use crate::metrics;

/// The program under test.
pub(crate) fn binary() -> PathBuf {
    env!("CARGO_BIN_EXE_offlock-nbd").into()
}

/// A server's command line, before it starts.
pub(crate) struct Launch<'a> {
    lab: &'a Lab,
    wrapper: Vec<OsString>,
    args: Vec<OsString>,
    socket: Option<PathBuf>,
    metrics: Option<PathBuf>,
    handed_over: Vec<OwnedFd>,
}

impl<'a> Launch<'a> {
    /// A server of a backend that each machine has, listening on a Unix socket in the trial's directory.
    pub(crate) fn threads(lab: &'a Lab) -> Launch<'a> {
        Launch::new(lab, Backend::Threads)
    }

    /// A server on `backend`, listening on a Unix socket in the trial's directory.
    pub(crate) fn new(lab: &'a Lab, backend: Backend) -> Launch<'a> {
        let mut launch = Launch::bare(lab);
        launch.args.extend(backend.args().into_iter().map(OsString::from));
        launch.on_socket("s")
    }

    /// Listens on a Unix socket in the trial's directory.
    pub(crate) fn on_socket(mut self, name: &str) -> Self {
        let socket = self.lab.path(name);
        self.args.extend(["--socket".into(), socket.clone().into()]);
        self.socket = Some(socket);
        self
    }

    /// A server with no arguments yet.
    pub(crate) fn bare(lab: &'a Lab) -> Launch<'a> {
        Launch {
            lab,
            wrapper: Vec::new(),
            args: Vec::new(),
            socket: None,
            metrics: None,
            handed_over: Vec::new(),
        }
    }

    /// Serves `path` under the name `vol`.
    pub(crate) fn image(self, path: &Path) -> Self {
        self.image_as("vol", path)
    }

    /// Serves a new image of zeros, `a.img` in the trial's directory.
    pub(crate) fn sparse(self, size: u64) -> Res<Self> {
        let path = self.lab.path("a.img");
        image::sparse(&path, size)?;
        Ok(self.image(&path))
    }

    /// Serves a new image with parts of random bytes, `a.img` in the trial's directory.
    pub(crate) fn parts(self, size: u64, parts: u64, seed: u64) -> Res<Self> {
        let path = self.lab.path("a.img");
        image::with_parts(&path, size, parts, seed)?;
        Ok(self.image(&path))
    }

    pub(crate) fn image_as(mut self, name: &str, path: &Path) -> Self {
        let mut value = OsString::from(format!("{name}="));
        value.push(path);
        self.args.extend(["--image".into(), value]);
        self
    }

    pub(crate) fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds each word as an argument.
    pub(crate) fn with(mut self, words: &str) -> Self {
        self.args.extend(words.split(' ').map(OsString::from));
        self
    }

    /// Serves the server's figures, for [`Server::figures`].
    pub(crate) fn metrics(mut self) -> Self {
        let path = self.lab.path("metrics");
        self.args.extend(["--metrics".into(), path.clone().into()]);
        self.metrics = Some(path);
        self
    }

    /// Another socket than the one in the trial's directory; for a second server.
    pub(crate) fn socket(mut self, path: &Path) -> Self {
        let old = self.socket.replace(path.to_path_buf()).expect("made by `new`");
        for arg in self.args.iter_mut().filter(|a| **a == old) {
            *arg = path.into();
        }
        self
    }

    /// Runs the server through another program (strace, unshare) that becomes it by exec.
    pub(crate) fn through<S: Into<OsString>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.wrapper.extend(words.into_iter().map(Into::into));
        self
    }

    /// Runs the server where `io_uring_setup` gives EPERM, as in many containers.
    pub(crate) fn without_uring(self) -> Self {
        let refused = ["-e", "trace=io_uring_setup", "-e", "inject=io_uring_setup:error=EPERM"];
        self.through(["strace", "-D", "-f", "-o", "/dev/null"]).through(refused)
    }

    /// Hands it listening sockets, as `systemd` does. With `pid` they are said to be for that process.
    pub(crate) fn handed_over(mut self, sockets: Vec<OwnedFd>, pid: Option<u32>) -> Self {
        let pid = pid.map_or("$$".to_string(), |pid| pid.to_string());
        let count = sockets.len();
        let script = format!("LISTEN_PID={pid} LISTEN_FDS={count} exec \"$0\" \"$@\"");
        self.wrapper.extend(["sh", "-c", &script].map(OsString::from));
        self.handed_over = sockets;
        self
    }

    /// Starts the process; gives it and the files of its standard output and error.
    fn spawn(&self) -> Res<(Tracked, PathBuf, PathBuf)> {
        let mut words = self.wrapper.clone();
        words.push(binary().into());
        words.extend(self.args.iter().cloned());
        let unique = self.socket.as_deref().and_then(Path::file_name).unwrap_or("x".as_ref());
        let stdout = self.lab.path(&format!("{}.out", unique.to_string_lossy()));
        let stderr = self.lab.path(&format!("{}.log", unique.to_string_lossy()));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        command.env_remove("OFFLOCK_LOG").env("NO_COLOR", "1");
        command.stdout(File::create(&stdout)?).stderr(File::create(&stderr)?);
        // SAFETY: between fork and exec it makes one system call, on plain numbers.
        unsafe { command.pre_exec(hear_of_hang_up) };
        let handed_over: Vec<_> = self.handed_over.iter().map(AsRawFd::as_raw_fd).collect();
        if !handed_over.is_empty() {
            let give = move || {
                // Up first, where none of the numbers below is; there they go when the program starts.
                for (&fd, number) in handed_over.iter().zip(1000..) {
                    dup(fd, number, libc::O_CLOEXEC)?;
                }
                (0..handed_over.len() as i32).try_for_each(|nr| dup(1000 + nr, 3 + nr, 0))
            };
            // SAFETY: between fork and exec it makes system calls only, which neither allocate nor lock,
            // on memory that the fork copied.
            unsafe { command.pre_exec(give) };
        }
        Ok((self.lab.spawn(&mut command)?, stdout, stderr))
    }

    /// Starts it without waiting for what it says.
    pub(crate) fn start_silent(self) -> Res<Tracked> {
        Ok(self.spawn()?.0)
    }

    /// Starts it and waits until it says where it listens.
    pub(crate) fn start(self) -> Res<Server> {
        let (mut process, stdout, stderr) = self.spawn()?;
        // It writes a line for each listener, the one of TCP last.
        let last = if self.args.iter().any(|arg| arg == "--tcp") { "tcp:" } else { "" };
        let last = format!("listening on {last}");
        let listening = wait_until(|| {
            let text = fs::read_to_string(&stdout).unwrap_or_default();
            let ended = matches!(process.wait_for(Duration::ZERO), Ok(Some(_)));
            let complete = text.ends_with('\n') && text.contains(&last);
            (ended || complete).then_some((ended, text))
        });
        let log = fs::read_to_string(&stderr).unwrap_or_default();
        let Some((false, text)) = listening else {
            fail!("the server did not start: {:?}\n{}", self.args, tail(&log, 20));
        };
        let found = text.lines().filter_map(|l| l.strip_prefix("listening on ")).map(String::from);
        let listeners = found.collect();
        Ok(Server { process, stderr, socket: self.socket, metrics: self.metrics, listeners })
    }

    /// Starts a server that must refuse to run, with this exit code and all the words in its message, or
    /// anywhere if it refuses its arguments; gives its log.
    pub(crate) fn refused(self, wanted: i32, words: &[&str]) -> Res<String> {
        let (code, _, log) = self.run_to_end()?;
        let (_, message) = log.split_once("offlock-nbd: ").unwrap_or_default();
        let said = if wanted == 2 { &log } else { message };
        let says = words.iter().all(|word| said.contains(word));
        check!(code == wanted && says, "exit code {code}, not {wanted} with {words:?}:\n{log}");
        check!(!log.contains("panicked") && !log.contains("RUST_BACKTRACE"), "a panic:\n{log}");
        Ok(log)
    }

    /// Starts a server that ends by itself; gives its exit code, its output and its log.
    pub(crate) fn run_to_end(self) -> Res<(i32, String, String)> {
        let (mut process, stdout, stderr) = self.spawn()?;
        let Some(status) = process.wait_for(PATIENCE)? else {
            let text = fs::read_to_string(&stdout)?;
            fail!("the server runs although it had to end: {text}");
        };
        let log = fs::read_to_string(&stderr)?;
        match status.code() {
            Some(code) => Ok((code, fs::read_to_string(&stdout)?, log)),
            None => fail!("ended by signal {:?}\n{}", status.signal(), tail(&log, 20)),
        }
    }
}

/// The tests may run under `nohup`, and what is ignored is inherited.
fn hear_of_hang_up() -> io::Result<()> {
    // SAFETY: it has no handler for which something would have to hold.
    match unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn dup(from: i32, to: i32, flags: i32) -> io::Result<()> {
    // SAFETY: dup3 takes plain numbers; what `to` was before is of a process that is about to become another.
    match unsafe { libc::dup3(from, to, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A running server. Dropped without `stop` it is killed.
pub(crate) struct Server {
    pub(crate) process: Tracked,
    stderr: PathBuf,
    socket: Option<PathBuf>,
    metrics: Option<PathBuf>,
    /// Where it listens, in its own words: `unix:PATH`, `tcp:ADDRESS`.
    pub(crate) listeners: Vec<String>,
}

impl Server {
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(crate) fn socket(&self) -> &Path {
        self.socket.as_deref().expect("this server has a Unix socket")
    }

    /// The URI of an export over the Unix socket.
    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// A connection that has not said anything yet.
    pub(crate) fn connect(&self) -> Res<Client> {
        Client::connect(self.socket())
    }

    /// A connection that has answered the greeting.
    pub(crate) fn greeted(&self) -> Res<Client> {
        let mut client = self.connect()?;
        client.greet()?;
        Ok(client)
    }

    /// A connection in the transmission phase of export `vol`, with simple replies.
    pub(crate) fn client(&self) -> Res<Client> {
        self.client_of("vol")
    }

    /// The same of another export.
    pub(crate) fn client_of(&self, export: &str) -> Res<Client> {
        self.connect()?.opened(export)
    }

    /// The address of its TCP listener.
    pub(crate) fn tcp(&self) -> Res<SocketAddr> {
        let found = self.listeners.iter().find_map(|listener| listener.strip_prefix("tcp:"));
        Ok(found.ok_or_else(|| format!("no TCP listener in {:?}", self.listeners))?.parse()?)
    }

    /// The same over TCP.
    pub(crate) fn tcp_client(&self) -> Res<Client> {
        Client::connect_tcp(self.tcp()?)?.opened("vol")
    }

    /// Everything it logged so far. A thread of the server writes it, so this waits until nothing more
    /// comes for a moment.
    pub(crate) fn log(&self) -> String {
        let read = || fs::read_to_string(&self.stderr).unwrap_or_default();
        let mut log = read();
        for _ in 0..40 {
            thread::sleep(Duration::from_millis(50));
            let now = read();
            if now.len() == log.len() {
                break;
            }
            log = now;
        }
        log
    }

    /// Waits until it has logged `text`; gives its log.
    pub(crate) fn logged(&self, text: &str) -> Res<String> {
        let read = || Some(self.log()).filter(|log| log.contains(text));
        wait_until(read).ok_or_else(|| format!("no {text:?} in the log:\n{}", self.log()).into())
    }

    /// Waits for a log line after the first `seen` bytes; fails if there is none.
    pub(crate) fn logged_since(&self, seen: usize, about: &str) -> Res<String> {
        let new = wait_until(|| {
            let log = self.log();
            let new = log.get(seen..).unwrap_or("");
            new.ends_with('\n').then(|| new.to_string())
        });
        new.ok_or_else(|| format!("nothing was logged about {about}").into())
    }

    /// Fails if the server is gone.
    pub(crate) fn still_runs(&mut self) -> Res {
        if let Some(status) = self.process.wait_for(Duration::ZERO)? {
            fail!("the server ended: {status}\n{}", tail(&self.log(), 20));
        }
        Ok(())
    }

    /// A new client reads and writes: the server goes on.
    pub(crate) fn still_serves(&mut self) -> Res {
        self.still_runs()?;
        let mut client = self.client()?;
        let data = vec![0xc3; 4096];
        client.write(0, &data, 0)?.ok("write by a fresh client")?;
        let back = client.read(0, 4096)?;
        check!(back == Ok(data), "a fresh client read other bytes than it wrote");
        client.disconnect()
    }

    /// The figures of a server with [`Launch::metrics`], by name and label.
    pub(crate) fn figures(&self) -> Res<HashMap<String, f64>> {
        metrics::values(self.metrics.as_deref().expect("started with metrics"))
    }

    /// One of the figures, without the prefix of its name.
    pub(crate) fn figure(&self, name: &str) -> Res<u64> {
        let figures = self.figures()?;
        let found = figures.get(&format!("offlock_nbd_{name}"));
        Ok(*found.ok_or_else(|| format!("no {name}: {figures:?}"))? as u64)
    }

    pub(crate) fn terminate(&mut self) {
        self.process.signal(libc::SIGTERM);
    }

    pub(crate) fn kill(&mut self) {
        self.process.signal(libc::SIGKILL);
    }

    /// Has it look at the sizes of files.
    pub(crate) fn hang_up(&mut self) {
        self.process.signal(libc::SIGHUP);
    }

    /// [`still_serves`](Self::still_serves), then [`stop`](Self::stop).
    pub(crate) fn serves_to_the_end(mut self) -> Res {
        self.still_serves()?;
        self.stop()
    }

    /// SIGTERM, then exit code 0 and no panic in the log.
    pub(crate) fn stop(mut self) -> Res {
        self.terminate();
        self.finished()
    }

    /// Waits for the end after `terminate`: exit code 0 and no panic in the log.
    pub(crate) fn finished(&mut self) -> Res {
        let status = self.ended()?;
        check!(status.success(), "after SIGTERM: {status}\n{}", tail(&self.log(), 20));
        Ok(())
    }

    /// Waits for the end after `terminate`, however it ends but by a panic.
    pub(crate) fn ended(&mut self) -> Res<ExitStatus> {
        let status = self.process.wait_for(PATIENCE)?;
        let log = self.log();
        let Some(status) = status else {
            fail!("still running {PATIENCE:?} after SIGTERM\n{}", tail(&log, 20));
        };
        check!(!log.contains("panicked at"), "it panicked:\n{}", tail(&log, 40));
        Ok(status)
    }

    /// A field of `/proc/<pid>/status` that is counted in KiB, in bytes.
    pub(crate) fn memory(&self, field: &str) -> Res<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find(|l| l.split(':').next() == Some(field));
        let kib =
            line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok());
        kib.map(|n| n * 1024).ok_or_else(|| format!("no {field} in /proc").into())
    }

    /// Where its descriptors lead.
    pub(crate) fn descriptors(&self) -> Res<Vec<PathBuf>> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid()))?;
        Ok(entries.filter_map(|e| fs::read_link(e.ok()?.path()).ok()).collect())
    }
}
