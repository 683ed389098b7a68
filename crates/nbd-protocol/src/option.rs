//! Options and their replies: the parts that both ends share.

use crate::bytes::Bytes;
use crate::export::ExportInfo;
use crate::style::HeaderStyle;
use crate::wire::{InfoType, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, opt, rep};

/// Length of an option header: magic, option, length of the data.
pub const OPTION_HEADER: usize = 16;

/// Appends an option, as a client sends it.
pub(crate) fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&len32(data).to_be_bytes());
    out.extend_from_slice(data);
}

/// Appends a reply to `option`, its data in two parts.
pub(crate) fn put_reply(out: &mut Vec<u8>, option: u32, kind: u32, head: &[u8], tail: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&len32(head).saturating_add(len32(tail)).to_be_bytes());
    out.extend_from_slice(head);
    out.extend_from_slice(tail);
}

/// A length as it stands on the wire. All data here is far below the limit.
fn len32(data: &[u8]) -> u32 {
    debug_assert!(u32::try_from(data.len()).is_ok());
    data.len() as u32
}

/// The longest prefix of `text` that the protocol allows as a string.
pub(crate) fn clip(text: &str) -> &str {
    let mut end = text.len().min(MAX_STRING);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An export name: UTF-8, without NUL, not too long.
pub(crate) fn name(bytes: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(bytes).ok()?;
    (name.len() <= MAX_STRING && !name.contains('\0')).then_some(name)
}

/// The data of INFO and GO.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InfoRequest<'a> {
    pub(crate) name: &'a str,
    /// The kinds asked for, as on the wire, two bytes each.
    wanted: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    /// `None` if the data is malformed: lengths that do not add up, a bad name.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut data = Bytes(data);
        let len = data.u32()?;
        let name = name(data.take(usize::try_from(len).ok()?)?)?;
        let count = data.u16()?;
        let wanted = data.take(2 * usize::from(count))?;
        data.is_empty().then_some(Self { name, wanted })
    }

    /// The data, as a client sends it.
    pub(crate) fn encode(name: &str, wanted: &[InfoType]) -> Vec<u8> {
        let mut data = Vec::with_capacity(6 + name.len() + 2 * wanted.len());
        data.extend_from_slice(&len32(name.as_bytes()).to_be_bytes());
        data.extend_from_slice(name.as_bytes());
        data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
        for &kind in wanted {
            data.extend_from_slice(&(kind as u16).to_be_bytes());
        }
        data
    }

    /// Whether the client asks for `kind`. Kinds it asks for twice count once, unknown ones not
    /// at all.
    pub(crate) fn wants(&self, kind: InfoType) -> bool {
        self.wanted.chunks_exact(2).any(|w| w == (kind as u16).to_be_bytes())
    }

    /// Appends the replies to a successful INFO or GO: always size and flags, the rest on demand.
    pub(crate) fn answer(
        &self,
        option: u32,
        export: &ExportInfo,
        style: HeaderStyle,
        out: &mut Vec<u8>,
    ) {
        let mut put = |kind: InfoType, payload: &[u8]| {
            put_reply(out, option, rep::INFO, &(kind as u16).to_be_bytes(), payload);
        };
        put(InfoType::Export, &size_and_flags(export, style));
        if self.wants(InfoType::Name) {
            put(InfoType::Name, clip(&export.name).as_bytes());
        }
        if self.wants(InfoType::Description) {
            put(InfoType::Description, clip(&export.description).as_bytes());
        }
        if self.wants(InfoType::BlockSize) {
            let mut sizes = [0; 12];
            sizes[0..4].copy_from_slice(&export.min_block.max(1).to_be_bytes());
            sizes[4..8].copy_from_slice(&export.preferred_block.to_be_bytes());
            sizes[8..12].copy_from_slice(&export.max_block.to_be_bytes());
            put(InfoType::BlockSize, &sizes);
        }
        put_reply(out, option, rep::ACK, &[], &[]);
    }
}

/// Size and transmission flags, as in the reply to EXPORT_NAME and in `INFO_EXPORT`.
pub(crate) fn size_and_flags(export: &ExportInfo, style: HeaderStyle) -> [u8; 10] {
    let mut data = [0; 10];
    data[0..8].copy_from_slice(&export.size.to_be_bytes());
    data[8..10].copy_from_slice(&export.advertised(style).0.to_be_bytes());
    data
}

/// The name of an option, for messages.
pub(crate) fn option_name(option: u32) -> &'static str {
    match option {
        opt::EXPORT_NAME => "EXPORT_NAME",
        opt::ABORT => "ABORT",
        opt::LIST => "LIST",
        opt::STARTTLS => "STARTTLS",
        opt::INFO => "INFO",
        opt::GO => "GO",
        opt::STRUCTURED_REPLY => "STRUCTURED_REPLY",
        opt::LIST_META_CONTEXT => "LIST_META_CONTEXT",
        opt::SET_META_CONTEXT => "SET_META_CONTEXT",
        opt::EXTENDED_HEADERS => "EXTENDED_HEADERS",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_requests_round_trip() {
        let data = InfoRequest::encode("disk", &[InfoType::Name, InfoType::BlockSize]);
        let request = InfoRequest::parse(&data).unwrap();
        assert_eq!(request.name, "disk");
        assert!(request.wants(InfoType::Name) && request.wants(InfoType::BlockSize));
        assert!(!request.wants(InfoType::Export) && !request.wants(InfoType::Description));
    }

    #[test]
    fn every_cut_and_every_extension_of_an_info_request_is_malformed() {
        let mut data = InfoRequest::encode("disk", &[InfoType::Name]);
        for end in 0..data.len() {
            assert_eq!(InfoRequest::parse(&data[..end]), None, "cut at {end}");
        }
        data.push(0);
        assert_eq!(InfoRequest::parse(&data), None);
    }

    #[test]
    fn names_must_be_utf8_without_nul_and_at_most_4096_bytes() {
        assert_eq!(name(b"\xff"), None);
        assert_eq!(name(b"a\0b"), None);
        assert!(name(&[b'x'; MAX_STRING]).is_some());
        assert_eq!(name(&[b'x'; MAX_STRING + 1]), None);
    }

    #[test]
    fn clip_stops_before_a_character_it_would_split() {
        let text = "ä".repeat(MAX_STRING);
        assert_eq!(clip(&text).len(), MAX_STRING);
        let odd = format!("x{text}");
        assert_eq!(clip(&odd).len(), MAX_STRING - 1);
    }
}
