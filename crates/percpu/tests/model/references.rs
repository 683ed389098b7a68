//! A per-CPU reference count, compared with a flag and a number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use offlock_percpu::{KillError, PercpuRef, Reference};

/// Counts the calls of the release closure of one object.
#[derive(Clone, Default)]
pub(super) struct Released(Arc<AtomicUsize>);

impl Released {
    pub(super) fn counted(&self) -> PercpuRef {
        let Self(count) = self.clone();
        PercpuRef::new(move || _ = count.fetch_add(1, Relaxed))
    }
}

/// The model of a [`PercpuRef`].
pub(super) struct References<'a> {
    refs: &'a PercpuRef,
    released: Released,
    held: Vec<Reference<'a>>,
    killed: bool,
}

impl<'a> References<'a> {
    pub(super) fn new(refs: &'a PercpuRef, released: &Released) -> Self {
        Self { refs, released: released.clone(), held: Vec::new(), killed: false }
    }

    pub(super) fn step(&mut self, what: u8, a: u8) {
        match what {
            0 => {
                let got = self.refs.try_get();
                assert_eq!(got.is_some(), !self.killed, "a get succeeds exactly while live");
                self.held.extend(got);
            }
            1 if a.is_multiple_of(8) => self.held.extend(self.held.last().cloned()),
            1 => self.put(usize::from(a)),
            _ => self.kill(),
        }
        self.check();
    }

    fn put(&mut self, which: usize) {
        if !self.held.is_empty() {
            drop(self.held.swap_remove(which % self.held.len()));
        }
    }

    fn kill(&mut self) {
        let want = if self.killed { Err(KillError::AlreadyDying) } else { Ok(()) };
        assert_eq!(self.refs.kill(), want);
        self.killed = true;
    }

    fn check(&self) {
        let zero = self.killed && self.held.is_empty();
        assert_eq!(self.refs.is_zero(), zero);
        assert_eq!(self.released.0.load(Relaxed), usize::from(zero), "one release");
    }

    /// Kills the object, puts all references, and checks that it was released once.
    pub(super) fn end(mut self) {
        self.kill();
        while !self.held.is_empty() {
            self.check();
            self.put(0);
        }
        self.check();
    }
}
