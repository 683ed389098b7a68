//! What the models write to: a device that knows what of it is durable.

use std::io;
use std::sync::Arc;

use crate::{AttachOptions, BlockDevice, Builder, Device, Wal};
use offlock_sync::native::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use offlock_sync::{Mutex, thread};

use super::world::{BLOCKS, LONG, SIZE, builder, dawdle};

/// Keeps what it is given, and knows what of it is durable. Its lock is the checker's: in which order a
/// write ends and a sync begins matters.
#[derive(Default)]
pub(super) struct Disk {
    state: Mutex<State>,
    /// So many writes fail first.
    pub(super) failing: AtomicUsize,
    /// So many syncs fail first, and give up what they should have made durable.
    pub(super) giving_up: AtomicUsize,
    /// How long a write goes on that has ended.
    pub(super) lingers: AtomicUsize,
    /// A byte is written only once the log is durable as far as that.
    pub(super) logs: AtomicBool,
}

#[derive(Default)]
pub(super) struct State {
    /// Of each write: the block, what, and whether that has ended.
    pub(super) written: Vec<(u64, u8, bool)>,
    durable: Vec<(u64, u8)>,
    writing: Vec<u64>,
    pub(super) log: u64,
}

impl State {
    fn begin(&mut self, block: u64) {
        assert!(!self.writing.contains(&block), "two writes of one block at a time");
        self.writing.push(block);
    }

    fn end(&mut self, block: u64) {
        self.writing.retain(|other| *other != block);
    }
}

impl Disk {
    pub(super) fn state<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock())
    }

    pub(super) fn durable(&self, block: u64) -> u8 {
        self.state(|state| {
            let last = state.durable.iter().rev().find(|(of, _)| *of == block);
            last.map_or(0, |(_, byte)| *byte)
        })
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let block = offset / SIZE as u64;
        let byte = self.state(|state| {
            let last = state.written.iter().rev().find(|(of, ..)| *of == block);
            last.map_or(0, |(_, byte, _)| *byte)
        });
        dawdle();
        buf.fill(byte);
        Ok(buf.len())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let block = offset / SIZE as u64;
        let left = self.failing.load(Relaxed);
        self.failing.store(left.saturating_sub(1), Relaxed);
        if left > 0 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let byte = buf[0];
        let at = self.state(|state| {
            let logged = u64::from(byte) <= state.log || !self.logs.load(Relaxed);
            assert!(logged, "before the log");
            state.begin(block);
            state.written.push((block, byte, false));
            state.written.len() - 1
        });
        thread::yield_now();
        dawdle();
        assert!(buf.iter().all(|other| *other == byte), "it changed while it was written");
        self.state(|state| {
            state.end(block);
            state.written[at].2 = true;
        });
        for _ in 0..self.lingers.load(Relaxed) {
            thread::yield_now(); // before the cache hears of it
            dawdle();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let ended: Vec<_> = self.state(|state| {
            let ended = state.written.iter().filter(|(_, _, ended)| *ended);
            ended.map(|&(block, byte, _)| (block, byte)).collect()
        });
        thread::yield_now();
        // Long enough for others to write something and to ask for a sync, too.
        (0..8).for_each(|_| dawdle());
        let left = self.giving_up.load(Relaxed);
        self.giving_up.store(left.saturating_sub(1), Relaxed);
        if left > 0 {
            self.state(|state| state.written.iter_mut().for_each(|write| write.2 = false));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.state(|state| state.durable.extend(ended));
        Ok(())
    }

    fn discard(&self, offset: u64, _: u64) -> io::Result<()> {
        let block = offset / SIZE as u64;
        self.state(|state| state.begin(block));
        thread::yield_now();
        dawdle();
        self.state(|state| {
            state.end(block);
            state.written.push((block, 0, true));
        });
        Ok(())
    }
}

impl Wal for Disk {
    fn durable(&self) -> u64 {
        self.state(|state| state.log)
    }

    fn flush(&self, number: u64) -> io::Result<()> {
        thread::yield_now();
        dawdle();
        self.state(|state| state.log = state.log.max(number));
        Ok(())
    }
}

/// Two buffers, and a device.
pub(super) fn world() -> (Arc<Disk>, Device) {
    of(small(2))
}

pub(super) fn small(buffers: usize) -> Builder {
    builder(buffers, LONG).dirty_limits(100, 100)
}

pub(super) fn of(builder: Builder) -> (Arc<Disk>, Device) {
    let disk = Arc::new(Disk::default());
    let options = AttachOptions::new().on_loss(|_| {}).wal(Arc::clone(&disk) as _);
    let device = builder.build().unwrap().attach_with(Arc::clone(&disk), options).unwrap();
    (disk, device)
}

pub(super) fn fill(device: &Device, block: u64, byte: u8) {
    let mut guard = device.get_mut(block).unwrap();
    guard[..SIZE / 2].fill(byte);
    dawdle();
    guard[SIZE / 2..].fill(byte);
}
