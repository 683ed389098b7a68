//! What changes the mode of a [`PercpuRef`]: kill, resurrect, reinit, and the two switches.
//!
//! All of it is rare, holds the mutex `mode`, and costs a heavy fence when it leaves percpu
//! mode. The invariants are those of the [module above](super).

use std::mem;

use super::error::{KillError, ReinitError, ReinitRefused, ResurrectError};
use super::percpu_ref::{DEAD, Mode, ONE, PercpuRef, Reference, ReleaseFn};
use super::words::{self, BIAS};
use crate::alloc::try_box;
use crate::error::AllocError;
use crate::fence;
use crate::rseq::section;
use crate::sync::atomic::Ordering;
use crate::sync::mutant;

impl PercpuRef {
    /// Kills: from its return on every [`try_get`](Self::try_get) fails. Drops the
    /// initial reference, and runs the release closure if that was the last.
    ///
    /// Implies no grace period: other readers of the object, who hold no reference, must be waited
    /// for by other means. Costs a heavy fence and a walk over the CPUs' words; blocks shortly
    /// while another thread switches the mode of the same object.
    ///
    /// # Errors
    ///
    /// [`KillError::AlreadyDying`] for a second kill. Nothing was changed then.
    ///
    /// # Panics
    ///
    /// With the panic of the release closure, if it runs here.
    pub fn kill(&self) -> Result<(), KillError> {
        self.kill_and_confirm(|| ())
    }

    /// [`kill`](Self::kill), and runs `confirm` when every [`try_get`](Self::try_get)
    /// fails, before the initial reference is dropped.
    ///
    /// No lock is held meanwhile: `confirm` may use the `PercpuRef`.
    ///
    /// # Errors
    ///
    /// As [`kill`](Self::kill); `confirm` did not run.
    ///
    /// # Panics
    ///
    /// With the panic of `confirm`; the initial reference is dropped all the same. With that of the
    /// release closure, if it runs here.
    ///
    /// # Aborts
    ///
    /// If both panic: the release closure then runs while the panic of `confirm` unwinds.
    pub fn kill_and_confirm(&self, confirm: impl FnOnce()) -> Result<(), KillError> {
        let mut mode = self.cold.mode.lock();
        if self.is_dying() {
            return Err(KillError::AlreadyDying);
        }
        // Ordering: AcqRel. Release pairs with the Acquire in `is_dying`, and with that of the last
        // put; it carries what `close` acquired from the holders.
        self.cold.atomic.fetch_add(self.close(&mut mode) + DEAD, Ordering::AcqRel);
        let initial = Reference { refs: self };
        if mutant("refcount-callbacks-under-the-lock") {
            confirm();
            drop(initial);
            drop(mode);
            return Ok(());
        }
        drop(mode);
        confirm();
        drop(initial);
        Ok(())
    }

    /// Undoes a [`kill`](Self::kill), if the count has not reached zero: there is an initial
    /// reference again, and [`try_get`](Self::try_get) succeeds.
    ///
    /// A reference taken after it sees what the caller did before it. Blocks shortly while another
    /// thread switches the mode of the same object.
    ///
    /// # Errors
    ///
    /// [`ResurrectError::NotDying`] if it is live, [`ResurrectError::Released`] if the count has
    /// reached zero. Nothing was changed then.
    pub fn resurrect(&self) -> Result<(), ResurrectError> {
        let mut mode = self.cold.mode.lock();
        let bias = if mode.force_atomic { 0 } else { BIAS };
        if bias != 0 && mutant("refcount-open-before-the-bias") {
            self.open(&mut mode);
        }
        let atomic = &self.cold.atomic;
        // Ordering: Relaxed; the exchange checks it.
        let mut seen = atomic.load(Ordering::Relaxed);
        loop {
            if seen & DEAD == 0 {
                return Err(ResurrectError::NotDying);
            }
            if seen < ONE {
                return Err(ResurrectError::Released);
            }
            let live = seen - DEAD + ONE + bias;
            // Ordering: AcqRel on success. Release pairs with the Acquire in `get_atomic_unless`; it
            // carries what the caller did to the object. Acquire pairs with the puts before. Relaxed
            // on failure: the next attempt checks again.
            let done =
                atomic.compare_exchange_weak(seen, live, Ordering::AcqRel, Ordering::Relaxed);
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

    /// Starts a new life after the count has reached zero: live, with one initial reference, and
    /// with `release` to run at the end of it.
    ///
    /// The closure of the life before may still be running. In percpu mode, unless
    /// [`switch_to_atomic`](Self::switch_to_atomic) was called last. A reference taken after it
    /// sees what the caller did before it. Allocates; blocks shortly while another thread switches
    /// the mode of the same object.
    ///
    /// # Errors
    ///
    /// [`ReinitRefused::InUse`] before the count has reached zero, [`ReinitRefused::Alloc`]. The error
    /// gives `release` back.
    pub fn reinit<F>(&self, release: F) -> Result<(), ReinitError<F>>
    where
        F: FnOnce() + Send + 'static,
    {
        let mut mode = self.cold.mode.lock();
        if !self.is_zero() {
            return Err(ReinitError::new(ReinitRefused::InUse, release));
        }
        let release: ReleaseFn = match try_box(release) {
            Ok(release) => release,
            Err(release) => {
                let why = ReinitRefused::Alloc(AllocError::new());
                return Err(ReinitError::new(why, release));
            }
        };
        // SAFETY: invariant 4: RELEASED is set, so the last put is done with the cell, as `is_zero`
        // has acquired; the next one comes after the store below. No other `reinit`: `mode`.
        self.cold.release.with_mut(|cell| unsafe { *cell = Some(release) });
        let bias = if mode.force_atomic { 0 } else { BIAS };
        // Ordering: Release pairs with the Acquire in `get_atomic_unless` and `put_atomic`; it carries the
        // closure, and what the caller did to the object.
        self.cold.atomic.store(ONE + bias, Ordering::Release);
        if bias != 0 {
            self.open(&mut mode);
        }
        Ok(())
    }

    /// Counts in one atomic from now on, until [`switch_to_percpu`](Self::switch_to_percpu): for an
    /// object that will soon be killed and resurrected often, where the kill then costs no heavy
    /// fence.
    ///
    /// Of a killed object it only decides in which mode a resurrection or a new start leaves it.
    /// Blocks shortly while another thread switches the mode of the same object.
    pub fn switch_to_atomic(&self) {
        let mut mode = self.cold.mode.lock();
        mode.force_atomic = true;
        // Ordering: AcqRel, as in `kill_and_confirm`.
        self.cold.atomic.fetch_add(self.close(&mut mode), Ordering::AcqRel);
    }

    /// Counts per CPU again; undoes [`switch_to_atomic`](Self::switch_to_atomic).
    ///
    /// Of a killed object it only decides in which mode a resurrection or a new start leaves it.
    /// Blocks shortly while another thread switches the mode of the same object.
    pub fn switch_to_percpu(&self) {
        let mut mode = self.cold.mode.lock();
        mode.force_atomic = false;
        if !mode.percpu && !self.is_dying() {
            // Live, so the initial reference is there and stays while we hold `mode`.
            // Ordering: AcqRel, as in `resurrect`.
            self.cold.atomic.fetch_add(BIAS, Ordering::AcqRel);
            self.open(&mut mode);
        }
    }

    /// Leaves percpu mode, if it is in it: closes the words and `remote`, and returns what to add
    /// to `atomic` for what they counted and for the bias.
    fn close(&self, mode: &mut Mode) -> i64 {
        if self.close_gate(mode) {
            barrier();
        }
        self.fold(mode)
    }

    /// The first step of it: true if a [`barrier`] must follow, before the second.
    pub(super) fn close_gate(&self, mode: &mut Mode) -> bool {
        if mode.percpu {
            // Ordering: Relaxed; the barrier makes every later section see it. Without sections
            // nobody asks the gate.
            self.gate.store(1, Ordering::Relaxed);
        }
        mode.percpu
    }

    /// The second.
    pub(super) fn fold(&self, mode: &mut Mode) -> i64 {
        if !mem::replace(&mut mode.percpu, false) {
            return 0;
        }
        words::close(&self.words, &self.cold.remote, &mut mode.folded) * ONE - BIAS
    }

    /// Opens the words and `remote`; `atomic` has the bias already (invariant 2).
    fn open(&self, mode: &mut Mode) {
        words::open(&self.words, &self.cold.remote);
        // Ordering: Release pairs with a section's Acquire load; it carries what the caller did to
        // the object.
        self.gate.store(0, Ordering::Release);
        mode.percpu = true;
    }
}

/// After it no section commits that saw a gate open which the caller has closed.
pub(super) fn barrier() {
    if section::available() && !mutant("refcount-fold-without-heavy") {
        fence::heavy_rseq();
    }
}
