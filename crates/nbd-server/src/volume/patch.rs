//! The value of a block in the database: the parts of the block that were written.
//!
//! A value is a list of parts in the order of their offsets, which do not overlap:
//!
//! ```text
//!  ┌───────────┬──────────────┬───────┬───────────┬──────────────┬─────
//!  │ offset u32│ length | Z u32│ bytes │ offset u32│ length | Z   │ ...     little-endian
//!  └───────────┴──────────────┴───────┴───────────┴──────────────┴─────
//! ```
//!
//! A part with the flag `Z` has zeros and no bytes. What no part covers reads as zeros.
//!
//! A write of a part of a block is a merge of the database: it is stored as it is, without a read of
//! the block, and a read or a compaction lays it over what is older. The same format serves the
//! stored block and what is laid over it, so that the operation is associative, which the database
//! requires.

use std::io;

use slatedb::bytes::{BufMut, Bytes, BytesMut};
use slatedb::{MergeOperator, MergeOperatorError};

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 64 << 10;

/// The flag of a part that has zeros.
const ZEROS: u32 = 1 << 31;
/// The bytes before those of a part.
const HEAD: usize = 8;

/// A part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part<'v> {
    start: u32,
    end: u32,
    /// `None` for zeros.
    bytes: Option<&'v [u8]>,
}

impl<'v> Part<'v> {
    /// Returns the rest of the part from `start` to `end`, which are within it.
    fn cut(self, start: u32, end: u32) -> Self {
        let from = (start - self.start) as usize..(end - self.start) as usize;
        Self { start, end, bytes: self.bytes.map(|bytes| &bytes[from]) }
    }
}

/// Returns the parts of a value.
///
/// # Errors
///
/// `InvalidData` if the value is not one.
fn parts(mut value: &[u8]) -> io::Result<Vec<Part<'_>>> {
    let (mut parts, mut last) = (Vec::new(), 0);
    while !value.is_empty() {
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "a damaged block");
        let (head, rest) = value.split_first_chunk::<HEAD>().ok_or_else(damaged)?;
        let [a, b, c, d, e, f, g, h] = *head;
        let (start, len) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let (len, is_zero) = (len & !ZEROS, len & ZEROS != 0);
        let end = start.checked_add(len).filter(|&end| u64::from(end) <= BLOCK && start >= last);
        let end = end.ok_or_else(damaged)?;
        let stored = if is_zero { 0 } else { len as usize };
        let (bytes, rest) = rest.split_at_checked(stored).ok_or_else(damaged)?;
        parts.push(Part { start, end, bytes: (!is_zero).then_some(bytes) });
        (value, last) = (rest, end);
    }
    Ok(parts)
}

/// Returns the value of one written part. `bytes` is `None` for zeros.
pub(crate) fn of_part(start: u64, len: u64, bytes: Option<&[u8]>) -> Bytes {
    debug_assert!(start + len <= BLOCK && bytes.is_none_or(|bytes| bytes.len() as u64 == len));
    encode(&[Part { start: start as u32, end: (start + len) as u32, bytes }])
}

fn encode(parts: &[Part<'_>]) -> Bytes {
    let stored = |part: &Part<'_>| HEAD + part.bytes.map_or(0, <[u8]>::len);
    let mut value = BytesMut::with_capacity(parts.iter().map(stored).sum());
    for part in parts {
        let flag = if part.bytes.is_none() { ZEROS } else { 0 };
        value.put_u32_le(part.start);
        value.put_u32_le((part.end - part.start) | flag);
        value.put_slice(part.bytes.unwrap_or_default());
    }
    value.freeze()
}

/// Copies the bytes of a block from `from` on to `into`, which has zeros.
///
/// # Errors
///
/// `InvalidData` if the value is not one.
pub(crate) fn copy(value: &[u8], from: u64, into: &mut [u8]) -> io::Result<()> {
    let (from, till) = (from as u32, (from + into.len() as u64) as u32);
    for part in parts(value)? {
        let (start, end) = (part.start.max(from), part.end.min(till));
        if start < end {
            if let Some(bytes) = part.cut(start, end).bytes {
                into[(start - from) as usize..(end - from) as usize].copy_from_slice(bytes);
            }
        }
    }
    Ok(())
}

/// Lays the parts of newer values over those of an older value.
fn overlay<'v>(values: impl Iterator<Item = &'v [u8]>) -> io::Result<Bytes> {
    let mut all: Vec<Part<'v>> = Vec::new();
    for value in values {
        for newer in parts(value)? {
            let mut next = Vec::with_capacity(all.len() + 2);
            let mut newer_at = Some(newer);
            for older in all.drain(..) {
                if older.start < newer.start {
                    next.push(older.cut(older.start, older.end.min(newer.start)));
                }
                if older.end > newer.start {
                    next.extend(newer_at.take());
                }
                if older.end > newer.end {
                    next.push(older.cut(older.start.max(newer.end), older.end));
                }
            }
            next.extend(newer_at);
            all = next;
        }
    }
    Ok(encode(&all))
}

/// Lays written parts over the block.
pub(super) struct Overlay;

impl MergeOperator for Overlay {
    fn merge(
        &self,
        key: &Bytes,
        existing_value: Option<Bytes>,
        value: Bytes,
    ) -> Result<Bytes, MergeOperatorError> {
        self.merge_batch(key, existing_value, &[value])
    }

    fn merge_batch(
        &self,
        _key: &Bytes,
        existing_value: Option<Bytes>,
        operands: &[Bytes],
    ) -> Result<Bytes, MergeOperatorError> {
        let values = existing_value.iter().chain(operands).map(|value| &value[..]);
        overlay(values).map_err(|error| MergeOperatorError::Callback { message: error.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use testkit::rng::{Rng, seeded};

    use super::*;

    /// Returns a random value, and the bytes of the block with it; `None` where it has none.
    fn random(rng: &mut Rng) -> Bytes {
        let start = rng.u64(..BLOCK / 512 - 1) * 512;
        let len = (1 + rng.u64(..8)) * 512;
        let len = len.min(BLOCK - start);
        let bytes = vec![rng.u8(1..); len as usize];
        of_part(start, len, (rng.u8(..3) > 0).then_some(&bytes[..]))
    }

    #[test]
    fn parts_laid_over_each_other_read_as_written_in_that_order_and_in_any_grouping() {
        let mut rng = seeded(7);
        for _ in 0..200 {
            let count = rng.usize(1..12);
            let values: Vec<Bytes> = (0..count).map(|_| random(&mut rng)).collect();
            let mut expected = vec![0; BLOCK as usize];
            for value in &values {
                let part = parts(value).unwrap()[0];
                let place = &mut expected[part.start as usize..part.end as usize];
                place.copy_from_slice(part.bytes.unwrap_or(&vec![0; place.len()]));
            }
            let key = Bytes::new();
            let all = Overlay.merge_batch(&key, None, &values).unwrap();
            // Grouped at a random place: an operand that is itself a merge of operands.
            let (left, right) = values.split_at(rng.usize(..=count));
            let merge = |values: &[Bytes]| match values {
                [] => Bytes::new(),
                _ => Overlay.merge_batch(&key, None, values).unwrap(),
            };
            let grouped = Overlay.merge(&key, Some(merge(left)), merge(right)).unwrap();
            for value in [&all, &grouped] {
                let mut found = vec![0; BLOCK as usize];
                copy(value, 0, &mut found).unwrap();
                assert!(found == expected, "{values:?}");
                let from = rng.u64(..BLOCK - 1);
                let mut some = vec![0; rng.u64(..BLOCK - from) as usize];
                copy(value, from, &mut some).unwrap();
                assert!(some == expected[from as usize..][..some.len()]);
            }
        }
    }

    #[test]
    fn a_damaged_value_is_refused() {
        let good = of_part(4096, 512, Some(&[1; 512]));
        for bad in [&good[..7], &good[..100], &[good.clone(), good.clone()].concat()] {
            assert_eq!(parts(bad).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        let mut beyond = of_part(BLOCK - 512, 512, None).to_vec();
        beyond[5] += 2;
        assert!(parts(&beyond).is_err());
    }
}
