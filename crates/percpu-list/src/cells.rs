//! The cells of a list: an addition and a removal are one restartable section each, with no lock.
//!
//! `offlock_percpu::cells` says how a cell is occupied and freed. This module has what is rare: growth, the
//! additions and removals that a section refuses, pins, snapshots, and the end of a list.
//!
//! # Pins
//!
//! The state of a cell is a number of pins and three flags. A walk marks the entries of up to
//! [`BATCH`] blocks, restarts the sections, and pins the entries. From then on sections refuse to
//! remove these entries, and a removal claims the state of the entry:
//!
//! ```text
//!  walk                                      removal of a marked entry
//!  special |= entries                        state: 0 -> FREE            no pin: take the value out,
//!  heavy_rseq()                              clear the mark, remote ^= bit
//!  state: n -> n + 1, unless UNLINKED        state: n -> n | UNLINKED    pinned: held |= bit, then
//!  occupied, and still marked? else unpin    remote ^= bit, then GONE; the last unpin drops the value
//! ```
//!
//! - An occupied cell has a value. Its state is not [`FREE`], except between the claim of a removal
//!   and its change of `remote`.
//! - While a cell is pinned its mark is not cleared: a removal clears it only after a claim, which
//!   a pin refuses, or after the last unpin. So a cell that a walk has pinned, and then sees marked
//!   and occupied, is the place of an entry whose removal respects the pin.
//! - `held` is set before the cell is freed, and cleared after the last unpin. So a pinned cell is
//!   not reused.
//! - A walk marks under `walk`, and restarts the sections before it unlocks; `share` marks an entry that no
//!   other thread can remove by a section. So a section that missed a mark cannot commit once a walk has found
//!   the mark.
//!
//! # What may end a block
//!
//! A block lives while one of its cells is occupied, held or pinned. [`Cells::trim`] unlinks other
//! blocks while no section and no walk uses them, and frees them when no thread counts entries. A
//! list that ends with entries or pins left gives each such cell the flag [`ORPHAN`] and counts
//! them; the end of the last one frees the blocks and the list.

use std::alloc::{Layout, alloc, dealloc};
use std::fs;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit, needs_drop};
use std::process;
use std::ptr::{self, NonNull};

#[cfg(not(offlock_model))]
use offlock_percpu::cells::Sections;
use offlock_percpu::cells::{
    Block, CELLS, Cell, CellSections, FREE, Head, NO_CPU, Refused as Section, VALUES,
};
use offlock_percpu::fence::heavy_rseq;
use offlock_percpu::{CpuId, current_cpu, possible_cpus};
use offlock_sync::alloc::try_box;
use offlock_sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
#[cfg(offlock_model)]
use offlock_sync::cell::UnsafeCell;
use offlock_sync::native::OnceLock;
use offlock_sync::panics::exhaust;
use offlock_sync::std_lock::{Mutex, MutexGuard}; // the first wait for one of parking_lot allocates
use offlock_sync::{check, load_own, order, step, thread, thread_id};

use crate::error::{Deadlock, InsertError, Refused};
#[cfg(offlock_model)]
use crate::model::Sections;
use crate::stats::Stats;

/// The cell is off the list, or about to be: no new pins by walks.
pub(crate) const UNLINKED: u32 = 1 << 31;
/// The entry has ended: the last unpin drops the value.
const GONE: u32 = 1 << 30;
/// The list has ended before the cell.
const ORPHAN: u32 = 1 << 29;
const PINS: u32 = ORPHAN - 1;
const _: () = assert!(FREE == UNLINKED | GONE);

/// The number of blocks that a walk marks and pins at a time.
pub(crate) const BATCH: usize = if cfg!(offlock_model) { 1 } else { 16 };
/// The cells of the first block of a shard, and of the others.
const FIRST_CELLS: u32 = if cfg!(offlock_model) { 2 } else { 8 };
/// The number of blocks that an addition searches for room before it makes a new one.
const SEARCHED: usize = 16;
/// Values above this size are in a box of their own. So are values aligned to more than 64 bytes.
const INLINE: usize = 256;
const ALIGN: usize = 128;

/// A snapshot keeps additions and removals out.
const FROZEN: u8 = 1;
/// The end of the list keeps them out.
const ENDING: u8 = 2;
/// In place of the stack of deferred removals: the list has ended.
const ENDED: *mut Block = ptr::without_provenance_mut(1);
/// The share that the end of a list has in `orphans` while it counts.
const COUNTING: u64 = 1 << 62;

/// The part of a list that belongs to a CPU.
#[repr(C, align(128))]
struct Shard {
    /// Used by sections of this CPU.
    current: AtomicPtr<Block>,
    /// The block into which threads without sections insert.
    shared: AtomicPtr<Block>,
    first: AtomicPtr<Block>,
    last: AtomicPtr<Block>,
    /// Where the next search for room begins.
    search: AtomicPtr<Block>,
    /// Removals without a section on the CPU of the block. A refill counts them as misses, and `stats` subtracts
    /// them.
    slow_hits: AtomicU64,
    /// Removals on this CPU of entries of another node.
    node_misses: AtomicU64,
    /// The counts of blocks that are gone.
    adds: AtomicU64,
    misses: AtomicU64,
    node: u32,
    /// For growth, and for removals and additions outside a section.
    lock: Mutex<()>,
}

#[cfg(not(offlock_model))]
const _: () = assert!(size_of::<Shard>() == offlock_percpu::cells::SHARD);

/// Returns the memory (NUMA) node of each CPU: that of the entry `node3` in the CPU's folder, or 0.
fn nodes() -> &'static [u32] {
    static NODES: OnceLock<Box<[u32]>> = OnceLock::new();
    let node = |cpu| {
        let mut entries = fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}")).ok()?.flatten();
        entries.find_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
    };
    NODES.get_or_init(|| (0..possible_cpus()).map(|cpu| node(cpu).unwrap_or(0)).collect())
}

/// The cells of a list, at a place that does not move.
pub(crate) struct Cells<T> {
    head: Head,
    /// The pointer that may free the list: one made from a `&self` may not, by the borrow models.
    this: NonNull<Self>,
    sections: Option<Sections>,
    shards: Box<[Shard]>,
    /// The serial number of the newest block.
    made: AtomicU64,
    /// Held while a walk marks and pins, and during a trim.
    walk: Mutex<()>,
    /// How many trims there were. Changed under `walk`.
    trims: AtomicU64,
    /// The threads that count entries or add up counters.
    counting: AtomicU64,
    /// The blocks that a trim has unlinked, and could not free because a thread counted.
    unlinked: AtomicPtr<Block>,
    /// Held by a snapshot, and by `close`.
    exclusive: Mutex<()>,
    /// 0, [`FROZEN`] or [`ENDING`].
    frozen: AtomicU8,
    /// The thread that has a snapshot, or 0.
    owner: AtomicU64,
    /// The blocks of which this thread has dropped entries meanwhile, or [`ENDED`].
    deferred: AtomicPtr<Block>,
    closed: AtomicBool,
    /// The cells that outlive the list.
    orphans: AtomicU64,
    /// loom fails a model that leaks it.
    #[cfg(offlock_model)]
    _leak: offlock_sync::Arc<()>,
    /// The list was freed.
    #[cfg(offlock_model)]
    freed: UnsafeCell<bool>,
    _value: PhantomData<*mut T>,
}

// SAFETY: any thread may drop values, and shares them by references, for which `T` is `Send` and
// `Sync`. The memory of the blocks belongs to the list, and the other fields are atomics and locks.
unsafe impl<T: Send + Sync> Send for Cells<T> {}
// SAFETY: `&Cells` gives atomics, locks, and `&T`, which threads may share because `T` is `Sync`. A
// thread may also drop a value through it, for which `T` is `Send`.
unsafe impl<T: Send + Sync> Sync for Cells<T> {}

/// A block, and the number of a cell in the low 6 bits of the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(NonNull<Block>);

impl Key {
    #[inline(always)]
    pub(crate) fn new(block: *const Block, index: u32) -> Self {
        // SAFETY: a block is larger than 64 bytes.
        let at = unsafe { block.cast_mut().byte_add(index as usize) };
        // SAFETY: a block is not at address 0. It is aligned to 64 bytes.
        Self(unsafe { NonNull::new_unchecked(at) })
    }

    #[inline(always)]
    fn index(self) -> u32 {
        self.0.addr().get() as u32 & 63
    }

    #[inline(always)]
    fn pointer(self) -> *const Block {
        self.0.as_ptr().map_addr(|addr| addr & !63)
    }

    #[inline(always)]
    fn bit(self) -> u64 {
        1 << self.index()
    }

    /// # Safety
    ///
    /// The block lives for `'a`. So it does while the caller has the entry or a pin of the cell.
    #[inline(always)]
    unsafe fn block<'a>(self) -> &'a Block {
        // SAFETY: by the contract of this function.
        let block = unsafe { &*self.pointer() };
        block.lives();
        block
    }

    /// # Safety
    ///
    /// That of [`block`](Self::block).
    #[inline(always)]
    unsafe fn state<'a>(self) -> &'a AtomicU32 {
        // SAFETY: by the contract of this function. The index is below 64.
        unsafe { &self.block().states[self.index() as usize] }
    }

    /// Returns whether the entry is on its list.
    ///
    /// # Safety
    ///
    /// The caller has the entry or a pin of the cell.
    pub(crate) unsafe fn is_linked(self) -> bool {
        // Ordering: Acquire; a caller that finds the entry off the list sees what preceded that.
        // SAFETY: by the contract of this function.
        unsafe { self.state() }.load(Ordering::Acquire) & UNLINKED == 0
    }

    /// Returns the CPU whose slot the entry was added to.
    ///
    /// # Safety
    ///
    /// The caller has the entry or a pin of the cell.
    pub(crate) unsafe fn slot(self) -> CpuId {
        // SAFETY: by the contract of this function.
        CpuId::new(unsafe { self.block() }.slot)
    }

    /// Returns the list, which may have ended.
    ///
    /// # Safety
    ///
    /// The caller has the entry or a pin of the cell, which is that of a list of `T`.
    pub(crate) unsafe fn list<T>(self) -> *const Cells<T> {
        // SAFETY: by the contract of this function.
        unsafe { self.block() }.list.cast()
    }

    /// Marks the entry and pins it. The mark needs no barrier: the only removal by a section that it
    /// must stop is that of this entry, whose owner calls this.
    ///
    /// # Safety
    ///
    /// The caller has the entry.
    pub(crate) unsafe fn mark_and_pin(self) {
        // SAFETY: by the contract of this function.
        mark(unsafe { self.block() }, self.bit());
        // SAFETY: the caller has the entry.
        unsafe { self.pin_again() };
    }

    /// Adds a pin.
    ///
    /// # Safety
    ///
    /// The caller has a pin, or the entry, which is marked.
    pub(crate) unsafe fn pin_again(self) {
        // Ordering: Relaxed; the pin or the entry of the caller orders the value.
        // SAFETY: by the contract of this function.
        check_pins(unsafe { self.state() }.fetch_add(1, Ordering::Relaxed));
    }
}

/// Ends the process like `Arc`, if the cell has so many pins that forgotten references could overflow them.
fn check_pins(state: u32) {
    if state & PINS > PINS / 2 {
        process::abort();
    }
}

fn mark(block: &Block, entries: u64) {
    // Ordering: Relaxed, both. A barrier follows, or the removal is ordered after the caller.
    block.special.fetch_or(entries, Ordering::Relaxed);
    block.special_remote.fetch_or(entries, Ordering::Relaxed);
}

fn clear_mark(block: &Block, bit: u64) {
    if block.special.load(Ordering::Relaxed) & bit != 0 {
        // Ordering: Relaxed, both; the change of `remote` or `held` that frees the cell follows, and
        // publishes them.
        block.special_remote.fetch_and(!bit, Ordering::Relaxed);
        block.special.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Returns the occupied cells. A cell that changes meanwhile may seem either.
pub(crate) fn occupied(block: &Block) -> u64 {
    // Ordering: Acquire, both. They pair with the Release of an insertion and of a removal. The first
    // carries the value.
    block.lives();
    let home = block.home.load(order!(Acquire, "occupied: before the value is read"));
    (home ^ block.remote.load(Ordering::Acquire)) & block.mask
}

/// The occupied cells, and those that a pin or the entry holds. A cell that is occupied or held during the whole
/// call is in the result: a removal sets `held` before it changes `remote`.
fn in_use(block: &Block) -> u64 {
    let occupied = occupied(block);
    occupied | block.held.load(Ordering::Acquire)
}

/// A large value, as it is in a cell.
struct Large<T>(NonNull<T>);

impl<T> Large<T> {
    /// Returns the value if memory is out.
    fn new(value: T) -> Result<Self, T> {
        Ok(Self(NonNull::from(Box::leak(try_box(value)?))))
    }

    fn into_box(self) -> Box<T> {
        // SAFETY: the pointer is from `Box::leak`, and its owner gives it up.
        unsafe { Box::from_raw(ManuallyDrop::new(self).0.as_ptr()) }
    }
}

impl<T> Drop for Large<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::leak`, and this is its owner.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Takes the lowest of some bits.
pub(crate) fn pop(bits: &mut u64) -> Option<u32> {
    (*bits != 0).then(|| {
        let index = bits.trailing_zeros();
        *bits &= *bits - 1;
        index
    })
}

impl<T> Cells<T> {
    const BOXED: bool = size_of::<T>() > INLINE || align_of::<T>() > 64;
    /// The size of a cell.
    const STRIDE: usize =
        if Self::BOXED { size_of::<Cell<Large<T>>>() } else { size_of::<Cell<T>>() };

    /// Makes an empty list. It ends by [`end`](Self::end).
    pub(crate) fn create() -> NonNull<Self> {
        let word = || AtomicU64::new(0);
        let shards: Box<[Shard]> = (0..possible_cpus() as u32)
            .map(|cpu| Shard {
                current: AtomicPtr::default(),
                shared: AtomicPtr::default(),
                first: AtomicPtr::default(),
                last: AtomicPtr::default(),
                search: AtomicPtr::default(),
                slow_hits: word(),
                node_misses: word(),
                adds: word(),
                misses: word(),
                node: nodes()[cpu as usize],
                lock: Mutex::new(()),
            })
            .collect();
        let (first, stride) = (shards.as_ptr().cast(), size_of::<Shard>());
        let cells = Self {
            head: Head { gate: word(), add_gate: word(), shards: first, stride },
            this: NonNull::dangling(),
            sections: Sections::find(),
            shards,
            made: word(),
            walk: Mutex::new(()),
            trims: word(),
            counting: word(),
            unlinked: AtomicPtr::default(),
            exclusive: Mutex::new(()),
            frozen: AtomicU8::new(0),
            owner: word(),
            deferred: AtomicPtr::default(),
            closed: AtomicBool::new(false),
            orphans: word(),
            #[cfg(offlock_model)]
            _leak: offlock_sync::Arc::new(()),
            #[cfg(offlock_model)]
            freed: UnsafeCell::new(false),
            _value: PhantomData,
        };
        let mut list = NonNull::from(Box::leak(Box::new(cells)));
        // SAFETY: no other pointer is used before this function returns.
        unsafe { list.as_mut() }.this = list;
        list
    }

    pub(crate) fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// The first block of a shard.
    pub(crate) fn first(&self, shard: usize) -> *const Block {
        // Ordering: Acquire pairs with the Release in `link`; it carries the block.
        self.shards[shard].first.load(order!(Acquire, "blocks: before a block is read"))
    }

    /// All blocks. They live while the caller has a snapshot, has locked `walk`, or counts.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &Block> {
        // SAFETY: by the contract of this function the blocks live.
        let block = |at: *const Block| unsafe { at.as_ref() };
        let chain = move |shard| {
            std::iter::successors(block(self.first(shard)), move |now| block(next(now)))
        };
        (0..self.shard_count()).flat_map(chain)
    }

    /// Returns whether this thread has a snapshot.
    pub(crate) fn is_owner(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `thaw`. Only this thread stores its own id.
        self.owner.load(order!(Acquire, "owner: the snapshot has ended")) == thread_id()
    }

    /// No section that saw the list before the caller's stores commits after this call.
    fn restart_sections(&self) {
        if self.sections.is_some() {
            heavy_rseq();
        }
    }

    // ---- values ----

    /// # Safety
    ///
    /// For `'a`, the cell has a value of this type, and is not freed.
    #[inline(always)]
    pub(crate) unsafe fn value<'a>(key: Key) -> &'a T {
        let (at, index) = (key.pointer(), key.index());
        // SAFETY: by the contract of this function the block is alive.
        unsafe { key.block() }.reads(index);
        if Self::BOXED {
            // SAFETY: the block has cells of this type.
            let cell = unsafe { Block::cell::<Large<T>>(at, index) };
            // SAFETY: by the contract of this function the cell is not freed.
            let cell = unsafe { &*cell };
            // SAFETY: by the contract of this function the cell has a value.
            let large = unsafe { cell.0.assume_init_ref() };
            // SAFETY: the value lives as long as its cell is not freed.
            unsafe { large.0.as_ref() }
        } else {
            // SAFETY: the block has cells of this type.
            let cell = unsafe { Block::cell::<T>(at, index) };
            // SAFETY: by the contract of this function the cell is not freed.
            let cell = unsafe { &*cell };
            // SAFETY: by the contract of this function the cell has a value.
            unsafe { cell.0.assume_init_ref() }
        }
    }

    /// # Safety
    ///
    /// The cell has a `V`, which only the caller uses. It leaves the cell.
    unsafe fn take<V>(key: Key) -> V {
        // SAFETY: by the contract of this function the block is alive.
        unsafe { key.block() }.moves(key.index());
        // SAFETY: the block has cells of `V`, by the contract of this function.
        let cell = unsafe { Block::cell::<V>(key.pointer(), key.index()) };
        // SAFETY: by the contract of this function.
        unsafe { cell.cast::<V>().read() }
    }

    // ---- additions ----

    /// Adds a value in the slot of the current CPU.
    #[inline(always)]
    pub(crate) fn insert(&self, value: T) -> Result<Key, InsertError<T>> {
        if !Self::BOXED {
            let refused = |(value, reason)| InsertError { value, reason };
            return self.insert_stored(value).map_err(refused);
        }
        match Large::new(value) {
            Ok(large) => self
                .insert_stored(large)
                .map_err(|(large, reason)| InsertError { value: *large.into_box(), reason }),
            Err(value) => Err(InsertError { value, reason: Refused::NoMemory }),
        }
    }

    /// Adds what a cell stores: a `T` or a [`Large`].
    #[inline(always)]
    fn insert_stored<V>(&self, value: V) -> Result<Key, (V, Refused)> {
        let place = Cell(MaybeUninit::new(value));
        let (head, source) = (&raw const self.head, &raw const place);
        loop {
            // SAFETY: there is a shard for each CPU, whose blocks have cells of this type.
            let done = self.sections.map(|sections| unsafe { sections.insert::<V>(head, source) });
            let refused = match done {
                Some(Ok((block, index))) => return Ok(Key::new(block, index)),
                Some(Err(refused)) => refused,
                None => Section::WrongCpu,
            };
            match self.insert_slow(refused, &place) {
                Ok(Some(key)) => return Ok(key),
                Ok(None) => {}
                // SAFETY: the value has not moved.
                Err(reason) => return Err((unsafe { place.0.assume_init() }, reason)),
            }
        }
    }

    /// Adds a value without a section, or makes room for one.
    #[cold]
    #[inline(never)]
    fn insert_slow<V>(&self, refused: Section, place: &Cell<V>) -> Result<Option<Key>, Refused> {
        let here = current_cpu();
        let shard = &self.shards[here.index()];
        let sections = self.sections.filter(|_| refused != Section::WrongCpu);
        let cpu = if sections.is_some() { here.get() } else { NO_CPU };
        let mut guard = self.enter_open(shard)?;
        if refused == Section::Closed {
            drop(guard);
            drop(self.exclusive.lock()); // a snapshot or a close has begun, and ends here
            return Ok(None);
        }
        let block = match self.find_room(shard, cpu) {
            Some(found) => found,
            None => {
                drop(guard); // the allocator may use the list
                let new = self.make_block(shard, here, cpu)?;
                guard = match self.enter_open(shard) {
                    Ok(guard) => guard,
                    Err(reason) => {
                        // SAFETY: no other thread knows the block, which has no values.
                        unsafe { Self::free_block(new) };
                        return Err(reason);
                    }
                };
                self.link(shard, new)
            }
        };
        let _guard = guard;
        if let Some(sections) = sections {
            // SAFETY: the block lives while its shard is locked. If the thread has moved, the next
            // attempt is on another CPU.
            let _ = unsafe { sections.refill(block) };
            return Ok(None);
        }
        // Ordering: Relaxed, all here; the lock of the shard orders these words, except the last.
        shard.shared.store(ptr::from_ref(block).cast_mut(), Ordering::Relaxed);
        let home = load_own(&block.home);
        let index = (!(home ^ load_own(&block.seen))).trailing_zeros();
        block.moves(index);
        // SAFETY: the block is one of this type.
        let target = unsafe { Block::cell::<V>(block, index) };
        // SAFETY: the cell is free, and the lock under which it is taken is held.
        unsafe { ptr::copy_nonoverlapping(place, target, 1) };
        block.adds.store(load_own(&block.adds) + 1, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `occupied`; it carries the value.
        block.home.store(home ^ 1 << index, order!(Release, "insert: the value is in its cell"));
        Ok(Some(Key::new(block, index)))
    }

    /// Locks a shard, for an addition or a removal outside a section. Waits for a snapshot of another
    /// thread.
    fn enter<'a>(&'a self, shard: &'a Shard) -> Result<Entered<'a, T>, Deadlock> {
        loop {
            if self.is_owner() {
                return Err(Deadlock);
            }
            let guard = Entered { _list: self, _guard: shard.lock.lock() };
            // Ordering: Acquire pairs with the Release in `thaw`; it carries the snapshot's reads.
            let frozen = self.frozen.load(Ordering::Acquire);
            if check!("enter: there is no snapshot", frozen == 0) {
                return Ok(guard);
            }
            drop(guard);
            drop(if frozen == FROZEN { self.exclusive.lock() } else { self.walk.lock() });
        }
    }

    fn enter_open<'a>(&'a self, shard: &'a Shard) -> Result<Entered<'a, T>, Refused> {
        let guard = self.enter(shard)?;
        // Ordering: Relaxed; `close` locks the shard after its store.
        if self.closed.load(Ordering::Relaxed) { Err(Refused::Closed) } else { Ok(guard) }
    }

    /// Finds a block with room. The caller holds the lock of the shard. `cpu` is that of the block.
    fn find_room<'a>(&'a self, shard: &'a Shard, cpu: u32) -> Option<&'a Block> {
        // Ordering: Relaxed, all here; they change under the lock of the shard.
        if cpu == NO_CPU {
            // SAFETY: blocks live while the shard is locked.
            let now = unsafe { shard.shared.load(Ordering::Relaxed).as_ref() };
            if let Some(block) = now {
                let free =
                    !(block.home.load(Ordering::Relaxed) ^ block.seen.load(Ordering::Relaxed));
                if free != 0 || learn(block) != 0 {
                    return now;
                }
            }
        }
        let mut at = shard.search.load(Ordering::Relaxed).cast_const();
        let mut found = None;
        for _ in 0..SEARCHED {
            if at.is_null() {
                at = shard.first.load(Ordering::Relaxed);
            }
            // SAFETY: blocks live while the shard is locked.
            let Some(block) = (unsafe { at.as_ref() }) else { break };
            at = next(block);
            // A refill for a few cells does not pay.
            let room = (!in_use(block) & block.mask).count_ones() * 8 >= block.mask.count_ones();
            if room && block.cpu == cpu && (cpu != NO_CPU || learn(block) != 0) {
                found = Some(block);
                break;
            }
        }
        shard.search.store(at.cast_mut(), Ordering::Relaxed);
        found
    }

    fn layout(cells: u32) -> Option<Layout> {
        let header = VALUES.max(size_of::<Block>()); // the atomics of a model are larger
        let size = (header + cells as usize * Self::STRIDE).next_multiple_of(ALIGN);
        Layout::from_size_align(size, ALIGN).ok()
    }

    fn make_block(&self, shard: &Shard, slot: CpuId, cpu: u32) -> Result<NonNull<Block>, Refused> {
        // Ordering: Relaxed; a stale answer only changes the size.
        let is_first = shard.first.load(Ordering::Relaxed).is_null();
        let cells = if is_first { FIRST_CELLS } else { CELLS as u32 };
        let layout = Self::layout(cells).ok_or(Refused::NoMemory)?;
        // SAFETY: the layout has a size.
        let memory = NonNull::new(unsafe { alloc(layout) }).ok_or(Refused::NoMemory)?;
        let (at, mask) = (memory.cast::<Block>(), !0_u64 >> (64 - cells));
        let word = || AtomicU64::new(0);
        let block = Block {
            home: word(),
            adds: word(),
            seen: AtomicU64::new(!mask),
            misses: word(),
            special: word(),
            mask,
            current: &raw const shard.current,
            cpu,
            slot: slot.get(),
            states: std::array::from_fn(|_| AtomicU32::new(0)),
            remote: word(),
            held: word(),
            special_remote: word(),
            next: AtomicPtr::default(),
            list: self.this.as_ptr().cast_const().cast(),
            deferred: word(),
            link: AtomicPtr::default(),
            serial: 0,
            #[cfg(offlock_model)]
            accessed: (std::array::from_fn(|_| UnsafeCell::new(())), UnsafeCell::new(false)),
        };
        // SAFETY: the memory has room for a block, and is aligned.
        unsafe { at.write(block) };
        #[cfg(offlock_model)] // the checker compares this write with each use
        // SAFETY: no other thread knows the block.
        unsafe { at.as_ref() }.accessed.1.with_mut(|_| ());
        Ok(at)
    }

    /// Appends a new block to its chain. The caller holds the lock of the shard.
    fn link<'a>(&'a self, shard: &'a Shard, new: NonNull<Block>) -> &'a Block {
        // Ordering: Relaxed, both; a walk that must see an entry of the block begins after it was added.
        let serial = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: no other thread knows the block.
        unsafe { (*new.as_ptr()).serial = serial };
        let last = shard.last.load(Ordering::Relaxed);
        shard.last.store(new.as_ptr(), Ordering::Relaxed);
        // SAFETY: blocks live while the shard is locked.
        let place = unsafe { last.as_ref() }.map_or(&shard.first, |last| &last.next);
        // Ordering: Release pairs with the Acquire in `first` and `next`; it carries the block.
        place.store(new.as_ptr(), order!(Release, "link: the block is complete"));
        // SAFETY: blocks live while the shard is locked.
        unsafe { new.as_ref() }
    }

    /// # Safety
    ///
    /// No thread uses the block, and none of its cells has a value.
    unsafe fn free_block(at: NonNull<Block>) {
        // SAFETY: by the contract of this function.
        let cells = unsafe { at.as_ref() }.mask.count_ones();
        #[cfg(offlock_model)]
        // SAFETY: by the contract of this function no other thread frees the block.
        if unsafe { at.as_ref() }.is_freed_in_model() {
            return; // its memory stays, so that a later use fails the model
        }
        let Some(layout) = Self::layout(cells) else { unreachable!("the block has this layout") };
        // SAFETY: by the contract of this function, which ends the block.
        unsafe { ptr::drop_in_place(at.as_ptr()) };
        // SAFETY: allocated with this layout in `make_block`.
        unsafe { dealloc(at.as_ptr().cast(), layout) };
    }

    // ---- removals ----

    /// Removes an entry, and drops its value unless it is pinned. Returns whether it was on the list.
    /// Waits for a snapshot of another thread; fails during one of this thread.
    ///
    /// # Safety
    ///
    /// The caller has the entry. It ends, and with it perhaps the list, unless the result is an
    /// error.
    #[inline(always)]
    pub(crate) unsafe fn remove(list: NonNull<Self>, key: Key) -> Result<bool, Deadlock> {
        if Self::BOXED {
            // SAFETY: by the contract of this function; the cells store a `Large` because `BOXED` is true.
            unsafe { Self::remove_stored::<Large<T>>(list, key) }
        } else {
            // SAFETY: by the contract of this function; the cells store a `T` because `BOXED` is false.
            unsafe { Self::remove_stored::<T>(list, key) }
        }
    }

    /// # Safety
    ///
    /// That of [`remove`](Self::remove), and the cell stores a `V`.
    #[inline(always)]
    unsafe fn remove_stored<V>(list: NonNull<Self>, key: Key) -> Result<bool, Deadlock> {
        let mut out = Cell(MaybeUninit::<V>::uninit());
        let target = &raw mut out;
        // SAFETY: the entry keeps the list.
        let this = unsafe { list.as_ref() };
        let (sections, head) = (this.sections, &raw const this.head);
        if let Some(sections) = sections {
            // SAFETY: the caller has the entry, so the cell is occupied, and its block is alive.
            let mut done =
                unsafe { sections.remove::<V>(head, key.pointer(), key.index(), target) };
            if done == Err(Section::WrongCpu) {
                // SAFETY: by the contract of this function; the entry has not ended.
                done = unsafe { Self::remove_remote(list, sections, key, target) };
            }
            if done.is_ok() {
                if needs_drop::<V>() {
                    // SAFETY: the section has moved the value out of the cell.
                    unsafe { out.0.assume_init_drop() };
                }
                return Ok(true);
            }
        }
        // SAFETY: by the contract of this function; no section has removed the entry.
        unsafe { Self::remove_slow::<V>(list, key) }
    }

    /// Removes an entry by a section, on another CPU than that of its block.
    ///
    /// # Safety
    ///
    /// The caller has the entry, which ends if the result is no error. The value moves to `target`.
    unsafe fn remove_remote<V>(
        list: NonNull<Self>,
        sections: Sections,
        key: Key,
        target: *mut Cell<V>,
    ) -> Result<(), Section> {
        // SAFETY: the entry keeps the list.
        let this = unsafe { list.as_ref() };
        // SAFETY: the entry keeps the block.
        let block = unsafe { key.block() };
        if block.cpu == NO_CPU {
            return Err(Section::Closed); // it belongs to no CPU
        }
        let here = &this.shards[current_cpu().index()];
        let is_far = here.node != this.shards[block.slot as usize].node;
        if is_far {
            // Ordering: Relaxed; a counter. Before the removal, which may end the list.
            here.node_misses.fetch_add(1, Ordering::Relaxed);
        }
        let (head, at, index) = (&raw const this.head, key.pointer(), key.index());
        // SAFETY: the caller has the entry.
        let done = unsafe { sections.remove_remote::<V>(head, at, index, target) };
        if is_far && done.is_err() {
            here.node_misses.fetch_sub(1, Ordering::Relaxed);
        }
        done
    }

    /// Removes an entry by atomic operations.
    ///
    /// # Safety
    ///
    /// That of [`remove_stored`](Self::remove_stored).
    #[cold]
    #[inline(never)]
    unsafe fn remove_slow<V>(list: NonNull<Self>, key: Key) -> Result<bool, Deadlock> {
        // SAFETY: the entry keeps the list.
        let this = unsafe { list.as_ref() };
        // SAFETY: the entry keeps the block.
        let block = unsafe { key.block() };
        let state = &block.states[key.index() as usize];
        let here = current_cpu();
        let guard = this.enter(&this.shards[here.index()])?;
        // Ordering: Acquire on success pairs with the Release of an unpin; it carries a walk's use of
        // the value.
        let order = order!(AcqRel, "claim: after the last use by a walk");
        if state.compare_exchange(0, FREE, order, Ordering::Relaxed).is_ok() {
            // SAFETY: no walk pins the value, and from now on none can.
            let value = unsafe { Self::take::<V>(key) };
            clear_mark(block, key.bit()); // before the cell can be that of another entry
            // Ordering: Release pairs with the Acquire in a refill; it carries the copy above.
            block
                .remote
                .fetch_xor(key.bit(), order!(AcqRel, "removal: the value is out of its cell"));
            this.count_removal(here, block);
            drop(guard); // the end of the list waits for it
            drop(value);
            return Ok(true);
        }
        let removed = this.unlink_pinned(here, key);
        // Before the entry ends: with the last unpin, the list may end.
        step!("removal: unlock before the entry ends", drop(guard));
        // Ordering: Release carries the owner's use of the value to the last unpin. Acquire
        // carries that of the walks, if none pins it now.
        let before = state.fetch_or(GONE, order!(AcqRel, "removal: after the last use by a walk"));
        if before & PINS == 0 {
            // SAFETY: the entry has ended, and no pin is left.
            let value = unsafe { Self::finish::<V>(key) };
            if before & ORPHAN != 0 {
                // SAFETY: the cell was counted, and has ended. The list is not used below.
                unsafe { Self::release(list) };
            }
            drop(value);
        }
        Ok(removed)
    }

    /// Takes a cell off the list, without its value. Returns whether it was on it. The caller has
    /// locked the shard of `here`.
    fn unlink_pinned(&self, here: CpuId, key: Key) -> bool {
        // SAFETY: the caller has the entry or a pin, which keeps the block.
        let block = unsafe { key.block() };
        let state = &block.states[key.index() as usize];
        // Ordering: Release pairs with the Acquire in `is_linked`; it carries what the removing thread did.
        let before = state.fetch_or(UNLINKED, Ordering::Release);
        if !check!("unlink: no other removal came first", before & UNLINKED == 0) {
            return false;
        }
        // Ordering: Relaxed; the next line publishes it.
        step!("unlink: hold the cell first", block.held.fetch_or(key.bit(), Ordering::Relaxed));
        // Ordering: Release pairs with the Acquire in a refill; it carries `held`.
        block.remote.fetch_xor(key.bit(), Ordering::Release);
        self.count_removal(here, block);
        true
    }

    /// Counts a removal outside a section on the CPU `here`.
    fn count_removal(&self, here: CpuId, block: &Block) {
        // Ordering: Relaxed, both; counters.
        let shard = &self.shards[here.index()];
        if here.get() == block.slot {
            shard.slow_hits.fetch_add(1, Ordering::Relaxed);
        } else if shard.node != self.shards[block.slot as usize].node {
            shard.node_misses.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the entry of a pinned cell off the list. Returns whether it was on it.
    ///
    /// # Safety
    ///
    /// The caller has a pin of the cell, which is of this list.
    pub(crate) unsafe fn unlink(&self, key: Key) -> Result<bool, Deadlock> {
        let here = current_cpu();
        let _guard = self.enter(&self.shards[here.index()])?;
        Ok(self.unlink_pinned(here, key))
    }

    /// Ends a cell that is off the list, and whose entry and pins have ended.
    ///
    /// # Safety
    ///
    /// The caller has ended the last of them, and the cell stores a `V`.
    unsafe fn finish<V>(key: Key) -> V {
        // SAFETY: no other thread uses the value.
        let value = unsafe { Self::take(key) };
        // SAFETY: the block lives while the cell is held.
        let block = unsafe { key.block() };
        clear_mark(block, key.bit());
        // Ordering: Release pairs with the Acquire in a refill; it carries the copy above.
        block.held.fetch_and(!key.bit(), order!(AcqRel, "finish: before the cell is reused"));
        value
    }

    /// Ends a pin. The last one drops the value if the entry has ended.
    ///
    /// # Safety
    ///
    /// The caller has the pin, which ends, and with it perhaps the list.
    pub(crate) unsafe fn unpin(key: Key) {
        if Self::BOXED {
            // SAFETY: by the contract of this function; the cells store a `Large` because `BOXED` is true.
            unsafe { Self::unpin_stored::<Large<T>>(key) };
        } else {
            // SAFETY: by the contract of this function; the cells store a `T` because `BOXED` is false.
            unsafe { Self::unpin_stored::<T>(key) };
        }
    }

    /// # Safety
    ///
    /// That of [`unpin`](Self::unpin), and the cell stores a `V`.
    unsafe fn unpin_stored<V>(key: Key) {
        // SAFETY: the pin keeps the block.
        let state = unsafe { key.state() };
        // SAFETY: the block is one of a list of `T`, by the contract of this function.
        let list = unsafe { key.list::<T>() };
        // Ordering: AcqRel. Release carries this thread's use of the value to the claim of a removal
        // or to the last unpin, which acquires it.
        let before = state.fetch_sub(1, order!(AcqRel, "unpin: after the last use"));
        if before & !ORPHAN == FREE | 1 {
            // SAFETY: the entry has ended, and this was the last pin.
            let value = unsafe { Self::finish::<V>(key) };
            if before & ORPHAN != 0 {
                // SAFETY: the block is one of a list.
                let list = unsafe { NonNull::new_unchecked(list.cast_mut()) };
                // SAFETY: the cell was counted, and has ended.
                unsafe { Self::release(list) };
            }
            drop(value);
        }
    }

    /// Leaves an entry on the list until the end of this thread's snapshot. If the thread has forgotten the
    /// snapshot, another one may end the list at this moment, and take the stack.
    ///
    /// # Safety
    ///
    /// The caller has the entry, which ends, and with it perhaps the list.
    #[cold]
    pub(crate) unsafe fn defer(list: NonNull<Self>, key: Key) {
        // SAFETY: the entry keeps the list, which is not used after the stack has the entry.
        let stack = unsafe { &list.as_ref().deferred };
        // SAFETY: the entry keeps the block.
        let block = unsafe { key.block() };
        // Ordering: AcqRel pairs with the AcqRel swap in `remove_deferred`. Release carries this thread's use of the
        // value to the drop. Acquire carries that function's load of `link`, so that it precedes the store below.
        let order = order!(AcqRel, "defer: after the last use by the entry");
        if block.deferred.fetch_or(key.bit(), order) != 0 {
            return; // the stack has the block
        }
        // Ordering: Acquire, both loads, pairs with the Release in `end`; it carries the end of the snapshot, so that
        // this thread is not its owner below.
        let acquire = order!(Acquire, "defer: before the removal");
        let mut top = stack.load(acquire);
        while top != ENDED {
            block.link.store(top, Ordering::Relaxed);
            let new = ptr::from_ref(block).cast_mut();
            // Ordering: Release pairs with the Acquire in `end`; it carries the link, the bit, and the use of the
            // value.
            let release = order!(Release, "defer: the link is stored");
            match stack.compare_exchange(top, new, release, acquire) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
        // SAFETY: the caller has the entry, which the end of the list has not found.
        let _ = unsafe { Self::remove(list, key) };
    }

    /// Removes the entries of a stack that [`defer`](Self::defer) made. A block on it has such an
    /// entry, and so lives.
    fn remove_deferred(list: NonNull<Self>, mut stack: *mut Block) {
        let (mut at, mut cells) = (ptr::null(), 0);
        exhaust(|| {
            while cells == 0 {
                // SAFETY: the block lives until its deferred entries are removed below.
                let Some(block) = (unsafe { stack.as_ref() }) else { return false };
                (at, stack) = (ptr::from_ref(block), block.link.load(Ordering::Relaxed));
                // Ordering: AcqRel pairs with the `fetch_or` in `defer`, in both directions.
                let order = order!(AcqRel, "deferred: before the value is dropped");
                cells = block.deferred.swap(0, order);
            }
            let Some(index) = pop(&mut cells) else { return false };
            let key = Key::new(at, index);
            // SAFETY: `defer` got the entry. The snapshot has ended, or the list is ending.
            if unsafe { Self::remove(list, key) }.is_err() {
                // The drop of a value before has made a snapshot, and kept it.
                // SAFETY: `defer` got the entry, which has not ended, and this function has read the link of
                // the block.
                unsafe { Self::defer(list, key) };
            }
            true
        });
    }

    // ---- counts ----

    /// Keeps the blocks that a trim unlinks, until it is dropped.
    fn counting(&self) -> Counting<'_> {
        // Ordering: Acquire pairs with the Release in `trim`: if the trim did not see this count, this
        // thread does not see the blocks that it has unlinked.
        self.counting.fetch_add(1, order!(AcqRel, "counting: before the blocks are read"));
        Counting(&self.counting)
    }

    /// Wait-free. An entry that stays during the call is counted: its bit does not change.
    pub(crate) fn len(&self) -> usize {
        let _counting = self.counting();
        self.blocks().map(|block| occupied(block).count_ones() as usize).sum()
    }

    /// The counters. Exact while no other thread changes the list.
    pub(crate) fn stats(&self) -> Stats {
        let _counting = self.counting();
        let (mut adds, mut live, mut misses) = (0, 0, 0);
        let (mut slow_hits, mut node_misses) = (0, 0);
        // Ordering: Relaxed, all here; counters.
        for shard in &self.shards {
            adds += shard.adds.load(Ordering::Relaxed);
            misses += shard.misses.load(Ordering::Relaxed);
            slow_hits += shard.slow_hits.load(Ordering::Relaxed);
            node_misses += shard.node_misses.load(Ordering::Relaxed);
        }
        for block in self.blocks() {
            adds += block.adds.load(Ordering::Relaxed);
            live += u64::from(occupied(block).count_ones());
            misses += misses_of(block);
        }
        let removals = adds.saturating_sub(live);
        let cpu_hits = removals.saturating_sub(misses.saturating_sub(slow_hits));
        let node_hits = removals.saturating_sub(node_misses).max(cpu_hits);
        Stats { adds, removals, cpu_hits, node_hits }
    }

    // ---- snapshots, close, trim ----

    /// Keeps additions and removals of all threads out, until [`thaw`](Self::thaw).
    pub(crate) fn freeze(&self) -> Result<MutexGuard<'_, ()>, Deadlock> {
        if self.is_owner() {
            return Err(Deadlock);
        }
        let guard = self.exclusive.lock();
        // Ordering: Relaxed, all here; the barrier and the locks order them before the snapshot.
        self.owner.store(thread_id(), Ordering::Relaxed);
        self.frozen.store(FROZEN, Ordering::Relaxed);
        self.head.gate.fetch_add(1, Ordering::Relaxed);
        self.head.add_gate.fetch_add(1, Ordering::Relaxed);
        step!("snapshot: no section is under way", self.restart_sections());
        step!("snapshot: no change under a lock is under way", self.pass_locks());
        Ok(guard)
    }

    /// Waits for the changes under the locks of the shards that have begun.
    fn pass_locks(&self) {
        self.shards.iter().for_each(|shard| drop(shard.lock.lock()));
    }

    pub(crate) fn thaw(&self) {
        // Ordering: Release, all. They pair with the Acquire in `enter` and with the loads of sections,
        // and carry what the snapshot has read.
        self.frozen.store(0, Ordering::Release);
        self.head.add_gate.fetch_sub(1, Ordering::Release);
        self.head.gate.fetch_sub(1, Ordering::Release);
        // Ordering: Release pairs with the Acquire in `is_owner`. A thread that has forgotten its snapshot
        // must not wait for it in `enter` while another thread ends the list.
        self.owner.store(0, order!(Release, "thaw: the owner last"));
    }

    /// Ends a snapshot, and removes the entries that its thread has dropped.
    pub(crate) fn end_snapshot(&self, guard: MutexGuard<'_, ()>) {
        let deferred = self.deferred.load(Ordering::Relaxed);
        self.deferred.store(ptr::null_mut(), Ordering::Relaxed);
        self.thaw();
        drop(guard);
        Self::remove_deferred(NonNull::from(self), deferred);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Refuses additions from now on. Those that have begun are complete when it returns.
    pub(crate) fn close(&self) -> Result<(), Deadlock> {
        if self.is_owner() {
            return Err(Deadlock);
        }
        let _exclusive = self.exclusive.lock();
        // Ordering: Relaxed, both; the barrier and the locks order them before the return.
        if !self.closed.swap(true, Ordering::Relaxed) {
            self.head.add_gate.fetch_add(1, Ordering::Relaxed);
        }
        step!("close: no section is under way", self.restart_sections());
        step!("close: no addition under a lock is under way", self.pass_locks());
        Ok(())
    }

    /// Frees the blocks that have no entries and no pins, except the first of each shard.
    pub(crate) fn trim(&self) -> Result<(), Deadlock> {
        let guard = self.freeze()?;
        let walk = self.walk.lock();
        self.shards.iter().for_each(|shard| self.trim_shard(shard));
        // Ordering: Relaxed; changed and read under `walk`.
        step!("trim: tell the open walks", self.trims.fetch_add(1, Ordering::Relaxed));
        self.thaw();
        drop(guard);
        // Ordering: AcqRel. Release pairs with the Acquire in `counting`. Acquire pairs with the
        // Release of the end of a count; it carries its reads.
        let counting = self.counting.fetch_add(0, Ordering::AcqRel);
        if !check!("trim: no thread counts", counting == 0) {
            return Ok(()); // the next trim frees them
        }
        let mut at = self.unlinked.load(Ordering::Relaxed);
        self.unlinked.store(ptr::null_mut(), Ordering::Relaxed);
        drop(walk);
        while let Some(block) = NonNull::new(at) {
            // SAFETY: the block is unlinked, and no thread found it before.
            at = unsafe { block.as_ref() }.link.load(Ordering::Relaxed);
            // SAFETY: no thread uses the unlinked block, and it has no values.
            unsafe { Self::free_block(block) };
        }
        Ok(())
    }

    fn trim_shard(&self, shard: &Shard) {
        // SAFETY: blocks live while the list is frozen.
        let block = |at: *const Block| unsafe { at.as_ref() };
        let Some(mut kept) = block(shard.first.load(Ordering::Relaxed)) else { return };
        // Ordering: Relaxed, the others here; the list is frozen.
        while let Some(now) = block(kept.next.load(Ordering::Relaxed)) {
            // A walk that found the cell free may not have taken its pin back yet.
            let pins = || now.states.iter().any(|state| state.load(Ordering::Acquire) & PINS != 0);
            if in_use(now) != 0 || !check!("trim: no pin is left", !pins()) {
                kept = now;
                continue;
            }
            let at = ptr::from_ref(now).cast_mut();
            let after = now.next.load(Ordering::Relaxed);
            // Ordering: Release pairs with the Acquire in `next`; it carries the block to a thread that
            // counts already, and so has not read the link to it.
            kept.next.store(after, Ordering::Release);
            if after.is_null() {
                shard.last.store(ptr::from_ref(kept).cast_mut(), Ordering::Relaxed);
            }
            for hint in [&shard.current, &shard.shared, &shard.search] {
                if hint.load(Ordering::Relaxed) == at {
                    hint.store(ptr::null_mut(), Ordering::Relaxed);
                }
            }
            shard.adds.fetch_add(now.adds.load(Ordering::Relaxed), Ordering::Relaxed);
            shard.misses.fetch_add(misses_of(now), Ordering::Relaxed);
            now.link.store(self.unlinked.load(Ordering::Relaxed), Ordering::Relaxed);
            self.unlinked.store(at, Ordering::Relaxed);
        }
    }

    /// Locks out other walks and trims. Returns the number of trims so far.
    pub(crate) fn walking(&self) -> (MutexGuard<'_, ()>, u64) {
        let guard = self.walk.lock();
        (guard, self.trims.load(Ordering::Relaxed))
    }

    /// The serial number of the newest block.
    pub(crate) fn newest(&self) -> u64 {
        // Ordering: Relaxed; see `link`.
        self.made.load(Ordering::Relaxed)
    }

    /// Marks entries of some blocks and pins them. Sets the second of each pair to the entries that
    /// are pinned now. The caller has locked `walk`. Returns pins that it must end after the unlock.
    pub(crate) fn pin_batch(&self, batch: &mut [(*const Block, u64)]) -> [u64; BATCH] {
        // SAFETY: blocks live while `walk` is locked.
        let block = |at: *const Block| unsafe { &*at };
        let (mut stale, mut fresh) = ([0_u64; BATCH], false);
        for &(at, entries) in &*batch {
            let block = block(at);
            let marked = block.special.load(Ordering::Relaxed)
                & block.special_remote.load(Ordering::Relaxed);
            if marked & entries != entries {
                mark(block, entries);
                fresh = true;
            }
        }
        if fresh {
            step!("walk: removals see the marks", self.restart_sections());
        }
        for ((at, entries), stale) in batch.iter_mut().zip(&mut stale) {
            let block = block(*at);
            let (mut left, mut pinned) = (*entries, 0_u64);
            while let Some(index) = pop(&mut left) {
                let state = &block.states[index as usize];
                let mut now = state.load(Ordering::Relaxed);
                while now & UNLINKED == 0 {
                    check_pins(now);
                    // Ordering: Acquire pairs with the Release of a refill; it carries the cleared mark of
                    // the entry before.
                    let (success, failure) = (Ordering::Acquire, Ordering::Relaxed);
                    match state.compare_exchange_weak(now, now + 1, success, failure) {
                        Ok(_) => {
                            pinned |= 1 << index;
                            break;
                        }
                        Err(other) => now = other,
                    }
                }
            }
            // The pin of a cell that is free by now counts for nothing. Nor does that of a later
            // entry in the cell, whose removal may be fast: that of the former cleared the mark.
            // Ordering: Relaxed, both; the pin has acquired what cleared the mark.
            let marked = block.special.load(Ordering::Relaxed)
                & block.special_remote.load(Ordering::Relaxed);
            let unmarked = pinned & !marked;
            let good = pinned & occupied(block);
            let good = if check!("walk: the entry is still marked", unmarked == 0) {
                good
            } else {
                good & marked
            };
            (*entries, *stale) = (good, pinned & !good);
        }
        stale
    }

    /// Checks what holds while no other thread uses the list, for tests.
    pub(crate) fn validate(&self) {
        let _counting = self.counting();
        for block in self.blocks() {
            let (occupied, held) = (occupied(block), block.held.load(Ordering::Relaxed));
            assert_eq!(occupied & held, 0, "a cell off the list is on it");
            assert_eq!((occupied | held) & !block.mask, 0, "a cell that does not exist");
            let free = !(block.home.load(Ordering::Relaxed) ^ block.seen.load(Ordering::Relaxed));
            assert_eq!(free & (occupied | held | !block.mask), 0, "a used cell seems free");
            for index in 0..block.mask.count_ones() {
                let state = block.states[index as usize].load(Ordering::Relaxed);
                let (bit, unlinked) = (1 << index, state & UNLINKED != 0);
                assert!(occupied & bit == 0 || !unlinked, "an entry is linked and unlinked");
                assert!(held & bit == 0 || unlinked, "a cell is held and linked");
                assert!((occupied | held) & bit != 0 || state & PINS == 0, "a pin of no entry");
            }
        }
    }

    // ---- the end ----

    /// Ends the list, and frees the memory when the last entry or pin ends.
    ///
    /// # Safety
    ///
    /// No other thread uses the list, except by entries and pins.
    pub(crate) unsafe fn end(list: NonNull<Self>) {
        struct Abandon<T>(NonNull<Cells<T>>);

        impl<T> Drop for Abandon<T> {
            fn drop(&mut self) {
                // SAFETY: by the contract of `end`, once.
                unsafe { Cells::abandon(self.0) };
            }
        }

        let _abandon = Abandon(list); // also after a panic below
        // SAFETY: the list lives until `abandon`.
        let this = unsafe { list.as_ref() };
        if this.frozen.load(Ordering::Relaxed) != 0 {
            this.thaw(); // a snapshot was forgotten
        }
        // Ordering: AcqRel pairs with the exchange in `defer`. Acquire carries the links and the uses of the values,
        // Release the end of the snapshot.
        let deferred = this.deferred.swap(ENDED, order!(AcqRel, "end: before a link is read"));
        Self::remove_deferred(list, deferred);
    }

    /// Frees the list, or leaves that to the last of its cells.
    ///
    /// # Safety
    ///
    /// That of [`end`](Self::end).
    unsafe fn abandon(list: NonNull<Self>) {
        // SAFETY: the list lives until `release` at the earliest.
        let this = unsafe { list.as_ref() };
        let walk = this.walk.lock();
        if this.blocks().next().is_some() {
            this.frozen.store(ENDING, Ordering::Relaxed);
            this.head.gate.fetch_add(1, Ordering::Relaxed); // and it stays
            step!("end: no section is under way", this.restart_sections());
            step!("end: no change under a lock is under way", this.pass_locks());
        }
        this.orphans.store(COUNTING, Ordering::Relaxed);
        let mut left = 0;
        for block in this.blocks() {
            let mut cells = in_use(block);
            while let Some(index) = pop(&mut cells) {
                // The end of the cell sees the flag, or this sees the end.
                // Ordering: Release carries the count above to `release`.
                let before = block.states[index as usize].fetch_or(ORPHAN, Ordering::Release);
                if before & GONE == 0 || before & PINS != 0 {
                    left += 1;
                    continue;
                }
                // The last unpin has begun to finish the cell, and runs no code of the program.
                // Ordering: Acquire pairs with the Release in `finish`; it carries the last use of the cell.
                while block.held.load(Ordering::Acquire) & 1 << index != 0 {
                    thread::yield_now();
                }
            }
        }
        // Ordering: Release pairs with the Acquire in `enter`; a removal comes after the flags.
        this.frozen.store(0, Ordering::Release);
        drop(walk);
        // Ordering: AcqRel, as in `release`.
        let before = this.orphans.fetch_sub(COUNTING - left, Ordering::AcqRel);
        if check!("end: no cell is left", before == COUNTING - left) {
            // SAFETY: all cells have ended.
            unsafe { Self::free(list) };
        }
    }

    /// Ends a cell that was counted when the list ended.
    ///
    /// # Safety
    ///
    /// The caller has ended the cell, and does not use the list again.
    #[cold]
    unsafe fn release(list: NonNull<Self>) {
        // Ordering: AcqRel. Release carries this thread's uses of the list and its blocks to the last
        // one, which acquires them.
        // SAFETY: the list lives while its count is not 0.
        let before = unsafe { &(*list.as_ptr()).orphans }
            .fetch_sub(1, order!(AcqRel, "release: after the last use"));
        if before == 1 {
            // SAFETY: all cells have ended.
            unsafe { Self::free(list) };
        }
    }

    /// # Safety
    ///
    /// No thread uses the list or a block of it.
    unsafe fn free(list: NonNull<Self>) {
        // SAFETY: by the contract of this function; `create` leaked the box.
        let this = unsafe { Box::from_raw(list.as_ptr()) };
        #[cfg(offlock_model)]
        // SAFETY: the checker fails the model if a use is not ordered with this write.
        this.freed.with_mut(|freed| unsafe { *freed = true });
        let free = |mut at: *mut Block, next: fn(&Block) -> *mut Block| {
            while let Some(block) = NonNull::new(at) {
                // SAFETY: the block lives until the next line.
                at = next(unsafe { block.as_ref() });
                // SAFETY: by the contract of this function.
                unsafe { Self::free_block(block) };
            }
        };
        for shard in &this.shards {
            free(shard.first.load(Ordering::Relaxed), |block| block.next.load(Ordering::Relaxed));
        }
        free(this.unlinked.load(Ordering::Relaxed), |block| block.link.load(Ordering::Relaxed));
        #[cfg(offlock_model)] // its memory stays, so that a later use fails the model
        // SAFETY: `this` is not used again.
        unsafe {
            ptr::drop_in_place(&raw mut Box::leak(this)._leak)
        };
    }
}

/// The lock of a shard. A model sees whether the list lives until the unlock.
struct Entered<'a, T> {
    _list: &'a Cells<T>,
    _guard: MutexGuard<'a, ()>,
}

#[cfg(offlock_model)]
impl<T> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the checker fails the model if the free of the list is not ordered with this read.
        self._list.freed.with(|freed| assert!(!unsafe { *freed }, "the list was freed"));
    }
}

/// Ends a count on drop.
struct Counting<'a>(&'a AtomicU64);

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `trim`; it carries the reads of blocks.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// The block after a block.
pub(crate) fn next(block: &Block) -> *const Block {
    block.lives();
    // Ordering: Acquire, as in `first`.
    block.next.load(Ordering::Acquire)
}

/// The removals through `remote`, with those that no refill has found yet.
fn misses_of(block: &Block) -> u64 {
    let (home, seen) = (block.home.load(Ordering::Relaxed), block.seen.load(Ordering::Relaxed));
    let unseen = (home ^ seen) & block.mask & !occupied(block);
    let held = block.held.load(Ordering::Relaxed);
    block.misses.load(Ordering::Relaxed) + u64::from((unseen | held).count_ones())
}

/// Does a refill of a block that belongs to no CPU, under the lock of its shard. Returns the free
/// cells.
fn learn(block: &Block) -> u64 {
    // Ordering: Acquire, both, in this order: as in the section.
    let remote = block.remote.load(order!(Acquire, "learn: `remote` before `held`"));
    let held = block.held.load(order!(Acquire, "learn: after the last unpin"));
    let home = load_own(&block.home);
    let taken = home ^ remote | held | !block.mask;
    let mut new = !taken & (home ^ load_own(&block.seen));
    let misses = load_own(&block.misses);
    block.misses.store(misses + u64::from(new.count_ones()), Ordering::Relaxed);
    while let Some(index) = pop(&mut new) {
        // Only FREE is replaced: another state has the pins of a walk with a stale word.
        let state = &block.states[index as usize];
        // Ordering: Release, as in the section.
        let _ = state.compare_exchange(FREE, 0, Ordering::Release, Ordering::Relaxed);
    }
    block.seen.store(home ^ taken, Ordering::Relaxed);
    !taken
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::mem::forget;

    use super::*;
    use crate::PerCpuList;

    /// Safe code can forget any number of references. The program ends before their pins overflow.
    #[test]
    fn inv07_forgotten_references_do_not_overflow() {
        let name = "cells::tests::inv07_forgotten_references_do_not_overflow";
        let child = || {
            testkit::child::in_own_process(name, || {
                let list = PerCpuList::new();
                let entry = list.insert(7).unwrap();
                forget(entry.share());
                // SAFETY: the entry is not dropped before the end of the block.
                let block = unsafe { &*list.cells().first(entry.slot().index()) };
                let state = block.states.iter().find(|state| state.load(Ordering::Relaxed) != 0);
                state.unwrap().store(PINS / 2, Ordering::Relaxed);
                forget(list.iter().next().unwrap());
                println!("one more is too many");
                forget(list.iter().next());
                println!("and was not noticed");
            });
        };
        let panic = std::panic::catch_unwind(child).unwrap_err();
        let output = panic.downcast_ref::<String>().unwrap();
        assert!(output.contains("too many") && !output.contains("not noticed"), "{output}");
    }
}
