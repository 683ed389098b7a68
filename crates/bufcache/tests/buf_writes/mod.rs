//! A cache that is written, driven by bytes, beside a model of what it, its devices, and what
//! survives a loss of power may be: writes, syncs, discards and all else, on two devices that fail
//! in every way. One thread, and now and then an operation of another one that stands still in the
//! device while the first goes on.
//!
//! What is evicted and when dirty blocks are written is the cache's business: the model demands
//! that what is not cached is on the device.

mod beside;
mod disk;
mod model;
mod steps;

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::Duration;

use bufcache::{AttachOptions, Cache, Device, Eviction, GetError, Pin, ReadGuard, WriteError};
use bufcache_test::{Fault, Operation};

use beside::Beside;
use disk::{BLOCKS, Disk, PARTS, PATIENCE, SECTOR, SIZE, is_whole, stamp, values};
use model::Model;

/// Blocks that fit.
const MOST: usize = 8;
/// How often a device is attached anew after it was closed, and once more.
const LIVES: usize = 4;

/// A device, and its handles: one after the other, as each is closed.
struct Place {
    disk: Arc<Disk>,
    handles: [OnceCell<Device>; LIVES],
    /// The loss that the drop of the last handle has reported.
    loss: Arc<OnceLock<WriteError>>,
}

impl Place {
    /// Returns whether `error` reports a block that the cleaner was writing for longer than the cache
    /// waits: the last handle does not wait for such a write, which may hang. It is not cancelled, so all
    /// that was written is on the device soon, unless a write of the cleaner has failed: perhaps before the
    /// last handle was dropped, with the block's mark taken off later.
    fn is_written_late(&self, error: WriteError, model: &Model) -> bool {
        let is_over = || {
            let is_there = |block| self.disk.values(block) == model.now(block);
            (0..BLOCKS).all(is_there) || self.disk.has_cleaner_failed()
        };
        matches!(error, WriteError::Busy { .. })
            && (0..10_000).any(|_| {
                is_over() || {
                    sleep(Duration::from_millis(1));
                    false
                }
            })
    }
}

/// Where it stands.
struct State {
    model: Model,
    life: usize,
    closed: bool,
    poisoned: bool,
    /// Writes that had failed when the handle was told of such last.
    told: u64,
    /// Syncs that have failed.
    syncs: u64,
    /// How often the device had given up unsynced writes at the last reset.
    reverts: u64,
    /// Blocks that were read from the device after it had given up what was written of them.
    owed: BTreeSet<u64>,
}

/// Something that keeps a buffer.
enum Kept<'d> {
    Guard(ReadGuard<'d>),
    Pin(Pin),
}

impl Deref for Kept<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Guard(guard) => guard,
            Self::Pin(pin) => pin,
        }
    }
}

/// What it says, for ever.
struct Holding<'d> {
    kept: Kept<'d>,
    which: usize,
    block: u64,
    values: Vec<u32>,
}

impl Holding<'_> {
    fn check(&self) {
        let now = values(self.block as usize * PARTS, &self.kept);
        assert_eq!(now, self.values, "a kept buffer changed");
    }
}

struct Machine<'d> {
    cache: &'d Cache,
    places: &'d [Place; 2],
    states: [State; 2],
    kept: Vec<Holding<'d>>,
    limit: usize,
    /// Set once a device reported that it is gone. A thread that needs memory drops its blocks
    /// then.
    gave_up: bool,
    /// The step is a write.
    writing: bool,
    is_task: bool,
    beside: Option<Beside>,
}

/// Bit of the first byte: the devices give up unsynced writes, and serve the older bytes again.
pub(crate) const REVERTS: u8 = 4;
/// Bit of the first byte: a write of the cleaner takes longer than the cache waits.
pub(crate) const CLEANS_SLOWLY: u8 = 8;
/// Bit of the first byte: the calls that may wait are those of a task. The bits above it make the cache smaller.
pub(crate) const TASK: u8 = 16;

/// Drives a cache by `input` and returns how many steps it were. Operations of the devices of the kind `lies` do
/// nothing.
///
/// # Panics
///
/// Panics if the cache does what it must not.
pub(crate) fn run(input: &[u8], lies: Option<Operation>) -> usize {
    let mut bytes = input.iter().copied();
    let first = bytes.next().unwrap_or(0);
    let limit = MOST - usize::from(first >> 5) % MOST;
    let cache = Cache::builder(limit * SIZE)
        .block_size(SIZE)
        .eviction(if first % 2 == 1 { Eviction::Clock } else { Eviction::A2 })
        .patience(PATIENCE)
        .write_back_after(Duration::from_secs(1 << 20))
        .dirty_limits(100, 100)
        .build()
        .unwrap();
    let (reverts, cleans_slowly) = (first & REVERTS != 0, first & CLEANS_SLOWLY != 0);
    let mut places = [0, 1].map(|_| Place {
        disk: Arc::new(Disk::new(lies, reverts, cleans_slowly)),
        handles: [const { OnceCell::new() }; LIVES],
        loss: Arc::default(),
    });
    let state = || State {
        model: Model::new(),
        life: 0,
        closed: false,
        poisoned: false,
        told: 0,
        syncs: 0,
        reverts: 0,
        owed: BTreeSet::new(),
    };
    places.iter().for_each(|place| attach(&cache, place, 0));
    let mut machine = Machine {
        cache: &cache,
        places: &places,
        states: [state(), state()],
        kept: Vec::new(),
        limit,
        gave_up: false,
        writing: false,
        is_task: first & TASK != 0,
        beside: None,
    };
    let mut steps = 0;
    while let (Some(op), Some(arg)) = (bytes.next(), bytes.next()) {
        machine.step(op, arg);
        steps += 1;
    }
    let states = machine.end(first / 2 % 2 == 1);
    for (place, mut state) in places.iter_mut().zip(states) {
        place.handles.iter_mut().for_each(|handle| drop(handle.take()));
        // The drop of the last handle syncs the device, or the loss is reported.
        if let Some(&error) = place.loss.get() {
            // The sync at the end of the last handle tells of writes that were given up before.
            let failed = place.disk.failures(Operation::Sync) > state.syncs;
            let was_wrong = state.poisoned || (reverts && failed);
            let is_late = || place.is_written_late(error, &state.model);
            assert!(was_wrong || is_late(), "nothing was wrong, and something is lost: {error}");
            state.model.check_power_cut(&place.disk, 1);
            continue;
        }
        for block in 0..BLOCKS {
            assert_eq!(
                place.disk.values(block),
                state.model.now(block),
                "block {block}, at the end"
            );
            if !state.poisoned {
                state.model.promise(block);
            }
        }
        state.model.check_power_cut(&place.disk, 1);
    }
    steps
}

fn attach(cache: &Cache, place: &Place, life: usize) {
    let loss = Arc::clone(&place.loss);
    let options = AttachOptions::new()
        .verify(is_whole)
        .before_write(is_whole)
        .on_loss(move |error| _ = loss.set(error));
    let device = cache.attach_with(Arc::clone(&place.disk.device), options).unwrap();
    place.handles[life].set(device).expect("one after the other");
}

impl<'d> Machine<'d> {
    fn step(&mut self, op: u8, arg: u8) {
        let (which, block) = (usize::from(arg & 1), u64::from(arg >> 1) % BLOCKS);
        let (few, how) = (block..(block + 1 + u64::from(op / 24) % 4).min(BLOCKS), op / 24);
        if self.must_not(op % 24, which, &few) {
            return;
        }
        match op % 24 {
            0 => drop(self.get(which, block)),
            1 => self.try_get(which, block),
            2 => {
                if let Some(holding) = self.get(which, block) {
                    self.keep(holding);
                }
            }
            3 => self.pin(arg),
            4 => self.let_go(arg),
            5..=8 => self.write(which, block, how),
            9 => self.flush(which),
            10 | 11 => self.sync(which),
            12 | 13 => self.write_through(which, few),
            14 if how % 2 == 1 => self.write_around(which, few),
            14 => {
                if how % 4 == 2 {
                    self.disk(which).fail(Operation::Discard, Fault::Error(libc::EOPNOTSUPP));
                }
                self.discard(which, few);
            }
            15 => self.zero(which, few),
            16 => self.invalidate(which, block),
            17 | 18 => self.arm(which, how, arg >> 1),
            19 => self.reset(which),
            20 => {
                let most = usize::from(arg % 5);
                assert!(self.cache.shrink(most) <= most);
            }
            21 => self.begin_beside(which, few, how, u64::from(arg >> 1) / BLOCKS % 2 == 1),
            22 => self.close(which),
            _ => self.look_around(u64::from(arg)),
        }
    }

    fn disk(&self, which: usize) -> &'d Disk {
        &self.places[which].disk
    }

    fn device(&self, which: usize) -> &'d Device {
        let life = self.states[which].life;
        self.places[which].handles[life].get().expect("attached")
    }

    fn keep(&mut self, holding: Holding<'d>) {
        if self.kept.len() < MOST + 2 {
            self.kept.push(holding);
        }
    }

    /// Whether all buffers may be in use, or dirty for good.
    fn may_be_full(&self) -> bool {
        let stuck = self.gave_up || self.states.iter().any(|state| state.poisoned);
        let dirty = if stuck { self.cache.stats().dirty / SIZE } else { 0 };
        let marked = self.beside.as_ref().map_or(0, Beside::most_marked);
        self.kept.len() + dirty + marked >= self.limit
    }

    /// Whether the device may get no more dirty buffers now: its last write failed, or it has as
    /// many as are left, or the least that it may always have.
    fn may_be_limited(&self, which: usize) -> bool {
        let dirty = self.cache.stats().dirty / SIZE;
        self.disk(which).failures(Operation::Write) > 0 || (dirty > 0 && 2 * dirty >= self.limit)
    }

    /// Runs `f` until it does not wait in vain for an idle buffer. A loaded machine may not run the
    /// other threads during the wait.
    fn patiently<T, E>(
        &mut self,
        mut f: impl FnMut() -> Result<T, E>,
        waits: impl Fn(&Self, &E) -> bool,
    ) -> Result<T, E> {
        // What stands still beside this may keep it from an end.
        let mut left = if self.beside.is_some() { 50 } else { 5_000 };
        while left > 0 {
            left -= 1;
            match f() {
                Err(error) if waits(self, &error) && (left > 0 || self.beside.is_none()) => {
                    self.see_failures();
                }
                result => {
                    self.see_failures();
                    return result;
                }
            }
        }
        panic!("{} are kept of {}, and there is none", self.kept.len(), self.limit);
    }

    /// Whether the device has given up unsynced writes since the last reset.
    fn reverted(&self, which: usize) -> bool {
        self.states[which].reverts < self.disk(which).reverts()
    }

    /// The block was read from the device, which may serve what there was before unsynced writes.
    fn read_again(&mut self, which: usize, block: u64, there: &[u32]) {
        let reverted = self.reverted(which);
        let State { model, owed, .. } = &mut self.states[which];
        if reverted && there != model.now(block) {
            model.forgotten(block, there);
            owed.insert(block);
        }
    }

    /// A sync that failed poisons.
    fn see_failures(&mut self) {
        for which in 0..2 {
            let (disk, state) = (self.disk(which), &mut self.states[which]);
            state.poisoned |= disk.failures(Operation::Sync) > state.syncs;
            state.syncs = disk.failures(Operation::Sync);
        }
    }

    /// A buffer, or why not: the device failed, or refuses, or there is no buffer to be had.
    fn had<T>(
        &mut self,
        which: usize,
        block: u64,
        busy: bool,
        f: impl FnMut() -> Result<T, GetError>,
    ) -> Option<Result<T, GetError>> {
        let before = self.disk(which).failures(Operation::Read);
        let cached = self.device(which).is_cached(block);
        let result = self.patiently(f, |machine, error| match error {
            // A cached block may not be dirtied before the cleaner has written others of its device.
            GetError::NoFreeBuffers => !machine.may_be_full() || (cached && machine.writing),
            GetError::Busy => !busy,
            _ => false,
        });
        let failed = self.disk(which).failures(Operation::Read) > before;
        let state = &self.states[which];
        match &result {
            Ok(_) => return Some(result),
            Err(error) => match error {
                // A device whose last write failed gets no more dirty buffers.
                GetError::Io { block: of, .. } if self.writing && !failed => {
                    let refuses = self.disk(which).failures(Operation::Write) > 0;
                    assert!(refuses && *of == block, "{error}");
                }
                GetError::Io { block: of, .. }
                | GetError::ShortRead { block: of }
                | GetError::Panicked { block: of } => {
                    assert!(failed && !cached && *of == block, "{error}");
                }
                GetError::NoFreeBuffers => assert!(!cached || self.beside.is_some()),
                GetError::Poisoned { .. } => assert!(state.poisoned),
                GetError::Closed => assert!(state.closed),
                GetError::Busy | GetError::WouldDeadlock | GetError::WouldBlock => {}
                error => panic!("{error}"),
            },
        }
        // A failed read leaves nothing.
        assert_eq!(self.device(which).is_cached(block), cached, "{:?}", result.as_ref().err());
        Some(result)
    }
}
