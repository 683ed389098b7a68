//! The table of a model, its contexts and its threads.
//!
//! Readers read a context some time after they found it. So a model fails if the drop comes before the read
//! or is not ordered after it. A second drop finds the memory in quarantine. A missing drop is missed by
//! the count.

use std::sync::atomic::AtomicUsize as Unchecked;

use offlock_percpu::CpuId;
use offlock_percpu::rcu;
use offlock_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::{self, set_current};
use offlock_sync::{Arc, model, thread, with_preemptions};
use radix_ctx::{Builder, CtxTable, GetRefError, Id, LookupError};

/// Runs a model with at least three preemptions, for models that take less than a second with them.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    with_preemptions(3, || model(f));
}

/// Runs a model with rseq sections, and then without.
pub(super) fn both_modes(f: fn()) {
    virtual_cpu::both_modes(|| model(f));
}

/// Repetitions of a short operation that must meet another short one: a random schedule needs several.
pub(super) const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// Lets other threads run for a while in a random schedule. loom runs every schedule anyway.
pub(super) fn yield_often() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

pub(super) fn on_cpu(cpu: u32) {
    set_current(CpuId::new(cpu));
}

pub(super) fn spawn<T: Send + Sync + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// A context that counts its drops, and whose memory stays in quarantine after its drop: the checker sees a
/// late read.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    drops: Arc<AtomicUsize>,
}

// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Send for Payload {}
// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Sync for Payload {}

impl Payload {
    /// Returns a pointer for a read after the reference is used for the last time.
    pub(super) fn late(&self) -> *const Watched<u64> {
        self.at
    }

    /// Reads the value of a pointer from [`late`](Self::late).
    pub(super) fn read(found: *const Watched<u64>) -> u64 {
        // SAFETY: the memory is alive, or in quarantine until the run ends.
        **unsafe { &*found }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is dropped once.
        free(unsafe { Box::from_raw(self.at) });
        // Ordering: Relaxed; the tests read it after joins.
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

/// A table, and the numbers of its contexts that were inserted, removed and dropped.
pub(super) struct Contexts {
    pub(super) table: CtxTable<Payload>,
    drops: Arc<AtomicUsize>,
    inserted: Unchecked,
    removed: Unchecked,
}

impl Contexts {
    pub(super) fn new() -> Arc<Self> {
        Self::built(|builder| builder)
    }

    pub(super) fn built(build: impl Fn(Builder<Payload>) -> Builder<Payload>) -> Arc<Self> {
        let (inserted, removed) = (Unchecked::new(0), Unchecked::new(0));
        let table = build(CtxTable::builder()).build();
        Arc::new(Self { table, drops: Arc::new(AtomicUsize::new(0)), inserted, removed })
    }

    /// Creates a table with `N` contexts, whose values are 1, 2 and so on.
    pub(super) fn with<const N: usize>() -> (Arc<Self>, [Id; N]) {
        let contexts = Self::new();
        let ids = std::array::from_fn(|n| contexts.insert(n as u64 + 1));
        (contexts, ids)
    }

    /// Inserts a context, if the limits admit one.
    pub(super) fn try_insert(&self, value: u64) -> Option<Id> {
        let at = Box::into_raw(Box::new(Watched::new(value)));
        let result = self.table.insert(Payload { at, drops: Arc::clone(&self.drops) });
        self.inserted.fetch_add(1, Ordering::Relaxed);
        if result.is_err() {
            self.removed.fetch_add(1, Ordering::Relaxed); // dropped here
        }
        result.ok()
    }

    pub(super) fn insert(&self, value: u64) -> Id {
        self.try_insert(value).expect("room for a context")
    }

    /// Inserts a context, and finds it.
    pub(super) fn insert_and_look(&self, value: u64) -> Id {
        let id = self.insert(value);
        assert_eq!(self.lookup(id), Ok(value));
        id
    }

    /// Removes a context, and reclaims as far as that needs no wait if `polls`. Another thread may have
    /// removed it.
    fn remove_once(&self, id: Id, polls: bool) {
        match self.table.remove(id) {
            Ok(removal) => {
                self.removed.fetch_add(1, Ordering::Relaxed);
                // The first look may start a grace period, which may have ended at the second one.
                let _ = polls && (removal.is_done() || removal.is_done());
            }
            Err(error) => assert_eq!(error, LookupError::Stale),
        }
    }

    pub(super) fn remove(&self, id: Id) {
        self.remove_once(id, false);
    }

    pub(super) fn remove_and_poll(&self, id: Id) {
        self.remove_once(id, true);
    }

    pub(super) fn flush(&self) {
        self.table.flush().unwrap();
    }

    /// Finds a context and reads it after a pause.
    pub(super) fn lookup(&self, id: Id) -> Result<u64, LookupError> {
        let guard = rcu::pin();
        let found = self.table.get(id, &guard)?.late();
        thread::yield_now();
        yield_often();
        Ok(Payload::read(found))
    }

    /// Checks that a lookup finds this value or fails with this error.
    pub(super) fn look(&self, id: Id, value: u64, missing: LookupError) {
        match self.lookup(id) {
            Ok(found) => assert_eq!(found, value),
            Err(error) => assert_eq!(error, missing),
        }
    }

    /// Takes a reference, reads the context late, and drops the reference.
    pub(super) fn hold(&self, id: Id, value: u64) {
        match self.table.get_ref(id) {
            Ok(context) => {
                let found = context.late();
                thread::yield_now();
                yield_often();
                assert_eq!(Payload::read(found), value);
                drop(context);
            }
            Err(error) => assert_eq!(error, GetRefError::Lookup(LookupError::Stale)),
        }
    }

    pub(super) fn dropped(&self) -> usize {
        self.drops.load(Ordering::Relaxed)
    }

    pub(super) fn drops(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.drops)
    }

    /// Checks that each removed context was dropped once, and the others are live. No other thread uses the
    /// table.
    pub(super) fn end(&self) {
        self.flush();
        let removed = self.removed.load(Ordering::Relaxed);
        let live = self.inserted.load(Ordering::Relaxed) - removed;
        assert_eq!(self.dropped(), removed);
        assert_eq!((self.table.len(), self.table.stats().pending), (live, 0));
        self.table.validate();
    }
}

/// Runs `there` on another thread beside `here`, in a table with `N` contexts whose values are 1, 2 and so on.
pub(super) fn race<const N: usize>(
    there: impl FnOnce(&Contexts, [Id; N]) + Send + 'static,
    here: impl FnOnce(&Contexts, [Id; N]),
) {
    let (contexts, ids) = Contexts::with();
    let other = spawn(&contexts, move |contexts| there(contexts, ids));
    here(&contexts, ids);
    other.join().unwrap();
    contexts.end();
}

/// Checks that a thread in which `there` returns true sees what came before `here`.
///
/// What `there` owns is dropped after the look, because the drop of a reference orders more than the look.
pub(super) fn carries(there: impl Fn() -> bool + Send + 'static, here: impl FnOnce()) {
    let done = Arc::new(AtomicBool::new(false));
    let other = thread::spawn({
        let done = Arc::clone(&done);
        move || {
            if there() {
                assert!(done.load(Ordering::Relaxed), "what came before is not seen");
            }
        }
    });
    done.store(true, Ordering::Relaxed);
    here();
    other.join().unwrap();
}
