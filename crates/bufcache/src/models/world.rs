//! What the models read from: a device whose blocks say which they are, and how often it was asked.

use std::env;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{AttachOptions, BlockDevice, Builder, Cache, Device, Eviction, Load};
use offlock_sync::native::atomic::{AtomicUsize, Ordering::Relaxed};
use offlock_sync::{Futex, model, thread, with_preemptions};

pub(super) const SIZE: usize = 512;
pub(super) const BLOCKS: u64 = 64;

/// No checker has time: it never runs out.
pub(super) const LONG: Duration = Duration::from_secs(3600);

/// Runs a model with at least three preemptions, for models that take less than a second with them.
///
/// Not with a planted bug: two show it, and a run that a bug makes longer is not worth the time.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    let least = if env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, || model(f));
}

/// Runs `f` in another thread, with a clone of what the two share.
pub(super) fn beside<S: Clone + Send + 'static, T: Send + 'static>(
    shared: &S,
    f: impl FnOnce(S) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let shared = shared.clone();
    thread::spawn(move || f(shared))
}

/// Runs `here` in this thread and `other` in another one. Returns the results of both.
pub(super) fn race<S: Clone + Send + 'static, H, T: Send + 'static>(
    shared: &S,
    here: impl FnOnce(&S) -> H,
    other: impl FnOnce(S) -> T + Send + 'static,
) -> (H, T) {
    let other = beside(shared, other);
    (here(shared), other.join().unwrap())
}

/// A cache of a few buffers.
pub(super) fn builder(buffers: usize, patience: Duration) -> Builder {
    let builder = Cache::builder(buffers * SIZE).block_size(SIZE);
    builder.patience(patience).eviction(Eviction::Clock)
}

/// Attaches a device to a cache of its own. A loss is no error.
pub(super) fn attach(builder: Builder, device: &Arc<impl BlockDevice>) -> Device {
    let options = AttachOptions::new().on_loss(|_| {});
    builder.build().unwrap().attach_with(Arc::clone(device), options).unwrap()
}

type Job = Box<dyn FnOnce() + Send>;

/// A device whose blocks are filled with their numbers. No part of the model: the checker does not
/// see its counters.
#[derive(Default)]
pub(super) struct Numbered {
    pub(super) reads: AtomicUsize,
    /// The number of the next reads that fail.
    failing: AtomicUsize,
    /// The number of the next reads that panic.
    panicking: AtomicUsize,
    /// The number of the next reads that the device begins, and ends in a new thread each.
    begins: AtomicUsize,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
    /// The job of a thread that the next read starts.
    meanwhile: Mutex<Option<Job>>,
    other: Mutex<Option<thread::JoinHandle<()>>>,
    gone: Gone,
}

/// Rings when the device is gone.
#[derive(Default)]
struct Gone(Arc<Futex>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.advance();
        self.0.wake_all();
    }
}

/// Held for a moment in which no other thread of the model runs.
fn own<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockDevice for Numbered {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.reads.fetch_add(1, Relaxed);
        let meanwhile = own(&self.meanwhile).take();
        if let Some(job) = meanwhile {
            let other = thread::spawn(job);
            *own(&self.other) = Some(other);
            thread::yield_now(); // it is the other's turn, which a checker need not find
            dawdle();
        }
        if due(&self.panicking) {
            // Without a message: a panic that has one ends a model.
            std::panic::resume_unwind(Box::new(()));
        }
        if due(&self.failing) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        buf.fill((offset / SIZE as u64) as u8);
        Ok(buf.len())
    }

    fn begin_read(&self, mut load: Load) {
        if !due(&self.begins) {
            return load.defer();
        }
        self.reads.fetch_add(1, Relaxed);
        let fails = due(&self.failing);
        let thread = thread::spawn(move || {
            let byte = (load.offset() / SIZE as u64) as u8;
            load[..SIZE / 2].fill(byte);
            dawdle();
            load[SIZE / 2..].fill(byte);
            let failed = io::Error::from_raw_os_error(libc::EIO);
            load.finish(if fails { Err(failed) } else { Ok(SIZE) });
        });
        own(&self.threads).push(thread);
    }
}

/// Decrements a counter. Returns whether it was above zero.
fn due(count: &AtomicUsize) -> bool {
    let left = count.load(Relaxed);
    count.store(left.saturating_sub(1), Relaxed); // one thread runs at a time
    left > 0
}

impl Numbered {
    /// Returns a device that begins one read. The first `failing` reads fail.
    pub(super) fn later(failing: usize) -> Self {
        let [begins, failing] = [1, failing].map(AtomicUsize::new);
        Self { begins, failing, ..Self::default() }
    }
}

/// A cache of a few buffers, and its device.
#[derive(Clone)]
pub(super) struct World {
    pub(super) cache: Cache,
    pub(super) disk: Device,
    pub(super) device: Arc<Numbered>,
}

impl World {
    pub(super) fn new(buffers: usize) -> Self {
        Self::of(buffers, Numbered::default())
    }

    /// Returns a world whose first `reads` reads fail.
    pub(super) fn failing(buffers: usize, reads: usize) -> Self {
        Self::of(buffers, Numbered { failing: AtomicUsize::new(reads), ..Numbered::default() })
    }

    /// Returns a world whose first `reads` reads panic.
    pub(super) fn panicking(buffers: usize, reads: usize) -> Self {
        Self::of(buffers, Numbered { panicking: AtomicUsize::new(reads), ..Numbered::default() })
    }

    /// Returns a world that never waits for a buffer.
    pub(super) fn impatient(buffers: usize) -> Self {
        Self::attach(builder(buffers, Duration::ZERO), Numbered::default(), AttachOptions::new())
    }

    /// Returns a world that never waits for a buffer, and in which another thread ends the first
    /// read. The first `failing` reads fail.
    pub(super) fn later(buffers: usize, failing: usize) -> Self {
        let builder = builder(buffers, Duration::ZERO);
        Self::attach(builder, Numbered::later(failing), AttachOptions::new())
    }

    /// Waits for the end of what the device has begun.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *own(&self.device.threads));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    pub(super) fn with(buffers: usize, options: AttachOptions) -> Self {
        Self::attach(builder(buffers, LONG), Numbered::default(), options)
    }

    fn of(buffers: usize, device: Numbered) -> Self {
        Self::attach(builder(buffers, LONG), device, AttachOptions::new())
    }

    pub(super) fn attach(builder: Builder, device: Numbered, options: AttachOptions) -> Self {
        let cache = builder.build().unwrap();
        let device = Arc::new(device);
        let disk = cache.attach_with(Arc::clone(&device), options).unwrap();
        Self { cache, disk, device }
    }

    /// Runs `f`, and `other` in a thread that begins when the device is first read.
    pub(super) fn with_other<T>(
        &self,
        f: impl FnOnce() -> T,
        other: impl FnOnce() + Send + 'static,
    ) -> T {
        *own(&self.device.meanwhile) = Some(Box::new(other));
        let result = f();
        let other = own(&self.device.other).take();
        other.expect("the device was read").join().unwrap();
        result
    }

    /// Runs `f` while another thread looks at block 0, if it is there still.
    pub(super) fn against_a_hit(&self, f: impl FnOnce()) {
        self.read(0);
        let hits = beside(&self.disk, |disk| {
            if let Ok(guard) = disk.try_get(0) {
                look(&guard, 0);
            }
        });
        f();
        hits.join().unwrap();
    }

    /// Waits until the cache's thread has let the device go: what a model has of statics ends with it.
    pub(super) fn end(self) {
        let gone = Arc::clone(&self.device.gone.0);
        let seen = gone.load();
        drop(self);
        gone.wait(seen);
    }

    /// Gets a block and lets it go.
    pub(super) fn read(&self, block: u64) {
        look(&self.disk.get(block).unwrap(), block);
    }

    /// Both buffers can be had at once.
    pub(super) fn both_are_of_use(&self) {
        let (one, two) = (self.disk.get(1).unwrap(), self.disk.get(2).unwrap());
        assert_ne!(one.as_ptr(), two.as_ptr());
        look(&one, 1);
        look(&two, 2);
    }

    /// Reads of the device so far.
    pub(super) fn reads(&self) -> usize {
        self.device.reads.load(Relaxed)
    }
}

/// The bytes are those of the block, however late one looks.
pub(super) fn look(bytes: &impl Deref<Target = [u8]>, block: u64) {
    assert_eq!(bytes[0], block as u8);
    dawdle();
    assert_eq!(bytes[SIZE - 1], block as u8);
}

/// Takes as long as what others do, so that they come in between as often as not; loom needs no help.
pub(super) fn dawdle() {
    if cfg!(offlock_shuttle) {
        for _ in 0..200 {
            thread::yield_now();
        }
    }
}

/// Blocks that have the home of block 0 in a table of two to the power of `bits` buckets, in which a
/// model finds what it expects; or else another hash would be met by no mutant.
pub(super) fn neighbours<const N: usize>(bits: u32) -> [u64; N] {
    let home = |block: u64| {
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let hash = (1 << 48 | block).wrapping_mul(SPREAD);
        (hash ^ (hash >> 32)).wrapping_mul(SPREAD) >> (u64::BITS - bits)
    };
    let mut blocks = (1..BLOCKS).filter(|&block| home(block) == home(0));
    [(); N].map(|()| blocks.next().unwrap())
}
