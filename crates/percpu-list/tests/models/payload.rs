//! The values that the models put on lists. The checker sees every read of one, even
//! after its drop, and the drops are counted.

use offlock_percpu::CpuId;
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::set_current;
use offlock_sync::{Arc, model, thread, with_preemptions};

pub(super) const ZERO: CpuId = CpuId::new(0);
pub(super) const ONE: CpuId = CpuId::new(1);

/// The number of payloads that were dropped in a run.
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
        // Ordering: Relaxed; the joins order the drops before this load.
        self.0.load(Ordering::Relaxed)
    }
}

/// A value. A read after its drop, a read that is not ordered with the drop, and a second drop fail
/// the model.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    drops: Drops,
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
        // Ordering: Relaxed; the joins order it before the load in `count`.
        self.drops.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs a model with at least three preemptions, for models that take less than a second with them.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    with_preemptions(3, || model(f));
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
pub(super) fn spawn_on<R: Send + 'static>(
    cpu: CpuId,
    f: impl FnOnce() -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    thread::spawn(move || {
        set_current(cpu);
        f()
    })
}
