//! The mode changes of a [`PercpuRef`]: kill, resurrect, reinit, and the two switches.
//!
//! They are rare, hold the mutex `mode`, and cost a heavy fence when they leave percpu mode. The
//! invariants are those of the [module above](super).

use std::mem;

use super::error::{KillError, ReinitError, ResurrectError};
use super::percpu_ref::{DEAD, Mode, ONE, PercpuRef, Reference, ReleaseFn};
use super::words::{self, BIAS};
use crate::fence;
use crate::rseq::section;
use crate::sync::alloc::try_box;
use crate::sync::atomic::Ordering;
use crate::sync::{order, step};

impl PercpuRef {
    /// Kills the count: drops the initial reference, and runs the release closure if that was the
    /// last.
    ///
    /// After this returns, every [`try_get`](Self::try_get) fails. A kill implies no grace period:
    /// readers of the object that hold no reference need another means to be waited for. Costs a
    /// heavy fence and a walk over the words of all CPUs. Blocks briefly while another thread
    /// changes the mode of the same count.
    ///
    /// # Errors
    ///
    /// [`KillError::AlreadyDying`] for a second kill, which changes nothing.
    ///
    /// # Panics
    ///
    /// If the release closure runs here and panics.
    pub fn kill(&self) -> Result<(), KillError> {
        self.kill_and_confirm(|| ())
    }

    /// Kills like [`kill`](Self::kill), and runs `confirm` once every [`try_get`](Self::try_get)
    /// fails, before the initial reference is dropped.
    ///
    /// No lock is held meanwhile, so `confirm` may use the `PercpuRef`.
    ///
    /// # Errors
    ///
    /// The errors of [`kill`](Self::kill); `confirm` does not run then.
    ///
    /// # Panics
    ///
    /// If `confirm` panics, after the initial reference was dropped. If the release closure runs
    /// here and panics.
    ///
    /// # Aborts
    ///
    /// If both panic, because the release closure runs while the panic of `confirm` unwinds.
    pub fn kill_and_confirm(&self, confirm: impl FnOnce()) -> Result<(), KillError> {
        let mut mode = self.cold.mode.lock();
        if self.is_dying() {
            return Err(KillError::AlreadyDying);
        }
        // Ordering: Release pairs with the Acquire in `is_dying`; it carries what the calling thread
        // did before. The put of the initial reference below carries what `close_and_sum` acquired
        // from the holders to the last put.
        let release = order!(Release, "kill: what the killer did before");
        self.cold.atomic.fetch_add(self.close(&mut mode) + DEAD, release);
        let initial = Reference { refs: self };
        step!("kill: unlock before the callbacks", drop(mode));
        confirm();
        drop(initial);
        Ok(())
    }

    /// Undoes a [`kill`](Self::kill), if the count has not reached zero.
    ///
    /// The count gets an initial reference again, and [`try_get`](Self::try_get) succeeds. A thread
    /// that takes a reference afterwards sees what the calling thread did before. Blocks like
    /// [`kill`](Self::kill).
    ///
    /// # Errors
    ///
    /// [`ResurrectError::NotDying`] if the count is live, and [`ResurrectError::Released`] if it
    /// has reached zero. The call changes nothing then.
    pub fn resurrect(&self) -> Result<(), ResurrectError> {
        let mut mode = self.cold.mode.lock();
        let bias = if mode.force_atomic { 0 } else { BIAS };
        let atomic = &self.cold.atomic;
        // Ordering: Relaxed; the compare-exchange checks the value.
        let mut seen = atomic.load(Ordering::Relaxed);
        loop {
            if seen & DEAD == 0 {
                return Err(ResurrectError::NotDying);
            }
            if seen < ONE {
                return Err(ResurrectError::Released);
            }
            let live = seen - DEAD + ONE + bias;
            // Ordering: Release on success pairs with the Acquire in `get_atomic_unless`; it carries
            // what the calling thread did to the object. A read-modify-write continues the release
            // sequences of the puts before, so the last put still acquires them. Relaxed on
            // failure: the next attempt checks again.
            let done =
                atomic.compare_exchange_weak(seen, live, Ordering::Release, Ordering::Relaxed);
            match done {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if bias != 0 {
            self.open(&mut mode);
        }
        Ok(())
    }

    /// Makes a count that has reached zero live again, with one initial reference and a new
    /// `release` closure.
    ///
    /// The previous release closure may still be running. The count is in percpu mode, unless
    /// [`switch_to_atomic`](Self::switch_to_atomic) was the last switch. A thread that takes a
    /// reference afterwards sees what the calling thread did before. Allocates. Blocks like
    /// [`kill`](Self::kill).
    ///
    /// # Errors
    ///
    /// [`ReinitError::InUse`] if the count has not reached zero, and [`ReinitError::Alloc`] if
    /// memory is out. Both return `release`.
    pub fn reinit<F>(&self, release: F) -> Result<(), ReinitError<F>>
    where
        F: FnOnce() + Send + 'static,
    {
        let mut mode = self.cold.mode.lock();
        if !self.is_zero() {
            return Err(ReinitError::InUse(release));
        }
        let release: ReleaseFn = try_box(release).map_err(ReinitError::Alloc)?;
        // SAFETY: invariant 4: `RELEASED` is set, and `is_zero` acquired it, so the last put is
        // done with the cell. The next last put comes after the store below. `mode` excludes
        // another `reinit`.
        self.cold.release.with_mut(|cell| unsafe { *cell = Some(release) });
        let bias = if mode.force_atomic { 0 } else { BIAS };
        // Ordering: Release pairs with the Acquire in `get_atomic_unless` and `put_atomic`; it
        // carries the closure, and what the caller did to the object.
        self.cold.atomic.store(ONE + bias, Ordering::Release);
        if bias != 0 {
            self.open(&mut mode);
        }
        Ok(())
    }

    /// Switches to atomic mode, until [`switch_to_percpu`](Self::switch_to_percpu).
    ///
    /// Use this for a count that will often be killed and resurrected: in atomic mode a kill costs
    /// no heavy fence. If the count is dying, this only sets the mode after
    /// [`resurrect`](Self::resurrect) or [`reinit`](Self::reinit). Blocks like [`kill`](Self::kill).
    ///
    /// ```
    /// use offlock_percpu::PercpuRef;
    ///
    /// let refs = PercpuRef::new(|| ())?;
    /// refs.switch_to_atomic();
    /// let reference = refs.try_get().expect("live");
    /// for _ in 0..3 {
    ///     refs.kill()?;
    ///     refs.resurrect()?; // `reference` keeps the count above zero
    /// }
    /// refs.switch_to_percpu();
    /// # drop(reference);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn switch_to_atomic(&self) {
        let mut mode = self.cold.mode.lock();
        mode.force_atomic = true;
        if mode.percpu {
            // Ordering: Relaxed; the thread that kills the count locks `mode` after this thread. So
            // what `close_and_sum` acquired from the holders happens before that thread puts the
            // initial reference, and the last put acquires it from there. As a read-modify-write,
            // the addition continues the release sequences of the puts before.
            self.cold.atomic.fetch_add(self.close(&mut mode), Ordering::Relaxed);
        }
    }

    /// Switches back to percpu mode after [`switch_to_atomic`](Self::switch_to_atomic); later, if
    /// the count is dying. Blocks like [`kill`](Self::kill).
    pub fn switch_to_percpu(&self) {
        let mut mode = self.cold.mode.lock();
        mode.force_atomic = false;
        if !mode.percpu && !self.is_dying() {
            // The count is live, so the initial reference exists, and stays while `mode` is held.
            // Ordering: Relaxed; as a read-modify-write, the addition continues the release
            // sequences of the puts before, so the last put still acquires them. `open` puts it
            // before the gets and puts of the words, and so before their fold.
            self.cold.atomic.fetch_add(BIAS, Ordering::Relaxed);
            self.open(&mut mode);
        }
    }

    /// Leaves percpu mode: closes the words and `remote`, and returns the amount to add to `atomic`
    /// for their sum and for the bias. Returns 0 in atomic mode.
    fn close(&self, mode: &mut Mode) -> i64 {
        if !mem::replace(&mut mode.percpu, false) {
            return 0;
        }
        // Ordering: Relaxed; every section that commits after the barrier sees it. Without
        // sections no operation reads the gate.
        self.gate.store(1, Ordering::Relaxed);
        if section::available() {
            step!("fold: no section still counts", fence::heavy_rseq());
        }
        words::close_and_sum(&self.words, &self.cold.remote, &mut mode.folded) * ONE - BIAS
    }

    /// Opens the words and `remote`. `atomic` must include the bias already (invariant 2).
    fn open(&self, mode: &mut Mode) {
        words::open(&self.words, &self.cold.remote);
        // Ordering: Release pairs with the Acquire of a section; it carries changes of the object.
        self.gate.store(0, Ordering::Release);
        mode.percpu = true;
    }
}
