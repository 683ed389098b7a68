//! The client's side: negotiating an export, and reading replies.

use crate::bytes::Bytes;
use crate::error::NbdError;
use crate::meta::MetaRequest;
use crate::option::{InfoRequest, put_option};
use crate::wire::{
    BASE_ALLOCATION, FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES,
    INIT_MAGIC, InfoType, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, TransmissionFlags, chunk, opt, rep,
};

/// Longest data of one option reply: a name and a description.
const MAX_REPLY_DATA: usize = 2 * MAX_STRING + 16;
/// Most entries of a list a client keeps.
const MAX_LISTED: usize = 10_000;

/// What a server said that a client cannot go on from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The greeting is not that of a fixed newstyle server.
    #[error("not a fixed newstyle NBD server")]
    NotNbd,
    /// An option reply is malformed, or answers another option.
    #[error("malformed reply to an option")]
    BadOptionReply,
    /// The server refused an option.
    #[error("server refused option {option}: error {code:#x} {message:?}")]
    Refused {
        /// The option.
        option: u32,
        /// One of [`rep`].
        code: u32,
        /// The server's explanation, often empty.
        message: String,
    },
    /// A reply starts with neither magic.
    #[error("reply starts with {0:#010x} instead of a reply magic")]
    BadReplyMagic(u32),
    /// A chunk of a structured reply contradicts itself.
    #[error("malformed chunk of type {kind:#06x} and length {len}")]
    BadChunk {
        /// One of [`chunk`], or unknown.
        kind: u16,
        /// Length of its payload in bytes.
        len: u32,
    },
}

/// What [`ClientHandshake::receive`] asks of its caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientStep {
    /// Send what was appended, then feed more bytes.
    More,
    /// The transmission phase begins.
    Connected(Connected),
    /// The list is complete and ABORT was appended: send it and close.
    Listed(Vec<ListedExport>),
}

/// What the client learned about its export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connected {
    /// Size in bytes.
    pub size: u64,
    /// What the export can do.
    pub flags: TransmissionFlags,
    /// Every READ will be answered with a structured reply.
    pub structured: bool,
    /// The id of the context [`BASE_ALLOCATION`], if it was asked for and granted.
    pub allocation: Option<u32>,
    /// Minimum, preferred and maximum block size in bytes, if the server told.
    pub block_sizes: Option<(u32, u32, u32)>,
    /// The canonical name, if the server told.
    pub name: Option<String>,
    /// The description, if the server told.
    pub description: Option<String>,
}

/// One entry of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// The name to ask for.
    pub name: String,
    /// A description for people; may be empty.
    pub description: String,
}

/// The client's side of fixed newstyle negotiation: one export by GO (by EXPORT_NAME where the
/// server does not know GO), or a list. Its example is at [`Handshake`](crate::Handshake).
#[derive(Clone, Debug)]
pub struct ClientHandshake {
    state: State,
    goal: Goal,
    ask_structured: bool,
    ask_allocation: bool,
    no_zeroes: bool,
    export: Connected,
    seen_export: bool,
    listed: Vec<ListedExport>,
}

#[derive(Clone, Debug)]
enum Goal {
    Connect(String),
    List,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Greeting,
    Structured,
    Meta,
    Go,
    ExportName,
    List,
}

impl ClientHandshake {
    /// Asks for the export `name`, after structured replies if `structured`.
    #[must_use]
    pub fn new(name: &str, structured: bool) -> Self {
        Self::with_goal(Goal::Connect(name.to_owned()), structured)
    }

    /// Asks also for the context [`BASE_ALLOCATION`], which needs structured replies.
    #[must_use]
    pub fn ask_allocation(self) -> Self {
        Self { ask_allocation: true, ..self }
    }

    /// Asks for the list of exports.
    #[must_use]
    pub fn list() -> Self {
        Self::with_goal(Goal::List, false)
    }

    fn with_goal(goal: Goal, ask_structured: bool) -> Self {
        Self {
            state: State::Greeting,
            goal,
            ask_structured,
            ask_allocation: false,
            no_zeroes: false,
            export: Connected::default(),
            seen_export: false,
            listed: Vec::new(),
        }
    }

    /// Takes whole messages from the front of `input`, appends the answers to `out`, and returns
    /// how many bytes it took. The rest is to be given again with more behind it.
    ///
    /// # Errors
    ///
    /// [`ClientError`] when there is no way on; close the connection.
    pub fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, ClientStep), ClientError> {
        let mut rest = Bytes(input);
        loop {
            let mut ahead = rest;
            let Some(step) = self.advance(&mut ahead, out)? else {
                return Ok((input.len() - rest.0.len(), ClientStep::More));
            };
            rest = ahead;
            if step != ClientStep::More {
                return Ok((input.len() - rest.0.len(), step));
            }
        }
    }

    /// Handles one message; `Ok(None)` if it is not complete.
    fn advance(
        &mut self,
        input: &mut Bytes<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<ClientStep>, ClientError> {
        match self.state {
            State::Greeting => {
                let (Some(init), Some(magic), Some(flags)) =
                    (input.u64(), input.u64(), input.u16())
                else {
                    return Ok(None);
                };
                if init != INIT_MAGIC || magic != OPTION_MAGIC || flags & FLAG_FIXED_NEWSTYLE == 0 {
                    return Err(ClientError::NotNbd);
                }
                self.greet(flags, out);
                Ok(Some(ClientStep::More))
            }
            State::ExportName => {
                let (Some(size), Some(flags)) = (input.u64(), input.u16()) else {
                    return Ok(None);
                };
                if !self.no_zeroes && input.take(124).is_none() {
                    return Ok(None);
                }
                self.export.size = size;
                self.export.flags = TransmissionFlags(flags);
                Ok(Some(ClientStep::Connected(self.export.clone())))
            }
            State::Structured => self.reply(opt::STRUCTURED_REPLY, input, out),
            State::Meta => self.reply(opt::SET_META_CONTEXT, input, out),
            State::Go => self.reply(opt::GO, input, out),
            State::List => self.reply(opt::LIST, input, out),
        }
    }

    fn greet(&mut self, flags: u16, out: &mut Vec<u8>) {
        let mut mine = FLAG_C_FIXED_NEWSTYLE;
        if flags & FLAG_NO_ZEROES != 0 {
            mine |= FLAG_C_NO_ZEROES;
            self.no_zeroes = true;
        }
        out.extend_from_slice(&mine.to_be_bytes());
        match self.goal {
            Goal::List => {
                put_option(out, opt::LIST, &[]);
                self.state = State::List;
            }
            Goal::Connect(_) if self.ask_structured => {
                put_option(out, opt::STRUCTURED_REPLY, &[]);
                self.state = State::Structured;
            }
            Goal::Connect(_) => self.go(out),
        }
    }

    /// After structured replies were granted.
    fn choose(&mut self, out: &mut Vec<u8>) {
        if !self.ask_allocation {
            return self.go(out);
        }
        let data = MetaRequest::encode(self.name(), &[BASE_ALLOCATION]);
        put_option(out, opt::SET_META_CONTEXT, &data);
        self.state = State::Meta;
    }

    fn go(&mut self, out: &mut Vec<u8>) {
        let wanted = [InfoType::Name, InfoType::Description, InfoType::BlockSize];
        put_option(out, opt::GO, &InfoRequest::encode(self.name(), &wanted));
        self.state = State::Go;
    }

    fn name(&self) -> &str {
        match &self.goal {
            Goal::Connect(name) => name,
            Goal::List => "",
        }
    }

    /// Handles one reply to `option`.
    fn reply(
        &mut self,
        option: u32,
        input: &mut Bytes<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<ClientStep>, ClientError> {
        let (Some(magic), Some(to), Some(kind), Some(len)) =
            (input.u64(), input.u32(), input.u32(), input.u32())
        else {
            return Ok(None);
        };
        if magic != OPTION_REPLY_MAGIC || to != option || len as usize > MAX_REPLY_DATA {
            return Err(ClientError::BadOptionReply);
        }
        let Some(data) = input.take(len as usize) else {
            return Ok(None);
        };
        if kind & rep::ERROR_BIT != 0 {
            return self.refused(option, kind, data, out).map(Some);
        }
        match (option, kind) {
            (opt::STRUCTURED_REPLY, rep::ACK) => {
                self.export.structured = true;
                self.choose(out);
            }
            (opt::SET_META_CONTEXT, rep::META_CONTEXT) => {
                let (id, name) = context(data).ok_or(ClientError::BadOptionReply)?;
                if name == BASE_ALLOCATION {
                    self.export.allocation = Some(id);
                }
            }
            (opt::SET_META_CONTEXT, rep::ACK) => self.go(out),
            (opt::GO, rep::INFO) => self.info(data).ok_or(ClientError::BadOptionReply)?,
            (opt::GO, rep::ACK) if self.seen_export => {
                return Ok(Some(ClientStep::Connected(self.export.clone())));
            }
            (opt::LIST, rep::SERVER) if self.listed.len() < MAX_LISTED => {
                self.listed.push(listed(data).ok_or(ClientError::BadOptionReply)?);
            }
            (opt::LIST, rep::ACK) => {
                put_option(out, opt::ABORT, &[]);
                return Ok(Some(ClientStep::Listed(std::mem::take(&mut self.listed))));
            }
            _ => return Err(ClientError::BadOptionReply),
        }
        Ok(Some(ClientStep::More))
    }

    /// Goes on without what the server does not know, where that is possible.
    fn refused(
        &mut self,
        option: u32,
        code: u32,
        message: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<ClientStep, ClientError> {
        match option {
            opt::STRUCTURED_REPLY => self.go(out),
            opt::SET_META_CONTEXT => {
                self.export.allocation = None; // whatever was said before the error
                self.go(out);
            }
            opt::GO if code == rep::ERR_UNSUP => {
                put_option(out, opt::EXPORT_NAME, self.name().as_bytes());
                self.state = State::ExportName;
            }
            _ => {
                let message = String::from_utf8_lossy(message).into_owned();
                return Err(ClientError::Refused { option, code, message });
            }
        }
        Ok(ClientStep::More)
    }

    /// Takes one piece of information; `None` if it is malformed. Unknown kinds are ignored.
    fn info(&mut self, data: &[u8]) -> Option<()> {
        let mut data = Bytes(data);
        let kind = data.u16()?;
        if kind == InfoType::Export as u16 {
            self.export.size = data.u64()?;
            self.export.flags = TransmissionFlags(data.u16()?);
            self.seen_export = true;
        } else if kind == InfoType::BlockSize as u16 {
            self.export.block_sizes = Some((data.u32()?, data.u32()?, data.u32()?));
        } else if kind == InfoType::Name as u16 {
            self.export.name = Some(std::str::from_utf8(data.rest()).ok()?.to_owned());
        } else if kind == InfoType::Description as u16 {
            self.export.description = Some(std::str::from_utf8(data.rest()).ok()?.to_owned());
        } else {
            data.rest();
        }
        data.is_empty().then_some(())
    }
}

/// One metadata context: its id and its name.
fn context(data: &[u8]) -> Option<(u32, &str)> {
    let mut data = Bytes(data);
    Some((data.u32()?, std::str::from_utf8(data.rest()).ok()?))
}

fn listed(data: &[u8]) -> Option<ListedExport> {
    let mut data = Bytes(data);
    let len = data.u32()?;
    let name = std::str::from_utf8(data.take(usize::try_from(len).ok()?)?).ok()?.to_owned();
    let description = String::from_utf8_lossy(data.rest()).into_owned();
    Some(ListedExport { name, description })
}

/// A simple reply or one chunk of a structured reply, as a client reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Success or failure. After a successful READ its data follows, as long as was asked for.
    Simple {
        /// Of the request.
        cookie: u64,
        /// What became of it.
        result: Result<(), NbdError>,
    },
    /// `len` bytes of data follow; they belong at `offset`.
    Data {
        /// Of the request.
        cookie: u64,
        /// Offset in the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u32,
        /// The last chunk of this reply.
        done: bool,
    },
    /// `len` zeroes belong at `offset`; nothing follows.
    Hole {
        /// Of the request.
        cookie: u64,
        /// Offset in the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u32,
        /// The last chunk of this reply.
        done: bool,
    },
    /// `len` bytes of [`Extent`](crate::Extent)s follow, a multiple of their size; the first begins where
    /// the request does.
    Extents {
        /// Of the request.
        cookie: u64,
        /// The context's id.
        context: u32,
        /// Length in bytes, at least one extent's.
        len: u32,
        /// The last chunk of this reply.
        done: bool,
    },
    /// The end of a structured reply.
    Done {
        /// Of the request.
        cookie: u64,
    },
    /// The request failed, whatever other chunks say.
    Error {
        /// Of the request.
        cookie: u64,
        /// How.
        error: NbdError,
        /// The last chunk of this reply.
        done: bool,
    },
}

impl Reply {
    /// Reads one reply header from the front of `input`; returns it and its length. `Ok(None)` if
    /// it is not complete.
    ///
    /// Data is not part of it: after [`Reply::Data`] and [`Reply::Extents`], and after a successful simple
    /// reply to a READ, it follows in the stream.
    ///
    /// # Errors
    ///
    /// [`ClientError::BadReplyMagic`], [`ClientError::BadChunk`]: the stream is out of step, close
    /// it.
    pub fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, ClientError> {
        let mut bytes = Bytes(input);
        let Some(magic) = bytes.u32() else { return Ok(None) };
        let reply = match magic {
            SIMPLE_REPLY_MAGIC => Ok(Self::simple(&mut bytes)),
            STRUCTURED_REPLY_MAGIC => Self::chunk(&mut bytes),
            _ => Err(ClientError::BadReplyMagic(magic)),
        }?;
        Ok(reply.map(|reply| (reply, input.len() - bytes.0.len())))
    }

    /// The cookie of the request it answers.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        match *self {
            Self::Simple { cookie, .. }
            | Self::Data { cookie, .. }
            | Self::Hole { cookie, .. }
            | Self::Extents { cookie, .. }
            | Self::Done { cookie }
            | Self::Error { cookie, .. } => cookie,
        }
    }

    /// Whether nothing more is to come for that request but the data of this reply.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match *self {
            Self::Simple { .. } | Self::Done { .. } => true,
            Self::Data { done, .. }
            | Self::Hole { done, .. }
            | Self::Extents { done, .. }
            | Self::Error { done, .. } => done,
        }
    }

    fn simple(bytes: &mut Bytes<'_>) -> Option<Self> {
        let (error, cookie) = (bytes.u32()?, bytes.u64()?);
        let result = NbdError::from_code(error).map_or(Ok(()), Err);
        Some(Self::Simple { cookie, result })
    }

    fn chunk(bytes: &mut Bytes<'_>) -> Result<Option<Self>, ClientError> {
        let (Some(flags), Some(kind), Some(cookie), Some(len)) =
            (bytes.u16(), bytes.u16(), bytes.u64(), bytes.u32())
        else {
            return Ok(None);
        };
        let bad = ClientError::BadChunk { kind, len };
        let done = flags & chunk::FLAG_DONE != 0;
        Ok(match kind {
            chunk::NONE if len == 0 && done => Some(Self::Done { cookie }),
            chunk::OFFSET_DATA if len > 8 => {
                bytes.u64().map(|offset| Self::Data { cookie, offset, len: len - 8, done })
            }
            chunk::OFFSET_HOLE if len == 12 => match (bytes.u64(), bytes.u32()) {
                (Some(_), Some(0)) => return Err(bad),
                (Some(offset), Some(len)) => Some(Self::Hole { cookie, offset, len, done }),
                _ => None,
            },
            chunk::BLOCK_STATUS if len >= 12 && (len - 4) % 8 == 0 => {
                bytes.u32().map(|context| Self::Extents { cookie, context, len: len - 4, done })
            }
            _ if kind & chunk::ERROR_BIT != 0 => {
                // Code, length of the message, the message, and eight bytes of an offset: what an
                // error chunk can hold. Unknown kinds of errors start the same way.
                if len < 6 || len as usize > 6 + MAX_STRING + 8 {
                    return Err(bad);
                }
                let Some(payload) = bytes.take(len as usize) else { return Ok(None) };
                let mut payload = Bytes(payload);
                let (Some(code), Some(message)) = (payload.u32(), payload.u16()) else {
                    return Err(bad);
                };
                if payload.take(message.into()).is_none() {
                    return Err(bad);
                }
                // A code of 0 is forbidden here; the request failed all the same.
                let error = NbdError::from_code(code).unwrap_or(NbdError::Inval);
                Some(Self::Error { cookie, error, done })
            }
            _ => return Err(bad),
        })
    }
}
