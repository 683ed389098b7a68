//! The count itself, and how references to it are taken and put.
//!
//! The invariants are those of the [module above](super).

use std::fmt;
use std::mem;

use super::words::{self, BIAS, add_open};
use crate::error::NewError;
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::{Mutex, cpu, mutant};
use crate::words::Words;

/// The bits of `atomic`: killed, released, and the count above them.
pub(super) const DEAD: i64 = 1;
pub(super) const RELEASED: i64 = 2;
pub(super) const ONE: i64 = 4;

pub(super) type ReleaseFn = Box<dyn FnOnce() + Send>;

/// What only a holder of the mutex reads and writes.
pub(super) struct Mode {
    /// The words and `remote` are open.
    pub(super) percpu: bool,
    /// Stay in atomic mode while live.
    pub(super) force_atomic: bool,
    /// What the sections' words summed to at the last fold.
    pub(super) folded: u64,
}

impl Mode {
    fn new() -> Self {
        Self { percpu: true, force_atomic: false, folded: 0 }
    }
}

/// A reference count without a shared cache line while the object is live.
///
/// [`try_get`](Self::try_get) and a put are a few instructions on this CPU's own word where rseq
/// sections run ([`capabilities`](crate::capabilities())), and a fetch-and-add on it elsewhere:
/// wait-free, without allocation. Once [killed](Self::kill), or
/// [switched](Self::switch_to_atomic), it is an atomic counter as in an `Arc`.
///
/// It starts live, with one initial reference that the kill drops. When the count reaches zero,
/// which only a kill makes possible, the release closure runs, once, on the thread that put the
/// last reference. If a `PercpuRef` is dropped before that, the closure is dropped without being
/// called.
///
/// Memory: 256 bytes, 8 bytes for every CPU, and the closure's box.
///
/// ```
/// use std::sync::mpsc;
/// use percpu::PercpuRef;
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
#[repr(C, align(128))]
pub struct PercpuRef {
    // Read by every get and put, written by switches only.
    pub(super) gate: AtomicU64,
    pub(super) words: Words,
    pub(super) cold: Cold,
}

/// What is written in atomic mode, on other lines than what is read in percpu mode.
#[repr(align(128))]
pub(super) struct Cold {
    pub(super) atomic: AtomicI64,
    pub(super) remote: AtomicU64,
    pub(super) mode: Mutex<Mode>,
    pub(super) release: UnsafeCell<Option<ReleaseFn>>,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<PercpuRef>() == 256 && mem::offset_of!(PercpuRef, cold) == 128);

// SAFETY: `release` is the only field that is not `Sync`. By invariant 4 one thread at a time
// touches it; what it does is move a closure in or out, which is `Send`. `&PercpuRef` gives no
// `&` to the closure.
unsafe impl Sync for PercpuRef {}

impl PercpuRef {
    /// Creates a live count in percpu mode with one reference, the initial one.
    ///
    /// `release` runs when the count reaches zero, on whichever thread put the last reference. No
    /// lock is held then and the `PercpuRef` is not touched again, so the closure may free what it
    /// is part of. It should not panic: where the last reference is dropped by a panic that unwinds,
    /// that aborts the process. Allocates.
    ///
    /// # Errors
    ///
    /// [`NewError`] if memory is out; it gives `release` back.
    pub fn new<F>(release: F) -> Result<Self, NewError<F>>
    where
        F: FnOnce() + Send + 'static,
    {
        let Ok(words) = Words::new() else { return Err(NewError(release)) };
        let release: ReleaseFn = crate::alloc::try_box(release).map_err(NewError)?;
        Ok(Self {
            gate: AtomicU64::new(0),
            words,
            cold: Cold {
                atomic: AtomicI64::new(BIAS + ONE),
                remote: AtomicU64::new(0),
                mode: Mutex::new(Mode::new()),
                release: UnsafeCell::new(Some(release)),
            },
        })
    }

    /// Takes a reference, unless the object was killed.
    ///
    /// Once [`kill`](Self::kill) has returned, or the closure of
    /// [`kill_and_confirm`](Self::kill_and_confirm) runs, every call fails, and so does every call
    /// that began earlier and has not taken its reference by then.
    ///
    /// Wait-free in percpu mode, lock-free else.
    #[inline]
    #[must_use = "dropping the reference puts it at once"]
    pub fn try_get(&self) -> Option<Reference<'_>> {
        (self.try_add(1) || self.get_atomic()).then(|| Reference { refs: self })
    }

    /// Takes a reference, unless the count has reached zero.
    ///
    /// Unlike [`try_get`](Self::try_get) it succeeds after a kill, while other references are left:
    /// for a user that must still finish its work on an object that is about to go.
    ///
    /// Wait-free in percpu mode, lock-free else.
    ///
    /// ```
    /// use percpu::PercpuRef;
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

    /// Puts a reference that was [leaked](Reference::leak), for those who embed the count in an
    /// object and hand the object itself around.
    ///
    /// May run the release closure, and through it free `*this`; that is why `this` is a pointer.
    /// A `&PercpuRef` coerces to it.
    ///
    /// ```
    /// use percpu::PercpuRef;
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
    /// `this` points to a live `PercpuRef`, and the caller owns a leaked reference of it, which
    /// this call uses up.
    #[inline]
    pub unsafe fn put(this: *const Self) {
        // Another thread may free `*this` once the put is counted, while this one is still inside
        // `count`. So `count` gets references to atomics, which promise nothing about the memory after
        // their last use, and words that are not part of `*this`.
        // SAFETY: the caller's reference keeps it alive until it is put.
        let words = unsafe { (*this).words.alias() };
        // SAFETY: the caller's reference, which is not put yet.
        let gate = unsafe { &(*this).gate };
        // SAFETY: the caller's reference, which is not put yet.
        let remote = unsafe { &(*this).cold.remote };
        if !count(gate, &words, remote, -1) {
            // SAFETY: the caller's contract; the reference was not put yet.
            unsafe { Self::put_atomic(this) };
        }
    }

    /// True from the moment of a [`kill`](Self::kill) until a [`resurrect`](Self::resurrect) or a
    /// [`reinit`](Self::reinit). A hint unless the caller keeps others from those. Wait-free.
    #[must_use]
    pub fn is_dying(&self) -> bool {
        // Ordering: Acquire pairs with the fold in `kill_and_confirm`; it carries what the killer
        // did before.
        self.cold.atomic.load(Ordering::Acquire) & DEAD != 0
    }

    /// True once the last reference was put and the release closure was taken out to be run: it
    /// may be running still. Stays true until [`reinit`](Self::reinit). Wait-free.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `put_atomic`; it carries what all holders
        // did with their references.
        self.cold.atomic.load(Ordering::Acquire) & RELEASED != 0
    }

    /// Adds `delta` where this CPU counts; false if that is closed, and the atomic counts.
    #[inline(always)]
    fn try_add(&self, delta: i64) -> bool {
        count(&self.gate, &self.words, &self.cold.remote, delta)
    }

    #[cold]
    fn get_even_killed_atomic(&self) -> bool {
        self.get_atomic_unless(|seen| seen < ONE)
    }

    #[cold]
    fn get_atomic(&self) -> bool {
        if mutant("refcount-get-forgets-the-kill") {
            return self.get_even_killed_atomic();
        }
        self.get_atomic_unless(|seen| seen & DEAD != 0)
    }

    /// Counts one more in the atomic, unless what it holds is refused.
    fn get_atomic_unless(&self, refused: impl Fn(i64) -> bool) -> bool {
        let atomic = &self.cold.atomic;
        // Ordering: Relaxed; the exchange checks it.
        let mut seen = atomic.load(Ordering::Relaxed);
        while !refused(seen) {
            // Ordering: Acquire on success pairs with the Release in `resurrect` and `reinit`; it
            // carries what their callers did to the object before. Relaxed on failure: the next
            // attempt checks again.
            let done = atomic.compare_exchange_weak(
                seen,
                seen + ONE,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match done {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Counts one more for somebody who holds a reference already.
    #[inline]
    pub(super) fn get_more(&self) {
        if !self.try_add(1) {
            // Ordering: Relaxed, as for an `Arc`: a reference that exists keeps the count from
            // zero, and whoever gives the new one away orders that.
            self.cold.atomic.fetch_add(ONE, Ordering::Relaxed);
        }
    }

    /// # Safety
    ///
    /// As [`put`](Self::put).
    #[cold]
    unsafe fn put_atomic(this: *const Self) {
        let order =
            if mutant("refcount-put-relaxed") { Ordering::Relaxed } else { Ordering::AcqRel };
        // Ordering: AcqRel: Release pairs with the Acquire of the last put, here, and of the fold;
        // it carries what the holder of this reference did with the object to the closure.
        // SAFETY: the caller's reference keeps it alive until this instruction.
        let before = unsafe { &*this }.cold.atomic.fetch_sub(ONE, order);
        if before == ONE | DEAD {
            // SAFETY: this was the last reference: whoever owns the object waits for the closure,
            // or holds a borrow until we return.
            let release = unsafe { &*this }.take_release();
            release();
        }
    }

    /// Takes the closure out; the caller touches nothing of `self` after this.
    fn take_release(&self) -> ReleaseFn {
        // SAFETY: invariant 4: `atomic` is DEAD and nothing else, and stays so until the store
        // below; this thread made it so.
        let release = self.cold.release.with_mut(|release| unsafe { (*release).take() });
        // Ordering: Release pairs with the Acquire in `reinit` and `is_zero`; it carries the
        // emptied cell, and what all the holders did.
        self.cold.atomic.store(DEAD | RELEASED, Ordering::Release);
        release.unwrap_or_else(|| Box::new(|| ())) // there is one: `new` and `reinit` put it there
    }
}

/// Adds `delta` to this CPU's word while `gate` is 0; false if it is closed.
#[inline(always)]
fn count(gate: &AtomicU64, words: &Words, remote: &AtomicU64, delta: i64) -> bool {
    if section::available() {
        match section::add(gate, words, delta as u64) {
            Ok(_) => true,
            Err(Refused::NoCpu) => count_remote(gate, remote, delta),
            Err(Refused::Closed | Refused::Busy) => false,
        }
    } else {
        add_open(words.slot(cpu::recent()), delta)
    }
}

/// For a thread without an id: it must not touch the words, which other threads change by plain
/// stores.
#[cold]
fn count_remote(gate: &AtomicU64, remote: &AtomicU64, delta: i64) -> bool {
    if mutant("refcount-remote-by-load-and-store") {
        let seen = remote.load(Ordering::Acquire);
        if words::is_open(seen) {
            remote.store(seen.wrapping_add(delta as u64), Ordering::Release);
        }
        return words::is_open(seen);
    }
    if mutant("refcount-remote-adds-and-takes-back") {
        let closed = !words::is_open(remote.fetch_add(delta as u64, Ordering::AcqRel))
            || gate.load(Ordering::Acquire) != 0;
        if closed {
            remote.fetch_sub(delta as u64, Ordering::AcqRel);
        }
        return !closed;
    }
    add_open(remote, delta)
}

impl fmt::Debug for PercpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ordering: Relaxed; for the eye only.
        let percpu = self.gate.load(Ordering::Relaxed) == 0;
        f.debug_struct("PercpuRef")
            .field("percpu", &percpu)
            .field("dying", &self.is_dying())
            .field("zero", &self.is_zero())
            .finish_non_exhaustive()
    }
}

/// A reference to what a [`PercpuRef`] counts; put when dropped.
///
/// It may be dropped on another thread, and on another CPU, than it was taken on; one that must
/// outlive the borrow is made by [`PercpuRef::try_get_arc`]. `clone` never
/// fails. [`mem::forget`] keeps the count from zero for ever.
///
/// # Panics
///
/// Its drop, with the panic of the release closure, if this is the last reference. On a thread that
/// unwinds already that aborts the process.
#[must_use = "dropping the reference puts it at once"]
pub struct Reference<'a> {
    pub(super) refs: &'a PercpuRef,
}

impl Reference<'_> {
    /// Gives the reference up without putting it: [`PercpuRef::put`] does that later.
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
        // SAFETY: the borrow keeps it alive, and this reference is put once, here.
        unsafe { PercpuRef::put(self.refs) };
    }
}

impl fmt::Debug for Reference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reference").field(self.refs).finish()
    }
}

/// What may cross threads, and what may be shortened.
const _: () = {
    const fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<PercpuRef>();
    send_and_sync::<Reference<'_>>();

    #[expect(dead_code, reason = "compiled for the variance it needs")]
    fn covariant<'short>(reference: Reference<'static>) -> Reference<'short> {
        reference
    }
};
