//! A small NBD client that can also misbehave: every byte it sends is the trial's choice.
//!
//! It shares no code with the server, so that both cannot be wrong in the same way.

use crate::lab::*;

/// Option numbers of the handshake.
pub(crate) mod opt {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Types of an option's reply.
pub(crate) mod rep {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUP: u32 = 0x8000_0001;
    pub(crate) const ERR_INVALID: u32 = 0x8000_0003;
    pub(crate) const ERR_UNKNOWN: u32 = 0x8000_0006;
}

/// Command types of the transmission phase.
pub(crate) mod cmd {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub(crate) mod flag {
    pub(crate) const FUA: u16 = 1;
    pub(crate) const NO_HOLE: u16 = 2;
    pub(crate) const DF: u16 = 4;
    pub(crate) const REQ_ONE: u16 = 8;
    pub(crate) const FAST_ZERO: u16 = 16;
}

/// NBD's error numbers.
pub(crate) mod err {
    pub(crate) const EPERM: u32 = 1;
    pub(crate) const EIO: u32 = 5;
    pub(crate) const ENOMEM: u32 = 12;
    pub(crate) const EINVAL: u32 = 22;
    pub(crate) const ENOSPC: u32 = 28;
    pub(crate) const EOVERFLOW: u32 = 75;
    pub(crate) const ENOTSUP: u32 = 95;
    pub(crate) const ESHUTDOWN: u32 = 108;
}

pub(crate) const MIB: u64 = 1 << 20;
/// The payload limit that the server advertises.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // IHAVEOPT
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// A READ's outcome in a few words, for a failure message.
pub(crate) fn brief(outcome: &Result<Vec<u8>, u32>) -> String {
    match outcome {
        Ok(bytes) => {
            format!("{} bytes, the first {:x?}", bytes.len(), &bytes[..bytes.len().min(8)])
        }
        Err(error) => format!("error {error}"),
    }
}

/// What a server answered: 0, or an NBD error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer(pub(crate) u32);

impl Answer {
    pub(crate) fn ok(self, what: &str) -> Res {
        check!(self.0 == 0, "{what}: error {}", self.0);
        Ok(())
    }

    pub(crate) fn is(self, wanted: u32, what: &str) -> Res {
        check!(self.0 == wanted, "{what}: answered {}, wanted {wanted}", self.0);
        Ok(())
    }

    pub(crate) fn any_of(self, wanted: &[u32], what: &str) -> Res {
        check!(wanted.contains(&self.0), "{what}: answered {}, wanted one of {wanted:?}", self.0);
        Ok(())
    }
}

/// A chunk of a structured reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) done: bool,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) payload: Vec<u8>,
}

pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR: u16 = 0x8001;
    pub(crate) const ERROR_OFFSET: u16 = 0x8002;
}

/// What the server said about an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    /// Minimum, preferred, maximum block size.
    pub(crate) blocks: Option<(u32, u32, u32)>,
}

/// One connection.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) export: Export,
    next_cookie: u64,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Res<Client> {
        Client::over(UnixStream::connect(socket)?)
    }

    /// Over TCP. The methods of `UnixStream` used here are those of any stream socket.
    pub(crate) fn connect_tcp(address: SocketAddr) -> Res<Client> {
        Client::over(UnixStream::from(OwnedFd::from(TcpStream::connect(address)?)))
    }

    pub(crate) fn over(stream: UnixStream) -> Res<Client> {
        // A server that neither answers nor closes fails the trial instead of hanging it.
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Client { stream, export: Export::default(), next_cookie: 0x1000 })
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> Res {
        self.stream.write_all(bytes).map_err(|e| format!("send: {e}"))?;
        Ok(())
    }

    pub(crate) fn recv<const N: usize>(&mut self) -> Res<[u8; N]> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn recv_vec(&mut self, len: usize) -> Res<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> Res {
        let mut got = 0;
        while got < bytes.len() {
            match self.stream.read(&mut bytes[got..]) {
                Ok(0) => fail!("receive: closed after {got} of {} bytes", bytes.len()),
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    fail!("receive: {got} of {} bytes, then nothing", bytes.len())
                }
                Err(e) => fail!("receive: {e}"),
            }
        }
        Ok(())
    }

    /// Reads what is left until the server closes; fails if it keeps the connection.
    pub(crate) fn closed(&mut self) -> Res<usize> {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(n) => Ok(n),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(rest.len()),
            Err(e) => fail!("the server did not close the connection: {e}"),
        }
    }

    /// The greeting and the usual client flags: fixed newstyle, no zeroes.
    pub(crate) fn greet(&mut self) -> Res<u16> {
        let flags = self.read_greeting()?;
        self.send(&3u32.to_be_bytes())?;
        Ok(flags)
    }

    /// The server's half of the greeting; gives its handshake flags.
    pub(crate) fn read_greeting(&mut self) -> Res<u16> {
        let hello: [u8; 18] = self.recv()?;
        check!(&hello[..8] == b"NBDMAGIC" && &hello[8..16] == b"IHAVEOPT", "greeting {hello:x?}");
        let flags = u16::from_be_bytes([hello[16], hello[17]]);
        check!(flags & 3 == 3, "handshake flags {flags:#x}: fixed newstyle and no zeroes wanted");
        Ok(flags)
    }

    pub(crate) fn send_option(&mut self, option: u32, data: &[u8]) -> Res {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).expect("a small option").to_be_bytes());
        bytes.extend(data);
        self.send(&bytes)
    }

    /// One reply to `option`: its type and data.
    pub(crate) fn option_reply(&mut self, option: u32) -> Res<(u32, Vec<u8>)> {
        let head: [u8; 20] = self.recv()?;
        let magic = u64::from_be_bytes(head[..8].try_into().expect("8 bytes"));
        check!(magic == OPTION_REPLY_MAGIC, "option reply magic {magic:#x}");
        let (about, kind, len) = (be32(&head[8..]), be32(&head[12..]), be32(&head[16..]));
        check!(about == option, "a reply to option {about}, wanted {option}");
        check!(len <= 4096, "an option reply of {len} bytes");
        Ok((kind, self.recv_vec(len as usize)?))
    }

    /// Sends an option and gives the type of its only reply.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Res<u32> {
        self.send_option(option, data)?;
        Ok(self.option_reply(option)?.0)
    }

    /// INFO or GO for `export`; gives the final reply's type and remembers the information.
    pub(crate) fn info_or_go(&mut self, option: u32, export: &str) -> Res<u32> {
        self.send_option(option, &info_data(export))?;
        loop {
            let (kind, data) = self.option_reply(option)?;
            if kind != rep::INFO {
                return Ok(kind);
            }
            check!(data.len() >= 2, "an information reply of {} bytes", data.len());
            match (u16::from_be_bytes([data[0], data[1]]), data.len()) {
                (0, 12) => {
                    self.export.size = be64(&data[2..]);
                    self.export.flags = u16::from_be_bytes([data[10], data[11]]);
                }
                (3, 14) => {
                    let sizes = (be32(&data[2..]), be32(&data[6..]), be32(&data[10..]));
                    self.export.blocks = Some(sizes);
                }
                (0 | 3, len) => fail!("an information reply of {len} bytes"),
                _ => {}
            }
        }
    }

    /// Greets, and begins the transmission phase of an export with simple replies.
    pub(crate) fn opened(mut self, export: &str) -> Res<Client> {
        self.greet()?;
        self.go(export)?;
        Ok(self)
    }

    pub(crate) fn go(&mut self, export: &str) -> Res {
        let kind = self.info_or_go(opt::GO, export)?;
        check!(kind == rep::ACK, "GO {export:?}: reply {kind:#x}");
        Ok(())
    }

    pub(crate) fn cookie(&mut self) -> u64 {
        self.next_cookie += 1;
        self.next_cookie
    }

    /// Sends a request header; gives its cookie.
    pub(crate) fn request(&mut self, flags: u16, kind: u16, offset: u64, len: u32) -> Res<u64> {
        let cookie = self.cookie();
        self.send(&header(flags, kind, cookie, offset, len))?;
        Ok(cookie)
    }

    /// The head of a simple reply: its error and cookie.
    pub(crate) fn simple_reply(&mut self) -> Res<(Answer, u64)> {
        parse_simple(&self.recv()?)
    }

    /// The answer to the one request in flight.
    pub(crate) fn answer(&mut self, cookie: u64) -> Res<Answer> {
        let (answer, about) = self.simple_reply()?;
        check!(about == cookie, "a reply to {about:#x}, wanted {cookie:#x}");
        Ok(answer)
    }

    /// A request without payload in either direction.
    pub(crate) fn plain(&mut self, kind: u16, flags: u16, offset: u64, len: u64) -> Res<Answer> {
        let len = u32::try_from(len).expect("a length of 32 bits");
        let cookie = self.request(flags, kind, offset, len)?;
        self.answer(cookie)
    }

    pub(crate) fn flush(&mut self) -> Res<Answer> {
        self.plain(cmd::FLUSH, 0, 0, 0)
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8], flags: u16) -> Res<Answer> {
        let len = u32::try_from(data.len()).expect("a length of 32 bits");
        let cookie = self.request(flags, cmd::WRITE, offset, len)?;
        self.send(data)?;
        self.answer(cookie)
    }

    /// Reads; `Err` is the server's error number.
    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Res<Result<Vec<u8>, u32>> {
        self.read_with_flags(0, offset, len)
    }

    pub(crate) fn read_with_flags(
        &mut self,
        flags: u16,
        offset: u64,
        len: u32,
    ) -> Res<Result<Vec<u8>, u32>> {
        let cookie = self.request(flags, cmd::READ, offset, len)?;
        match self.answer(cookie)? {
            Answer(0) => Ok(Ok(self.recv_vec(len as usize)?)),
            Answer(error) => Ok(Err(error)),
        }
    }

    /// One chunk of a structured reply.
    pub(crate) fn chunk(&mut self) -> Res<Chunk> {
        let head: [u8; 20] = self.recv()?;
        let magic = be32(&head);
        check!(magic == STRUCTURED_REPLY_MAGIC, "structured reply magic {magic:#x}");
        let flags = u16::from_be_bytes([head[4], head[5]]);
        let kind = u16::from_be_bytes([head[6], head[7]]);
        let len = be32(&head[16..]);
        check!(len <= MAX_PAYLOAD + 8, "a chunk of {len} bytes");
        let payload = self.recv_vec(len as usize)?;
        Ok(Chunk { done: flags & 1 == 1, kind, cookie: be64(&head[8..]), payload })
    }

    /// Says goodbye and waits for the server to close.
    pub(crate) fn disconnect(mut self) -> Res {
        self.request(0, cmd::DISC, 0, 0)?;
        let rest = self.closed()?;
        check!(rest == 0, "{rest} bytes after DISC");
        Ok(())
    }
}

/// The error and the cookie of a simple reply's head.
pub(crate) fn parse_simple(head: &[u8; 16]) -> Res<(Answer, u64)> {
    let magic = be32(head);
    check!(magic == SIMPLE_REPLY_MAGIC, "simple reply magic {magic:#x}");
    Ok((Answer(be32(&head[4..])), be64(&head[8..])))
}

/// The 28 bytes of a request.
pub(crate) fn header(flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// The data of INFO and GO: the name, and a request for the block sizes.
pub(crate) fn info_data(export: &str) -> Vec<u8> {
    let mut data = u32::try_from(export.len()).expect("a short name").to_be_bytes().to_vec();
    data.extend(export.as_bytes());
    data.extend(1u16.to_be_bytes());
    data.extend(3u16.to_be_bytes());
    data
}

pub(crate) fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("4 bytes"))
}

pub(crate) fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes"))
}
