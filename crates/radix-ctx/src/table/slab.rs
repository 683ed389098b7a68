//! Slots side by side, and what a slot's word says.
//!
//! ```text
//!  Slab -> | state, T | state, T | ... 64 of them |  used, refs, weights, where it belongs
//!             ^
//!   live:    the id's own bits
//!   else:    | 1 | pending | next generation | link |
//!             63   62        61           32   31  0
//! ```
//!
//! So a lookup compares one word, and a dead slot needs no memory but its own to wait in a list.
//!
//! # Invariants
//!
//! 1. A slot's value is initialised exactly while its state is live or pending, and it changes only
//!    between a pending state's end and the next live one, in the hands of one thread.
//! 2. A set bit of `used` belongs to a slot that is live, pending, claimed by an insert, or retired.
//!    Whoever sets it owns the vacant slot until it stores the live state.
//! 3. The counts of `refs` are open except between the fold of a dead slot and its vacancy.
//! 4. Whoever has a [`SlabPtr`] may follow it: he found it in the tree, and since then has
//!    - a guard, as a slab is freed a grace period after it left the tree;
//!    - or the table's lock, as a slab leaves under it;
//!    - or a used slot of it, as a slab with one stays;
//!    - or the core of a dropped table, whose slabs all stay.
//!
//!    But for one that was just made: its maker has it to himself until it is in the tree.

use std::alloc::{Layout, dealloc};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use percpu::alloc::try_alloc;
use percpu::rcu::RetireHead;
use percpu::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::quarantine::{self, Watched};
use percpu::{AllocError, RefBlock};

use super::id::Id;

/// An index is a slab's key and a slot's number of that many bits.
pub(super) const SLAB_BITS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 6 };
pub(super) const SLOTS: usize = 1 << SLAB_BITS;
/// `used` of a slab without a vacant slot.
pub(super) const FULL: u64 = u64::MAX >> (64 - SLOTS);

const NOT_LIVE: u64 = 1 << 63;
const DEAD: u64 = 1 << 62;
/// Ends a list of dead slots.
pub(super) const NO_LINK: u32 = u32::MAX;
/// In the place of the link: it was folded, and the last reference will vacate it.
const REFERENCED: u32 = u32::MAX - 1;
/// What may be an index: below the marks.
pub(super) const MAX_INDEX: u32 = u32::MAX - 2;

/// A state that is not live, read.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotLive(u64);

impl NotLive {
    pub(super) fn vacant(next: u32) -> Self {
        Self(NOT_LIVE | u64::from(next) << 32)
    }

    pub(super) fn dead(id: Id, link: u32) -> Self {
        Self(NOT_LIVE | DEAD | u64::from(id.generation() + 1) << 32 | u64::from(link))
    }

    /// Folded, with references left.
    pub(super) fn referenced(self) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | u64::from(REFERENCED))
    }

    /// `None` if the state is live.
    pub(super) fn read(state: u64) -> Option<Self> {
        (state & NOT_LIVE != 0).then_some(Self(state))
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// The generation of the next context here: those below are stale.
    pub(super) fn next(self) -> u32 {
        (self.0 >> 32) as u32 & (u32::MAX >> 2)
    }

    /// Its last context is not dropped yet.
    pub(super) fn is_dead(self) -> bool {
        self.0 & DEAD != 0
    }

    pub(super) fn is_referenced(self) -> bool {
        self.is_dead() && self.link() == REFERENCED
    }

    pub(super) fn link(self) -> u32 {
        self.0 as u32
    }
}

/// One context, or room for one.
#[repr(C)]
pub(super) struct Slot<T> {
    pub(super) state: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Slot<T> {
    /// The value of a slot that is live or pending.
    ///
    /// # Safety
    ///
    /// It is initialised, and stays so for `'a`: the caller holds a guard from before it could be
    /// removed, a reference, or the table itself.
    #[inline(always)]
    pub(super) unsafe fn value<'a>(&self) -> &'a T {
        // SAFETY: initialised (invariant 1), and for `'a`, says the caller.
        self.value.with(|value| unsafe { &*value.cast::<T>() })
    }

    /// Makes a live slot dead. False if its context is not that of `id` any more: of several that
    /// try, one succeeds, and owns the slot's link.
    #[inline(always)]
    pub(super) fn kill(&self, id: Id) -> bool {
        let dead = NotLive::dead(id, NO_LINK).bits();
        // Ordering: AcqRel. Release pairs with the Acquire of who asks whether it is removed; it
        // carries what the caller did before. Acquire, so that what follows comes after. Relaxed on
        // failure: somebody else has removed it.
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        self.state.compare_exchange(id.to_bits(), dead, order.0, order.1).is_ok()
    }

    /// # Safety
    ///
    /// The slot is vacant, and the caller's: invariants 1 and 2.
    #[inline(always)]
    pub(super) unsafe fn write(&self, value: T) {
        self.value.with_mut(|at| {
            // SAFETY: nobody reads a vacant slot, says the caller; nothing is there to be dropped.
            unsafe { at.cast::<T>().write(value) }
        });
    }

    /// Drops the value where it is.
    ///
    /// # Safety
    ///
    /// It is initialised, nobody reads it any more, and nobody else will drop it.
    pub(super) unsafe fn drop_value(&self) {
        self.value.with_mut(|at| {
            // SAFETY: a value is there, read by nobody and dropped by nobody else, says the caller.
            unsafe { at.cast::<T>().drop_in_place() }
        });
    }
}

/// Neighbouring slots, and what is known of them together.
#[repr(C, align(64))]
pub(super) struct Slab<T: Send + Sync + 'static> {
    slots: [Slot<T>; SLOTS],
    head: RetireHead,
    /// The table's core, which this module does not know.
    owner: NonNull<()>,
    /// The index of its first slot.
    first: u32,
    /// Invariant 2; read and written under the table's lock only.
    used: AtomicU64,
    /// Null until somebody asks for a counted reference.
    refs: AtomicPtr<RefBlock>,
    /// What each context weighs, if the table has a limit for it.
    weights: Option<Box<[AtomicU64]>>,
}

/// How slabs are pointed to. Invariant 4 says who may follow it.
pub(super) type SlabPtr<T> = NonNull<Watched<Slab<T>>>;

/// With which generations the slots of a new slab begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    /// The generation of the slots that may have been used in a slab released before: the slab's floor.
    floor: u32,
    /// How many slots those are. The others begin at [`Id::FIRST_GENERATION`].
    used_before: u32,
}

impl Begin {
    /// For the slab with a key. Indexes from `unused_from` on were never used in a released slab.
    pub(super) fn new(key: u64, floor: u32, unused_from: u32) -> Self {
        let first = (key << SLAB_BITS) as u32;
        let used_before = unused_from.saturating_sub(first).min(SLOTS as u32);
        Self { floor: floor.max(Id::FIRST_GENERATION), used_before }
    }

    fn generation(self, number: usize) -> u32 {
        if number < self.used_before as usize { self.floor } else { Id::FIRST_GENERATION }
    }
}

impl<T: Send + Sync + 'static> Slab<T> {
    /// Makes a slab of vacant slots.
    pub(super) fn try_new(
        owner: NonNull<()>,
        first: u32,
        begin: Begin,
        weighted: bool,
    ) -> Result<SlabPtr<T>, AllocError> {
        let weights = if weighted {
            let mut weights = Vec::new();
            weights.try_reserve_exact(SLOTS).map_err(|_| AllocError::new())?;
            weights.resize_with(SLOTS, || AtomicU64::new(0));
            Some(weights.into_boxed_slice())
        } else {
            None
        };
        let at = try_alloc::<Watched<Self>>()?;
        // SAFETY: `free` frees the whole slab, from the head that lies in it.
        let head = unsafe { RetireHead::new(free::<T>) };
        let refs = AtomicPtr::new(std::ptr::null_mut());
        // In place but for the checkers, as a slab may be larger than a stack.
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        {
            let slab = at.as_ptr().cast::<Self>(); // a `Watched` is transparent
            for number in 0..SLOTS {
                // SAFETY: within the slab that was just allocated.
                let slot = unsafe { &raw mut (*slab).slots[number].state };
                // SAFETY: as above; nobody else has it.
                unsafe {
                    slot.write(AtomicU64::new(NotLive::vacant(begin.generation(number)).bits()))
                };
            }
            // The values stay as they are: not initialised.
            macro_rules! write {
                ($($field:ident: $value:expr),+ $(,)?) => {$({
                    // SAFETY: within the slab that was just allocated.
                    let at = unsafe { &raw mut (*slab).$field };
                    // SAFETY: as above; nobody else has it.
                    unsafe { at.write($value) };
                })+};
            }
            write!(head: head, owner: owner, first: first, used: AtomicU64::new(0), refs: refs,
                weights: weights);
        }
        #[cfg(any(offlock_loom, offlock_shuttle))]
        {
            let slots = std::array::from_fn(|number| Slot {
                state: AtomicU64::new(NotLive::vacant(begin.generation(number)).bits()),
                value: UnsafeCell::new(MaybeUninit::uninit()),
            });
            let used = AtomicU64::new(0);
            let slab = Self { slots, head, owner, first, used, refs, weights };
            // SAFETY: fresh memory for just that.
            unsafe { at.write(Watched::new(slab)) };
        }
        Ok(at)
    }

    pub(super) fn slots(&self) -> &[Slot<T>; SLOTS] {
        &self.slots
    }

    /// The slot of an index that belongs to this slab.
    #[inline(always)]
    pub(super) fn slot(&self, index: u32) -> &Slot<T> {
        &self.slots[index as usize % SLOTS]
    }

    /// Has what reclaim will look at brought near: the slot, and what is known of the slab.
    #[inline(always)]
    pub(super) fn prefetch(&self, index: u32) {
        #[cfg(all(target_arch = "x86_64", not(any(offlock_loom, offlock_shuttle))))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, for an address of ours; every x86_64 has the instruction.
            unsafe { _mm_prefetch(std::ptr::from_ref(self.slot(index)).cast(), _MM_HINT_T0) };
            // SAFETY: as above.
            unsafe { _mm_prefetch(std::ptr::from_ref(&self.used).cast(), _MM_HINT_T0) };
        }
        let _ = index;
    }

    /// What the slabs of a table are found by: the upper bits of an index.
    pub(super) fn key(&self) -> u64 {
        u64::from(self.first) >> SLAB_BITS
    }

    pub(super) fn index(&self, number: usize) -> u32 {
        self.first + number as u32
    }

    pub(super) fn owner(&self) -> NonNull<()> {
        self.owner
    }

    /// Under the table's lock.
    #[inline(always)]
    pub(super) fn used(&self) -> u64 {
        // Ordering: Relaxed; the table's lock orders it.
        self.used.load(Ordering::Relaxed)
    }

    /// Under the table's lock.
    #[inline(always)]
    pub(super) fn set_used(&self, used: u64) {
        // Ordering: Relaxed; the table's lock orders it.
        self.used.store(used, Ordering::Relaxed);
    }

    /// The counts of its slots, if there are any yet.
    #[inline(always)]
    pub(super) fn refs(&self) -> Option<&RefBlock> {
        // Ordering: Acquire pairs with the Release in `make_refs`; it carries the block.
        let refs = self.refs.load(Ordering::Acquire);
        // SAFETY: null, or a block that lives as long as the slab.
        unsafe { refs.as_ref() }
    }

    /// Makes the counts, open for each slot. Under the table's lock.
    #[cold]
    pub(super) fn make_refs(&self) -> Result<&RefBlock, AllocError> {
        if let Some(refs) = self.refs() {
            return Ok(refs);
        }
        let refs = RefBlock::try_new()?;
        (0..SLOTS).for_each(|number| refs.open(number));
        let refs = Box::into_raw(percpu::alloc::try_box(refs).map_err(|_| AllocError::new())?);
        // Ordering: Release pairs with the Acquire in `refs`; it carries the block.
        self.refs.store(refs, Ordering::Release);
        // SAFETY: just made, and given to the slab, which lives as long as `self`.
        Ok(unsafe { &*refs })
    }

    pub(super) fn set_weight(&self, index: u32, weight: u64) {
        if let Some(weights) = &self.weights {
            // Ordering: Relaxed; the slot's state publishes it with the value.
            weights[index as usize % SLOTS].store(weight, Ordering::Relaxed);
        }
    }

    pub(super) fn weight(&self, index: u32) -> u64 {
        // Ordering: Relaxed; ordered by the slot's state.
        let load = |weights: &[AtomicU64]| weights[index as usize % SLOTS].load(Ordering::Relaxed);
        self.weights.as_deref().map_or(0, load)
    }

    /// Bytes from the start of the allocation to the head.
    const HEAD: usize = Watched::<Self>::OFFSET + std::mem::offset_of!(Self, head);

    /// What a table is told a slab costs.
    pub(super) const BYTES: usize = size_of::<Self>();

    /// The bytes of its counts, as far as the slab holds them.
    pub(super) fn refs_bytes(&self) -> usize {
        let counts = SLOTS * size_of::<u64>() * percpu::topology().capacity();
        self.refs().map_or(0, |_| size_of::<RefBlock>() + counts)
    }
}

impl<T: Send + Sync + 'static> Drop for Slab<T> {
    fn drop(&mut self) {
        // Ordering: Relaxed; whoever drops a slab has it to himself.
        let refs = self.refs.load(Ordering::Relaxed);
        if !refs.is_null() {
            // SAFETY: a box of `make_refs`, and nobody holds a reference any more.
            drop(unsafe { Box::from_raw(refs) });
        }
    }
}

/// The head of a slab, as a pointer that may free the slab.
///
/// # Safety
///
/// `slab` points to a live slab and is derived from its allocation, not from a reference: it is what
/// [`Slab::try_new`] returned, or what the tree holds.
pub(super) unsafe fn head_of<T: Send + Sync + 'static>(slab: SlabPtr<T>) -> NonNull<RetireHead> {
    // SAFETY: inside the slab (the caller's).
    unsafe { slab.byte_add(Slab::<T>::HEAD) }.cast()
}

/// Frees a slab, whose slots are all vacant or retired.
///
/// # Safety
///
/// Nobody reads it any more, it is freed once, and the pointer is one that [`head_of`] takes.
pub(super) unsafe fn free_slab<T: Send + Sync + 'static>(slab: SlabPtr<T>) {
    // SAFETY: `try_new` allocated it with the layout of its type, as a box would.
    quarantine::free(unsafe { Box::from_raw(slab.as_ptr()) });
}

/// # Safety
///
/// `head` is that of a slab that was retired, a grace period ago.
unsafe fn free<T: Send + Sync + 'static>(head: NonNull<RetireHead>) {
    // SAFETY: `head_of` added as much, to a pointer that is good for all of the slab.
    let slab = unsafe { head.byte_sub(Slab::<T>::HEAD) }.cast::<Watched<Slab<T>>>();
    // SAFETY: the grace period is over, and a head is retired once.
    unsafe { free_slab(slab) };
}

/// Frees a slab that nobody has seen.
///
/// # Safety
///
/// It came from [`Slab::try_new`], and nobody else has it.
pub(super) unsafe fn discard<T: Send + Sync + 'static>(slab: SlabPtr<T>) {
    // SAFETY: initialised by `try_new`, and the caller's alone.
    unsafe { slab.drop_in_place() };
    // SAFETY: allocated with this layout.
    unsafe { dealloc(slab.as_ptr().cast(), Layout::new::<Watched<Slab<T>>>()) };
}
