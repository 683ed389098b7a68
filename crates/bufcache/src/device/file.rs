//! A file or a block device of the system.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::BlockDevice;

/// An open file or block device, read with `pread`.
///
/// A file that was opened with `O_DIRECT` takes blocks of its sector size and more.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    len: u64,
}

impl FileDevice {
    /// The file as large as it is now.
    ///
    /// # Errors
    ///
    /// The system's, where it does not tell the size.
    pub fn new(mut file: File) -> io::Result<Self> {
        use std::io::{Seek, SeekFrom};
        let len = file.seek(SeekFrom::End(0))?; // a block device has no other size
        Ok(Self { file, len })
    }
}

impl BlockDevice for FileDevice {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}
