//! A per-CPU reference count, compared with two flags and a number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use percpu::{KillError, PercpuRef, Reference, ReinitError, ResurrectError};

/// Counts the calls of the release closures of all lives of one object.
#[derive(Clone, Default)]
pub(super) struct Released(Arc<AtomicUsize>);

impl Released {
    pub(super) fn counted(&self) -> PercpuRef {
        PercpuRef::new(self.closure()).unwrap()
    }

    fn closure(&self) -> impl FnOnce() + Send + 'static + use<> {
        let Self(count) = self.clone();
        move || _ = count.fetch_add(1, Relaxed)
    }
}

/// The model of a [`PercpuRef`].
pub(super) struct References<'a> {
    refs: &'a PercpuRef,
    released: Released,
    held: Vec<Reference<'a>>,
    dying: bool,
    zero: bool,
    /// The number of lives that have ended.
    ended: usize,
}

impl<'a> References<'a> {
    pub(super) fn new(refs: &'a PercpuRef, released: &Released) -> Self {
        let released = released.clone();
        Self { refs, released, held: Vec::new(), dying: false, zero: false, ended: 0 }
    }

    pub(super) fn step(&mut self, what: u8, a: u8) {
        match what {
            0 => {
                let got = if a.is_multiple_of(2) {
                    self.refs.try_get_even_killed()
                } else {
                    self.refs.try_get()
                };
                let want = if a.is_multiple_of(2) { !self.zero } else { !self.dying };
                assert_eq!(
                    got.is_some(),
                    want,
                    "a get succeeds exactly while live, or while not zero"
                );
                self.held.extend(got);
            }
            1 if a.is_multiple_of(8) => self.held.extend(self.held.last().cloned()),
            1 => self.put(usize::from(a)),
            2 => self.change(a),
            _ if a.is_multiple_of(2) => self.refs.switch_to_atomic(),
            _ => self.refs.switch_to_percpu(),
        }
        self.check();
    }

    fn put(&mut self, which: usize) {
        if !self.held.is_empty() {
            drop(self.held.swap_remove(which % self.held.len()));
            self.settle();
        }
    }

    /// Kills, resurrects or reinitialises.
    fn change(&mut self, a: u8) {
        match a % 4 {
            0 | 1 => {
                let want = if self.dying { Err(KillError::AlreadyDying) } else { Ok(()) };
                let mut confirmed = false;
                let confirm = || {
                    assert!(self.refs.try_get().is_none() && !self.refs.is_zero());
                    confirmed = true;
                };
                assert_eq!(self.refs.kill_and_confirm(confirm), want);
                assert_eq!(confirmed, want.is_ok());
                self.dying = true;
                self.settle();
            }
            2 => {
                let want = match (self.dying, self.zero) {
                    (false, _) => Err(ResurrectError::NotDying),
                    (true, true) => Err(ResurrectError::Released),
                    (true, false) => Ok(()),
                };
                assert_eq!(self.refs.resurrect(), want);
                self.dying &= self.zero;
            }
            _ => match self.refs.reinit(self.released.closure()) {
                Ok(()) => {
                    assert!(self.zero, "a new life before the end of the last");
                    (self.dying, self.zero) = (false, false);
                }
                Err(error) => {
                    assert!(matches!(error, ReinitError::InUse(_)) && !self.zero);
                }
            },
        }
    }

    /// The put of the last reference after a kill ends the life.
    fn settle(&mut self) {
        if self.dying && self.held.is_empty() && !self.zero {
            self.zero = true;
            self.ended += 1;
        }
    }

    fn check(&self) {
        assert_eq!((self.refs.is_dying(), self.refs.is_zero()), (self.dying, self.zero));
        assert_eq!(self.released.0.load(Relaxed), self.ended, "one release for each life");
    }

    /// Kills the object, puts all references, and checks that this life ended once.
    pub(super) fn end(mut self) {
        _ = self.refs.kill();
        self.dying = true;
        self.settle();
        while !self.held.is_empty() {
            self.check();
            self.put(0);
        }
        assert!(self.zero);
        self.check();
    }
}
