//! The NBD protocol as pure functions: bytes in, values and bytes out.
//!
//! Nothing here does I/O, blocks, panics on any bytes from the peer, or uses `unsafe`, so a server, a
//! client, a test and a fuzz target share one implementation. It follows the protocol document,
//! `doc/proto.md` of the Network Block Device project; names without their `NBD_` prefix are its
//! names.
//!
//! | phase | server | client |
//! |---|---|---|
//! | handshake (fixed newstyle) | [`Handshake`] over [`Exports`] | [`ClientHandshake`] |
//! | STARTTLS | [`Step::StartTls`] | [`ClientStep::StartTls`] |
//! | a request | [`Request::parse`], [`Request::checked_payload_len`], [`Request::check`] | [`Request::encode`] |
//! | a reply | [`ReplyHeader`] | [`Reply::parse`] |
//! | BLOCK_STATUS | [`Handshake::base_allocation`], [`Extent::encode32`], [`Extent::encode64`] | [`Extent::parse_all`] |
//!
//! # Example
//!
//! A read, from the client's request to its data, on a connection that negotiated extended headers:
//!
//! ```
//! use nbd_protocol::{
//!     Agreed, Command, CommandFlags, ExportInfo, HeaderStyle, Reply, ReplyContent, ReplyHeader,
//!     Request, wire::cmd,
//! };
//!
//! let (export, style) = (ExportInfo::new("disk", 1 << 20), HeaderStyle::Extended);
//!
//! // The client sends:
//! let flags = CommandFlags::NONE;
//! let read = Request { flags, command: cmd::READ, cookie: 7, offset: 4096, len: 512 };
//! let sent = read.encode(style)?;
//!
//! // The server receives, and answers:
//! let (request, _) = Request::parse(sent.as_slice(), style)?.expect("the header is complete");
//! let mut answer = Vec::new();
//! match request.check(&export, Agreed { style, allocation: false }) {
//!     Ok(Command::Read { .. }) => {
//!         answer.extend(ReplyHeader::read_data(&request, style).as_slice());
//!         answer.extend([0x5a; 512]);
//!     }
//!     Ok(_) => unreachable!("it is a READ"),
//!     Err(error) => answer.extend(ReplyHeader::error(&request, style, error).as_slice()),
//! }
//!
//! // The client receives:
//! let (reply, used) = Reply::parse(&answer, style)?.expect("the header is complete");
//! assert_eq!(reply.cookie, read.cookie);
//! assert_eq!(reply.content, ReplyContent::Data { offset: 4096, len: 512 });
//! assert_eq!(answer[used..], [0x5a; 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choosing
//!
//! | you write | take | not |
//! |---|---|---|
//! | a server, or a proxy, on an event loop of your own | this crate | |
//! | a client that pipelines requests by cookie, or speaks to lying servers | this crate | |
//! | a test that must send malformed messages | [`wire`], and bytes by hand | [`Request::encode`], which cannot |
//! | a plugin for a server that exists | nbdkit | this crate |
//! | a client in a few lines, blocking, on Linux | libnbd | this crate: the sockets are yours to write |
//!
//! [`HeaderStyle::Structured`] is what deployed servers and clients have; ask for
//! [`HeaderStyle::Extended`] (it falls back) if TRIM, WRITE_ZEROES or BLOCK_STATUS exceed 4 GiB.
//! [`TlsPolicy::Require`] is the one that protects: [`TlsPolicy::On`] can be talked out of it.
//!
//! Left out: oldstyle negotiation, metadata contexts other than `base:allocation`, resizing, the
//! payload of BLOCK_STATUS, and TLS itself, which belongs to the transport.
//!
//! Each numbered promise of the crate, with its tests, is in `INVARIANTS.md` of the package.
#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod bytes;
mod client;
mod error;
mod export;
mod handshake;
mod meta;
mod option;
mod reply;
mod reply_header;
mod request;
mod style;
pub mod wire;

pub use client::{ClientError, ClientHandshake, ClientStep, Connected};
pub use error::NbdError;
pub use export::{ExportInfo, Exports, ListedExport};
pub use handshake::{
    CloseReason, Handshake, MAX_META_DATA, MAX_OPTION_DATA, MAX_OPTION_DRAIN, MAX_OPTIONS,
    MAX_REPLIES, Negotiated, Step,
};
pub use meta::{ALLOCATION_ID, Extent};
pub use option::OPTION_HEADER;
pub use reply::{Reply, ReplyContent};
pub use reply_header::ReplyHeader;
pub use request::{Agreed, BadMagic, BadPayload, Command, LengthTooLong, Request, RequestHeader};
pub use style::{HeaderStyle, TlsPolicy};
pub use wire::{CommandFlags, InfoType, MAX_PAYLOAD, MAX_STRING, TransmissionFlags};
