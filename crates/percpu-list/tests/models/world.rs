//! The list of a model, its values and its threads.
//!
//! The checker sees every read of a value, even after its drop, and the drops are counted.

use std::sync::atomic::AtomicUsize as Unchecked;

use offlock_percpu::CpuId;
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::{self, set_current};
use offlock_sync::{Arc, model, thread, with_preemptions};
use percpu_list::PerCpuList;

pub(super) const ZERO: CpuId = CpuId::new(0);
pub(super) const ONE: CpuId = CpuId::new(1);

pub(super) type Entry = percpu_list::Entry<Payload>;

/// The numbers of payloads that were made and dropped in a run.
#[derive(Clone)]
pub(super) struct Census {
    made: std::sync::Arc<Unchecked>,
    dropped: Arc<AtomicUsize>,
}

impl Census {
    fn payload(&self, value: u64) -> Payload {
        self.made.fetch_add(1, Ordering::Relaxed);
        Payload { at: Box::into_raw(Box::new(Watched::new(value))), census: self.clone() }
    }

    pub(super) fn dropped(&self) -> usize {
        // Ordering: Relaxed; the joins order the drops before this load.
        self.dropped.load(Ordering::Relaxed)
    }

    /// Checks that every payload was dropped once.
    pub(super) fn assert_all_dropped(&self) {
        assert_eq!(self.dropped(), self.made.load(Ordering::Relaxed));
    }
}

/// A value. A read after its drop, a read that is not ordered with the drop, and a second drop fail
/// the model.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    census: Census,
}

// SAFETY: only the drop frees the value, and the models check that no thread uses it then.
unsafe impl Send for Payload {}
// SAFETY: `&Payload` only reads the value.
unsafe impl Sync for Payload {}

impl Payload {
    pub(super) fn read(&self) -> u64 {
        // SAFETY: the memory stays allocated until the end of the run: a dropped payload is in
        // quarantine, and a read of it fails the model.
        **unsafe { &*self.at }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `into_raw`, and `free` fails the model at a second drop.
        free(unsafe { Box::from_raw(self.at) });
        // Ordering: Relaxed; the joins order it before the load in `dropped`.
        self.census.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// The list of a run. The main thread begins on CPU 0.
pub(super) struct World {
    pub(super) list: PerCpuList<Payload>,
    pub(super) census: Census,
}

impl World {
    /// Creates a list with `N` entries in slot 0, whose values are 0, 1 and so on.
    pub(super) fn alone<const N: usize>() -> (Self, [Entry; N]) {
        let (made, dropped) = (std::sync::Arc::default(), Arc::new(AtomicUsize::new(0)));
        let world = Self { list: PerCpuList::new(), census: Census { made, dropped } };
        let entries = std::array::from_fn(|n| world.add(n as u64));
        (world, entries)
    }

    /// Creates a list like [`alone`](Self::alone), to be shared with other threads.
    pub(super) fn with<const N: usize>() -> (Arc<Self>, [Entry; N]) {
        let (world, entries) = Self::alone();
        (Arc::new(world), entries)
    }

    pub(super) fn payload(&self, value: u64) -> Payload {
        self.census.payload(value)
    }

    pub(super) fn add(&self, value: u64) -> Entry {
        self.list.insert(self.payload(value)).unwrap()
    }

    /// Walks the list. Reads each value while other threads may remove it.
    pub(super) fn walk(&self) -> Vec<u64> {
        let found: Vec<_> = self.list.iter().collect();
        found.iter().map(|value| value.read()).collect()
    }

    /// Drains the list, reads every value and returns their number.
    pub(super) fn drain(&self) -> usize {
        self.list.drain().map(|found| assert!(found.unwrap().read() < 2)).count()
    }

    /// Checks the list, on which are `entries` only, and that all values are dropped with them.
    pub(super) fn end<const N: usize>(&self, entries: [Entry; N]) {
        self.list.validate();
        assert_eq!(self.list.len(), N);
        drop(entries);
        self.list.validate();
        let stats = self.list.stats();
        assert_eq!((self.list.len(), stats.removals), (0, stats.adds));
        self.census.assert_all_dropped();
    }
}

/// Runs a model with at least three preemptions, for models that take less than a second with them.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    with_preemptions(3, || model(f));
}

/// Runs a model with rseq sections, and then without.
pub(super) fn both_modes(f: impl Fn() + Send + Sync + Copy + 'static) {
    virtual_cpu::both_modes(|| model(f));
}

/// Yields many times under shuttle, so that other threads often run in between. loom tries that
/// anyway.
pub(super) fn yield_often() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

/// Runs `f` in a thread on `cpu`.
pub(super) fn spawn<R: Send + 'static>(
    cpu: CpuId,
    f: impl FnOnce() -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    thread::spawn(move || {
        set_current(cpu);
        f()
    })
}

/// Runs `f` on the world in a thread on `cpu`.
pub(super) fn beside<R: Send + 'static>(
    world: &Arc<World>,
    cpu: CpuId,
    f: impl FnOnce(&World) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let world = Arc::clone(world);
    spawn(cpu, move || f(&world))
}
