//! The XFS buffer cache: every event of it.

use std::io;

use crate::packed::load;

/// One of the two recordings.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    /// A word: what was running.
    pub name: &'static str,
    /// The number of gets.
    pub gets: u64,
    /// The number of gets that found no buffer and allocated one.
    pub allocations: u64,
    packed: &'static [u8],
}

/// 8 processes unlink 48,000 files, from a cold cache.
pub const UNLINK8: Recording = Recording {
    name: "unlink8",
    gets: 640_328,
    allocations: 2_024,
    packed: include_bytes!("../xfsbuf-unlink8.bin.gz"),
};

/// 8 processes create 48,000 files.
pub const CREATE8: Recording = Recording {
    name: "create8",
    gets: 475_601,
    allocations: 2_024,
    packed: include_bytes!("../xfsbuf-create8.bin.gz"),
};

/// The thread of an event that a worker of the kernel caused.
pub const WORKER: u8 = 255;

/// An event of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The address of the buffer on the disk, in blocks of 512 bytes.
    pub address: u32,
    /// The length of the buffer, in blocks of 512 bytes.
    pub length: u16,
    /// The thread: 0 to 7, or [`WORKER`].
    pub thread: u8,
    /// The kind of the event.
    pub operation: Operation,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Looked up, and made if there was none.
    Get,
    /// Wanted with its contents.
    Read,
    /// Made, since there was none.
    Allocate,
    /// Given back.
    Release,
    /// A read of it went to the disk.
    SubmitRead,
    /// To be written some time.
    DelayWrite,
    /// Made outside the cache.
    GetUncached,
    /// A write of it went to the disk.
    SubmitWrite,
}

impl Recording {
    /// All events, in the order in which they happened.
    ///
    /// # Errors
    ///
    /// If the file in the repository is damaged.
    pub fn load(&self) -> io::Result<Vec<Event>> {
        load(self.packed, b"XFSBUFT1", |record| {
            let [a0, a1, a2, a3, l0, l1, thread, operation] = *record;
            Some(Event {
                address: u32::from_le_bytes([a0, a1, a2, a3]),
                length: u16::from_le_bytes([l0, l1]),
                thread: (thread < 8 || thread == WORKER).then_some(thread)?,
                operation: Operation::numbered(operation & !FLAGS)?,
            })
        })
    }
}

/// Set in an operation that was for later, and in one that failed if another thread had the buffer locked.
const FLAGS: u8 = 0x80 | 0x40;

impl Operation {
    fn numbered(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Get,
            1 => Self::Read,
            2 => Self::Allocate,
            3 => Self::Release,
            4 => Self::SubmitRead,
            5 => Self::DelayWrite,
            6 => Self::GetUncached,
            7 => Self::SubmitWrite,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recordings_are_whole() {
        for (recording, records) in [(UNLINK8, 2_026_616), (CREATE8, 1_430_324)] {
            let events = recording.load().unwrap();
            assert_eq!(events.len(), records);
            let count = |wanted| events.iter().filter(|event| event.operation == wanted).count();
            assert_eq!(count(Operation::Get) as u64, recording.gets);
            assert_eq!(count(Operation::Allocate) as u64, recording.allocations);
        }
    }
}
