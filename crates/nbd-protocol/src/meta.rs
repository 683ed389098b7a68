//! Metadata contexts: of those the protocol knows, `base:allocation`.

use crate::bytes::Bytes;
use crate::option::{name, put_reply};
use crate::style::HeaderStyle;
use crate::wire::{BASE_ALLOCATION, MAX_STRING, opt, rep};

/// The id under which the server tells of [`BASE_ALLOCATION`].
pub const ALLOCATION_ID: u32 = 1;

/// The namespace of [`BASE_ALLOCATION`], which as a query asks for all that it has.
const BASE: &str = "base:";

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MetaRequest<'a> {
    pub(crate) name: &'a str,
    /// The queries as encoded on the wire. `parse` has checked their lengths.
    queries: &'a [u8],
}

impl<'a> MetaRequest<'a> {
    /// `None` if the data is malformed: lengths that do not add up, a string that is none.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut data = Bytes(data);
        let len = data.u32()?;
        let name = name(data.take(usize::try_from(len).ok()?)?)?;
        let count = data.u32()?;
        let queries = data.0;
        for _ in 0..count {
            query(&mut data)?; // takes four bytes at least, so the data bounds the count
        }
        data.is_empty().then_some(Self { name, queries })
    }

    /// The data, as a client sends it.
    pub(crate) fn encode(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = Vec::new();
        let mut put = |text: &str| {
            data.extend_from_slice(&(text.len() as u32).to_be_bytes());
            data.extend_from_slice(text.as_bytes());
        };
        put(name);
        let at = 4 + name.len();
        queries.iter().for_each(|query| put(query));
        data.splice(at..at, (queries.len() as u32).to_be_bytes());
        data
    }

    /// Appends the replies: the context, if it is asked for, once; returns whether it is. Queries for
    /// anything else find nothing, which is no error.
    pub(crate) fn answer(&self, option: u32, out: &mut Vec<u8>) -> bool {
        let listing = option == opt::LIST_META_CONTEXT;
        let mut rest = Bytes(self.queries);
        let mut queries = std::iter::from_fn(|| query(&mut rest));
        let found = if self.queries.is_empty() {
            listing // all there is; an empty choice chooses nothing
        } else {
            queries.any(|query| query == BASE_ALLOCATION || (listing && query == BASE))
        };
        if found {
            let id = if listing { 0 } else { ALLOCATION_ID }; // reserved in a list
            let name = BASE_ALLOCATION.as_bytes();
            put_reply(out, option, rep::META_CONTEXT, &id.to_be_bytes(), name);
        }
        put_reply(out, option, rep::ACK, &[], &[]);
        found
    }
}

fn query<'a>(data: &mut Bytes<'a>) -> Option<&'a str> {
    let len = usize::try_from(data.u32()?).ok()?;
    let text = std::str::from_utf8(data.take(len)?).ok()?;
    (len <= MAX_STRING).then_some(text)
}

/// A part of an export that is in one state throughout.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{Extent, HeaderStyle, wire::state};
///
/// let extents = [Extent { len: 4096, flags: 0 }, Extent { len: 8192, flags: state::HOLE }];
/// let bytes: Vec<u8> = extents.iter().filter_map(|extent| extent.encode32()).flatten().collect();
/// assert!(Extent::parse_all(&bytes, HeaderStyle::Structured).eq(extents));
///
/// let huge = Extent { len: 1 << 40, flags: state::HOLE };
/// assert_eq!(huge.encode32(), None);
/// assert!(Extent::parse_all(&huge.encode64(), HeaderStyle::Extended).eq([huge]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Flags of [`state`](crate::wire::state).
    pub flags: u64,
}

impl Extent {
    /// Bytes of an extent on the wire: 16 with extended headers, else 8.
    #[must_use]
    pub const fn size(style: HeaderStyle) -> usize {
        if style.is_extended() { 16 } else { 8 }
    }

    /// Writes an extent for `NBD_REPLY_TYPE_BLOCK_STATUS`; `None` if it needs more than 32 bits.
    #[must_use]
    pub fn encode32(self) -> Option<[u8; 8]> {
        let (len, flags) = (u32::try_from(self.len).ok()?, u32::try_from(self.flags).ok()?);
        Some((u64::from(len) << 32 | u64::from(flags)).to_be_bytes())
    }

    /// Writes an extent for `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    #[must_use]
    pub fn encode64(self) -> [u8; 16] {
        (u128::from(self.len) << 64 | u128::from(self.flags)).to_be_bytes()
    }

    /// Reads the extents that follow a reply's header; a part of one at the end is left out.
    pub fn parse_all(bytes: &[u8], style: HeaderStyle) -> impl Iterator<Item = Self> {
        let mut bytes = Bytes(bytes);
        std::iter::from_fn(move || {
            if style.is_extended() {
                Some(Self { len: bytes.u64()?, flags: bytes.u64()? })
            } else {
                Some(Self { len: bytes.u32()?.into(), flags: bytes.u32()?.into() })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_and_every_extension_of_a_request_is_malformed() {
        let mut data = MetaRequest::encode("disk", &["base:allocation", "", "x:y"]);
        let whole = MetaRequest::parse(&data).expect("well formed");
        assert_eq!((whole.name, whole.queries.len()), ("disk", 4 + 15 + 4 + 4 + 3));
        for end in 0..data.len() {
            assert_eq!(MetaRequest::parse(&data[..end]), None, "cut at {end}");
        }
        data.push(0);
        assert_eq!(MetaRequest::parse(&data), None);
    }

    #[test]
    fn a_count_that_the_data_does_not_bear_out_is_malformed() {
        let mut data = MetaRequest::encode("", &["a:b"]);
        data[4..8].fill(0xff);
        assert_eq!(MetaRequest::parse(&data), None);
    }

    #[test]
    fn extents_survive_the_wire() {
        let extent = Extent { len: 0xffff_f000, flags: 3 };
        let bytes = extent.encode32().unwrap();
        assert_eq!(bytes, *b"\xff\xff\xf0\0\0\0\0\x03");
        assert!(Extent::parse_all(&bytes, HeaderStyle::Structured).eq([extent]));
        let wide = Extent { len: 1 << 32, flags: 3 };
        assert_eq!(wide.encode32(), None);
        assert_eq!(wide.encode64(), *b"\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x03");
        assert!(Extent::parse_all(&wide.encode64(), HeaderStyle::Extended).eq([wide]));
    }
}
