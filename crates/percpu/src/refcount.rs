//! A reference count that every CPU keeps in its own word, and that ends in exactly one release.
//!
//! The count itself holds an initial reference until [`PercpuRef::kill`]. So the number of
//! references does not matter while the object is live, and every CPU counts in its own word. A
//! kill closes those words, folds them into one atomic and drops the initial reference. From then
//! on the atomic is the count, and the thread that takes it to zero runs the release closure.
//!
//! ```text
//!   live                                                killed
//!   gate = 0                                            gate = 1
//!   words:  | cpu 0: +3 | cpu 1: -1 | ...   -- fold --> words: closed
//!   remote: 0   (threads without a CPU id)              remote: CLOSED
//!   atomic: BIAS + initial                              atomic: the count
//! ```
//!
//! The design is that of the Linux kernel's `lib/percpu-refcount.c` (3.11), which waits for a grace
//! period between closing the words and summing them. Here the rseq sections that change the words
//! test the gate, so one [`heavy_rseq`](crate::fence) suffices. Where no sections run,
//! fetch-and-adds change the words, and a `swap` to `CLOSED` ends them. An add to a closed word is
//! void, and is not undone.
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` until the fold, plus `atomic`, less
//! `BIAS` until the fold.
//!
//! 1. A change of a word or of `remote` counts only while that word is open, and in the fold. A
//!    section commits only while `gate` is 0, and a fetch-and-add counts only if the value that it
//!    returns is open.
//! 2. Until the fold `atomic` includes the bias. After it `atomic` is the number of references, and
//!    only the holder of a reference adds to it. So it reaches 0 once, by the kill or by one put,
//!    and stays 0.
//! 3. A `try_get` counts on open words only, and so before the fold of a kill.
//! 4. Only the thread that takes `atomic` to 0 accesses `release`. It takes the closure out before it
//!    calls it, and accesses nothing in the `PercpuRef` afterwards.

use std::{array, fmt, mem};

use crossbeam_utils::CachePadded;
use offlock_sync::alloc::{AllocError, out_of_memory};
use offlock_sync::atomic::{AtomicI64, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{check, impl_error, order, step};

use crate::rseq::{self, Refused};
use crate::words::{BLOCK, WordBlock, Words};
use crate::{cpu, fence};

// The words of a `PercpuRef`, or of one count of a `RefBlock`. Where sections run, only sections change
// the words, and a gate closes them. Elsewhere, and always in `remote`, the value of a word says
// whether the word is open.

/// Added to the atomic of a count while its words are open. References and puts before a fold cannot
/// cancel it: there are fewer than 2^60 of them.
const BIAS: i64 = 1 << 61;

/// Stored in a word or in `remote` to close it. Void adds may change the value afterwards.
const CLOSED: u64 = 1 << 62;

/// Words below this value are open. Neither references nor void adds reach it: it is halfway to
/// [`CLOSED`].
const OPEN_LIMIT: i64 = 1 << 61;

/// Adds `delta` to the word of this CPU, if the value of `gate` is `open_value`, or to `remote`.
/// Returns false, and counts nothing, if the word or `remote` is closed. Wait-free.
#[inline(always)]
fn try_add(
    words: &Words,
    remote: &AtomicU64,
    gate: &AtomicU64,
    open_value: u64,
    delta: i64,
) -> bool {
    match rseq::add(Some((gate, open_value)), words, delta as u64) {
        Ok(()) => true,
        Err(Refused::Closed) => false,
        Err(_) => try_add_without_section(words, remote, delta),
    }
}

/// Adds `delta` without a section. Returns false if the word is closed.
///
/// Where sections run, the calling thread adds to `remote`, because sections change the words by
/// plain stores: it has no CPU id, or it decides just now whether sections run. Elsewhere it adds to
/// the word of this CPU.
#[inline]
fn try_add_without_section(words: &Words, remote: &AtomicU64, delta: i64) -> bool {
    if rseq::available() {
        add_if_open(remote, delta)
    } else {
        add_if_open(words.slot(cpu::recent_cpu()), delta)
    }
}

/// Adds `delta` to a word, and returns whether the word was open. An add to a closed word is void.
#[inline]
fn add_if_open(word: &AtomicU64, delta: i64) -> bool {
    // Ordering: AcqRel. Release, in a put, pairs with the Acquire of the swap in `fold`; it carries
    // what the holder did with the object. Acquire, in a void add, pairs with the
    // Release of that swap, for the accesses of the calling thread to the atomic after it.
    (word.fetch_add(delta as u64, Ordering::AcqRel) as i64) < OPEN_LIMIT
}

/// The part of a count outside the words, which threads without a CPU id write, and all threads after
/// the fold.
struct Count {
    /// The references and puts that the words and `remote` refused, and [`BIAS`] until the fold.
    atomic: AtomicI64,
    remote: AtomicU64,
    /// The sum of the words at the last fold, where sections run. Only the owner uses it.
    folded: AtomicU64,
}

impl Count {
    /// Takes one more reference, after its word refused. The calling thread already has one.
    fn get_more(&self) {
        // Ordering: Relaxed, as in `Arc`: the existing reference keeps the count above zero, and
        // passing the new reference to another thread orders that thread after this.
        self.atomic.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts a reference, after its word refused. Returns true if it was the last.
    ///
    /// # Safety
    ///
    /// The reference keeps `*this` alive until it is put.
    #[cold]
    unsafe fn put(this: *const Self) -> bool {
        let order = order!(AcqRel, "put: the use is done");
        // Ordering: AcqRel. Release pairs with the Acquire of the last put, here, and of the
        // `fetch_add` in `fold`; it carries what the holder of this reference did with the object.
        // SAFETY: the contract of this function.
        unsafe { &*this }.atomic.fetch_sub(1, order) == 1
    }

    /// Closes the words and `remote`, and adds their sum since they were opened to `atomic`, which is
    /// the count from now on. Drops the bias and `initial` references. Returns true if none is left.
    ///
    /// Where sections run, the gate must be closed and no section may still be able to commit. The
    /// words then keep their values, because only sections may change a word.
    fn fold(&self, words: &Words, initial: i64) -> bool {
        let counted = if rseq::available() {
            // Ordering: Acquire pairs with the Release of a section's store; it carries what the
            // holders did before their puts. No model checks it: `heavy_rseq` of a model locks the
            // mutex of each virtual CPU, and that carries it too.
            let mut sum = words
                .iter()
                .fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Acquire)));
            // Ordering: Relaxed, both; only the owner uses it.
            let before = self.folded.load(Ordering::Relaxed);
            self.folded.store(sum, Ordering::Relaxed);
            step!("fold: only since the last fold", sum = sum.wrapping_sub(before));
            sum
        } else {
            words.iter().fold(0, |sum: u64, word| {
                // Ordering: AcqRel. Acquire pairs with the Release in `add_if_open`; it carries what
                // the holders did before their puts. Release pairs with the Acquire of a void add,
                // for the accesses of its thread to the atomic after it.
                sum.wrapping_add(word.swap(CLOSED, order!(AcqRel, "fold: the holders of the word")))
            })
        };
        // Ordering: AcqRel. Acquire pairs with the Release in `add_if_open`; it carries what the
        // holders did before their puts. Release pairs with the Acquire of a void add, for the
        // accesses of its thread to the atomic after it.
        let counted = counted.wrapping_add(self.remote.swap(CLOSED, Ordering::AcqRel)) as i64;
        let delta = counted - BIAS - initial;
        // Ordering: AcqRel. Acquire pairs with the Release in `put` of a put between the closing of
        // the words and this; it carries what that holder did with the object. Release pairs with the
        // Acquire of the last put; it carries what the loads and swaps above acquired.
        let order = order!(AcqRel, "kill: the uses so far are done");
        self.atomic.fetch_add(delta, order) + delta == 0
    }
}

type ReleaseFn = Box<dyn FnOnce() + Send>;

/// A reference count without a shared cache line while the object is live.
///
/// [`try_get`](Self::try_get) and a put are a few instructions on the word of this CPU where rseq
/// sections run, and a fetch-and-add on that word elsewhere. Both are wait-free and do not allocate.
/// After a [kill](Self::kill) the count is one atomic, like that of an `Arc`.
///
/// A new count is live, with one initial reference that the kill drops. So the count reaches zero
/// only after a kill. The release closure then runs once, on the thread that put the last
/// reference. If the `PercpuRef` is dropped earlier, the closure is dropped and never runs.
///
/// Memory: 256 bytes, 8 bytes for every CPU, and the heap memory of the closure.
///
/// ```
/// use std::sync::mpsc;
/// use offlock_percpu::PercpuRef;
///
/// let (tell, told) = mpsc::channel();
/// let refs = PercpuRef::new(move || tell.send("released").unwrap());
///
/// let reference = refs.try_get().expect("live");
/// refs.kill()?;
/// assert!(refs.try_get().is_none(), "no new users");
/// assert!(told.try_recv().is_err(), "`reference` is still there");
/// drop(reference);
/// assert_eq!(told.try_recv(), Ok("released"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)]
pub struct PercpuRef {
    // The cache line that every get and put reads, and that only the kill writes.
    gate: AtomicU64,
    words: Words,
    cold: CachePadded<Cold>,
}

/// The fields that threads without a CPU id write, and all threads after the kill.
struct Cold {
    count: Count,
    release: UnsafeCell<Option<ReleaseFn>>,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<PercpuRef>() == 256 && mem::offset_of!(PercpuRef, cold) == 128);

// SAFETY: `release` is the only field that is not `Sync`. By invariant 4 one thread at a time
// accesses it, and only to move the closure in or out. The closure is `Send`, and no `&PercpuRef`
// gives out a reference to it.
unsafe impl Sync for PercpuRef {}

impl PercpuRef {
    /// Creates a live count with one reference, the initial one. Allocates.
    ///
    /// `release` runs when the count reaches zero, on the thread that put the last reference, with
    /// no lock held. A panic of the closure goes on from the put of that reference, or from the kill;
    /// if that thread already unwinds, the process aborts.
    ///
    /// The closure may free the memory of the `PercpuRef` itself only if [`put`](Self::put) put the
    /// last reference, because `put` takes a raw pointer. A [`Reference`], and the `&self` of
    /// [`kill`](Self::kill), must stay valid until their call returns. So
    /// [leak](Reference::leak) a reference before the kill, and `put` it after the kill.
    #[must_use]
    pub fn new(release: impl FnOnce() + Send + 'static) -> Self {
        // Decides both now: a get may interrupt what the first use of them waits for.
        let _ = (rseq::available(), cpu::recent_cpu());
        let words = Words::new().unwrap_or_else(|_| out_of_memory::<u64>(cpu::possible_cpus()));
        Self {
            gate: AtomicU64::new(0),
            words,
            cold: CachePadded::new(Cold {
                count: Count {
                    atomic: AtomicI64::new(BIAS + 1),
                    remote: AtomicU64::new(0),
                    folded: AtomicU64::new(0),
                },
                release: UnsafeCell::new(Some(Box::new(release))),
            }),
        }
    }

    /// Takes a reference, unless the object was killed.
    ///
    /// Once [`kill`](Self::kill) has returned, every call fails. So does every call that began earlier
    /// and has not taken its reference by then. Wait-free.
    #[inline]
    #[must_use = "dropping the reference puts it at once"]
    pub fn try_get(&self) -> Option<Reference<'_>> {
        try_add(&self.words, &self.cold.count.remote, &self.gate, 0, 1)
            .then(|| Reference { refs: self })
    }

    /// Puts a [leaked](Reference::leak) reference. For an object that embeds its count.
    ///
    /// `this` is a raw pointer, because the release closure may free `*this` during the call.
    ///
    /// ```
    /// use offlock_percpu::PercpuRef;
    ///
    /// let refs = PercpuRef::new(|| ());
    /// refs.try_get().expect("live").leak();
    /// refs.kill()?;
    /// assert!(!refs.is_zero());
    /// // SAFETY: the reference leaked above, put once.
    /// unsafe { PercpuRef::put(&refs) };
    /// assert!(refs.is_zero());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    ///
    /// `this` points to a valid `PercpuRef`, and the caller owns a leaked reference to it, which
    /// this call consumes.
    #[inline]
    pub unsafe fn put(this: *const Self) {
        // SAFETY: the leaked reference keeps `*this` alive until it is put.
        let Self { gate, words, cold } = unsafe { &*this };
        // Another thread may free `*this` once the put is counted, while this thread is still
        // inside `try_add`. So the arguments of `try_add` are references to atomics, which may dangle
        // after their last use, and words that are not part of `*this`.
        if try_add(&words.alias(), &cold.count.remote, gate, 0, -1) {
            return;
        }
        // SAFETY: `try_add` returned false, so the reference is not put yet.
        if unsafe { Count::put(&cold.count) } {
            // SAFETY: this was the last reference. The owner frees `*this` in the closure or after
            // it, or holds a borrow until this call returns.
            let release = unsafe { &*this }.take_release();
            release();
        }
    }

    /// Kills the count: drops the initial reference, and runs the release closure if that was the
    /// last.
    ///
    /// After this returns `Ok`, every [`try_get`](Self::try_get) fails. A kill implies no grace period:
    /// readers of the object that hold no reference need another means to be waited for. Costs a
    /// heavy fence and a walk over the words of all CPUs. Never waits.
    ///
    /// # Errors
    ///
    /// [`KillError::AlreadyDying`] for a second kill, which changes nothing.
    pub fn kill(&self) -> Result<(), KillError> {
        // Ordering: Relaxed, both; a section that commits after the barrier below sees it. Without sections
        // the swaps of `fold` close the words. Otherwise only a second kill and `Debug` read the gate.
        let killed = self.gate.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed);
        killed.map_err(|_| KillError::AlreadyDying)?;
        if rseq::available() {
            step!("fold: no section still counts", fence::heavy_rseq());
        }
        if self.cold.count.fold(&self.words, 1) {
            self.take_release()();
        }
        Ok(())
    }

    /// Returns true from the last put on. Wait-free.
    ///
    /// The release closure may still be running.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `Count::put` and `fold`; it carries what all
        // holders did with their references.
        self.cold.count.atomic.load(Ordering::Acquire) == 0
    }

    /// Takes the release closure out. The calling thread must not use `self` after this.
    fn take_release(&self) -> ReleaseFn {
        // SAFETY: invariant 4: this thread took `atomic` to 0, which happens once.
        let release = self.cold.release.with_mut(|release| unsafe { (*release).take() });
        release.unwrap_or_else(|| Box::new(|| ())) // never empty: `new` fills the cell
    }
}

impl fmt::Debug for PercpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ordering: Relaxed; the value is only printed.
        let killed = self.gate.load(Ordering::Relaxed) != 0;
        f.debug_struct("PercpuRef")
            .field("killed", &killed)
            .field("zero", &self.is_zero())
            .finish_non_exhaustive()
    }
}

/// A counted reference to the object of a [`PercpuRef`]; its drop puts it.
///
/// A reference may be taken on one thread or CPU and dropped on another.
/// `clone` never fails. A forgotten reference ([`mem::forget`]) keeps the count above zero for ever.
///
/// ```
/// use offlock_percpu::{PercpuRef, Reference};
///
/// fn serve(connection: Reference<'_>) {
///     let _for_a_helper = connection.clone();
///     // ... uses the object; both references are put at the end ...
/// }
///
/// let refs = PercpuRef::new(|| ());
/// std::thread::scope(|scope| {
///     let reference = refs.try_get().expect("live");
///     scope.spawn(move || serve(reference));
/// });
/// refs.kill()?;
/// assert!(refs.is_zero());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping the reference puts it at once"]
pub struct Reference<'a> {
    refs: &'a PercpuRef,
}

impl Reference<'_> {
    /// Forgets the reference, so that [`PercpuRef::put`] can put it later.
    #[inline]
    pub fn leak(self) {
        mem::forget(self);
    }
}

impl Clone for Reference<'_> {
    #[inline]
    fn clone(&self) -> Self {
        let PercpuRef { gate, words, cold } = self.refs;
        if !try_add(words, &cold.count.remote, gate, 0, 1) {
            cold.count.get_more();
        }
        Self { refs: self.refs }
    }
}

impl Drop for Reference<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the borrow keeps the `PercpuRef` alive, and only this drop puts the reference.
        unsafe { PercpuRef::put(self.refs) };
    }
}

impl fmt::Debug for Reference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reference").field(self.refs).finish()
    }
}

/// The error of [`PercpuRef::kill`](crate::PercpuRef::kill). The call changed nothing.
///
/// ```
/// use offlock_percpu::{KillError, PercpuRef};
///
/// let refs = PercpuRef::new(|| ());
/// refs.kill()?;
/// assert_eq!(refs.kill(), Err(KillError::AlreadyDying));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KillError {
    /// Another call has killed the count, or is about to. Maps to `EINVAL`.
    AlreadyDying,
}

impl_error! {
    KillError {
        Self::AlreadyDying => EINVAL, "the reference count was already killed";
    }
}

// `RefBlock`: counts of an owner with many objects. A `PercpuRef` has a gate and a closure of its own.
// The owner of a table has a state word per slot that says which object is in the slot, and does the
// kills itself. So here the state word is the gate: sections count while it has the value that the
// owner calls `open`. A count then takes only 8 bytes per CPU and 24 bytes more.
//
// | step | thread | operation in the life of a count |
// |---|---|---|
// | 1 | the owner, with exclusive access | calls `open`, then stores `open` in the gate (Release) |
// | 2 | any thread with a guard of the owner | calls `try_get` |
// | | a holder of a reference | calls `get_more` and `put` |
// | 3 | the owner | stores another value in the gate, calls `heavy_rseq` |
// | 4 | the owner, once | calls `fold`, which returns true if no reference is left |
// | | a holder of a reference | if `fold` returned false, the last `put` returns true |
// | 5 | the owner | waits until every guard of step 2 is gone; then repeats step 1, or drops the block |
//
// Invariants 1 and 2 of the file hold for each life, with the sum since the last fold. Two more:
//
// 5. A void add (to a closed word) is never undone. A void add of a `try_get` is over before step
//    5, and one of a holder before that holder's put. So each comes before the next `open`, which
//    overwrites it.
// 6. A put that is not the last accesses nothing after the instruction that counts it.

/// [`RefBlock::COUNTS`] reference counts, each gated by a word of its owner.
///
/// A get and a put cost the same as those of a [`PercpuRef`]. Every operation
/// except [`try_new`](Self::try_new) and the drop is wait-free and does not allocate. Memory: 1,664
/// bytes, and 512 bytes for every CPU, from a pool. Semantic versioning does not cover it.
///
/// # Panics
///
/// Each method that takes the index of a count panics if it is not below [`COUNTS`](Self::COUNTS).
#[repr(C)]
pub struct RefBlock {
    // The line that every get and put reads; no operation writes it.
    words: WordBlock,
    counts: CachePadded<[Count; BLOCK]>,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<RefBlock>() == 128 + BLOCK * 24);

impl RefBlock {
    /// The number of counts in a block: 64, and 2 in a model.
    pub const COUNTS: usize = BLOCK;

    /// Creates a block of closed counts.
    ///
    /// Blocks shortly while another thread takes memory from the pool, and may map memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        let block = Self {
            words: WordBlock::new()?,
            counts: CachePadded::new(array::from_fn(|_| Count {
                atomic: AtomicI64::new(0),
                remote: AtomicU64::new(CLOSED),
                folded: AtomicU64::new(0),
            })),
        };
        if !rseq::available() {
            for i in 0..BLOCK {
                for word in block.words.words(i).iter() {
                    // Ordering: Relaxed; no other thread has the block yet.
                    word.store(CLOSED, Ordering::Relaxed);
                }
            }
        }
        Ok(block)
    }

    /// Prepares count `i` for a new life, which begins with no reference when the owner stores
    /// `open` in the gate, by a Release store.
    ///
    /// No other thread may use the count during the call. The owner may call this again before the
    /// first reference.
    #[inline]
    pub fn open(&self, i: usize) {
        let Count { atomic, remote, .. } = &self.counts[i];
        // Ordering: Relaxed, all; the owner's Release store in the gate carries them to the Acquire
        // in `try_get`.
        let open = |word: &AtomicU64| {
            step!("open a count: from zero", word.store(0, Ordering::Relaxed));
        };
        if !rseq::available() {
            self.words.words(i).iter().for_each(open);
        }
        open(remote);
        atomic.store(BIAS, Ordering::Relaxed);
    }

    /// Takes a reference to count `i`, if `gate` reads `open` at the moment of counting.
    ///
    /// The calling thread then sees what the owner did before it stored `open` in the gate. The
    /// calling thread must hold a guard that keeps the owner from opening the count again, and from
    /// dropping the block, during the call.
    #[inline]
    #[must_use = "a reference that was taken must be put"]
    pub fn try_get(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        match rseq::add(Some((gate, open)), &self.words.words(i), 1) {
            Ok(()) => true,
            Err(Refused::Closed) => false,
            Err(_) => self.try_get_without_section(i, gate, open),
        }
    }

    /// Takes a reference without a section.
    fn try_get_without_section(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        // If the gate closes between this load and the count, the reference counts as taken at this
        // load, before the gate closed.
        // Ordering: Acquire pairs with the owner's Release store of `open`; it carries what the
        // method `open` stored, and what the owner did to the object.
        if !check!("get a count: its gate is open", gate.load(Ordering::Acquire) == open) {
            return false;
        }
        try_add_without_section(&self.words.words(i), &self.counts[i].remote, 1)
    }

    /// Takes one more reference, for a thread that already has one. Succeeds also after the gate
    /// was closed.
    #[inline]
    pub fn get_more(&self, i: usize, gate: &AtomicU64, open: u64) {
        let count = &self.counts[i];
        if !try_add(&self.words.words(i), &count.remote, gate, open, 1) {
            count.get_more();
        }
    }

    /// Puts a reference. Returns true if it was the last one after the [`fold`](Self::fold).
    ///
    /// After true, no other thread uses the object that the reference kept alive, and the calling
    /// thread sees what every holder did with the object. After false, the block and the gate may
    /// be freed when this returns; that is why they are pointers.
    ///
    /// # Safety
    ///
    /// - `this` points to a valid `RefBlock`, and `gate` to a valid gate.
    /// - The caller owns a reference to count `i`, taken with this `gate` and `open`. The call
    ///   consumes it.
    /// - References keep the block and the gate alive: their owner frees neither before the end of
    ///   each count's life, nor before the guards of every `try_get` are gone.
    #[inline]
    #[must_use = "the object must be cleaned up after the last put"]
    pub unsafe fn put(this: *const Self, i: usize, gate: *const AtomicU64, open: u64) -> bool {
        // SAFETY: the reference to put keeps the block alive until it is put.
        let Self { words, counts } = unsafe { &*this };
        // SAFETY: the reference, which is not put yet, keeps the gate alive.
        let gate = unsafe { &*gate };
        // Another thread may free the block and the gate once the put is counted, while this thread
        // is still inside `try_add`. So `try_add` gets references to atomics, which may dangle after
        // their last use, and words that are not part of the block.
        if try_add(&words.words(i), &counts[i].remote, gate, open, -1) {
            return false;
        }
        // SAFETY: the contract of this function; the reference is not put yet.
        unsafe { Count::put(&counts[i]) }
    }

    /// Closes count `i` and sums it up. Returns true if no reference is left, and false if a later
    /// [`put`](Self::put) will return true.
    ///
    /// After true, the calling thread sees what every holder did with the object. The owner calls
    /// this once per life, after it closed the gate and then called
    /// [`heavy_rseq`](crate::fence::heavy_rseq). One call of that is enough for any number of
    /// counts. Loads a word of every CPU.
    #[must_use = "the object must be cleaned up if no reference is left"]
    pub fn fold(&self, i: usize) -> bool {
        self.counts[i].fold(&self.words.words(i), 0)
    }
}

impl fmt::Debug for RefBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefBlock").field("counts", &Self::COUNTS).finish_non_exhaustive()
    }
}
