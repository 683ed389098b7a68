//! [`PercpuRef`]: takes and puts references, and runs the release closure at zero.
//!
//! The invariants are those of the [module above](super).

use std::fmt;
use std::mem;

use crossbeam_utils::CachePadded;

use super::words::{BIAS, try_add};
use crate::error::NewError;
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::std_lock::Mutex;
use crate::sync::{check, order};
use crate::words::Words;

/// The bit of `atomic` that is set from a kill until `resurrect` or `reinit`.
pub(super) const DEAD: i64 = 1;
/// The bit of `atomic` that is set from the last put until `reinit`.
pub(super) const RELEASED: i64 = 2;
/// One reference in `atomic`.
pub(super) const ONE: i64 = 4;

pub(super) type ReleaseFn = Box<dyn FnOnce() + Send>;

/// The state of the mode changes, under a mutex.
pub(super) struct Mode {
    /// True while the words and `remote` are open.
    pub(super) percpu: bool,
    /// True if the count stays in atomic mode while the object is live.
    pub(super) force_atomic: bool,
    /// The sum of the words at the last fold, where sections run.
    pub(super) folded: u64,
}

impl Mode {
    fn new() -> Self {
        Self { percpu: true, force_atomic: false, folded: 0 }
    }
}

/// A reference count without a shared cache line while the object is live.
///
/// [`try_get`](Self::try_get) and a put are a few instructions on the word of this CPU where rseq
/// sections run, and a fetch-and-add on that word elsewhere. Both are wait-free and do not allocate.
/// After a [kill](Self::kill), or a [switch](Self::switch_to_atomic), the count is one atomic, like
/// that of an `Arc`.
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
/// let refs = PercpuRef::new(move || tell.send("released").unwrap())?;
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
    // The cache line that every get and put reads, and that only mode changes write.
    pub(super) gate: AtomicU64,
    pub(super) words: Words,
    pub(super) cold: CachePadded<Cold>,
}

/// The fields that mode changes, threads without a CPU id, and gets and puts in atomic mode write.
pub(super) struct Cold {
    pub(super) atomic: AtomicI64,
    pub(super) remote: AtomicU64,
    pub(super) mode: Mutex<Mode>,
    pub(super) release: UnsafeCell<Option<ReleaseFn>>,
}

#[cfg(all(target_arch = "x86_64", not(any(offlock_loom, offlock_shuttle))))]
const _: () = assert!(size_of::<PercpuRef>() == 256 && mem::offset_of!(PercpuRef, cold) == 128);

// SAFETY: `release` is the only field that is not `Sync`. By invariant 4 one thread at a time
// accesses it, and only to move the closure in or out. The closure is `Send`, and no `&PercpuRef`
// gives out a reference to it.
unsafe impl Sync for PercpuRef {}

impl PercpuRef {
    /// Creates a live count in percpu mode with one reference, the initial one. Allocates.
    ///
    /// `release` runs when the count reaches zero, on the thread that put the last reference, with
    /// no lock held. The closure should not panic: if an unwinding thread drops the last reference,
    /// a panic of the closure aborts the process.
    ///
    /// The closure may free the memory of the `PercpuRef` itself only if [`put`](Self::put) put the
    /// last reference, because `put` takes a raw pointer. A [`Reference`], and the `&self` of
    /// [`kill`](Self::kill), must stay valid until their call returns. So
    /// [leak](Reference::leak) a reference before the kill, and `put` it after the kill.
    ///
    /// # Errors
    ///
    /// [`NewError`], which returns `release`, if there is no memory.
    pub fn new<F>(release: F) -> Result<Self, NewError<F>>
    where
        F: FnOnce() + Send + 'static,
    {
        let Ok(words) = Words::new() else { return Err(NewError(release)) };
        let release: ReleaseFn = crate::sync::alloc::try_box(release).map_err(NewError)?;
        Ok(Self {
            gate: AtomicU64::new(0),
            words,
            cold: CachePadded::new(Cold {
                atomic: AtomicI64::new(BIAS + ONE),
                remote: AtomicU64::new(0),
                mode: Mutex::new(Mode::new()),
                release: UnsafeCell::new(Some(release)),
            }),
        })
    }

    /// Takes a reference, unless the object was killed.
    ///
    /// Once [`kill`](Self::kill) has returned, or the closure of
    /// [`kill_and_confirm`](Self::kill_and_confirm) runs, every call fails. So does every call that
    /// began earlier and has not taken its reference by then.
    ///
    /// Wait-free in percpu mode, lock-free in atomic mode.
    #[inline]
    #[must_use = "dropping the reference puts it at once"]
    pub fn try_get(&self) -> Option<Reference<'_>> {
        (self.try_add(1) || self.get_atomic()).then(|| Reference { refs: self })
    }

    /// Takes a reference, unless the count has reached zero.
    ///
    /// For code that must finish its work on a dying object: it also succeeds after a kill.
    /// Wait-free in percpu mode, lock-free in atomic mode.
    ///
    /// ```
    /// use offlock_percpu::PercpuRef;
    ///
    /// let refs = PercpuRef::new(|| ())?;
    /// let last = refs.try_get().expect("live");
    /// refs.kill()?;
    /// assert!(refs.try_get().is_none());
    /// assert!(refs.try_get_even_killed().is_some(), "`last` keeps the count from zero");
    /// drop(last);
    /// assert!(refs.try_get_even_killed().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    #[must_use = "dropping the reference puts it at once"]
    pub fn try_get_even_killed(&self) -> Option<Reference<'_>> {
        (self.try_add(1) || self.get_even_killed_atomic()).then(|| Reference { refs: self })
    }

    /// Puts a [leaked](Reference::leak) reference. For an object that embeds its count.
    ///
    /// `this` is a raw pointer, because the release closure may free `*this` during the call.
    ///
    /// ```
    /// use offlock_percpu::PercpuRef;
    ///
    /// let refs = PercpuRef::new(|| ())?;
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
        if !try_add(&words.alias(), &cold.remote, gate, 0, -1) {
            // SAFETY: the contract of this function; `try_add` returned false, so the reference is
            // not put yet.
            unsafe { Self::put_atomic(this) };
        }
    }

    /// Returns true from a [`kill`](Self::kill) until a [`resurrect`](Self::resurrect) or a
    /// [`reinit`](Self::reinit). Wait-free.
    ///
    /// The result is a hint unless the caller excludes those calls.
    #[must_use]
    pub fn is_dying(&self) -> bool {
        // Ordering: Acquire pairs with the Release of the `fetch_add` in `kill_and_confirm`; it
        // carries what the killing thread did before.
        self.cold.atomic.load(Ordering::Acquire) & DEAD != 0
    }

    /// Returns true from the last put until [`reinit`](Self::reinit). Wait-free.
    ///
    /// The release closure may still be running.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `put_atomic`; it carries what all holders
        // did with their references.
        self.cold.atomic.load(Ordering::Acquire) & RELEASED != 0
    }

    /// Adds `delta` to a word. Returns false if it is closed; the caller then changes `atomic`.
    #[inline(always)]
    fn try_add(&self, delta: i64) -> bool {
        try_add(&self.words, &self.cold.remote, &self.gate, 0, delta)
    }

    #[cold]
    fn get_even_killed_atomic(&self) -> bool {
        self.get_atomic_unless(|seen| seen < ONE)
    }

    #[cold]
    fn get_atomic(&self) -> bool {
        self.get_atomic_unless(|seen| !check!("get: not killed", seen & DEAD == 0))
    }

    /// Adds one reference to `atomic`, unless `refused` returns true for its value.
    fn get_atomic_unless(&self, refused: impl Fn(i64) -> bool) -> bool {
        let atomic = &self.cold.atomic;
        let acquire = order!(Acquire, "get: what was done before the new life");
        // Ordering: Relaxed; the compare-exchange checks the value.
        let mut seen = atomic.load(Ordering::Relaxed);
        while !refused(seen) {
            // Ordering: Acquire on success pairs with the Release in `resurrect` and `reinit`; it
            // carries the changes that their callers made to the object before. Relaxed on failure:
            // the next attempt checks again.
            let done = atomic.compare_exchange_weak(seen, seen + ONE, acquire, Ordering::Relaxed);
            match done {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Takes one more reference. The caller already has one, so this never fails.
    #[inline]
    pub(super) fn get_more(&self) {
        if !self.try_add(1) {
            // Ordering: Relaxed, as in `Arc`: the existing reference keeps the count above zero,
            // and passing the new reference to another thread orders that thread after this.
            self.cold.atomic.fetch_add(ONE, Ordering::Relaxed);
        }
    }

    /// Subtracts a reference from `atomic`, and runs the release closure if it was the last one.
    ///
    /// # Safety
    ///
    /// The conditions of [`put`](Self::put).
    #[cold]
    unsafe fn put_atomic(this: *const Self) {
        let order = order!(AcqRel, "put: the use is done");
        // Ordering: AcqRel. Release pairs with the Acquire of the last put, here, and of the
        // `fetch_add` after a fold; it carries what the holder of this reference did with the
        // object.
        // SAFETY: the reference to put keeps `*this` alive until this instruction.
        let before = unsafe { &*this }.cold.atomic.fetch_sub(ONE, order);
        if before == ONE | DEAD {
            // SAFETY: this was the last reference. The owner frees `*this` in the closure or after
            // it, or holds a borrow until this call returns.
            let release = unsafe { &*this }.take_release();
            release();
        }
    }

    /// Takes the release closure out. The calling thread must not use `self` after this.
    fn take_release(&self) -> ReleaseFn {
        // SAFETY: invariant 4: the last put, on this thread, left `atomic` at exactly `DEAD`, and
        // it stays so until the store below.
        let release = self.cold.release.with_mut(|release| unsafe { (*release).take() });
        // Ordering: Release pairs with the Acquire in `is_zero`, which `reinit` calls; it carries
        // the empty cell, and what all holders did with the object.
        self.cold.atomic.store(DEAD | RELEASED, Ordering::Release);
        release.unwrap_or_else(|| Box::new(|| ())) // never empty: `new` and `reinit` fill the cell
    }
}

impl fmt::Debug for PercpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ordering: Relaxed; the value is only printed.
        let percpu = self.gate.load(Ordering::Relaxed) == 0;
        f.debug_struct("PercpuRef")
            .field("percpu", &percpu)
            .field("dying", &self.is_dying())
            .field("zero", &self.is_zero())
            .finish_non_exhaustive()
    }
}

/// A counted reference to the object of a [`PercpuRef`]; its drop puts it.
///
/// A reference may be taken on one thread or CPU and dropped on another.
/// [`PercpuRef::try_get_arc`] returns a reference that outlives the borrow. `clone` never fails. A
/// forgotten reference ([`mem::forget`]) keeps the count above zero for ever.
///
/// ```
/// use offlock_percpu::{PercpuRef, Reference};
///
/// fn serve(connection: Reference<'_>) {
///     let _for_a_helper = connection.clone();
///     // ... uses the object; both references are put at the end ...
/// }
///
/// let refs = PercpuRef::new(|| ())?;
/// std::thread::scope(|scope| {
///     let reference = refs.try_get().expect("live");
///     scope.spawn(move || serve(reference));
/// });
/// refs.kill()?;
/// assert!(refs.is_zero());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
///
/// The drop of the last reference panics if the release closure does. On a thread that already
/// unwinds this aborts the process.
#[must_use = "dropping the reference puts it at once"]
pub struct Reference<'a> {
    pub(super) refs: &'a PercpuRef,
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
        self.refs.get_more();
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
