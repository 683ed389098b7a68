//! An NBD server in memory, with a fault to order. One thread per connection; it answers what one
//! read brought in reverse order, to prove that the client does not rely on the order.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use nbd_protocol::wire::STRUCTURED_REPLY_MAGIC;
use nbd_protocol::{
    Command, ExportInfo, Handshake, HeaderStyle, NbdError, ReplyHeader, Request, Step,
    TransmissionFlags,
};
use tempfile::TempDir;

/// What the server does wrong, if anything. Faults strike late, once much has gone well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Not a fault: no optional command, no several connections.
    Plain,
    ReadOnly,
    LostWrite,
    WriteElsewhere,
    LostZeroes,
    FlippedBit,
    WrongCookie,
    SimpleReplyToStructuredRead,
    ShortData,
    Garbage,
    Error,
    Hangup,
}

/// Requests that are answered rightly before a fault strikes.
const GRACE: u64 = 200;

pub(crate) struct Server(TempDir);

struct Shared {
    export: ExportInfo,
    fault: Fault,
    image: Mutex<Vec<u8>>,
    served: AtomicU64,
}

impl Server {
    /// Serves an image of zeroes. Its threads end with their connections; the listener's with the
    /// test process.
    pub(crate) fn start(size: u64, fault: Fault) -> Self {
        let mut export = ExportInfo::new("disk", size);
        export.flags = match fault {
            Fault::Plain => TransmissionFlags::HAS_FLAGS,
            Fault::ReadOnly => TransmissionFlags::READ_ONLY | TransmissionFlags::CAN_MULTI_CONN,
            _ => TransmissionFlags(0x0dfd), // all but READ_ONLY and the experimental RESIZE
        };
        let image = Mutex::new(vec![0; size as usize]);
        let shared = Arc::new(Shared { export, fault, image, served: AtomicU64::new(0) });
        let server = Self(tempfile::tempdir().unwrap());
        let listener = UnixListener::bind(server.socket()).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.serve(&mut stream.unwrap()));
            }
        });
        server
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.path().join("socket")
    }
}

impl Shared {
    fn serve(&self, stream: &mut UnixStream) -> io::Result<()> {
        let (mut input, mut out) = (Vec::new(), Vec::new());
        let mut handshake = Handshake::new(&mut out);
        let negotiated = loop {
            stream.write_all(&out)?;
            out.clear();
            read_some(stream, &mut input)?;
            let exports = std::slice::from_ref(&self.export);
            let (used, step) = handshake.receive(&input, exports, &mut out);
            input.drain(..used);
            match step {
                Step::More => {}
                Step::Ready(negotiated) => break negotiated,
                Step::StartTls | Step::Close(_) => return stream.write_all(&out),
            }
        };
        stream.write_all(&out)?;
        loop {
            let mut replies = Vec::new();
            let mut rest = &input[..];
            let style = negotiated.style;
            while let Some((request, used)) =
                Request::parse(rest, style).map_err(io::Error::other)?
            {
                let payload = request.payload_len(style) as usize;
                let Some((data, tail)) = rest[used..].split_at_checked(payload) else {
                    break;
                };
                rest = tail;
                let verdict = request.check(&self.export, negotiated.agreed());
                if verdict == Ok(Command::Disconnect) {
                    return Ok(());
                }
                replies.push(self.answer(&request, verdict, data, style)?);
            }
            let used = input.len() - rest.len();
            input.drain(..used);
            replies.reverse();
            stream.write_all(&replies.concat())?;
            read_some(stream, &mut input)?;
        }
    }

    fn answer(
        &self,
        request: &Request,
        verdict: Result<Command, NbdError>,
        data: &[u8],
        style: HeaderStyle,
    ) -> io::Result<Vec<u8>> {
        let late = self.served.fetch_add(1, Ordering::Relaxed) >= GRACE;
        let fault = if late { self.fault } else { Fault::None };
        let mut request = *request;
        let Request { offset, len, .. } = request;
        if fault == Fault::WrongCookie {
            request.cookie ^= 1 << 40;
        }
        let request = &request;
        if fault == Fault::Hangup {
            return Err(io::Error::other("fault"));
        }
        if fault == Fault::Garbage {
            return Ok(b"HTTP/1.1 500 Internal Server Error".to_vec());
        }
        let verdict = if fault == Fault::Error { Err(NbdError::Io) } else { verdict };
        let mut image = self.image.lock().unwrap();
        let (start, end) = (offset as usize, offset as usize + len as usize);
        Ok(match verdict {
            Err(error) => ReplyHeader::error(request, style, error).as_slice().to_vec(),
            Ok(Command::Read { df }) => {
                let mut data = image[start..end].to_vec();
                if fault == Fault::FlippedBit {
                    data[len as usize / 2] ^= 0x10;
                }
                if fault == Fault::SimpleReplyToStructuredRead || !style.has_chunks() {
                    [ReplyHeader::simple(request.cookie, Ok(())).as_slice(), &data].concat()
                } else if fault == Fault::ShortData {
                    let short = len / 2;
                    let header = ReplyHeader::read_data(&Request { len: short, ..*request }, style);
                    [header.as_slice(), &data[..short as usize]].concat()
                } else if df || len == 4096 {
                    let header = ReplyHeader::read_data(request, style);
                    [header.as_slice(), &data].concat()
                } else {
                    in_chunks(request, &data)
                }
            }
            Ok(command) => {
                match command {
                    Command::Write { .. } if fault == Fault::LostWrite => {}
                    Command::Write { .. } if fault == Fault::WriteElsewhere => {
                        let at = start / 2 / 4096 * 4096;
                        image[at..at + data.len()].copy_from_slice(data);
                    }
                    Command::Write { .. } => image[start..end].copy_from_slice(data),
                    Command::WriteZeroes { .. } if fault == Fault::LostZeroes => {}
                    // Trims every other time, as a server may.
                    Command::Trim { .. } if start / 65536 % 2 == 0 => {}
                    Command::WriteZeroes { .. } | Command::Trim { .. } => {
                        image[start..end].fill(0);
                    }
                    _ => {}
                }
                ReplyHeader::done(request, style).as_slice().to_vec()
            }
        })
    }
}

/// A long read as a server may answer it: holes and data, the last part first, and an empty last
/// chunk.
fn in_chunks(request: &Request, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, part) in data.chunks(65536).enumerate().rev() {
        let at = request.offset + i as u64 * 65536;
        let hole = part.iter().all(|&byte| byte == 0);
        out.extend(STRUCTURED_REPLY_MAGIC.to_be_bytes());
        out.extend(0_u16.to_be_bytes()); // not the last
        out.extend(if hole { 2_u16 } else { 1 }.to_be_bytes());
        out.extend(request.cookie.to_be_bytes());
        out.extend(if hole { 12 } else { part.len() as u32 + 8 }.to_be_bytes());
        out.extend(at.to_be_bytes());
        if hole {
            out.extend((part.len() as u32).to_be_bytes());
        } else {
            out.extend(part);
        }
    }
    out.extend(ReplyHeader::done(request, HeaderStyle::Structured).as_slice());
    out
}

/// Appends what the next read brings; the end of the stream is an error.
fn read_some(stream: &mut UnixStream, input: &mut Vec<u8>) -> io::Result<()> {
    let mut piece = [0; 65536];
    match stream.read(&mut piece)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        len => {
            input.extend_from_slice(&piece[..len]);
            Ok(())
        }
    }
}
