//! Slabs: blocks of 64 slots, the states of a slot, and the tree of a table's slabs.
//!
//! ```text
//!  Slab -> | state, T | state, T | ... 64 of them |  used, refs, owner
//!             ^
//!   live:    the bits of the id
//!   vacant:  | 1 | 0    | next generation | index |
//!   dead:    | 1 | 1    | next generation | link |
//!             63   62     61           32   31  0
//! ```
//!
//! A slot is *live* while its context can be found, *dead* from the removal of the context until the
//! drop of its value, and *vacant* otherwise. A lookup compares one word. A dead slot is linked to a list
//! through its own state, so a list needs no memory.
//!
//! # Invariants
//!
//! 1. A slot's value is initialised exactly while its state is live or dead. Only one thread can change
//!    the value between the end of a dead state and the next live one.
//! 2. A set bit of `used` belongs to a slot that is live, dead, claimed by an insert, or exhausted. The
//!    thread that sets the bit owns the vacant slot until it stores the live state.
//! 3. The counts of `refs` are open, except between the fold of a dead slot and its vacancy.
//! 4. A thread may follow a [`SlabPtr`] that it found in the tree while it has, since then,
//!    - a guard, because a slab is freed a grace period after it left the tree;
//!    - or the table's lock, because a slab leaves under it;
//!    - or a used slot of the slab, because a slab with one stays;
//!    - or the core of a dropped table, because its slabs all stay.
//!
//!    A slab that is not in the tree yet belongs to the thread that made it.
//!
//! A lookup reads the tree, the slab and the slot, and nothing else of the table. The tree is changed
//! under the table's lock only.

use std::alloc::{Layout, dealloc};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use offlock_percpu::rcu::RetireHead;
use offlock_percpu::{AllocError, RefBlock};
use offlock_sync::alloc::try_alloc;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::quarantine::{self, Watched};
use offlock_sync::{WaitSet, order};

use crate::error::LookupError;
use crate::id::Id;
use crate::tree::{Tree, floor_in, is_present};

/// The number of bits of an index that select the slot; the others are the slab's key.
pub(super) const SLAB_BITS: u32 = if cfg!(offlock_model) { 1 } else { 6 };
pub(super) const SLOTS: usize = 1 << SLAB_BITS;
/// The value of `used` in a slab without a vacant slot.
pub(super) const FULL: u64 = u64::MAX >> (64 - SLOTS);

const NOT_LIVE: u64 = 1 << 63;
const DEAD: u64 = 1 << 62;
/// The link of the last slot of a list.
pub(super) const NO_LINK: u32 = u32::MAX;
/// The link of a dead slot that was folded: the last put vacates it.
const REFERENCED: u32 = u32::MAX - 1;
/// The largest index: the two values above it are links with a meaning of their own.
pub(super) const MAX_INDEX: u32 = u32::MAX - 2;

/// A state that is not live: dead or vacant.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotLive(u64);

impl NotLive {
    pub(super) fn vacant(next: u32, index: u32) -> Self {
        Self(NOT_LIVE | u64::from(next) << 32 | u64::from(index))
    }

    pub(super) fn dead(id: Id, link: u32) -> Self {
        Self(NOT_LIVE | DEAD | u64::from(id.generation() + 1) << 32 | u64::from(link))
    }

    /// Returns the state of a folded slot that references keep.
    pub(super) fn referenced(self) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | u64::from(REFERENCED))
    }

    /// Returns `None` if the state is live.
    pub(super) fn read(state: u64) -> Option<Self> {
        (state & NOT_LIVE != 0).then_some(Self(state))
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// Returns the generation of the next context in the slot. Lower generations are stale.
    pub(super) fn next(self) -> u32 {
        (self.0 >> 32) as u32 & (u32::MAX >> 2)
    }

    /// Returns whether the value is not dropped yet.
    pub(super) fn is_dead(self) -> bool {
        self.0 & DEAD != 0
    }

    pub(super) fn is_referenced(self) -> bool {
        self.is_dead() && self.link() == REFERENCED
    }

    pub(super) fn link(self) -> u32 {
        self.0 as u32
    }

    /// Returns the id of the next context in a vacant slot.
    #[inline(always)]
    pub(super) fn next_id(self) -> Id {
        debug_assert!(!self.is_dead());
        Id::new(self.link(), self.next())
    }
}

/// Memory for one context.
#[repr(C)]
pub(super) struct Slot<T> {
    pub(super) state: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Slot<T> {
    /// Returns the value of a slot that is live or dead.
    ///
    /// # Safety
    ///
    /// The value is initialised and stays so for `'a`: the caller holds a guard from before the removal,
    /// a reference, or the table itself.
    #[inline(always)]
    pub(super) unsafe fn value<'a>(&self) -> &'a T {
        // SAFETY: by the contract of this function the value is initialised for `'a`.
        self.value.with(|value| unsafe { &*value.cast::<T>() })
    }

    /// Makes a live slot dead. Returns false if its context is not the one of `id` any more. One of
    /// several threads that try succeeds, and owns the slot's link.
    #[inline(always)]
    pub(super) fn kill(&self, id: Id) -> bool {
        let dead = NotLive::dead(id, NO_LINK).bits();
        // Ordering: AcqRel. Release pairs with the Acquire in `CtxRef::is_removed`; it carries what the
        // caller did before. Acquire pairs with the Release in `Claim::publish`; it carries the value to the
        // thread that drops it, by way of the lists. Relaxed on failure: the value is not accessed.
        let order = (order!(AcqRel, "kill: what came before the removal"), Ordering::Relaxed);
        self.state.compare_exchange(id.to_bits(), dead, order.0, order.1).is_ok()
    }

    /// Writes the value of a vacant slot.
    ///
    /// # Safety
    ///
    /// The slot is vacant and belongs to the calling thread: invariants 1 and 2.
    #[inline(always)]
    pub(super) unsafe fn write(&self, value: T) {
        self.value.with_mut(|at| {
            // SAFETY: no thread reads a vacant slot, and there is no value to drop.
            unsafe { at.cast::<T>().write(value) }
        });
    }

    /// Drops the value in place.
    ///
    /// # Safety
    ///
    /// The value is initialised, no thread reads it any more, and no other thread will drop it.
    pub(super) unsafe fn drop_value(&self) {
        self.value.with_mut(|at| {
            // SAFETY: by the contract of this function the value is initialised and only used here.
            unsafe { at.cast::<T>().drop_in_place() }
        });
    }
}

/// What counted references to the contexts of a slab need. Made with the first reference.
#[derive(Debug)]
pub(super) struct Refs {
    pub(super) counts: RefBlock,
    /// The tasks that wait for a removal, by the index of the context.
    pub(super) removed: WaitSet,
}

/// A block of neighbouring slots.
#[repr(C, align(64))]
pub(super) struct Slab<T: Send + Sync + 'static> {
    slots: [Slot<T>; SLOTS],
    head: RetireHead,
    /// The table's core, which this module does not know.
    owner: NonNull<()>,
    /// The index of the first slot.
    first: u32,
    /// A bit for each slot (invariant 2). Read and written under the table's lock only.
    used: AtomicU64,
    /// Null before the first counted reference.
    refs: AtomicPtr<Refs>,
}

/// A pointer to a slab. Invariant 4 says when a thread may follow it.
pub(super) type SlabPtr<T> = NonNull<Watched<Slab<T>>>;

/// The first generations of the slots of a new slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    /// The generation of the slots that may have been used in a released slab: the floor of the key.
    floor: u32,
    /// The number of those slots. The others begin at [`Id::FIRST_GENERATION`].
    used_before: u32,
}

impl Begin {
    /// Returns the generations for the slab of a key. Indexes from `unused_from` on were never used in a
    /// released slab.
    pub(super) fn new(key: u64, floor: u32, unused_from: u32) -> Self {
        let first = (key << SLAB_BITS) as u32;
        let used_before = unused_from.saturating_sub(first).min(SLOTS as u32);
        Self { floor: floor.max(Id::FIRST_GENERATION), used_before }
    }

    /// Returns the state of a slot of the slab that begins with index `first`.
    fn state(self, first: u32, number: usize) -> u64 {
        let is_new = number >= self.used_before as usize;
        let generation = if is_new { Id::FIRST_GENERATION } else { self.floor };
        NotLive::vacant(generation, first + number as u32).bits()
    }
}

impl<T: Send + Sync + 'static> Slab<T> {
    /// Makes a slab of vacant slots.
    pub(super) fn try_new(
        owner: NonNull<()>,
        first: u32,
        begin: Begin,
    ) -> Result<SlabPtr<T>, AllocError> {
        let at = try_alloc::<Watched<Self>>()?;
        // SAFETY: `free` is for the heads of slabs, and this head will lie in one.
        let head = unsafe { RetireHead::new(free::<T>) };
        let refs = AtomicPtr::new(std::ptr::null_mut());
        // In place, because a slab may be larger than a stack; the models' slabs are small.
        #[cfg(not(offlock_model))]
        {
            let slab = at.as_ptr().cast::<Self>(); // a `Watched` is transparent
            for number in 0..SLOTS {
                // SAFETY: within the slab that was just allocated.
                let slot = unsafe { &raw mut (*slab).slots[number].state };
                // SAFETY: no other thread knows the slab yet.
                unsafe { slot.write(AtomicU64::new(begin.state(first, number))) };
            }
            // The values stay uninitialised.
            macro_rules! write {
                ($($field:ident: $value:expr),+ $(,)?) => {$({
                    // SAFETY: within the slab that was just allocated.
                    let at = unsafe { &raw mut (*slab).$field };
                    // SAFETY: no other thread knows the slab yet.
                    unsafe { at.write($value) };
                })+};
            }
            write!(head: head, owner: owner, first: first, used: AtomicU64::new(0), refs: refs);
        }
        #[cfg(offlock_model)]
        {
            let slots = std::array::from_fn(|number| Slot {
                state: AtomicU64::new(begin.state(first, number)),
                value: UnsafeCell::new(MaybeUninit::uninit()),
            });
            let used = AtomicU64::new(0);
            let slab = Self { slots, head, owner, first, used, refs };
            // SAFETY: the memory was just allocated with the layout of a slab.
            unsafe { at.write(Watched::new(slab)) };
        }
        Ok(at)
    }

    pub(super) fn slots(&self) -> &[Slot<T>; SLOTS] {
        &self.slots
    }

    /// Returns the slot of an index that belongs to this slab.
    #[inline(always)]
    pub(super) fn slot(&self, index: u32) -> &Slot<T> {
        &self.slots[index as usize % SLOTS]
    }

    /// Prefetches what reclaim will access: the slot, and the slab's `used`.
    #[inline(always)]
    pub(super) fn prefetch(&self, index: u32) {
        #[cfg(all(target_arch = "x86_64", not(offlock_model)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every x86_64 has the instruction, which accesses no memory.
            unsafe { _mm_prefetch(std::ptr::from_ref(self.slot(index)).cast(), _MM_HINT_T0) };
            // SAFETY: every x86_64 has the instruction, which accesses no memory.
            unsafe { _mm_prefetch(std::ptr::from_ref(&self.used).cast(), _MM_HINT_T0) };
        }
        let _ = index;
    }

    /// Returns the key of the slab: the upper bits of the indexes of its slots.
    pub(super) fn key(&self) -> u64 {
        u64::from(self.first) >> SLAB_BITS
    }

    pub(super) fn index(&self, number: usize) -> u32 {
        self.first + number as u32
    }

    pub(super) fn owner(&self) -> NonNull<()> {
        self.owner
    }

    /// Returns the bits of the used slots. The caller holds the table's lock.
    #[inline(always)]
    pub(super) fn used(&self) -> u64 {
        // Ordering: Relaxed; the table's lock orders it.
        self.used.load(Ordering::Relaxed)
    }

    /// Sets the bits of the used slots. The caller holds the table's lock.
    #[inline(always)]
    pub(super) fn set_used(&self, used: u64) {
        // Ordering: Relaxed; the table's lock orders it.
        self.used.store(used, Ordering::Relaxed);
    }

    /// Returns the counts of references and the tasks that wait, if they were made.
    #[inline(always)]
    pub(super) fn refs(&self) -> Option<&Refs> {
        // Ordering: Acquire pairs with the Release in `make_refs`; it carries the block.
        let refs = self.refs.load(order!(Acquire, "refs: the counts are made"));
        // SAFETY: null, or a block that the slab owns until it is dropped.
        unsafe { refs.as_ref() }
    }

    /// Makes the counts, which are open, unless they exist. The caller holds the table's lock.
    #[cold]
    pub(super) fn make_refs(&self) -> Result<&Refs, AllocError> {
        if let Some(refs) = self.refs() {
            return Ok(refs);
        }
        let counts = RefBlock::try_new()?;
        (0..SLOTS).for_each(|number| counts.open(number));
        let refs = Refs { counts, removed: WaitSet::new() };
        let refs =
            Box::into_raw(offlock_sync::alloc::try_box(refs).map_err(|_| AllocError::new())?);
        // Ordering: Release pairs with the Acquire in `refs`; it carries the block.
        self.refs.store(refs, Ordering::Release);
        // SAFETY: the slab owns the block until it is dropped.
        Ok(unsafe { &*refs })
    }

    /// Bytes from the start of the allocation to the head.
    const HEAD: usize = Watched::<Self>::OFFSET + std::mem::offset_of!(Self, head);

    /// The size of a slab in the statistics of a table.
    pub(super) const BYTES: usize = size_of::<Self>();

    /// Returns the size of the counts that the slab has made.
    pub(super) fn refs_bytes(&self) -> usize {
        let counts = SLOTS * size_of::<u64>() * offlock_percpu::possible_cpus();
        self.refs().map_or(0, |_| size_of::<Refs>() + counts)
    }
}

impl<T: Send + Sync + 'static> Drop for Slab<T> {
    fn drop(&mut self) {
        // Ordering: Relaxed; no other thread uses the slab any more.
        let refs = self.refs.load(Ordering::Relaxed);
        if !refs.is_null() {
            // SAFETY: a box of `make_refs`, and no reference is left.
            drop(unsafe { Box::from_raw(refs) });
        }
    }
}

/// Returns the head of a slab, as a pointer through which the slab may be freed.
///
/// # Safety
///
/// `slab` points to a slab that is not freed, and is derived from its allocation, not from a reference:
/// [`Slab::try_new`] returned it, or the tree holds it.
pub(super) unsafe fn head_of<T: Send + Sync + 'static>(slab: SlabPtr<T>) -> NonNull<RetireHead> {
    // SAFETY: the head lies inside the slab.
    unsafe { slab.byte_add(Slab::<T>::HEAD) }.cast()
}

/// Frees a slab whose slots are all vacant or exhausted.
///
/// # Safety
///
/// No thread reads the slab any more, it is freed once, and the pointer is one that [`head_of`] accepts.
pub(super) unsafe fn free_slab<T: Send + Sync + 'static>(slab: SlabPtr<T>) {
    // SAFETY: `try_new` allocated the slab with the layout of a box, and it is freed once.
    quarantine::free(unsafe { Box::from_raw(slab.as_ptr()) });
}

/// Frees the slab of a head that was retired.
///
/// # Safety
///
/// `head` is the head of a slab that was retired a grace period ago.
unsafe fn free<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    // SAFETY: `head_of` added the offset to a pointer that covers the whole slab.
    let slab = unsafe { head.byte_sub(Slab::<T>::HEAD) }.cast::<Watched<Slab<T>>>();
    // SAFETY: the grace period has ended, and a head is retired once.
    unsafe { free_slab(slab) };
}

/// Frees a slab that was never in the tree.
///
/// # Safety
///
/// [`Slab::try_new`] returned the slab, and no other thread knows it.
pub(super) unsafe fn discard<T: Send + Sync + 'static>(slab: SlabPtr<T>) {
    // SAFETY: `try_new` initialised the slab, and no other thread knows it.
    unsafe { slab.drop_in_place() };
    // SAFETY: `try_new` allocated the slab with this layout.
    unsafe { dealloc(slab.as_ptr().cast(), Layout::new::<Watched<Slab<T>>>()) };
}

/// The key of the slab with the highest index.
pub(super) const LAST_KEY: u64 = u32::MAX as u64 >> SLAB_BITS;

/// A tree whose entries are slabs, by key. A floor in it is the generation that the slots of a released
/// slab continue with.
pub(super) struct SlabTree<T: Send + Sync + 'static> {
    tree: Tree,
    _slabs: PhantomData<SlabPtr<T>>,
}

impl<T: Send + Sync + 'static> SlabTree<T> {
    pub(super) fn new() -> Self {
        Self { tree: Tree::new(), _slabs: PhantomData }
    }

    /// Returns the tree of words.
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Returns the slab that an index belongs to. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard, the table's lock or a used slot of the slab: invariant 4.
    #[inline(always)]
    pub(super) unsafe fn slab<'a>(&self, index: u32) -> Option<&'a Watched<Slab<T>>> {
        let word = self.tree.load(u64::from(index) >> SLAB_BITS);
        // SAFETY: by the contract of this function the slab stays for `'a`.
        slab_of(word).map(|slab| unsafe { slab.as_ref() })
    }

    /// Returns the slot of a live context. Wait-free.
    ///
    /// # Safety
    ///
    /// For `'a` the caller holds an RCU guard.
    #[inline(always)]
    pub(super) unsafe fn find<'a>(
        &self,
        id: Id,
    ) -> Result<(&'a Watched<Slab<T>>, &'a Slot<T>), LookupError> {
        // SAFETY: the caller holds a guard for `'a`.
        if let Some(slab) = unsafe { self.slab(id.index()) } {
            let slot = slab.slot(id.index());
            // Ordering: Acquire pairs with the Release in `Claim::publish`; it carries the value.
            let state = slot.state.load(Ordering::Acquire);
            if state == id.to_bits() {
                return Ok((slab, slot));
            }
        }
        // SAFETY: the caller holds a guard.
        Err(unsafe { self.lookup_error(id) })
    }

    /// Returns the reason why an id is not live.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn lookup_error(&self, id: Id) -> LookupError {
        let word = self.tree.load(u64::from(id.index()) >> SLAB_BITS);
        let next = match slab_of::<T>(word) {
            // SAFETY: invariant 4 of `slab`: the slab was found under the caller's guard.
            Some(slab) => next_generation(unsafe { slab.as_ref() }, id.index()),
            None => floor_in(word),
        };
        if id.generation() < next { LookupError::Stale } else { LookupError::NotFound }
    }

    /// Returns the slab with the lowest key of a range.
    ///
    /// Invariant 4 of [`slab`](crate::slab) says which callers may follow the pointer: those that were
    /// pinned before the call, hold the lock, or own the core of a dropped table.
    pub(super) fn next_slab(&self, from: u64, to: u64) -> Option<(u64, SlabPtr<T>)> {
        let (key, word) = self.tree.iter_from(from).next().filter(|(key, _)| *key <= to)?;
        Some((key, slab_of(word)?))
    }

    /// Takes every slab out and passes it to `slab`. Frees the nodes at once.
    pub(super) fn destroy(&mut self, mut slab: impl FnMut(SlabPtr<T>)) {
        self.tree.destroy(|word| {
            if let Some(found) = slab_of::<T>(word) {
                slab(found);
            }
        });
    }
}

/// Returns the slab that a word of the tree leads to, or `None` for a floor.
#[inline(always)]
pub(super) fn slab_of<T: Send + Sync + 'static>(word: *mut ()) -> Option<SlabPtr<T>> {
    // SAFETY: a tree has no null words.
    is_present(word).then(|| unsafe { NonNull::new_unchecked(word.cast()) })
}

/// Returns the generation of the next context at `index`, or of the live one. Lower generations are
/// stale.
pub(super) fn next_generation<T: Send + Sync + 'static>(slab: &Slab<T>, index: u32) -> u32 {
    // Ordering: Relaxed; the lock orders it, or the caller uses it as a hint.
    let state = slab.slot(index).state.load(Ordering::Relaxed);
    match NotLive::read(state) {
        Some(state) => state.next(),
        None => Id::from_live(state).generation(),
    }
}
