//! The table of a model, its contexts and its threads.
//!
//! Readers read a context some time after they found it. So a model fails if the drop comes before the read
//! or is not ordered after it. A second drop finds the memory in quarantine. A missing drop is missed by
//! the count.

use std::sync::atomic::AtomicUsize as Unchecked;

use offlock_percpu::CpuId;
use offlock_percpu::rcu;
use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::quarantine::{Drops, Payload};
use offlock_sync::virtual_cpu::{self, set_current};
use offlock_sync::{Arc, beside, model, thoroughly, thread, yield_often};
use radix_ctx::{Builder, CtxTable, GetRefError, Id, LookupError};

/// Runs a model with rseq sections, and then without.
pub(super) fn both_modes(f: fn()) {
    virtual_cpu::both_modes(|| model(f));
}

/// Repetitions of a short operation that must meet another short one: a random schedule needs several.
pub(super) const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

pub(super) fn on_cpu(cpu: u32) {
    set_current(CpuId::new(cpu));
}

/// A table, and the numbers of its contexts that were made, removed and dropped.
pub(super) struct Contexts {
    pub(super) table: CtxTable<Payload>,
    pub(super) drops: Drops,
    removed: Unchecked,
}

impl Contexts {
    pub(super) fn new() -> Arc<Self> {
        Self::built(|builder| builder)
    }

    pub(super) fn built(build: impl Fn(Builder<Payload>) -> Builder<Payload>) -> Arc<Self> {
        let table = build(CtxTable::builder()).build();
        Arc::new(Self { table, drops: Drops::default(), removed: Unchecked::new(0) })
    }

    /// Creates a table with `N` contexts, whose values are 1, 2 and so on.
    pub(super) fn with<const N: usize>() -> (Arc<Self>, [Id; N]) {
        let contexts = Self::new();
        let ids = std::array::from_fn(|n| contexts.insert(n as u64 + 1));
        (contexts, ids)
    }

    /// Inserts a context, if the limits admit one.
    pub(super) fn try_insert(&self, value: u64) -> Option<Id> {
        let result = self.table.insert(self.drops.payload(value));
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
        Ok(found.read())
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
                assert_eq!(found.read(), value);
                drop(context);
            }
            Err(error) => assert_eq!(error, GetRefError::Lookup(LookupError::Stale)),
        }
    }

    /// Checks that each removed context was dropped once, and the others are live. No other thread uses the
    /// table.
    pub(super) fn end(&self) {
        self.flush();
        let removed = self.removed.load(Ordering::Relaxed);
        let live = self.drops.made() - removed;
        assert_eq!(self.drops.dropped(), removed);
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
    let other = beside(&contexts, move |contexts| there(contexts, ids));
    here(&contexts, ids);
    other.join().unwrap();
    contexts.end();
}

/// Runs the model of a [`race`] with at least three preemptions.
pub(super) fn race_thoroughly<const N: usize>(
    there: impl Fn(&Contexts, [Id; N]) + Copy + Send + Sync + 'static,
    here: impl Fn(&Contexts, [Id; N]) + Copy + Send + Sync + 'static,
) {
    thoroughly(move || race(there, here));
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
