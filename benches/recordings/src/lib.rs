//! Recordings of kernels under load: see `README.md` for the formats and where they come from.

use std::io::{self, ErrorKind, Read};

use flate2::read::GzDecoder;

/// A recording.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// A word: what was running.
    pub name: &'static str,
    packed: &'static [u8],
}

/// Open files under 64 clients of dbench.
pub const DBENCH64: Recording =
    Recording { name: "dbench64", packed: include_bytes!("../files-dbench64.bin.gz") };

/// Open files under a cargo build, 16 at a time.
pub const BUILD16: Recording =
    Recording { name: "build16", packed: include_bytes!("../files-build16.bin.gz") };

/// The XFS buffer cache while 8 processes unlink 48,000 files, from a cold cache.
pub const UNLINK8: Recording =
    Recording { name: "unlink8", packed: include_bytes!("../xfsbuf-unlink8.bin.gz") };

/// The XFS buffer cache while 8 processes create 48,000 files.
pub const CREATE8: Recording =
    Recording { name: "create8", packed: include_bytes!("../xfsbuf-create8.bin.gz") };

/// The number of CPUs of the machine on which open files were recorded.
pub const CPUS: usize = 2;

/// An event of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileEvent {
    /// The number of the file: dense, from 0, and used again after a release.
    pub file: u32,
    /// The CPU, 0 or 1.
    pub cpu: u8,
    /// Whether the file's object was allocated, and not released.
    pub is_added: bool,
}

/// An event of a buffer of XFS: it was looked up, or made since there was none. The recordings have other
/// events beside these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferEvent {
    /// The address of the buffer on the disk, in blocks of 512 bytes.
    pub address: u32,
    /// The length of the buffer, in blocks of 512 bytes.
    pub length: u16,
    /// The thread: 0 to 7, or 255 for a worker of the kernel.
    pub thread: u8,
    /// Whether the buffer was made, and not looked up.
    pub is_made: bool,
}

impl Recording {
    /// All events of open files, in the order in which they happened.
    ///
    /// # Errors
    ///
    /// If the recording is of another kind, or damaged.
    pub fn files(&self) -> io::Result<Vec<FileEvent>> {
        let event = |&[f0, f1, f2, f3, _, _, cpu, action]: &[u8; 8]| FileEvent {
            file: u32::from_le_bytes([f0, f1, f2, f3]),
            cpu,
            is_added: action == 0,
        };
        Ok(self.records(b"FILELST1")?.iter().map(event).collect())
    }

    /// The lookups and allocations of buffers, in the order in which they happened.
    ///
    /// # Errors
    ///
    /// If the recording is of another kind, or damaged.
    pub fn buffers(&self) -> io::Result<Vec<BufferEvent>> {
        let event = |&[a0, a1, a2, a3, l0, l1, thread, operation]: &[u8; 8]| {
            let (address, length) =
                (u32::from_le_bytes([a0, a1, a2, a3]), u16::from_le_bytes([l0, l1]));
            // The upper bits tell how the buffer was locked.
            let is_made = match operation & 0x3f {
                0 => false,
                2 => true,
                _ => return None,
            };
            Some(BufferEvent { address, length, thread, is_made })
        };
        Ok(self.records(b"XFSBUFT1")?.iter().filter_map(event).collect())
    }

    /// Unpacks the records: behind the name of the format and their number, 8 bytes each.
    fn records(&self, format: &[u8; 8]) -> io::Result<Vec<[u8; 8]>> {
        let mut bytes = Vec::new();
        GzDecoder::new(self.packed).read_to_end(&mut bytes)?;
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().expect("8 bytes"));
        let head = (words.next(), words.next().map(u64::from_le_bytes));
        if head != (Some(*format), Some(words.len() as u64)) {
            let name = self.name;
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("{name} is another recording"),
            ));
        }
        Ok(words.collect())
    }
}
