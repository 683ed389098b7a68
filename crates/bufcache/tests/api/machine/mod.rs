//! A cache that is written, driven by steps of two bytes, beside a model of what it, its devices, and an image after a
//! loss of power may have: writes, syncs, discards and all else, on devices that fail in every way. The property test
//! and the fuzzer make the steps in one thread, the stress tests in several.
//!
//! Each sector that is written says which version of which block it is; versions of a block only grow. A reader
//! sees one version of a sector, none older than the last whose guard had dropped before. What a sync has returned
//! for must be there in any image of a later moment: that version, or a later one, sector by sector.
//!
//! One thread expects one outcome of each step: that version, and an error only where the device has failed. Now and
//! then an operation of another thread stands still in the device while the first goes on. What is evicted and when
//! dirty blocks are written is the cache's business: what is not cached must be on the device.

mod beside;
mod disk;
mod steps;

use std::ops::Range;
use std::slice::ChunksExact;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device, Eviction, Pin, WriteError};
use bufcache_test::Operation;
use offlock_sync::Mutex;
use testkit::rng::Rng;
use testkit::wait::wait_for;

use beside::Beside;
use disk::{BESIDE, Disk, PARTS, PATIENCE, SIZE, is_thread, words};

/// Kinds of [steps](World::step).
const KINDS: u8 = 24;

/// The devices, the cache and the faults of a world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) devices: usize,
    /// Blocks of a device, and blocks that fit into the cache.
    pub(crate) blocks: u64,
    pub(crate) buffers: usize,
    pub(crate) eviction: Eviction,
    /// One thread makes the steps, and expects one outcome of each.
    pub(crate) exact: bool,
    /// Operations of the devices fail.
    pub(crate) fails: bool,
    /// The devices record what a loss of power leaves.
    pub(crate) records: bool,
    /// The devices give up unsynced writes, and serve the older bytes again.
    pub(crate) reverts: bool,
    /// A write of the cleaner takes longer than the cache waits.
    pub(crate) cleans_slowly: bool,
    /// The calls that may wait are those of a task.
    pub(crate) is_task: bool,
    /// Operations of this kind do nothing.
    pub(crate) lies: Option<Operation>,
}

const ONE_THREAD: Shape = Shape {
    devices: 2,
    blocks: 12,
    buffers: 8,
    eviction: Eviction::A2,
    exact: true,
    fails: true,
    records: true,
    reverts: false,
    cleans_slowly: false,
    is_task: false,
    lies: None,
};

/// Of several threads.
pub(crate) const THREADS: Shape =
    Shape { devices: 1, blocks: 24, buffers: 12, exact: false, ..ONE_THREAD };

/// A pin of a block, and the words that it shows for ever.
struct Held {
    pin: Pin,
    block: u64,
    words: Option<[u64; PARTS]>,
}

impl Held {
    fn check(&self) {
        let now = words(self.block, &self.pin);
        assert_eq!(now, self.words, "a pin of block {} changed", self.block);
    }
}

/// A cache, its devices, and what is known of them.
pub(crate) struct World {
    cache: Cache,
    shape: Shape,
    disks: Vec<Disk>,
    /// Of each device. Closed and attached anew now and then.
    handles: Vec<RwLock<Device>>,
    /// Pins that any thread drops.
    shelf: Mutex<Vec<Held>>,
    /// The addresses of the buffers that the one thread has read guards of, over steps.
    guarded: Mutex<Vec<usize>>,
    beside: Mutex<Option<Beside>>,
    writes: AtomicU64,
    reads: AtomicU64,
}

/// Bit of the first byte: the devices give up unsynced writes, and serve the older bytes again.
pub(crate) const REVERTS: u8 = 4;

/// Makes the steps of `input` in one thread, and returns how many these are. The bits of the first byte choose the
/// shape. Operations of the devices of the kind `lies` do nothing.
pub(crate) fn run(input: &[u8], lies: Option<Operation>) -> usize {
    let (&first, steps) = input.split_first().unwrap_or((&0, &[]));
    let world = Arc::new(World::new(Shape {
        buffers: ONE_THREAD.buffers - usize::from(first >> 5),
        eviction: if first & 1 != 0 { Eviction::Clock } else { Eviction::A2 },
        reverts: first & REVERTS != 0,
        cleans_slowly: first & 8 != 0,
        is_task: first & 16 != 0,
        lies,
        ..ONE_THREAD
    }));
    let mut steps = steps.chunks_exact(2);
    let count = steps.len();
    world.steps(&mut steps, count);
    world.end_beside();
    world.look_around(0);
    if first & 2 == 0 {
        world.calm();
    }
    Arc::into_inner(world).expect("no other thread runs").end();
    count
}

impl World {
    pub(crate) fn new(shape: Shape) -> Self {
        let (patience, write_back_after) = match shape.exact {
            true => (PATIENCE, Duration::from_secs(1 << 20)),
            false => (Duration::from_millis(5), Duration::from_millis(20)),
        };
        let cache = Cache::builder(shape.buffers * SIZE)
            .block_size(SIZE)
            .eviction(shape.eviction)
            .patience(patience)
            .write_back_after(write_back_after)
            .dirty_limits(100, 100)
            .build()
            .unwrap();
        let disks: Vec<_> = (0..shape.devices).map(|_| Disk::new(shape)).collect();
        let handles = disks.iter().map(|disk| RwLock::new(disk.attach(&cache))).collect();
        let (shelf, guarded, beside, writes, reads) = Default::default();
        Self { cache, shape, disks, handles, shelf, guarded, beside, writes, reads }
    }

    /// Whether this thread expects one outcome of a step.
    fn is_exact(&self) -> bool {
        self.shape.exact && !is_thread(BESIDE)
    }

    /// Makes so many steps, or as many as there are, in one thread. One of kind 3 keeps a read guard of a cached block
    /// over the next ones.
    fn steps(self: &Arc<Self>, steps: &mut ChunksExact<'_, u8>, most: usize) {
        for _ in 0..most {
            let Some(&[op, arg]) = steps.next() else { return };
            self.step(op, arg, 0..self.shape.blocks);
            if op % KINDS != 3 || self.guarded.lock().len() == 10 {
                continue;
            }
            let (which, block) = (usize::from(arg) % self.shape.devices, u64::from(arg >> 1));
            let device = self.handles[which].read().unwrap().clone();
            let Ok(guard) = device.try_get(block % self.shape.blocks) else { continue };
            let (at, there) = (guard.as_ptr().addr(), guard.to_vec());
            self.guarded.lock().push(at);
            self.steps(steps, 1 + usize::from(op / KINDS));
            assert!(*guard == *there, "block {block} changed in a guard");
            drop(guard);
            self.guarded.lock().pop();
        }
    }

    /// Makes a step. The thread writes to blocks of `own` only, which no other thread writes to.
    pub(crate) fn step(self: &Arc<Self>, op: u8, arg: u8, own: Range<u64>) {
        let (op, how) = (op % KINDS, op / KINDS);
        let (which, at) = (usize::from(arg) % self.shape.devices, u64::from(arg >> 1));
        let (block, any) = (own.start + at % (own.end - own.start), at % self.shape.blocks);
        let few = block..(block + 1 + u64::from(how) % 4).min(own.end);
        if self.must_not(op, which, &few) {
            return;
        }
        if op == 22 {
            return self.close(which);
        }
        let (disk, device) = (&self.disks[which], &*self.handles[which].read().unwrap());
        match op {
            0..3 => self.get(which, device, any, op, how),
            3 if !self.shape.exact => self.read_by_other_means(disk, device, any, how),
            4 => self.let_go(arg),
            5..9 => self.write(disk, device, block, how),
            9 => self.flush(disk, device),
            10 | 11 => self.sync(disk, device),
            12 | 13 => self.write_through(disk, device, few),
            14 if how % 2 == 1 => self.wipe(disk, device, few, Operation::Write),
            14 => {
                if how % 4 == 2 && self.shape.fails {
                    let fault = bufcache_test::Fault::Error(libc::EOPNOTSUPP);
                    disk.fail(Operation::Discard, fault);
                }
                self.wipe(disk, device, few, Operation::Discard);
            }
            15 => self.wipe(disk, device, few, Operation::Zero),
            16 if self.shape.exact => self.invalidate(disk, device, block),
            16 => self.change_beside(disk, device, block),
            17 | 18 if self.shape.fails => disk.arm(how, arg >> 1),
            19 => self.reset(disk, device),
            20 => {
                let most = usize::from(arg % 5);
                assert!(self.cache.shrink(most) <= most);
            }
            21 if self.shape.exact => {
                let fails = at / self.shape.blocks % 2 == 1;
                self.begin_beside(which, device, few, how, fails);
            }
            23 if self.shape.exact => self.look_around(arg.into()),
            _ => {}
        }
    }

    /// Runs `threads` threads of so many steps, or until `is_over` returns true.
    pub(crate) fn rage(
        self: &Arc<Self>,
        threads: u64,
        seed: u64,
        steps: u64,
        is_over: impl Fn() -> bool + Sync,
    ) {
        let (is_over, share) = (&is_over, self.shape.blocks / threads);
        thread::scope(|scope| {
            for number in 0..threads {
                scope.spawn(move || {
                    let mut rng = testkit::rng::seeded(seed * 1000 + number);
                    for _ in (0..steps).take_while(|_| !is_over()) {
                        // Two in three are gets and writes; a few blocks are used more often.
                        let often = [0, 1, 5][rng.usize(..3)];
                        let op = if rng.u8(..3) > 0 { often } else { rng.u8(..KINDS) };
                        let arg = rng.u8(..) & rng.u8(..);
                        let own = number * share..(number + 1) * share;
                        self.step(op + KINDS * rng.u8(..10), arg, own);
                    }
                });
            }
        });
    }

    /// The numbers of writes, of reads, and of evictions.
    pub(crate) fn done(&self) -> [u64; 3] {
        [self.writes.load(Relaxed), self.reads.load(Relaxed), self.cache.stats().evictions]
    }

    /// Nothing is wrong any more: all that was written is on the devices, and each buffer is of use again.
    pub(crate) fn calm(&self) {
        self.shelf.lock().drain(..).for_each(|held| held.check());
        for (which, disk) in self.disks.iter().enumerate() {
            disk.device.heal();
            if disk.told().closed {
                self.close(which); // which attaches it anew
            }
            let device = self.handles[which].read().unwrap();
            // The cleaner may have a block marked for longer than the cache waits.
            wait_for("a reset and a sync", || {
                self.reset(disk, &device);
                self.sync(disk, &device);
                device.sync().is_ok() && device.reset().is_ok_and(|lost| lost.is_empty())
            });
            self.check_device(disk);
        }
        assert_eq!(self.cache.stats().dirty, 0);
        let device = self.handles[0].read().unwrap();
        let mut held = Vec::new();
        for block in 0..(self.shape.buffers as u64).min(self.shape.blocks) {
            // The threads that read ahead may have some still.
            wait_for("a buffer for each block", || {
                held.extend(device.get(block).ok());
                held.len() as u64 > block
            });
        }
    }

    /// The device has the last version of each block.
    fn check_device(&self, disk: &Disk) {
        for block in 0..self.shape.blocks {
            let least = disk.block(block).over;
            let most = self.shape.exact.then_some(least);
            disk.check(block, &disk.bytes(block), least, most, "on the device");
        }
    }

    /// Pins show what they did, and nothing is lost: what is not cached is on the device, unless that has given it up.
    fn look_around(&self, seed: u64) {
        self.shelf.lock().iter().for_each(Held::check);
        for (which, disk) in self.disks.iter().enumerate() {
            let device = self.handles[which].read().unwrap();
            for block in 0..self.shape.blocks {
                let may_change = self.changes_beside(which, block) || disk.has_reverted();
                let is_somewhere = device.is_cached(block) || disk.is_there(block);
                assert!(may_change || is_somewhere, "block {block} is neither here nor there");
            }
            disk.check_power_cut(disk.device.moments(), 3, &mut Rng::with_seed(seed));
        }
    }

    /// Looks at images of that many moments of each device, the present one among them, or of all if there are fewer.
    pub(crate) fn check_power_cuts(&self, moments: usize, images: usize, rng: &mut Rng) {
        for disk in &self.disks {
            let last = disk.device.moments();
            let between = 1 + last as usize / moments;
            let moments = (0..=last).rev().step_by(between);
            moments.for_each(|moment| disk.check_power_cut(moment, images, rng));
        }
    }

    /// The drop of the last handle syncs the device, or the loss is reported.
    fn end(self) {
        self.check_power_cuts(256, 4, &mut Rng::with_seed(1));
        self.disks.iter().for_each(|disk| disk.device.heal());
        drop((self.shelf, self.handles));
        for disk in self.disks {
            if let Some(&error) = disk.loss.get() {
                // The sync at the end of the last handle tells of writes that were given up before.
                let has_failed = disk.failures(Operation::Sync) > disk.told().syncs;
                let was_wrong = disk.told().poisoned || (self.shape.reverts && has_failed);
                if !was_wrong {
                    // The last handle waits for no write of the cleaner, which may hang: it is over soon.
                    assert!(matches!(error, WriteError::Busy { .. }), "nothing was wrong: {error}");
                    wait_for("the cleaner's write", || {
                        let is_there = |block| disk.is_there(block);
                        (0..self.shape.blocks).all(is_there) || disk.has_cleaner_failed()
                    });
                }
            } else {
                let all = 0..self.shape.blocks;
                assert!(all.clone().all(|block| disk.is_there(block)), "lost without a word");
                let is_durable = !disk.told().poisoned;
                disk.makes_durable(all, || is_durable);
            }
            disk.check_power_cut(disk.device.moments(), 3, &mut Rng::with_seed(1));
        }
    }
}
