//! The server's side of the handshake, from its greeting to the first request.
//!
//! ```text
//!  new() -> ClientFlags -> OptionHeader <-> OptionData -> Ready | Close
//!                               ^  |
//!                               |  v
//!                               Drain      data of an option that is refused unread
//! ```
//!
//! STARTTLS leads back to OptionHeader, with everything negotiated before forgotten.
//!
//! # Invariants
//!
//! 1. `held` never exceeds [`MAX_META_DATA`], which is above [`MAX_OPTION_DATA`]: longer data is drained,
//!    not kept.
//! 2. After `Ready` or `Close`, `receive` takes nothing more and says the same again.

use std::borrow::Cow;

use crate::bytes::Bytes;
use crate::export::{ExportInfo, Exports, ListedExport};
use crate::meta::MetaRequest;
use crate::option::{
    InfoRequest, OPTION_HEADER, clip, name, option_name, put_reply, size_and_flags,
};
use crate::request::Agreed;
use crate::style::{HeaderStyle, TlsPolicy};
use crate::wire::{
    FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, INIT_MAGIC,
    MAX_STRING, OPTION_MAGIC, TransmissionFlags, opt, rep,
};

/// The number of options that a client may send before it is cut off. Real clients send fewer than ten.
pub const MAX_OPTIONS: u32 = 256;
/// Longest option data that is kept and parsed, in bytes: the longest name and room for every
/// kind of information several times over.
pub const MAX_OPTION_DATA: usize = MAX_STRING + 1024;
/// Longest data of LIST_META_CONTEXT and SET_META_CONTEXT that is kept and parsed, in bytes: the longest
/// name and many queries.
pub const MAX_META_DATA: usize = 4 * MAX_STRING;
/// Longest option data that is drained and answered with an error; above, the client is cut off.
pub const MAX_OPTION_DRAIN: u32 = 1 << 20;
/// Once a client was sent this many bytes of replies, it may send no further option.
pub const MAX_REPLIES: usize = 1 << 20;

/// The next step of a server, as [`Handshake::receive`] returns it.
///
/// # Examples
///
/// ```
/// use nbd_protocol::Step;
///
/// fn next(step: &Step) -> &'static str {
///     match step {
///         Step::More => "send, then receive",
///         Step::StartTls => "send in plaintext, then continue over TLS",
///         Step::Ready(_) => "send, then serve requests",
///         Step::Close(_) => "send, then close",
///     }
/// }
/// assert_eq!(next(&Step::More), "send, then receive");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send what was appended, then feed more bytes.
    More,
    /// Send what was appended, all of it in plaintext, then start TLS as its server. From here on feed
    /// what was received over TLS, and nothing that was received in plaintext. If TLS fails, close.
    StartTls,
    /// Send what was appended; the bytes not taken are the first of the transmission phase.
    Ready(Negotiated),
    /// Send what was appended, then close.
    Close(CloseReason),
}

/// The result of a handshake: the export, and what both sides agreed on.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ExportInfo, Handshake, Step};
///
/// let mut out = Vec::new();
/// let mut server = Handshake::new(&mut out);
/// let client = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk"; // flags, EXPORT_NAME
/// let (_, step) = server.receive(client, &[ExportInfo::new("disk", 512)][..], &mut out);
/// let Step::Ready(negotiated) = step else { panic!("{step:?}") };
/// assert_eq!((negotiated.export.as_str(), negotiated.size), ("disk", 512));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The export's name as the client gave it, so that [`Exports::open`] finds it again; empty
    /// for the default export.
    pub export: String,
    /// The headers of requests and replies.
    pub style: HeaderStyle,
    /// The client chose the context [`BASE_ALLOCATION`](crate::wire::BASE_ALLOCATION) for this export, so
    /// it may send BLOCK_STATUS; its id is [`ALLOCATION_ID`](crate::ALLOCATION_ID). Always false without
    /// [`Handshake::base_allocation`].
    pub allocation: bool,
    /// The client asked for the block sizes, so it promises to keep to them.
    pub block_sizes: bool,
    /// The size the client was told, in bytes.
    pub size: u64,
    /// The transmission flags the client was told.
    pub flags: TransmissionFlags,
    /// The session is over TLS.
    pub tls: bool,
}

impl Negotiated {
    /// Returns the part of the agreement that [`Request::check`](crate::Request::check) needs.
    #[must_use]
    pub fn agreed(&self) -> Agreed {
        Agreed { style: self.style, allocation: self.allocation }
    }
}

/// The reason for which a handshake ended without an export.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{CloseReason, ExportInfo, Handshake, Step};
///
/// let mut out = Vec::new();
/// let mut server = Handshake::new(&mut out);
/// let (_, step) = server.receive(b"GET / HTTP/1.1", &[] as &[ExportInfo], &mut out);
/// let Step::Close(reason) = step else { panic!("{step:?}") };
/// assert_eq!(reason.to_string(), "unknown client flags 0x47455420");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The client asked to end the session.
    #[error("client aborted the handshake")]
    Aborted,
    /// The client set flags that were not offered.
    #[error("unknown client flags {0:#010x}")]
    UnknownClientFlags(u32),
    /// An option did not start with its magic: not an NBD client, or out of step.
    #[error("option starts with {0:#018x} instead of the option magic")]
    BadOptionMagic(u64),
    /// A client without fixed newstyle may only send EXPORT_NAME.
    #[error("client without fixed newstyle sent option {0} ({name})", name = option_name(*.0))]
    NotFixedNewstyle(u32),
    /// EXPORT_NAME with a name that is not offered; the option has no error reply.
    #[error("no export named {0:?}")]
    UnknownExport(String),
    /// EXPORT_NAME with data that is no name.
    #[error("malformed export name")]
    BadExportName,
    /// An option with far more data than any has.
    #[error("option {option} ({name}) has too much data: {len} bytes", name = option_name(*.option))]
    OptionTooLong {
        /// The option.
        option: u32,
        /// Bytes of data announced.
        len: u32,
    },
    /// Too many options, or too many bytes of replies to them.
    #[error("too many options")]
    TooManyOptions,
    /// EXPORT_NAME before TLS where TLS is required; the option has no error reply.
    #[error("client sent EXPORT_NAME before TLS, which is required")]
    TlsRequired,
    /// Bytes in plaintext follow STARTTLS before its reply. An attacker may have injected them, and they would
    /// pass for bytes that the client sends over TLS.
    #[error("{0} bytes in plaintext follow STARTTLS before its reply")]
    PlaintextBehindStartTls(usize),
    /// EXPORT_NAME after extended headers were negotiated, which the protocol forbids.
    #[error("client sent EXPORT_NAME after it negotiated extended headers")]
    ExportNameWithExtendedHeaders,
}

/// The server's side of fixed newstyle negotiation.
///
/// Feed it what the client sends, send what it appends. It keeps at most [`MAX_META_DATA`] bytes
/// and allocates once per option.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ClientHandshake, ClientStep, ExportInfo, Handshake, HeaderStyle, Step};
///
/// let exports = [ExportInfo::new("disk", 1 << 20)];
/// let mut to_client = Vec::new();
/// let mut to_server = Vec::new();
/// let mut server = Handshake::new(&mut to_client);
/// let mut client = ClientHandshake::new("disk", HeaderStyle::Structured);
/// loop {
///     let (used, step) = client.receive(&to_client, &mut to_server)?;
///     to_client.drain(..used);
///     if let ClientStep::Connected(connected) = step {
///         assert_eq!(connected.size, 1 << 20);
///         break;
///     }
///     let (used, step) = server.receive(&to_server, &exports[..], &mut to_client);
///     to_server.drain(..used);
///     assert!(!matches!(step, Step::Close(_)));
/// }
/// # Ok::<(), nbd_protocol::ClientError>(())
/// ```
#[derive(Debug)]
pub struct Handshake {
    state: State,
    fixed: bool,
    no_zeroes: bool,
    offers_extended: bool,
    offers_allocation: bool,
    policy: TlsPolicy,
    tls: bool,
    lacked_tls: bool,
    style: HeaderStyle,
    /// The export for which the client chose base:allocation.
    allocation: Option<String>,
    options: u32,
    replied: usize,
    /// The start of a field or of option data that has not arrived in full.
    held: Vec<u8>,
}

#[derive(Clone, Debug)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionData { option: u32, len: usize },
    Drain { option: u32, left: u32, reply: u32 },
    Over(Step),
}

impl Handshake {
    /// Starts a handshake and appends the greeting.
    pub fn new(out: &mut Vec<u8>) -> Self {
        out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
        out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        out.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        Self {
            state: State::ClientFlags,
            fixed: false,
            no_zeroes: false,
            offers_extended: false,
            offers_allocation: false,
            policy: TlsPolicy::Off,
            tls: false,
            lacked_tls: false,
            style: HeaderStyle::Simple,
            allocation: None,
            options: 0,
            replied: 0,
            held: Vec::new(),
        }
    }

    /// Grants extended headers to a client that asks; by default they are refused.
    #[must_use]
    pub fn extended_headers(self) -> Self {
        Self { offers_extended: true, ..self }
    }

    /// Grants the context [`BASE_ALLOCATION`](crate::wire::BASE_ALLOCATION) to a client that asks. It may
    /// then send BLOCK_STATUS, which the server answers with one [`Extent`](crate::Extent) at least.
    ///
    /// By default the options of metadata contexts are refused as unknown, and so
    /// [`Request::check`](crate::Request::check) refuses BLOCK_STATUS.
    #[must_use]
    pub fn base_allocation(self) -> Self {
        Self { offers_allocation: true, ..self }
    }

    /// Sets what to answer to STARTTLS, and to everything before it. By default there is no TLS.
    #[must_use]
    pub fn tls(self, policy: TlsPolicy) -> Self {
        Self { policy, ..self }
    }

    /// Takes bytes from the client, appends the replies to `out`, and returns how many it took.
    ///
    /// It takes all of `input`, except that after the option that ends the handshake it takes
    /// nothing more: those bytes belong to the transmission phase. Give it all that was received:
    /// bytes behind a STARTTLS end the handshake. One call appends at most 1 MiB
    /// and one list of exports.
    pub fn receive(
        &mut self,
        input: &[u8],
        exports: &(impl Exports + ?Sized),
        out: &mut Vec<u8>,
    ) -> (usize, Step) {
        let mut rest = input;
        let step = loop {
            let before = out.len();
            match self.advance(&mut rest, exports, out) {
                Some(Step::More) => {}
                Some(Step::StartTls) if rest.is_empty() => break Step::StartTls,
                Some(Step::StartTls) => {
                    out.truncate(before);
                    let reason = CloseReason::PlaintextBehindStartTls(rest.len());
                    self.state = State::Over(Step::Close(reason.clone()));
                    break Step::Close(reason);
                }
                Some(over) => {
                    self.state = State::Over(over.clone());
                    self.held = Vec::new();
                    break over;
                }
                None => break Step::More,
            }
        };
        (input.len() - rest.len(), step)
    }

    /// Whether the client may still say something: false after `Ready` and `Close`.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !matches!(self.state, State::Over(_))
    }

    /// Whether an option was refused because TLS is required and the client had not started it.
    #[must_use]
    pub fn lacked_tls(&self) -> bool {
        self.lacked_tls
    }

    /// Handles one field or option; `None` if more bytes are needed.
    fn advance(
        &mut self,
        rest: &mut &[u8],
        exports: &(impl Exports + ?Sized),
        out: &mut Vec<u8>,
    ) -> Option<Step> {
        match self.state {
            State::ClientFlags => {
                let flags = Bytes(self.gather(rest, 4)?.as_slice()).u32()?;
                if flags & !(FLAG_C_FIXED_NEWSTYLE | FLAG_C_NO_ZEROES) != 0 {
                    return Some(Step::Close(CloseReason::UnknownClientFlags(flags)));
                }
                self.fixed = flags & FLAG_C_FIXED_NEWSTYLE != 0;
                self.no_zeroes = flags & FLAG_C_NO_ZEROES != 0;
                self.state = State::OptionHeader;
                Some(Step::More)
            }
            State::OptionHeader => {
                let header = self.gather(rest, OPTION_HEADER)?;
                let mut header = Bytes(&header);
                let (magic, option, len) = (header.u64()?, header.u32()?, header.u32()?);
                Some(self.start_option(magic, option, len))
            }
            State::OptionData { option, len } => {
                let data = self.gather(rest, len)?;
                self.state = State::OptionHeader;
                let before = out.len();
                let step = self.option(option, &data, exports, out);
                self.replied += out.len() - before;
                Some(step)
            }
            State::Drain { option, left, reply } => {
                let take = rest.len().min(left as usize);
                *rest = &rest[take..];
                let left = left - take as u32;
                if left > 0 {
                    self.state = State::Drain { option, left, reply };
                    return None;
                }
                self.state = State::OptionHeader;
                let before = out.len();
                put_reply(out, option, reply, &[], &[]);
                self.replied += out.len() - before;
                let aborted = option == opt::ABORT;
                Some(if aborted { Step::Close(CloseReason::Aborted) } else { Step::More })
            }
            State::Over(ref step) => Some(step.clone()),
        }
    }

    /// Returns the next `len` bytes once they are all there, else holds what there is.
    fn gather(&mut self, rest: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let missing = len.saturating_sub(self.held.len());
        let (head, tail) = rest.split_at(missing.min(rest.len()));
        *rest = tail;
        self.held.extend_from_slice(head);
        (self.held.len() >= len).then(|| std::mem::take(&mut self.held))
    }

    /// Decides from its header what to do with an option.
    fn start_option(&mut self, magic: u64, option: u32, len: u32) -> Step {
        if magic != OPTION_MAGIC {
            return Step::Close(CloseReason::BadOptionMagic(magic));
        }
        if !self.fixed && option != opt::EXPORT_NAME {
            return Step::Close(CloseReason::NotFixedNewstyle(option));
        }
        self.options += 1;
        if self.options > MAX_OPTIONS || self.replied > MAX_REPLIES {
            return Step::Close(CloseReason::TooManyOptions);
        }
        if option == opt::SET_META_CONTEXT {
            self.allocation = None; // also if the new choice fails
        }
        let needs_tls = self.policy == TlsPolicy::Require && !self.tls;
        let may_start_tls = self.policy != TlsPolicy::Off && !self.tls;
        let known = matches!(option, opt::EXPORT_NAME | opt::INFO | opt::GO);
        let meta = matches!(option, opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT);
        self.state = match option {
            _ if len > MAX_OPTION_DRAIN => {
                return Step::Close(CloseReason::OptionTooLong { option, len });
            }
            // EXPORT_NAME has no error reply.
            opt::EXPORT_NAME if needs_tls => return Step::Close(CloseReason::TlsRequired),
            opt::EXPORT_NAME if self.style.is_extended() => {
                return Step::Close(CloseReason::ExportNameWithExtendedHeaders);
            }
            opt::STARTTLS if may_start_tls && len == 0 => State::OptionData { option, len: 0 },
            opt::STARTTLS if self.policy != TlsPolicy::Off => {
                State::Drain { option, left: len, reply: rep::ERR_INVALID }
            }
            _ if needs_tls && option != opt::ABORT => {
                self.lacked_tls = true;
                State::Drain { option, left: len, reply: rep::ERR_TLS_REQD }
            }
            opt::EXPORT_NAME if len as usize > MAX_STRING => {
                return Step::Close(CloseReason::BadExportName);
            }
            _ if meta && !self.offers_allocation => {
                State::Drain { option, left: len, reply: rep::ERR_UNSUP }
            }
            _ if meta && !self.style.has_chunks() => {
                State::Drain { option, left: len, reply: rep::ERR_INVALID }
            }
            _ if known && len as usize > MAX_OPTION_DATA
                || meta && len as usize > MAX_META_DATA =>
            {
                State::Drain { option, left: len, reply: rep::ERR_TOO_BIG }
            }
            _ if known || meta => State::OptionData { option, len: len as usize },
            // Its data, if any, is ignored; the rest of the work needs none.
            opt::ABORT => State::Drain { option, left: len, reply: rep::ACK },
            opt::EXTENDED_HEADERS if !self.offers_extended => {
                State::Drain { option, left: len, reply: rep::ERR_UNSUP }
            }
            opt::LIST | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS if len > 0 => {
                State::Drain { option, left: len, reply: rep::ERR_INVALID }
            }
            opt::LIST | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => {
                State::OptionData { option, len: 0 }
            }
            // STARTTLS too: a server without TLS answers as if it did not know the option.
            _ => State::Drain { option, left: len, reply: rep::ERR_UNSUP },
        };
        Step::More
    }

    /// Answers an option whose data is complete.
    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &(impl Exports + ?Sized),
        out: &mut Vec<u8>,
    ) -> Step {
        match option {
            opt::EXPORT_NAME => return self.export_name(data, exports, out),
            opt::LIST => list(exports, out),
            opt::STARTTLS => {
                // Whatever was agreed on in plaintext may be another's choice.
                (self.tls, self.style, self.allocation) = (true, HeaderStyle::Simple, None);
                put_reply(out, option, rep::ACK, &[], &[]);
                return Step::StartTls;
            }
            opt::STRUCTURED_REPLY if self.style.is_extended() => {
                put_reply(out, option, rep::ERR_EXT_HEADER_REQD, &[], &[]);
            }
            opt::EXTENDED_HEADERS if self.style.is_extended() => {
                put_reply(out, option, rep::ERR_INVALID, &[], b"already negotiated");
            }
            opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => {
                self.style = if option == opt::EXTENDED_HEADERS {
                    HeaderStyle::Extended
                } else {
                    HeaderStyle::Structured
                };
                put_reply(out, option, rep::ACK, &[], &[]);
            }
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => match MetaRequest::parse(data) {
                None => put_reply(out, option, rep::ERR_INVALID, &[], &[]),
                Some(request) => match exports.find(request.name) {
                    Err(refusal) => {
                        put_reply(out, option, rep::ERR_UNKNOWN, &[], refusal.as_bytes());
                    }
                    Ok(_) => {
                        let found = request.answer(option, out);
                        if option == opt::SET_META_CONTEXT && found {
                            self.allocation = Some(request.name.to_owned());
                        }
                    }
                },
            },
            _ => match InfoRequest::parse(data) {
                None => put_reply(out, option, rep::ERR_INVALID, &[], &[]),
                Some(request) => match look_up(exports, option, request.name) {
                    Err(refusal) => {
                        put_reply(out, option, rep::ERR_UNKNOWN, &[], refusal.as_bytes());
                    }
                    Ok(export) => {
                        request.answer(option, &export, self.style, out);
                        if option == opt::GO {
                            let block_sizes = request.wants(crate::InfoType::BlockSize);
                            return self.ready(request.name, &export, block_sizes);
                        }
                    }
                },
            },
        }
        Step::More
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: &(impl Exports + ?Sized),
        out: &mut Vec<u8>,
    ) -> Step {
        let Some(name) = name(data) else {
            return Step::Close(CloseReason::BadExportName);
        };
        let Ok(export) = exports.open(name) else {
            return Step::Close(CloseReason::UnknownExport(name.to_owned()));
        };
        out.extend_from_slice(&size_and_flags(&export, self.style));
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        self.ready(name, &export, false)
    }

    fn ready(&self, name: &str, export: &ExportInfo, block_sizes: bool) -> Step {
        Step::Ready(Negotiated {
            export: name.to_owned(),
            style: self.style,
            allocation: self.allocation.as_deref() == Some(name),
            block_sizes,
            size: export.size,
            flags: export.advertised(self.style),
            tls: self.tls,
        })
    }
}

/// An export to tell about, or to use.
fn look_up<'a>(
    exports: &'a (impl Exports + ?Sized),
    option: u32,
    name: &str,
) -> Result<Cow<'a, ExportInfo>, &'static str> {
    if option == opt::GO { exports.open(name) } else { exports.find(name) }
}

/// Answers LIST: every name, with its description.
fn list(exports: &(impl Exports + ?Sized), out: &mut Vec<u8>) {
    let mut head = Vec::new();
    for ListedExport { name, description } in exports.list() {
        let (name, description) = (clip(&name), clip(&description));
        head.clear();
        head.extend_from_slice(&(name.len() as u32).to_be_bytes());
        head.extend_from_slice(name.as_bytes());
        put_reply(out, opt::LIST, rep::SERVER, &head, description.as_bytes());
    }
    put_reply(out, opt::LIST, rep::ACK, &[], &[]);
}
