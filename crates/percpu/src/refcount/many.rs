//! The kill of many counts with one barrier.

use super::error::KillError;
use super::percpu_ref::{DEAD, Mode, PercpuRef, Reference};
use super::switch;
use crate::error::AllocError;
use crate::sync::atomic::Ordering;
use crate::sync::std_lock::MutexGuard;
use crate::sync::step;

/// A count that [`PercpuRef::kill_many`] kills.
struct Kill<'a> {
    refs: &'a PercpuRef,
    /// The index of the count in the argument of the call.
    index: usize,
    /// The locked mode, until the count is closed.
    mode: Option<MutexGuard<'a, Mode>>,
    /// The initial reference, once the count is closed.
    initial: Option<Reference<'a>>,
}

impl PercpuRef {
    /// Kills many counts with one heavy fence, and returns how many it killed.
    ///
    /// A kill of 500 counts costs little more than a kill of a few. After this returns, every
    /// [`try_get`](Self::try_get) of each count fails. The call first closes all counts, and then
    /// drops the initial references in the order of `refs`. If an initial reference was the last
    /// one, the release closure runs; no lock is held then.
    ///
    /// `refused` is called with the index in `refs` of each count that was not killed, and the
    /// reason, before any release closure runs. Allocates. Blocks briefly while other threads
    /// change the modes of the same counts, and blocks those threads for the duration of the fence.
    ///
    /// ```
    /// use offlock_percpu::{KillError, PercpuRef};
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
    /// [`AllocError`] if memory is out. The call changes nothing then.
    ///
    /// # Panics
    ///
    /// If a release closure or `refused` panics. The call kills the remaining counts all the same.
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
        // Every thread that holds several of the mutexes locks them in order of address, so threads
        // do not wait in a circle. If a count is listed twice, its first entry is killed.
        let address = |one: &Kill| (std::ptr::from_ref(one.refs).addr(), one.index);
        step!("kill many: lock in order of address", dying.sort_unstable_by_key(address));
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
        // The mutexes are unlocked. Restores the order of `refs`.
        dying.sort_unstable_by_key(|one| one.index);
        errors.sort_unstable_by_key(|&(index, _)| index);
        errors.into_iter().for_each(|(index, why)| refused(index, why));
        let killed = dying.len();
        for one in &mut dying {
            drop(one.initial.take()); // after a panic, the drop of `dying` drops the rest
        }
        Ok(killed)
    }
}

impl Kill<'_> {
    /// Locks the mode of the count, if the count is live.
    fn lock(&mut self) -> Result<(), KillError> {
        let mode = self.refs.cold.mode.lock();
        if self.refs.is_dying() {
            return Err(KillError::AlreadyDying);
        }
        self.mode = Some(mode);
        Ok(())
    }
}

/// Closes and folds all counts, and unlocks their modes.
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
        // Ordering: AcqRel. Release pairs with the Acquire in `is_dying` and with that of the last
        // put in `put_atomic`; it carries what `fold` acquired from the holders. Acquire pairs with
        // the Release in `put_atomic`; it carries what the holders of references put there did.
        refs.cold.atomic.fetch_add(refs.fold(&mut mode) + DEAD, Ordering::AcqRel);
        *initial = Some(Reference { refs });
    }
}
