//! An upstream in this process that follows a script, with a disk whose power can be cut.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, FaultDevice, MemoryDevice};
use nbd_protocol::{
    ALLOCATION_ID, Agreed, Command, ExportInfo, Extent, Handshake, HeaderStyle, NbdError,
    ReplyHeader, Request, Step, TransmissionFlags as Flags,
    wire::{cmd, state},
};
use tempfile::TempDir;

use crate::upstream::{NbdDevice, UpstreamError, UpstreamOptions};

/// What the upstream does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Carries the request out, and answers.
    Answer,
    /// Answers with this error, and does nothing.
    Fail(NbdError),
    /// Closes the connection, and does nothing.
    CloseBefore,
    /// As `CloseBefore` on the connections with this number or a higher one, otherwise as `Answer`.
    CloseFrom(usize),
    /// Carries the request out, and closes the connection without an answer.
    CloseAfter,
    /// Closes the connection after this many bytes of the reply.
    CloseWithin(usize),
    /// Cuts the power before the request, which loses unflushed data and all connections, and
    /// restarts.
    CrashBefore,
    /// As `CrashBefore`, but after the request.
    CrashAfter,
    /// Answers, and does nothing.
    Pretend,
    /// Never answers.
    Silent,
    /// Answers after this time. Other requests are answered in between.
    Late(Duration),
    /// Carries the request out after this time, and answers.
    Slow(Duration),
    /// Loses unflushed data and all other connections. Later carries the request out, and answers.
    CrashOthers(Duration),
    /// Answers twice.
    Twice,
    /// Answers with another cookie.
    Cookie(u64),
    /// Carries the request out, and answers with these bytes.
    Bytes(fn(&Request, HeaderStyle) -> Vec<u8>),
}

type Script = Box<dyn FnMut(usize, &Request) -> Act + Send>;

struct State {
    /// The data that reads return.
    disk: Vec<u8>,
    /// The data that survive a power cut.
    stable: Vec<u8>,
    /// Records the data that may survive a power cut at each moment.
    recorder: Option<FaultDevice<MemoryDevice>>,
    script: Script,
    /// Requests since the last change of the script.
    count: usize,
    /// Every request, in the order of its arrival.
    seen: Vec<Request>,
    /// Reads of each connection, in the order of the connections.
    reads: Vec<usize>,
    open: Vec<UnixStream>,
    /// New connections are closed at once.
    refuses: bool,
}

struct Inner {
    state: Mutex<State>,
    export: ExportInfo,
    extended: bool,
}

/// See the [module](self).
pub(crate) struct Upstream {
    inner: Arc<Inner>,
    dir: TempDir,
}

impl Upstream {
    /// Makes an upstream of `size` bytes with all features.
    pub(crate) fn new(size: usize) -> Self {
        Self::with(size, |_| {}, false)
    }

    /// As [`new`](Self::new), but records the changes.
    pub(crate) fn recording(size: usize) -> Self {
        let upstream = Self::new(size);
        let recorder = FaultDevice::new(MemoryDevice::new(upstream.disk()));
        recorder.record().unwrap();
        upstream.state().recorder = Some(recorder);
        upstream
    }

    pub(crate) fn with(size: usize, change: impl FnOnce(&mut ExportInfo), extended: bool) -> Self {
        let mut export = ExportInfo::new("disk", size as u64);
        export.flags |= Flags::SEND_FLUSH
            | Flags::SEND_FUA
            | Flags::SEND_TRIM
            | Flags::SEND_WRITE_ZEROES
            | Flags::CAN_MULTI_CONN;
        change(&mut export);
        let disk: Vec<u8> = (0..size).map(|at| (at / 512 * 37 + at) as u8).collect();
        let state = State {
            stable: disk.clone(),
            disk,
            recorder: None,
            script: Box::new(|_, _| Act::Answer),
            count: 0,
            seen: Vec::new(),
            reads: Vec::new(),
            open: Vec::new(),
            refuses: false,
        };
        let inner = Arc::new(Inner { state: Mutex::new(state), export, extended });
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        thread::spawn({
            let inner = Arc::clone(&inner);
            move || {
                for socket in listener.incoming().map_while(Result::ok) {
                    let inner = Arc::clone(&inner);
                    thread::spawn(move || inner.serve(socket));
                }
            }
        });
        Self { inner, dir }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Makes a device with this upstream. It waits 20 seconds for a lost connection.
    pub(crate) fn device(&self, change: impl FnOnce(&mut UpstreamOptions)) -> NbdDevice {
        self.try_device(change).unwrap()
    }

    pub(crate) fn try_device(
        &self,
        change: impl FnOnce(&mut UpstreamOptions),
    ) -> Result<NbdDevice, UpstreamError> {
        let address = format!("nbd+unix:///disk?socket={}", self.socket().display());
        let mut options =
            UpstreamOptions { reconnect: Duration::from_secs(20), ..Default::default() };
        change(&mut options);
        NbdDevice::open(address.parse().unwrap(), options)
    }

    /// From now on `script` decides about each request. It gets the number of requests since this
    /// call.
    pub(crate) fn script(&self, script: impl FnMut(usize, &Request) -> Act + Send + 'static) {
        let mut state = self.state();
        (state.script, state.count) = (Box::new(script), 0);
    }

    /// Applies `act` to the request with this number, counted from now, and to no other.
    pub(crate) fn once(&self, number: usize, act: Act) {
        self.script(move |count, _| if count == number { act.clone() } else { Act::Answer });
    }

    pub(crate) fn count(&self) -> usize {
        self.state().count
    }

    pub(crate) fn seen(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().seen)
    }

    /// Returns the number of reads on each connection, in the order of the connections.
    pub(crate) fn reads(&self) -> Vec<usize> {
        self.state().reads.clone()
    }

    pub(crate) fn stable(&self) -> Vec<u8> {
        self.state().stable.clone()
    }

    pub(crate) fn disk(&self) -> Vec<u8> {
        self.state().disk.clone()
    }

    /// Evaluates the recording.
    pub(crate) fn recorded<T>(&self, ask: impl FnOnce(&FaultDevice<MemoryDevice>) -> T) -> T {
        ask(self.state().recorder.as_ref().unwrap())
    }

    /// Cuts the power.
    pub(crate) fn crash(&self) {
        self.state().crash();
    }

    /// Closes the connection with this number, in the order of their arrival.
    pub(crate) fn close(&self, connection: usize) {
        self.state().open[connection].shutdown(Shutdown::Both).unwrap();
    }

    /// Closes all connections and refuses new ones, or stops to refuse them.
    pub(crate) fn refuse(&self, refuses: bool) {
        let mut state = self.state();
        state.refuses = refuses;
        if refuses {
            state.close_all();
        }
    }
}

impl State {
    /// Cuts the power: every other sector loses its unflushed data.
    fn crash(&mut self) {
        self.lose();
        self.close_all();
    }

    fn lose(&mut self) {
        for (at, (disk, stable)) in
            self.disk.chunks_mut(512).zip(self.stable.chunks_mut(512)).enumerate()
        {
            if at % 2 == 0 { disk.copy_from_slice(stable) } else { stable.copy_from_slice(disk) }
        }
    }

    fn close_all(&mut self) {
        for socket in self.open.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Carries out a request. Returns the data of a READ.
    fn carry_out(&mut self, request: &Request, command: Command, payload: &[u8]) -> Vec<u8> {
        let range = request.offset as usize..(request.offset + request.len) as usize;
        if let Some(recorder) = &self.recorder {
            let Request { offset, len, .. } = *request;
            match command {
                Command::Write { fua: false } => recorder.write(offset, payload),
                Command::Write { fua: true } => recorder.write_durable(offset, payload),
                Command::WriteZeroes { .. } => recorder.zero(offset, len),
                Command::Flush => recorder.sync(),
                _ => Ok(()),
            }
            .unwrap();
        }
        match command {
            Command::Read { .. } => return self.disk[range].to_vec(),
            Command::Write { fua } => {
                self.disk[range.clone()].copy_from_slice(payload);
                if fua {
                    self.stable[range].copy_from_slice(payload);
                }
            }
            Command::WriteZeroes { .. } => self.disk[range].fill(0),
            Command::Trim { .. } => self.disk[range].fill(0xdd), // allowed by the protocol
            Command::Flush => self.stable.copy_from_slice(&self.disk),
            _ => {}
        }
        Vec::new()
    }
}

impl Inner {
    fn serve(&self, mut socket: UnixStream) {
        let number = {
            let mut state = self.state.lock().unwrap();
            if state.refuses {
                return;
            }
            state.open.push(socket.try_clone().unwrap());
            state.reads.push(0);
            (state.open.len() - 1, state.reads.len() - 1)
        };
        let _ = self.talk(&mut socket, number); // fails if the client has closed the connection, or a script has
        let _ = socket.shutdown(Shutdown::Both);
    }

    fn talk(
        &self,
        socket: &mut UnixStream,
        (number, connection): (usize, usize),
    ) -> io::Result<()> {
        let mut out = Vec::new();
        let mut handshake = Handshake::new(&mut out).base_allocation();
        if self.extended {
            handshake = handshake.extended_headers();
        }
        let mut input = Vec::new();
        let negotiated = loop {
            let exports = std::slice::from_ref(&self.export);
            let (used, step) = handshake.receive(&input, exports, &mut out);
            input.drain(..used);
            socket.write_all(&out)?;
            out.clear();
            match step {
                Step::Ready(negotiated) => break negotiated,
                Step::More => more(socket, &mut input)?,
                _ => return Ok(()),
            }
        };
        let style = negotiated.style;
        let agreed = Agreed { style, allocation: negotiated.allocation };
        let writer = Arc::new(Mutex::new(socket.try_clone()?));
        loop {
            let (request, used) = loop {
                match Request::parse(&input, style).map_err(io::Error::other)? {
                    Some(found) => break found,
                    None => more(socket, &mut input)?,
                }
            };
            let payload = request.payload_len(style) as usize;
            while input.len() < used + payload {
                more(socket, &mut input)?;
            }
            let payload: Vec<u8> = input.drain(..used + payload).skip(used).collect();
            let command = request.check(&self.export, agreed);
            if command == Ok(Command::Disconnect) {
                return Ok(());
            }
            let mut state = self.state.lock().unwrap();
            let count = state.count;
            state.count += 1;
            state.seen.push(request);
            state.reads[connection] += usize::from(request.command == cmd::READ);
            let act = (state.script)(count, &request);
            match act {
                Act::Slow(time) => {
                    drop(state);
                    thread::sleep(time);
                    state = self.state.lock().unwrap();
                }
                Act::CrashOthers(time) => {
                    state.lose();
                    for (other, socket) in state.open.iter().enumerate() {
                        if other != number {
                            let _ = socket.shutdown(Shutdown::Both); // fails if it is closed
                        }
                    }
                    drop(state);
                    thread::sleep(time);
                    state = self.state.lock().unwrap();
                }
                Act::CloseBefore => return Ok(()),
                Act::CloseFrom(first) if connection >= first => return Ok(()),
                Act::CrashBefore => {
                    state.crash();
                    return Ok(());
                }
                _ => {}
            }
            let mut reply = Vec::new();
            match (&act, command) {
                (&Act::Fail(error), _) | (_, Err(error)) => {
                    reply.extend_from_slice(ReplyHeader::error(&request, style, error).as_slice());
                }
                (_, Ok(command)) => {
                    let data = match act {
                        Act::Pretend => Vec::new(),
                        _ => state.carry_out(&request, command, &payload),
                    };
                    let header = match command {
                        Command::Read { .. } => ReplyHeader::read_data(&request, style),
                        Command::BlockStatus { .. } => {
                            ReplyHeader::block_status(&request, style, ALLOCATION_ID, 2)
                        }
                        _ => ReplyHeader::done(&request, style),
                    };
                    reply.extend_from_slice(header.as_slice());
                    reply.extend_from_slice(&data);
                    if let Command::BlockStatus { .. } = command {
                        for flags in [0, state::HOLE | state::ZERO] {
                            let extent = Extent { len: request.len / 2, flags };
                            match style {
                                HeaderStyle::Extended => reply.extend(extent.encode64()),
                                _ => reply.extend(extent.encode32().unwrap()),
                            }
                        }
                    }
                }
            }
            match act {
                Act::CloseAfter => return Ok(()),
                Act::CrashAfter => {
                    state.crash();
                    return Ok(());
                }
                Act::Silent => continue,
                Act::CloseWithin(len) => {
                    drop(state);
                    return writer.lock().unwrap().write_all(&reply[..len.min(reply.len() - 1)]);
                }
                Act::Late(time) => {
                    let writer = Arc::clone(&writer);
                    thread::spawn(move || {
                        thread::sleep(time);
                        let _ = writer.lock().unwrap().write_all(&reply);
                    });
                    continue;
                }
                Act::Twice => reply.extend_from_within(..),
                Act::Cookie(cookie) => {
                    // The offset of the payload is the same in simple replies and in chunks.
                    reply[8..16].copy_from_slice(&cookie.to_be_bytes());
                }
                Act::Bytes(make) => reply = make(&request, style),
                _ => {}
            }
            drop(state);
            writer.lock().unwrap().write_all(&reply)?;
        }
    }
}

fn more(socket: &mut UnixStream, input: &mut Vec<u8>) -> io::Result<()> {
    let mut part = [0; 65536];
    match socket.read(&mut part)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => {
            input.extend_from_slice(&part[..count]);
            Ok(())
        }
    }
}
