//! The list on cells: an addition and a removal are one restartable section each, with no lock.
//!
//! `percpu::cells` says how a cell is occupied and freed. This module adds what is rare: growth,
//! removals that a section refuses, walks, snapshots.
//!
//! A cell's state is a number of pins and two flags. A walk marks the entries of up to [`BATCH`]
//! blocks, restarts the sections, and pins the entries. From then on the sections refuse to remove
//! these entries, and a removal claims the state of the entry:
//!
//! ```text
//!  walk                                      removal of a marked entry
//!  special |= entries                        state: 0 -> FREE            no pin: take the value out
//!  heavy_rseq()                              clear the mark, remote ^= bit
//!  state: n -> n + 1, unless UNLINKED        state: n -> n | UNLINKED    pinned: held |= bit, then
//!  occupied, and still marked? else unpin    remote ^= bit, then GONE; the last unpin drops the value
//! ```
//!
//! # Invariants
//!
//! 1. An occupied cell has a value. Its state is not [`FREE`], except between the claim of a removal
//!    and its change of `remote`.
//! 2. A walk reads a value only after it has pinned it, and then seen the cell occupied and marked.
//!    The mark is cleared before the cell is freed, so it is that of the entry that was pinned.
//! 3. `held` is set before the cell is freed, and cleared by the last unpin: a pinned cell is not
//!    reused.
//! 4. Marks are set under `walk`, so a mark that a walk finds set has had its barrier.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit, needs_drop};
use std::ops::Deref;
use std::ptr::{self, NonNull};

use percpu::cells::{Block, Cell, FREE, Head, Refused as Section, Sections, VALUES};
use percpu::fence::heavy_rseq;
use percpu::lglock::LockError;
use percpu::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use percpu::sync::{Arc, Mutex, MutexGuard, check, cpu, order, step, thread_id};
use percpu::{AllocError, CpuId, topology};

use crate::error::{InsertError, Refused};
use crate::stats::Stats;

/// The cell is off the list, or about to be: no new pins.
const UNLINKED: u32 = 1 << 31;
/// The entry has given up the value: the last unpin drops it.
const GONE: u32 = 1 << 30;
const PINS: u32 = GONE - 1;
const _: () = assert!(FREE == UNLINKED | GONE);
/// The number of blocks that a walk marks and pins at a time.
const BATCH: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 16 };
/// The cells of the first block of a shard.
const FIRST_CELLS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 8 };

/// The part of a list that belongs to a CPU. What comes first is read by sections.
#[repr(C, align(128))]
struct Shard {
    current: AtomicPtr<Block>,
    /// The block into which threads without sections insert, under `lock`.
    shared: AtomicPtr<Block>,
    first: AtomicPtr<Block>,
    tail: AtomicPtr<Block>,
    blocks: AtomicUsize,
    /// Removals outside a section on the CPU of the block; a refill counts them as misses.
    slow_hits: AtomicU64,
    /// Removals on this CPU of entries of another node.
    node_misses: AtomicU64,
    /// For growth, and for removals and additions outside a section.
    lock: Mutex<()>,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Shard>() == percpu::cells::SHARD);

/// Memory of blocks.
struct Region(NonNull<u8>, Layout);

/// A list, at a place that does not move.
pub struct Cells<T> {
    head: Head,
    sections: Option<Sections>,
    shards: Box<[Shard]>,
    regions: Mutex<Vec<Region>>,
    /// Held by the walk that marks and pins.
    walk: Mutex<()>,
    /// The thread that has a snapshot, or 0.
    owner: AtomicU64,
    /// The entries that this thread has dropped meanwhile.
    deferred: Mutex<Vec<Key>>,
    nodes: bool,
    _value: PhantomData<*mut T>,
}

// SAFETY: any thread may drop values, and shares them by references. `T` is `Send` and `Sync`. The
// other fields are atomics and locks, and the memory of the blocks belongs to the list.
unsafe impl<T: Send + Sync> Send for Cells<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Cells<T> {}

/// A block, and the number of a cell in the low 6 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(NonNull<Block>);

// SAFETY: a block is used by any thread.
unsafe impl Send for Key {}
// SAFETY: as above.
unsafe impl Sync for Key {}

impl Key {
    #[inline(always)]
    fn new(block: *const Block, index: u32) -> Self {
        // SAFETY: a block is not at address 0, and is aligned to 64 bytes.
        Self(unsafe { NonNull::new_unchecked(block.cast_mut().byte_add(index as usize)) })
    }

    #[inline(always)]
    fn index(self) -> u32 {
        self.0.addr().get() as u32 & 63
    }

    #[inline(always)]
    fn pointer(self) -> *const Block {
        self.0.as_ptr().map_addr(|addr| addr & !63)
    }

    fn bit(self) -> u64 {
        1 << self.index()
    }

    /// # Safety
    ///
    /// The block lives for `'a`: the caller has the entry or a pin of the cell.
    unsafe fn block<'a>(self) -> &'a Block {
        // SAFETY: by the contract of this function.
        unsafe { &*self.pointer() }
    }
}

fn occupied(block: &Block) -> u64 {
    // Ordering: Acquire, both. They pair with the Release of an insertion and of a removal; the first
    // carries the value.
    let home = block.home.load(order!(Acquire, "occupied: before the value is read"));
    (home ^ block.remote.load(Ordering::Acquire)) & block.mask
}

impl<T> Cells<T> {
    const STRIDE: usize = size_of::<Cell<T>>();

    pub fn new() -> Self {
        const { assert!(align_of::<T>() <= 64, "values are aligned to at most 64 bytes") };
        let sections = Sections::find();
        let shards: Box<[Shard]> = (0..cpu::possible())
            .map(|_| Shard {
                current: AtomicPtr::default(),
                shared: AtomicPtr::default(),
                first: AtomicPtr::default(),
                tail: AtomicPtr::default(),
                blocks: AtomicUsize::new(0),
                slow_hits: AtomicU64::new(0),
                node_misses: AtomicU64::new(0),
                lock: Mutex::new(()),
            })
            .collect();
        let first = ptr::from_ref(&shards[0]).cast();
        Self {
            head: Head { gate: AtomicU64::new(0), add_gate: AtomicU64::new(0), shards: first },
            sections,
            shards,
            regions: Mutex::new(Vec::new()),
            walk: Mutex::new(()),
            owner: AtomicU64::new(0),
            deferred: Mutex::new(Vec::new()),
            nodes: topology().nodes().len() > 1,
            _value: PhantomData,
        }
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.shards.iter().flat_map(|shard| {
            // SAFETY: blocks are published complete, and live as long as the list.
            let block = |at: *mut Block| unsafe { at.as_ref() };
            let first = block(shard.first.load(Ordering::Acquire));
            std::iter::successors(first, move |now| block(now.next.load(Ordering::Acquire)))
        })
    }

    /// Returns whether this thread has a snapshot.
    fn is_owner(&self) -> bool {
        // Ordering: Relaxed; only this thread stores its own id.
        self.owner.load(Ordering::Relaxed) == thread_id() as u64
    }

    // ---- additions ----

    #[inline(always)]
    pub fn insert(&self, value: T) -> Result<Key, InsertError<T>> {
        let cell = Cell(MaybeUninit::new(value));
        loop {
            let refused = match self.sections {
                // SAFETY: there is a shard for each CPU, and its blocks have cells of `T`.
                Some(sections) => match unsafe { sections.insert(&self.head, &raw const cell) } {
                    Ok((block, index)) => return Ok(Key::new(block, index)),
                    Err(refused) => refused,
                },
                None => Section::OtherCpu,
            };
            let done = match refused {
                Section::OtherCpu => self.insert_locked(&cell),
                _ => self.make_room().map(|()| None),
            };
            match done {
                Ok(Some(key)) => return Ok(key),
                Ok(None) => {}
                Err(reason) => {
                    // SAFETY: no section has moved the value.
                    return Err(InsertError { value: unsafe { cell.0.assume_init() }, reason });
                }
            }
        }
    }

    /// Finds or makes a block with room on this CPU, and makes it current. The thread may be on
    /// another CPU afterwards.
    #[cold]
    #[inline(never)]
    fn make_room(&self) -> Result<(), Refused> {
        let at = cpu::current();
        let shard = &self.shards[at.index()];
        let guard = self.enter(shard)?;
        let Some(sections) = self.sections else { return Ok(()) };
        let mut next = shard.current.load(Ordering::Relaxed).cast_const();
        for _ in 0..shard.blocks.load(Ordering::Relaxed) {
            // SAFETY: blocks live as long as the list.
            let after = unsafe { next.as_ref() }.map(|now| now.next.load(Ordering::Acquire));
            next = after.filter(|at| !at.is_null()).unwrap_or(shard.first.load(Ordering::Acquire));
            // SAFETY: as above; a shard that has blocks has a first one.
            let block = unsafe { &*next };
            let taken = occupied(block) | block.held.load(Ordering::Relaxed) | !block.mask;
            if block.cpu == at.get() && taken.count_zeros() * 8 >= block.mask.count_ones() {
                drop(guard);
                // SAFETY: the block and its shard are alive.
                let _ = unsafe { sections.refill(next) }; // else the thread has moved
                return Ok(());
            }
        }
        let first = self.grow(shard, at.get())?;
        drop(guard);
        // SAFETY: the block and its shard are alive.
        let _ = unsafe { sections.refill(first) };
        Ok(())
    }

    /// Locks a shard for an addition. Waits for a snapshot of another thread.
    fn enter<'a>(&self, shard: &'a Shard) -> Result<MutexGuard<'a, ()>, Refused> {
        if self.is_owner() {
            return Err(LockError::Deadlock.into());
        }
        let guard = shard.lock.lock();
        // Under the lock there is no snapshot, so a closed gate is that of `close`.
        // Ordering: Relaxed; `close` holds the lock after its store.
        if self.head.add_gate.load(Ordering::Relaxed) != 0 {
            return Err(Refused::Closed);
        }
        Ok(guard)
    }

    /// Allocates blocks and links them. The caller holds the lock of the shard.
    fn grow(&self, shard: &Shard, cpu: u32) -> Result<*mut Block, AllocError> {
        let have = shard.blocks.load(Ordering::Relaxed);
        let (count, cells) =
            if have == 0 { (1, FIRST_CELLS) } else { ((have / 2).clamp(1, 64), 64) };
        let header = VALUES.max(size_of::<Block>());
        let size = (header + cells as usize * Self::STRIDE).next_multiple_of(128);
        let layout = Layout::from_size_align(size * count, 128).map_err(|_| AllocError::new())?;
        let mut regions = self.regions.lock();
        regions.try_reserve(1).map_err(|_| AllocError::new())?;
        // SAFETY: the layout has a size.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(AllocError::new)?;
        regions.push(Region(memory, layout));
        drop(regions);
        let mask = !0_u64 >> (64 - cells);
        // SAFETY: the place is in the memory.
        let at = |n: usize| unsafe { memory.byte_add(n * size) }.cast::<Block>().as_ptr();
        for n in 0..count {
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
                padding: 0,
                states: std::array::from_fn(|_| AtomicU32::new(0)),
                remote: word(),
                held: word(),
                special_remote: word(),
                next: AtomicPtr::new(if n + 1 < count { at(n + 1) } else { ptr::null_mut() }),
            };
            // SAFETY: the memory has room for a block, at an aligned place that no thread knows.
            unsafe { at(n).write(block) };
        }
        let tail = shard.tail.load(Ordering::Relaxed);
        shard.tail.store(at(count - 1), Ordering::Relaxed);
        // SAFETY: blocks live as long as the list.
        let link = unsafe { tail.as_ref() }.map_or(&shard.first, |tail| &tail.next);
        // Ordering: Release pairs with the Acquire in `blocks`; it carries the blocks.
        link.store(at(0), order!(Release, "grow: the blocks are complete"));
        shard.blocks.store(have + count, Ordering::Relaxed);
        Ok(at(0))
    }

    /// Adds a value without a section, in a block that belongs to no CPU.
    #[cold]
    #[inline(never)]
    fn insert_locked(&self, cell: &Cell<T>) -> Result<Option<Key>, Refused> {
        let shard = &self.shards[cpu::current().index()];
        let _guard = self.enter(shard)?;
        let mut at = shard.shared.load(Ordering::Relaxed);
        // SAFETY: blocks live as long as the list.
        let free = |at: *mut Block| unsafe { at.as_ref() }.map_or(0, Self::learn);
        if free(at) == 0 {
            let shared =
                |block: &&Block| block.cpu == u32::MAX && ptr::eq(block.current, &shard.current);
            let room = |block: &&Block| Self::learn(block) != 0;
            let found = self.blocks().filter(shared).find(room);
            at = match found {
                Some(block) => ptr::from_ref(block).cast_mut(),
                None => self.grow(shard, u32::MAX)?,
            };
            shard.shared.store(at, Ordering::Relaxed);
        }
        // SAFETY: as above.
        let block = unsafe { &*at };
        let index = free(at).trailing_zeros();
        // SAFETY: the cell is free, and this thread holds the lock under which it is taken.
        unsafe { ptr::copy_nonoverlapping(cell, Block::cell::<T>(at, index), 1) };
        block.adds.store(block.adds.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let home = block.home.load(Ordering::Relaxed);
        block.home.store(home ^ 1 << index, Ordering::Release);
        Ok(Some(Key::new(at, index)))
    }

    /// Does a refill of a block that belongs to no CPU, under the lock of its shard. Returns the free
    /// cells.
    fn learn(block: &Block) -> u64 {
        let remote = block.remote.load(Ordering::Acquire); // before `held`
        let (held, home) = (block.held.load(Ordering::Acquire), block.home.load(Ordering::Relaxed));
        let taken = home ^ remote | held | !block.mask;
        let mut new = !taken & (home ^ block.seen.load(Ordering::Relaxed));
        let misses = block.misses.load(Ordering::Relaxed);
        block.misses.store(misses + u64::from(new.count_ones()), Ordering::Relaxed);
        while new != 0 {
            let state = &block.states[new.trailing_zeros() as usize];
            new &= new - 1;
            let _ = state.compare_exchange(FREE, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        block.seen.store(home ^ taken, Ordering::Relaxed);
        !taken
    }

    // ---- removals ----

    /// Removes an entry, and drops its value unless it is pinned.
    ///
    /// # Safety
    ///
    /// The caller has the entry, which ends.
    #[inline(always)]
    pub unsafe fn remove(&self, key: Key) {
        let mut out = Cell(MaybeUninit::<T>::uninit());
        let (at, index) = (key.pointer(), key.index());
        if let Some(sections) = self.sections {
            let target = &raw mut out;
            // SAFETY: the caller has the entry, so the cell is occupied and its block alive.
            let mut done = unsafe { sections.remove(&self.head, at, index, target) };
            if done == Err(Section::OtherCpu) {
                // SAFETY: as above. A block that belongs to no CPU is left to `remove_slow`.
                done = if unsafe { key.block() }.cpu == u32::MAX {
                    Err(Section::Closed)
                } else {
                    self.count_node(at);
                    // SAFETY: as above.
                    unsafe { sections.remove_remote(&self.head, at, index, target) }
                };
            }
            if done.is_ok() {
                if needs_drop::<T>() {
                    // SAFETY: the section has moved the value, which needs a drop, out of the cell.
                    drop(unsafe { out.0.assume_init() });
                }
                return;
            }
        }
        if self.is_owner() {
            self.deferred.lock().push(key);
            return;
        }
        // SAFETY: the caller has the entry.
        drop(unsafe { self.remove_slow(key) });
    }

    /// Counts a removal by a CPU of another node.
    fn count_node(&self, at: *const Block) {
        if !self.nodes {
            return;
        }
        let here = cpu::current();
        // SAFETY: the caller has an entry of the block.
        let there = CpuId::new(unsafe { (*at).cpu });
        if topology().node_of(here) != topology().node_of(there) {
            self.shards[here.index()].node_misses.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes an entry by atomic operations. Waits for a snapshot of another thread. Returns the
    /// value if no walk pins it.
    ///
    /// # Safety
    ///
    /// The caller has the entry, which ends.
    #[cold]
    #[inline(never)]
    unsafe fn remove_slow(&self, key: Key) -> Option<T> {
        // SAFETY: the caller has the entry, so the block is alive.
        let block = unsafe { key.block() };
        let here = &self.shards[cpu::current().index()];
        let _guard = here.lock.lock();
        if ptr::eq(&raw const here.current, block.current) {
            here.slow_hits.fetch_add(1, Ordering::Relaxed);
        }
        let state = &block.states[key.index() as usize];
        // Ordering: Acquire on success pairs with the Release of an unpin; it carries a walk's use of
        // the value.
        let order = order!(AcqRel, "claim: after the last use by a walk");
        if state.compare_exchange(0, FREE, order, Ordering::Relaxed).is_ok() {
            // SAFETY: no walk pins the value, and from now on none can.
            let value = unsafe { Self::take(key) };
            step!("removal: clear the mark of the entry", Self::clear(block, key.bit()));
            block.remote.fetch_xor(key.bit(), Ordering::AcqRel);
            return Some(value);
        }
        Self::unlink_pinned(block, key);
        let before = state.fetch_or(GONE, Ordering::AcqRel);
        // SAFETY: the entry has ended, and no pin is left.
        (before & PINS == 0).then(|| unsafe { Self::finish(key) })
    }

    /// Takes a pinned cell off the list. Returns whether it was on it.
    fn unlink_pinned(block: &Block, key: Key) -> bool {
        let state = &block.states[key.index() as usize];
        let before = state.fetch_or(UNLINKED, Ordering::AcqRel);
        if !check!("unlink: no drain came first", before & UNLINKED == 0) {
            return false;
        }
        step!("unlink: hold the cell first", block.held.fetch_or(key.bit(), Ordering::AcqRel));
        block.remote.fetch_xor(key.bit(), Ordering::AcqRel);
        true
    }

    /// Ends a cell that is off the list, and whose entry and pins have ended.
    ///
    /// # Safety
    ///
    /// The caller is the one that ended the last of them.
    unsafe fn finish(key: Key) -> T {
        // SAFETY: no other thread uses the value.
        let value = unsafe { Self::take(key) };
        // SAFETY: the block lives as long as the list.
        let block = unsafe { key.block() };
        Self::clear(block, key.bit());
        // Ordering: Release pairs with the Acquire in a refill; it carries the copy above.
        block.held.fetch_and(!key.bit(), order!(AcqRel, "finish: before the cell is reused"));
        value
    }

    /// # Safety
    ///
    /// The cell has a value, which only the caller uses. It is moved out.
    unsafe fn take(key: Key) -> T {
        // SAFETY: by the contract of this function.
        unsafe { ptr::read(Block::cell::<T>(key.pointer(), key.index())).0.assume_init() }
    }

    /// # Safety
    ///
    /// For `'a`, the caller has the entry or a pin.
    #[inline(always)]
    unsafe fn value<'a>(key: Key) -> &'a T {
        // SAFETY: by the contract of this function the cell has a value.
        unsafe { (*Block::cell::<T>(key.pointer(), key.index())).0.assume_init_ref() }
    }

    fn clear(block: &Block, bit: u64) {
        if block.special.load(Ordering::Relaxed) & bit != 0 {
            block.special_remote.fetch_and(!bit, Ordering::AcqRel);
            block.special.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    // ---- counts ----

    pub fn len(&self) -> usize {
        self.blocks().map(|block| occupied(block).count_ones() as usize).sum()
    }

    /// The counters. Exact while no other thread adds or removes.
    pub fn stats(&self) -> Stats {
        let (mut stats, mut misses) = (Stats::default(), 0);
        for block in self.blocks() {
            stats.adds += block.adds.load(Ordering::Relaxed);
            let home = block.home.load(Ordering::Relaxed);
            let unseen =
                (home ^ block.seen.load(Ordering::Relaxed)) & block.mask & !occupied(block);
            let held = block.held.load(Ordering::Relaxed);
            misses += block.misses.load(Ordering::Relaxed);
            misses += u64::from((unseen | held).count_ones());
        }
        let sum = |counter: fn(&Shard) -> &AtomicU64| -> u64 {
            self.shards.iter().map(|shard| counter(shard).load(Ordering::Relaxed)).sum()
        };
        stats.removals = stats.adds.saturating_sub(self.len() as u64);
        let slow_hits = sum(|shard| &shard.slow_hits);
        stats.cpu_hits = stats.removals.saturating_sub(misses.saturating_sub(slow_hits));
        let node_misses = sum(|shard| &shard.node_misses);
        stats.node_hits = stats.removals.saturating_sub(node_misses).max(stats.cpu_hits);
        stats
    }

    // ---- snapshots, close ----

    pub fn lock_all(&self) -> Result<Snapshot<'_, T>, LockError> {
        if self.is_owner() {
            return Err(LockError::Deadlock);
        }
        let guards = self.shards.iter().map(|shard| shard.lock.lock()).collect();
        self.head.gate.fetch_add(1, Ordering::Relaxed);
        self.head.add_gate.fetch_add(1, Ordering::Relaxed);
        step!("snapshot: no section is under way", heavy_rseq());
        self.owner.store(thread_id() as u64, Ordering::Relaxed);
        Ok(Snapshot { list: self, guards })
    }

    /// Refuses additions from now on. Those that have begun are complete when it returns.
    pub fn close(&self) -> Result<(), LockError> {
        if self.is_owner() {
            return Err(LockError::Deadlock);
        }
        self.head.add_gate.fetch_add(1, Ordering::Relaxed);
        step!("close: no section is under way", heavy_rseq());
        self.shards.iter().for_each(|shard| drop(shard.lock.lock()));
        Ok(())
    }

    pub fn iter(&self) -> Iter<'_, T> {
        Iter { list: self, shard: 0, at: ptr::null(), batch: [(ptr::null(), 0); BATCH], len: 0 }
    }

    /// Takes the pinned value off the list, and returns whether it was on it.
    pub fn unlink(&self, found: &Pinned<T>) -> Result<bool, LockError> {
        if self.is_owner() {
            return Err(LockError::Deadlock);
        }
        // SAFETY: the pin keeps the cell.
        let block = unsafe { found.0.block() };
        let here = &self.shards[cpu::current().index()];
        let _guard = here.lock.lock();
        let done = Self::unlink_pinned(block, found.0);
        if done && ptr::eq(&raw const here.current, block.current) {
            here.slow_hits.fetch_add(1, Ordering::Relaxed);
        }
        Ok(done)
    }
}

impl<T> Drop for Cells<T> {
    fn drop(&mut self) {
        let (mut pinned, mut left) = (false, Vec::new());
        for block in self.blocks() {
            pinned |= block.held.load(Ordering::Relaxed) != 0;
            let mut cells = occupied(block);
            while cells != 0 {
                let key = Key::new(block, cells.trailing_zeros());
                cells &= cells - 1;
                let state = block.states[key.index() as usize].load(Ordering::Relaxed);
                pinned |= state & PINS != 0;
                if state & PINS == 0 {
                    left.push(key);
                }
            }
        }
        for key in left {
            // SAFETY: the entry was forgotten, and no walk pins the value.
            drop(unsafe { Self::take(key) });
        }
        if !pinned {
            for Region(memory, layout) in self.regions.lock().drain(..) {
                // SAFETY: allocated in `grow` with this layout; no entry and no pin is left.
                unsafe { dealloc(memory.as_ptr(), layout) };
            }
        }
    }
}

/// A list at one instant.
pub struct Snapshot<'a, T> {
    list: &'a Cells<T>,
    guards: Vec<MutexGuard<'a, ()>>,
}

impl<T> Snapshot<'_, T> {
    pub fn for_each(&self, mut f: impl FnMut(&T)) {
        for block in self.list.blocks() {
            let mut cells = occupied(block);
            while cells != 0 {
                // SAFETY: no entry is removed during the snapshot.
                f(unsafe { Cells::<T>::value(Key::new(block, cells.trailing_zeros())) });
                cells &= cells - 1;
            }
        }
    }
}

impl<T> Drop for Snapshot<'_, T> {
    fn drop(&mut self) {
        let list = self.list;
        let deferred = std::mem::take(&mut *list.deferred.lock());
        list.owner.store(0, Ordering::Relaxed);
        // Ordering: Release, both; they pair with the tests of a section, and carry what the snapshot
        // has read.
        list.head.add_gate.fetch_sub(1, Ordering::Release);
        list.head.gate.fetch_sub(1, Ordering::Release);
        self.guards.clear();
        for key in deferred {
            // SAFETY: the entry was dropped during the snapshot, and has not ended yet.
            drop(unsafe { list.remove_slow(key) });
        }
    }
}

/// A value that a walk has pinned. It may be off the list.
pub struct Pinned<T>(Key, PhantomData<T>);

// SAFETY: pins on several threads share `&T`, and the last may drop the value.
unsafe impl<T: Send + Sync> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Pinned<T> {}

impl<T> Pinned<T> {
    pub fn is_linked(&self) -> bool {
        // SAFETY: the pin keeps the cell.
        let state = &unsafe { self.0.block() }.states[self.0.index() as usize];
        state.load(Ordering::Acquire) & UNLINKED == 0
    }
}

impl<T> Deref for Pinned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is pinned.
        unsafe { Cells::value(self.0) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: the pin keeps the cell.
        let state = &unsafe { self.0.block() }.states[self.0.index() as usize];
        // Ordering: AcqRel. Release carries this walk's use of the value to the claim of a removal or
        // to the last unpin, which acquires it.
        if state.fetch_sub(1, order!(AcqRel, "unpin: after the last use")) == FREE | 1 {
            // SAFETY: the entry has ended, and this was the last pin.
            drop(unsafe { Cells::<T>::finish(self.0) });
        }
    }
}

/// A walk, which pins the entries of [`BATCH`] blocks at a time.
pub struct Iter<'a, T> {
    list: &'a Cells<T>,
    shard: usize,
    at: *const Block,
    /// Blocks and their pinned cells, the next block last.
    batch: [(*const Block, u64); BATCH],
    len: usize,
}

impl<T> Iter<'_, T> {
    fn next_block(&mut self) -> Option<*const Block> {
        // SAFETY: blocks live as long as the list.
        self.at = match unsafe { self.at.as_ref() } {
            Some(block) => block.next.load(Ordering::Acquire),
            None => self.list.shards.get(self.shard)?.first.load(Ordering::Acquire),
        };
        self.shard += usize::from(self.at.is_null());
        Some(self.at)
    }

    fn fill(&mut self) {
        let (mut stale, mut fresh) = ([0_u64; BATCH], false);
        let walk = self.list.walk.lock();
        while self.len < BATCH
            && let Some(at) = self.next_block()
        {
            // SAFETY: blocks live as long as the list.
            let Some(block) = (unsafe { at.as_ref() }) else { continue };
            let entries = occupied(block);
            if entries != 0 {
                self.batch[self.len] = (at, entries);
                self.len += 1;
                if block.special.load(Ordering::Relaxed) & entries != entries {
                    block.special.fetch_or(entries, Ordering::Relaxed);
                    block.special_remote.fetch_or(entries, Ordering::Relaxed);
                    fresh = true;
                }
            }
        }
        if fresh {
            step!("walk: removals see the marks", heavy_rseq());
        }
        for n in 0..self.len {
            let (at, mut left) = self.batch[n];
            // SAFETY: as above.
            let block = unsafe { &*at };
            let mut pinned = 0_u64;
            while left != 0 {
                let (state, bit) =
                    (&block.states[left.trailing_zeros() as usize], left & left.wrapping_neg());
                left ^= bit;
                let mut now = state.load(Ordering::Relaxed);
                while now & UNLINKED == 0 {
                    let pin = state.compare_exchange_weak(
                        now,
                        now + 1,
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    );
                    match pin {
                        Ok(_) => {
                            pinned |= bit;
                            break;
                        }
                        Err(other) => now = other,
                    }
                }
            }
            // The pin of a cell that is free by now counts for nothing. Nor does that of a later
            // entry in the cell, whose removal may be fast: that of the former cleared the mark.
            let marked = block.special.load(Ordering::Acquire)
                & block.special_remote.load(Ordering::Acquire);
            let marked = if check!("walk: the entry is still marked", marked == u64::MAX) {
                u64::MAX
            } else {
                marked
            };
            let good = occupied(block) & marked;
            (self.batch[n].1, stale[n]) = (pinned & good, pinned & !good);
        }
        drop(walk);
        for n in 0..self.len {
            Self::unpin(self.batch[n].0, stale[n]); // may drop values
        }
        self.batch[..self.len].reverse();
    }

    fn unpin(at: *const Block, mut cells: u64) {
        while cells != 0 {
            drop(Pinned::<T>(Key::new(at, cells.trailing_zeros()), PhantomData));
            cells &= cells - 1;
        }
    }
}

impl<T> Iterator for Iter<'_, T> {
    type Item = Pinned<T>;

    fn next(&mut self) -> Option<Pinned<T>> {
        loop {
            while let Some((at, pinned)) = self.batch.get_mut(self.len.wrapping_sub(1)) {
                if *pinned != 0 {
                    let key = Key::new(*at, pinned.trailing_zeros());
                    *pinned &= *pinned - 1;
                    return Some(Pinned(key, PhantomData));
                }
                self.len -= 1;
            }
            self.fill();
            if self.len == 0 {
                return None;
            }
        }
    }
}

impl<T> Drop for Iter<'_, T> {
    fn drop(&mut self) {
        for &(at, pinned) in &self.batch[..self.len] {
            Self::unpin(at, pinned);
        }
    }
}

/// An entry of a list behind an `Arc`, for the tests of this module.
pub struct Entry<T>(Key, Arc<Cells<T>>);

impl<T> Entry<T> {
    pub fn insert(list: &Arc<Cells<T>>, value: T) -> Result<Self, InsertError<T>> {
        Ok(Self(list.insert(value)?, Arc::clone(list)))
    }

    pub fn key(self) -> Key {
        ManuallyDrop::new(self).0
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this is the entry.
        unsafe { Cells::value(self.0) }
    }
}

impl<T> Drop for Entry<T> {
    fn drop(&mut self) {
        // SAFETY: the entry ends here, once.
        unsafe { self.1.remove(self.0) };
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
