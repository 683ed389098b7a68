//! The common part of the formats: gzip, a name, a number of records, records of 8 bytes.

use std::io::{Error, ErrorKind, Read, Result};

use flate2::read::GzDecoder;

/// Unpacks a recording of the format called `name`; `parse` says what each record is.
pub(crate) fn load<T>(
    packed: &[u8],
    name: &[u8; 8],
    parse: impl Fn(&[u8; 8]) -> Option<T>,
) -> Result<Vec<T>> {
    let bad = |what: String| Error::new(ErrorKind::InvalidData, format!("a recording {what}"));
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes)?;
    let mut words = bytes.chunks_exact(8).map(|word| word.try_into().expect("8 bytes"));
    let head = (words.next(), words.next().map(u64::from_le_bytes));
    let whole = bytes.len() % 8 == 0;
    if !whole || head != (Some(*name), Some(words.len() as u64)) {
        return Err(bad("is of another format, or of another length than it says".into()));
    }
    let record = |(number, bytes)| {
        parse(&bytes).ok_or_else(|| bad(format!("has a record {number} that makes no sense")))
    };
    words.enumerate().map(record).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn small(count: u64, records: &[u64], length: usize) -> Result<Vec<u64>> {
        let mut bytes = b"NUMBERS1".to_vec();
        bytes.extend(count.to_le_bytes());
        records.iter().for_each(|record| bytes.extend(record.to_le_bytes()));
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&bytes[..length.min(bytes.len())])?;
        load(&gzip.finish()?, b"NUMBERS1", |bytes| {
            Some(u64::from_le_bytes(*bytes)).filter(|number| *number < 10)
        })
    }

    #[test]
    fn records_come_in_order_and_a_damaged_file_is_refused() {
        assert_eq!(small(3, &[7, 0, 9], usize::MAX).unwrap(), [7, 0, 9]);
        assert_eq!(small(0, &[], usize::MAX).unwrap(), []);
        let damaged: [(u64, &[u64], usize); 5] = [
            (2, &[7, 0, 9], usize::MAX),
            (3, &[7, 0], usize::MAX),
            (3, &[7, 0, 9], 39),
            (0, &[], 8),
            (2, &[7, 10], usize::MAX),
        ];
        for (count, records, length) in damaged {
            assert!(small(count, records, length).is_err(), "{count} {records:?} {length}");
        }
        assert!(load(b"no gzip", b"NUMBERS1", |_| Some(())).is_err());
    }
}
