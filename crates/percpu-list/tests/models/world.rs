//! The list of a model, its values and its threads.
//!
//! The checker sees every read of a value, even after its drop, and the drops are counted.

use offlock_percpu::CpuId;
use offlock_sync::quarantine::{Drops, Payload};
use offlock_sync::virtual_cpu::{self, set_current};
use offlock_sync::{Arc, model, thread};
use percpu_list::PerCpuList;

pub(super) const ZERO: CpuId = CpuId::new(0);
pub(super) const ONE: CpuId = CpuId::new(1);

pub(super) type Entry = percpu_list::Entry<Payload>;

/// The list of a run. The main thread begins on CPU 0.
pub(super) struct World {
    pub(super) list: PerCpuList<Payload>,
    pub(super) drops: Drops,
}

impl World {
    /// Creates a list with `N` entries in slot 0, whose values are 0, 1 and so on.
    pub(super) fn alone<const N: usize>() -> (Self, [Entry; N]) {
        let world = Self { list: PerCpuList::new(), drops: Drops::default() };
        let entries = std::array::from_fn(|n| world.add(n as u64));
        (world, entries)
    }

    /// Creates a list like [`alone`](Self::alone), to be shared with other threads.
    pub(super) fn with<const N: usize>() -> (Arc<Self>, [Entry; N]) {
        let (world, entries) = Self::alone();
        (Arc::new(world), entries)
    }

    pub(super) fn add(&self, value: u64) -> Entry {
        self.list.insert(self.drops.payload(value)).unwrap()
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
        assert_all_dropped(&self.drops);
    }
}

/// Checks that every value of a run was dropped once.
pub(super) fn assert_all_dropped(drops: &Drops) {
    assert_eq!(drops.dropped(), drops.made());
}

/// Runs a model with rseq sections, and then without.
pub(super) fn both_modes(f: impl Fn() + Send + Sync + Copy + 'static) {
    virtual_cpu::both_modes(|| model(f));
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
