//! The client's side of the handshake.

use crate::bytes::Bytes;
use crate::export::ListedExport;
use crate::meta::MetaRequest;
use crate::option::{InfoRequest, put_option};
use crate::style::{HeaderStyle, TlsPolicy};
use crate::wire::{
    BASE_ALLOCATION, FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES,
    INIT_MAGIC, InfoType, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, TransmissionFlags, opt,
    rep,
};

/// Longest data of one option reply: a name and a description.
const MAX_REPLY_DATA: usize = 2 * MAX_STRING + 16;
/// Most entries of a list a client keeps.
const MAX_LISTED: usize = 10_000;

/// An error of the server after which the client must close the connection.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ClientError, ClientHandshake, HeaderStyle};
///
/// let mut client = ClientHandshake::new("disk", HeaderStyle::Simple);
/// let refused = client.receive(b"HTTP/1.1 400 Bad Request", &mut Vec::new());
/// assert_eq!(refused, Err(ClientError::NotNbd));
/// ```
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
    #[error("server refused option {option} with error {code:#x}: {message:?}")]
    Refused {
        /// The option.
        option: u32,
        /// One of [`rep`].
        code: u32,
        /// The server's explanation, often empty.
        message: String,
    },
    /// A reply does not start with a magic of the headers in use.
    #[error("reply starts with {0:#010x} instead of a reply magic")]
    BadReplyMagic(u32),
    /// A chunk of a structured reply contradicts itself.
    #[error("malformed chunk of type {kind:#06x} and length {len}")]
    BadChunk {
        /// One of [`chunk`](crate::wire::chunk), or unknown.
        kind: u16,
        /// Length of its payload in bytes.
        len: u64,
    },
    /// Bytes in plaintext follow the reply that starts TLS. An attacker may have injected them.
    #[error("{0} bytes in plaintext follow the reply to STARTTLS")]
    PlaintextBehindStartTls(usize),
}

/// The next step of a client, as [`ClientHandshake::receive`] returns it.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ClientHandshake, ClientStep, HeaderStyle};
///
/// let (mut client, mut out) = (ClientHandshake::new("disk", HeaderStyle::Simple), Vec::new());
/// let (used, step) = client.receive(b"NBDMAGICIHAVEOPT\0\x03", &mut out)?;
/// assert_eq!((used, step), (18, ClientStep::More)); // `out` has the client's flags, and GO
/// # Ok::<(), nbd_protocol::ClientError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientStep {
    /// Send what was appended, then feed more bytes.
    More,
    /// Start TLS as its client, then call [`receive`](ClientHandshake::receive) without input: it appends
    /// what to send over TLS first. From here on feed what was received over TLS. If TLS fails, close.
    StartTls,
    /// The transmission phase begins.
    Connected(Connected),
    /// The list is complete and ABORT was appended: send it and close.
    Listed(Vec<ListedExport>),
}

/// The export of a client, as the server described it in the handshake.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{Connected, TransmissionFlags};
///
/// fn needs_write_and_flush(export: &Connected) -> bool {
///     !export.flags.contains(TransmissionFlags::SEND_FUA)
/// }
/// assert!(needs_write_and_flush(&Connected::default()));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connected {
    /// Size in bytes.
    pub size: u64,
    /// The optional commands and properties of the export.
    pub flags: TransmissionFlags,
    /// The headers of requests and replies.
    pub style: HeaderStyle,
    /// The session is over TLS.
    pub tls: bool,
    /// The id of the context [`BASE_ALLOCATION`], if it was asked for and granted.
    pub allocation: Option<u32>,
    /// Minimum, preferred and maximum block size in bytes, if the server told. The first two are powers of
    /// two, the maximum is not less than the minimum.
    pub block_sizes: Option<(u32, u32, u32)>,
    /// The canonical name, if the server told.
    pub name: Option<String>,
    /// The description, if the server told.
    pub description: Option<String>,
}

/// The client's side of fixed newstyle negotiation: one export by GO (by EXPORT_NAME where the
/// server does not know GO), or a list.
///
/// # Examples
///
/// The same against a server is the example of [`Handshake`](crate::Handshake).
///
/// ```
/// use nbd_protocol::{ClientHandshake, ClientStep, HeaderStyle, TlsPolicy};
///
/// let mut client = ClientHandshake::new("disk", HeaderStyle::Extended)
///     .tls(TlsPolicy::Require)
///     .ask_allocation();
/// let mut out = Vec::new();
/// client.receive(b"NBDMAGICIHAVEOPT\0\x03", &mut out)?;
/// assert_eq!(out, b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0"); // STARTTLS before anything else
/// let granted = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0";
/// assert_eq!(client.receive(granted, &mut out)?, (20, ClientStep::StartTls));
/// # Ok::<(), nbd_protocol::ClientError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClientHandshake {
    state: State,
    goal: Goal,
    style: HeaderStyle,
    policy: TlsPolicy,
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
    StartTls,
    OverTls,
    Extended,
    Structured,
    Meta,
    Go,
    ExportName,
    List,
}

impl ClientHandshake {
    /// Asks for the export `name`, after headers of `style`. Where the server does not know extended
    /// headers it asks for structured replies, and goes on without them if they are refused, too.
    #[must_use]
    pub fn new(name: &str, style: HeaderStyle) -> Self {
        Self::with_goal(Goal::Connect(name.to_owned()), style)
    }

    /// Sets whether to start TLS, before any other option. By default there is no TLS.
    #[must_use]
    pub fn tls(self, policy: TlsPolicy) -> Self {
        Self { policy, ..self }
    }

    /// Asks also for the context [`BASE_ALLOCATION`], which needs structured replies.
    #[must_use]
    pub fn ask_allocation(self) -> Self {
        Self { ask_allocation: true, ..self }
    }

    /// Asks for the list of exports.
    #[must_use]
    pub fn list() -> Self {
        Self::with_goal(Goal::List, HeaderStyle::Simple)
    }

    fn with_goal(goal: Goal, style: HeaderStyle) -> Self {
        Self {
            state: State::Greeting,
            goal,
            style,
            policy: TlsPolicy::Off,
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
            if step == ClientStep::StartTls && !rest.is_empty() {
                return Err(ClientError::PlaintextBehindStartTls(rest.0.len()));
            }
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
            State::StartTls => self.reply(opt::STARTTLS, input, out),
            State::OverTls => {
                self.begin(out);
                Ok(Some(ClientStep::More))
            }
            State::Extended => self.reply(opt::EXTENDED_HEADERS, input, out),
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
        if self.policy == TlsPolicy::Off {
            self.begin(out);
        } else {
            put_option(out, opt::STARTTLS, &[]);
            self.state = State::StartTls;
        }
    }

    /// The first option but STARTTLS.
    fn begin(&mut self, out: &mut Vec<u8>) {
        match (&self.goal, self.style) {
            (Goal::List, _) => {
                put_option(out, opt::LIST, &[]);
                self.state = State::List;
            }
            (_, HeaderStyle::Simple) => self.go(out),
            (_, HeaderStyle::Structured) => self.ask_structured(out),
            (_, HeaderStyle::Extended) => {
                put_option(out, opt::EXTENDED_HEADERS, &[]);
                self.state = State::Extended;
            }
        }
    }

    fn ask_structured(&mut self, out: &mut Vec<u8>) {
        put_option(out, opt::STRUCTURED_REPLY, &[]);
        self.state = State::Structured;
    }

    /// Continues the handshake once the server has granted structured replies.
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
            (opt::STARTTLS, rep::ACK) => {
                self.export.tls = true;
                self.state = State::OverTls;
                return Ok(Some(ClientStep::StartTls));
            }
            (opt::EXTENDED_HEADERS, rep::ACK) => {
                self.export.style = HeaderStyle::Extended;
                self.choose(out);
            }
            (opt::STRUCTURED_REPLY, rep::ACK) => {
                self.export.style = HeaderStyle::Structured;
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
            opt::STARTTLS if self.policy != TlsPolicy::Require => self.begin(out),
            opt::EXTENDED_HEADERS => self.ask_structured(out),
            opt::STRUCTURED_REPLY => self.go(out),
            opt::SET_META_CONTEXT => {
                self.export.allocation = None; // whatever was said before the error
                self.go(out);
            }
            opt::GO if code == rep::ERR_UNSUP && !self.export.style.is_extended() => {
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
            let (min, preferred, max) = (data.u32()?, data.u32()?, data.u32()?);
            if !min.is_power_of_two() || !preferred.is_power_of_two() || max < min {
                return None; // a caller divides by them
            }
            self.export.block_sizes = Some((min, preferred, max));
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
