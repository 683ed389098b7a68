//! The NBD protocol as pure functions: bytes in, values and bytes out.
//!
//! Nothing here does I/O, blocks, panics on any input, or uses `unsafe`, so a server, a client, a
//! test and a fuzz target share one implementation. It follows the protocol description,
//! `doc/proto.md` of the Network Block Device project; names without their `NBD_` prefix are its
//! names.
//!
//! | phase | server | client |
//! |---|---|---|
//! | handshake (fixed newstyle) | [`Handshake`] | [`ClientHandshake`] |
//! | a request | [`Request::parse`], [`Request::check`] | [`Request::encode`] |
//! | a reply | [`ReplyHeader`] | [`Reply::parse`] |
//!
//! Of metadata contexts there is `base:allocation`, the holes of an export. Left out: other contexts, TLS
//! (refused as the description asks of a server without it), extended headers.

mod bytes;
mod client;
mod error;
mod export;
mod handshake;
mod meta;
mod option;
mod reply;
mod request;
pub mod wire;

pub use client::{ClientError, ClientHandshake, ClientStep, Connected, ListedExport, Reply};
pub use error::NbdError;
pub use export::{ExportInfo, Exports};
pub use handshake::{
    CloseReason, Handshake, MAX_META_DATA, MAX_OPTION_DATA, MAX_OPTION_DRAIN, MAX_OPTIONS,
    MAX_REPLIES, Negotiated, Step,
};
pub use meta::{ALLOCATION_ID, Extent};
pub use option::OPTION_HEADER;
pub use reply::ReplyHeader;
pub use request::{Agreed, BadMagic, Command, REQUEST_LEN, Request};
pub use wire::{CommandFlags, InfoType, MAX_PAYLOAD, MAX_STRING, TransmissionFlags};
