//! A device whose blocks say which they are and how often they were changed, and that fails as it is
//! told to.

use std::io;
use std::sync::{Mutex, PoisonError};

use bufcache::{BlockDevice, GetError};

pub(super) const BLOCKS: u64 = 20;

/// What becomes of the next read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Fault {
    #[default]
    None,
    Io,
    Short,
    /// It is read again at once.
    Interrupted,
    /// The verifier refuses it.
    Torn,
    Panic,
}

impl Fault {
    pub(super) fn of(byte: u8) -> Self {
        [Self::Io, Self::Short, Self::Interrupted, Self::Torn, Self::Panic][usize::from(byte) % 5]
    }

    /// What the reader is told.
    pub(super) fn error(self, block: u64) -> Option<GetError> {
        match self {
            Self::None | Self::Interrupted => None,
            Self::Io => Some(GetError::Io { errno: libc::ENXIO, block }),
            Self::Short => Some(GetError::ShortRead { block }),
            Self::Torn => Some(GetError::Verify { block }),
            Self::Panic => Some(GetError::Panicked { block }),
        }
    }
}

#[derive(Default)]
struct State {
    versions: [u8; BLOCKS as usize],
    next: Fault,
    /// What became of the read before.
    last: Fault,
}

pub(super) struct Disk {
    size: usize,
    state: Mutex<State>,
}

impl Disk {
    pub(super) fn new(size: usize) -> Self {
        Self { size, state: Mutex::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another writes to the device.
    pub(super) fn change(&self, block: u64) {
        let version = &mut self.state().versions[block as usize];
        *version = version.wrapping_add(1);
    }

    pub(super) fn version(&self, block: u64) -> u8 {
        self.state().versions[block as usize]
    }

    pub(super) fn arm(&self, fault: Fault) {
        self.state().next = fault;
    }

    pub(super) fn last_fault(&self) -> Fault {
        self.state().last
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * self.size as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        assert!(buf.len() == self.size && buf.as_ptr().addr().is_multiple_of(self.size));
        let block = offset / self.size as u64;
        let mut state = self.state();
        state.last = std::mem::take(&mut state.next);
        let (fault, version) = (state.last, state.versions[block as usize]);
        drop(state);
        match fault {
            Fault::None => fill(buf, block as u8, version),
            Fault::Io => return Err(io::Error::from_raw_os_error(libc::ENXIO)),
            Fault::Short => return Ok(self.size / 2),
            Fault::Interrupted => return Err(io::ErrorKind::Interrupted.into()),
            Fault::Torn => {
                fill(buf, block as u8, version);
                buf[self.size - 1] ^= 1;
            }
            // Without a message.
            Fault::Panic => std::panic::resume_unwind(Box::new(())),
        }
        Ok(buf.len())
    }
}

pub(super) fn fill(buf: &mut [u8], block: u8, version: u8) {
    buf.fill(block);
    buf[1] = version;
    let last = buf.len() - 1;
    buf[last] = block ^ version ^ 0x5a;
}

pub(super) fn is_whole(buf: &[u8]) -> bool {
    let (last, middle) = (buf.len() - 1, &buf[2..buf.len() - 1]);
    buf[last] == buf[0] ^ buf[1] ^ 0x5a && middle.iter().all(|&byte| byte == buf[0])
}

/// The block and its version.
pub(super) fn check(buf: &[u8]) -> (u8, u8) {
    assert!(is_whole(buf), "torn");
    (buf[0], buf[1])
}
