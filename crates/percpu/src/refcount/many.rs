//! The kill of many counts at the price of one barrier.

use super::error::KillError;
use super::percpu_ref::{DEAD, Mode, PercpuRef, Reference};
use super::switch;
use crate::error::AllocError;
use crate::sync::atomic::Ordering;
use crate::sync::{MutexGuard, mutant};

/// One of the counts, on its way to be killed.
struct Kill<'a> {
    refs: &'a PercpuRef,
    /// Where it is among the counts that the caller gave.
    index: usize,
    mode: Option<MutexGuard<'a, Mode>>,
    /// What each reference holds when it is dropped.
    initial: Option<Reference<'a>>,
}

impl PercpuRef {
    /// [`kill`](Self::kill)s many, with one heavy fence for all: the kill of 500 costs little more
    /// than that of a few. Returns how many it killed.
    ///
    /// When it returns, every [`try_get`](Self::try_get) of each fails. First all are
    /// closed, then the initial references are dropped, in the order given, and with each the release
    /// closure runs if that was the last reference; no lock is held then.
    ///
    /// `refused` is called with the place in `refs` of each that was not killed, and why; also
    /// before any release closure runs. Allocates; blocks shortly while other threads switch the
    /// modes of the same objects, and keeps them from it for the time of the fence.
    ///
    /// ```
    /// use percpu::{KillError, PercpuRef};
    ///
    /// let refs = [PercpuRef::new(|| ())?, PercpuRef::new(|| ())?];
    /// refs[0].kill()?;
    /// let mut refused = Vec::new();
    /// let killed = PercpuRef::kill_many(&[&refs[0], &refs[1]], |i, why| refused.push((i, why)))?;
    /// assert_eq!((killed, refused), (1, vec![(0, KillError::AlreadyDying)]));
    /// assert!(refs.iter().all(PercpuRef::is_zero));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AllocError`], if memory is out: nothing was changed.
    ///
    /// # Panics
    ///
    /// With the panic of a release closure or of `refused`; all others are killed all the same.
    ///
    /// # Aborts
    ///
    /// If a second release closure panics while the panic of the first unwinds.
    pub fn kill_many(
        refs: &[&Self],
        mut refused: impl FnMut(usize, KillError),
    ) -> Result<usize, AllocError> {
        let mut errors = Vec::new();
        let mut dying = Vec::new();
        errors.try_reserve_exact(refs.len()).map_err(|_| AllocError::new())?;
        dying.try_reserve_exact(refs.len()).map_err(|_| AllocError::new())?;
        dying.extend(refs.iter().enumerate().map(|(index, &refs)| Kill {
            refs,
            index,
            mode: None,
            initial: None,
        }));
        // Everybody who holds more than one of the mutexes takes them by address: nobody waits in
        // a circle. Of one that comes twice, the first is killed.
        if !mutant("refcount-kill-many-in-any-order") {
            dying.sort_unstable_by_key(|one| (std::ptr::from_ref(one.refs).addr(), one.index));
        }
        let mut before = None;
        dying.retain_mut(|one| {
            let again = before.is_some_and(|before| std::ptr::eq(before, one.refs));
            let locked = if again { Err(KillError::AlreadyDying) } else { one.lock() };
            if !again && locked.is_ok() {
                before = Some(one.refs);
            }
            locked.map_err(|why| errors.push((one.index, why))).is_ok()
        });
        close_all(&mut dying);
        // Unlocked by now. In the order of the caller again.
        dying.sort_unstable_by_key(|one| one.index);
        errors.sort_unstable_by_key(|&(index, _)| index);
        errors.into_iter().for_each(|(index, why)| refused(index, why));
        let killed = dying.len();
        for one in &mut dying {
            drop(one.initial.take()); // a panic leaves the rest to the drop of `dying`
        }
        Ok(killed)
    }
}

impl Kill<'_> {
    /// Takes the mutex of a count that is live.
    fn lock(&mut self) -> Result<(), KillError> {
        let mode = self.refs.cold.mode.lock();
        if self.refs.is_dying() {
            return Err(KillError::AlreadyDying);
        }
        self.mode = Some(mode);
        Ok(())
    }
}

/// Closes and folds all of them, and gives the mutexes back.
fn close_all(dying: &mut [Kill<'_>]) {
    let mut barrier = false;
    for Kill { refs, mode, .. } in &mut *dying {
        barrier |= mode.as_mut().is_some_and(|mode| refs.close_gate(mode));
    }
    if barrier {
        switch::barrier();
    }
    for Kill { refs, mode, initial, .. } in dying {
        let Some(mut mode) = mode.take() else { continue };
        // Ordering: AcqRel, as in `kill_and_confirm`.
        refs.cold.atomic.fetch_add(refs.fold(&mut mode) + DEAD, Ordering::AcqRel);
        *initial = Some(Reference { refs });
    }
}
