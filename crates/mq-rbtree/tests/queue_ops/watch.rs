//! What the allocator is called for while a queue is locked.

use std::cell::Cell;
use std::fmt::{self, Debug, Write};
use std::ptr::NonNull;

use mq_rbtree::{Levels, Queue, QueueStats};
use testkit::alloc::Calls;

thread_local! {
    /// A queue that must not be locked during a call of the allocator.
    static PROBE: Cell<Option<NonNull<dyn Debug>>> = const { Cell::new(None) };
    /// The calls with that queue locked.
    static HELD: Cell<Calls> = const { Cell::new(Calls::NONE) };
}

/// Finds the field in a queue's `Debug` output that is there only if the lock was free.
struct FindsLen(bool);

impl Write for FindsLen {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 |= text == "len";
        Ok(())
    }
}

/// Counts a call of the allocator if the probed queue is locked: by this thread, because no other thread
/// uses it.
pub(crate) fn probe(call: Calls) {
    let Some(queue) = PROBE.take() else { return };
    let mut free = FindsLen(false);
    // SAFETY: the queue outlives the time during which it is in `PROBE`: see `watched`.
    write!(free, "{:?}", unsafe { queue.as_ref() }).unwrap();
    PROBE.set(Some(queue));
    if !free.0 {
        let Calls { allocated, freed } = HELD.get();
        HELD.set(Calls { allocated: allocated + call.allocated, freed: freed + call.freed });
    }
}

/// Runs `f`; returns the calls of the allocator that it made with the queue locked.
pub(crate) fn watched<T, L: Levels, R>(queue: &Queue<T, L>, f: impl FnOnce() -> R) -> Calls {
    /// Ends the watch, after a panic too.
    struct End;

    impl Drop for End {
        fn drop(&mut self) {
            PROBE.set(None);
        }
    }

    let _end = End;
    HELD.set(Calls::NONE);
    let probe: NonNull<dyn Debug + '_> = NonNull::from(queue);
    // SAFETY: only the lifetime changes, and the pointer is removed before the borrow of the queue
    // ends.
    PROBE.set(Some(unsafe {
        std::mem::transmute::<NonNull<dyn Debug + '_>, NonNull<dyn Debug>>(probe)
    }));
    drop(f());
    HELD.get()
}

/// Returns the queue's own count of allocations under the lock.
pub(crate) fn fallbacks(stats: &QueueStats) -> u64 {
    stats.levels.fallback + stats.slab_fallback
}
