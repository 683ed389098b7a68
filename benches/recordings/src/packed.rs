//! The common part of the formats: gzip, a name, a number of records, records of 8 bytes.

use std::fmt;
use std::io::{self, Read};

use flate2::read::GzDecoder;

/// The reason for which a recording could not be read: the file is damaged.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is not gzip, or is cut short.
    Unpack(io::Error),
    /// The file begins with the name of another format.
    Format,
    /// There are more or fewer records than it says.
    Length,
    /// The record with this number makes no sense.
    Record(usize),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unpack(error) => write!(f, "a recording cannot be unpacked: {error}"),
            Self::Format => f.write_str("a recording is of another format"),
            Self::Length => f.write_str("a recording has not as many records as it says"),
            Self::Record(number) => write!(f, "record {number} makes no sense"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unpack(error) => Some(error),
            _ => None,
        }
    }
}

/// Unpacks a recording of the format called `name`; `parse` says what each record is.
pub(crate) fn load<T>(
    packed: &[u8],
    name: &[u8; 8],
    parse: impl Fn(&[u8; 8]) -> Option<T>,
) -> Result<Vec<T>, LoadError> {
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes).map_err(LoadError::Unpack)?;
    let mut words = bytes.chunks_exact(8).map(|word| word.try_into().expect("8 bytes"));
    let (Some(first), Some(count)) = (words.next(), words.next()) else {
        return Err(LoadError::Length);
    };
    if first != *name {
        return Err(LoadError::Format);
    }
    let whole = bytes.len() % 8 == 0;
    if !whole || u64::from_le_bytes(count) != words.len() as u64 {
        return Err(LoadError::Length);
    }
    let record = |(number, bytes)| parse(&bytes).ok_or(LoadError::Record(number));
    words.enumerate().map(record).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    }

    fn small(packed: &[u8]) -> Result<Vec<u64>, LoadError> {
        load(packed, b"NUMBERS1", |bytes| {
            Some(u64::from_le_bytes(*bytes)).filter(|number| *number < 10)
        })
    }

    fn file(count: u64, records: &[u64]) -> Vec<u8> {
        let mut bytes = b"NUMBERS1".to_vec();
        bytes.extend(count.to_le_bytes());
        records.iter().for_each(|record| bytes.extend(record.to_le_bytes()));
        bytes
    }

    #[test]
    fn records_come_in_order() {
        assert_eq!(small(&packed(&file(3, &[7, 0, 9]))).unwrap(), [7, 0, 9]);
        assert_eq!(small(&packed(&file(0, &[]))).unwrap(), []);
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let good = packed(&file(3, &[7, 0, 9]));
        let cut = &good[..good.len() - 9];
        assert!(matches!(small(cut), Err(LoadError::Unpack(_))));
        assert!(matches!(small(b"no gzip"), Err(LoadError::Unpack(_))));
        assert!(matches!(small(&packed(&file(2, &[7, 0, 9]))), Err(LoadError::Length)));
        assert!(matches!(small(&packed(&file(3, &[7, 0]))), Err(LoadError::Length)));
        assert!(matches!(small(&packed(&file(3, &[7, 0, 9])[..35])), Err(LoadError::Length)));
        assert!(matches!(small(&packed(b"NUMBERS1")), Err(LoadError::Length)));
        assert!(matches!(small(&packed(&[0; 24])), Err(LoadError::Format)));
        assert!(matches!(small(&packed(&file(3, &[7, 10, 9]))), Err(LoadError::Record(1))));
    }
}
