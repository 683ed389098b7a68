//! [`PercpuRef`]: takes and puts references, and runs the release closure at zero.
//!
//! The invariants are those of the [module above](super).

use std::fmt;
use std::mem;

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicI64, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{order, step};

use super::error::KillError;
use super::words::{self, BIAS, try_add};
use crate::cpu;
use crate::error::out_of_memory;
use crate::fence;
use crate::rseq::section;
use crate::words::Words;

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
    atomic: AtomicI64,
    remote: AtomicU64,
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
    /// no lock held. The closure should not panic: if an unwinding thread drops the last reference,
    /// a panic of the closure aborts the process.
    ///
    /// The closure may free the memory of the `PercpuRef` itself only if [`put`](Self::put) put the
    /// last reference, because `put` takes a raw pointer. A [`Reference`], and the `&self` of
    /// [`kill`](Self::kill), must stay valid until their call returns. So
    /// [leak](Reference::leak) a reference before the kill, and `put` it after the kill.
    ///
    /// # Aborts
    ///
    /// If there is no memory, like `Box::new`.
    #[must_use]
    pub fn new(release: impl FnOnce() + Send + 'static) -> Self {
        let words = Words::new().unwrap_or_else(|_| out_of_memory::<u64>(cpu::possible()));
        Self {
            gate: AtomicU64::new(0),
            words,
            cold: CachePadded::new(Cold {
                atomic: AtomicI64::new(BIAS + 1),
                remote: AtomicU64::new(0),
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
        self.try_add(1).then(|| Reference { refs: self })
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
        if !try_add(&words.alias(), &cold.remote, gate, 0, -1) {
            // SAFETY: the contract of this function; `try_add` returned false, so the reference is
            // not put yet.
            unsafe { Self::put_atomic(this) };
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
    ///
    /// # Panics
    ///
    /// If the release closure runs here and panics.
    pub fn kill(&self) -> Result<(), KillError> {
        // Ordering: Relaxed, both; every section that commits after the barrier sees it, and only a
        // second kill reads the gate otherwise.
        let killed = self.gate.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed);
        killed.map_err(|_| KillError::AlreadyDying)?;
        if section::available() {
            step!("fold: no section still counts", fence::heavy_rseq());
        }
        // Every word was 0 when the count was made.
        let counted = words::close_and_sum(&self.words, &self.cold.remote, &mut 0);
        let delta = counted - BIAS - 1; // 1 for the initial reference
        // Ordering: AcqRel. Acquire pairs with the Release in `put_atomic` of a put between the
        // closing of the words and this; it carries what that holder did with the object. Release
        // pairs with the Acquire of the last put in `put_atomic`; it carries what `close_and_sum`
        // acquired from the holders.
        let order = order!(AcqRel, "kill: the uses so far are done");
        if self.cold.atomic.fetch_add(delta, order) + delta == 0 {
            self.take_release()();
        }
        Ok(())
    }

    /// Returns true from the last put on. Wait-free.
    ///
    /// The release closure may still be running.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `put_atomic` and in `kill`; it carries what all
        // holders did with their references.
        self.cold.atomic.load(Ordering::Acquire) == 0
    }

    /// Adds `delta` to a word. Returns false if it is closed; the caller then changes `atomic`.
    #[inline(always)]
    fn try_add(&self, delta: i64) -> bool {
        try_add(&self.words, &self.cold.remote, &self.gate, 0, delta)
    }

    /// Takes one more reference. The caller already has one, so this never fails.
    #[inline]
    fn get_more(&self) {
        if !self.try_add(1) {
            // Ordering: Relaxed, as in `Arc`: the existing reference keeps the count above zero,
            // and passing the new reference to another thread orders that thread after this.
            self.cold.atomic.fetch_add(1, Ordering::Relaxed);
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
        // `fetch_add` in `kill`; it carries what the holder of this reference did with the object.
        // SAFETY: the reference to put keeps `*this` alive until this instruction.
        let before = unsafe { &*this }.cold.atomic.fetch_sub(1, order);
        if before == 1 {
            // SAFETY: this was the last reference. The owner frees `*this` in the closure or after
            // it, or holds a borrow until this call returns.
            let release = unsafe { &*this }.take_release();
            release();
        }
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
///
/// # Panics
///
/// The drop of the last reference panics if the release closure does. On a thread that already
/// unwinds this aborts the process.
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
