//! What the models put on lists: a value whose reads the checker sees, however late, and whose drops
//! are counted; and an item of an intrusive list that has one.

use std::ops::Deref;
use std::pin::Pin;

use percpu::CpuId;
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, thread};
use percpu_list::{Domain, Link, linked};

pub(super) const ZERO: CpuId = CpuId::new(0);
pub(super) const ONE: CpuId = CpuId::new(1);

/// How many payloads of a run were dropped.
#[derive(Clone)]
pub(super) struct Drops(Arc<AtomicUsize>);

impl Drops {
    pub(super) fn new() -> Self {
        Self(Arc::new(AtomicUsize::new(0)))
    }

    pub(super) fn payload(&self, value: u64) -> Payload {
        Payload { at: Box::into_raw(Box::new(Watched::new(value))), drops: self.clone() }
    }

    pub(super) fn count(&self) -> usize {
        // Ordering: Relaxed; asked for behind the joins.
        self.0.load(Ordering::Relaxed)
    }
}

/// A read of it that a drop overtook, or is not ordered before, fails the model; so does a second
/// drop.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    drops: Drops,
}

// SAFETY: read by all, and freed by the drop, which has it alone: that is what the models check.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Sync for Payload {}

impl Payload {
    pub(super) fn read(&self) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*self.at }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: ours from `into_raw`; a second drop finds the canary dead.
        free(unsafe { Box::from_raw(self.at) });
        // Ordering: Relaxed; counted at the end, behind the joins.
        self.drops.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) struct Item {
    pub(super) link: Link,
    payload: Payload,
}
linked!(Item => link);

impl Item {
    pub(super) fn read(&self) -> u64 {
        self.payload.read()
    }
}

/// An item in a place of its own, which stays until the run is over.
pub(super) struct Owned(*mut Watched<Item>);

// SAFETY: a box of an item, which may be dropped anywhere.
unsafe impl Send for Owned {}
// SAFETY: walks share an item, whose fields are `Sync`.
unsafe impl Sync for Owned {}

impl Owned {
    /// One whose first home is `slot`.
    pub(super) fn new(domain: &Domain, slot: CpuId, drops: &Drops, value: u64) -> Self {
        let here = percpu::sync::cpu::current();
        set_current(slot);
        let item = Item { link: Link::new(domain), payload: drops.payload(value) };
        set_current(here);
        Self(Box::into_raw(Box::new(Watched::new(item))))
    }

    pub(super) fn pin(&self) -> Pin<&Item> {
        // SAFETY: the item is in a box, and this model does not move it out.
        unsafe { Pin::new_unchecked(self) }
    }
}

impl Deref for Owned {
    type Target = Item;

    fn deref(&self) -> &Item {
        // SAFETY: from `into_raw`, and freed by our drop only.
        unsafe { &*self.0 }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: from `into_raw`, once.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// Takes a while, so that others come in between as often as not; loom needs no help.
pub(super) fn dawdle() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

/// Runs `f` in a thread that is on `cpu`.
pub(super) fn spawn_on<R: Send + 'static>(
    cpu: CpuId,
    f: impl FnOnce() -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    thread::spawn(move || {
        set_current(cpu);
        f()
    })
}
