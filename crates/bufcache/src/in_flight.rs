//! The count of a device's operations in flight. A device that has ended is detached after the last
//! one.

use offlock_sync::atomic::{AtomicBool, AtomicU64, Ordering};
use offlock_sync::{fence, order};

/// Set once the device has ended: no new operation begins.
const ENDED: u64 = 1 << 63;

/// The count of the operations of one device.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// The count, and `ENDED`.
    state: AtomicU64,
    /// Set when the last handle is dropped: a block whose write fails is dropped then.
    abandoned: AtomicBool,
}

// Ordering: AcqRel where an operation or the device ends. Each pairs with the later ones, so that the
// last, whose thread detaches the device, comes after all that the operations did.
impl InFlight {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU64::new(0), abandoned: AtomicBool::new(false) }
    }

    /// Counts one more operation, unless the device has ended. Lock-free.
    pub(crate) fn begin(&self) -> bool {
        // Ordering: Relaxed, all; an operation that begins needs nothing of those before it, and the
        // exchange keeps their releases going.
        let mut seen = self.state.load(Ordering::Relaxed);
        while seen & ENDED == 0 {
            let next = self.state.compare_exchange_weak(
                seen,
                seen + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match next {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Ends an operation. Returns whether it was the last one of a device that has ended.
    pub(crate) fn end(&self) -> bool {
        self.state.fetch_sub(1, order!(AcqRel, "end: the operations come before the detach"))
            == ENDED + 1
    }

    /// Refuses new operations. Returns `true` to the first caller if no operation is in flight.
    pub(crate) fn refuse(&self) -> bool {
        self.state.fetch_or(ENDED, order!(AcqRel, "refuse: the operations come before the detach"))
            == 0
    }

    /// Returns the number of operations in flight: a recent value.
    pub(crate) fn count(&self) -> usize {
        // Ordering: Relaxed; a measure.
        (self.state.load(Ordering::Relaxed) & !ENDED) as usize
    }

    /// Returns whether an operation is in flight.
    pub(crate) fn any(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `end`; it carries what the operations did.
        self.state.load(order!(Acquire, "any: the operations come before the detach")) & !ENDED != 0
    }

    /// Notes that the last handle is dropped. The caller looks for marked blocks next.
    pub(crate) fn abandon(&self) {
        // Ordering: Relaxed; the fence orders it.
        self.abandoned.store(true, Ordering::Relaxed);
        // Ordering: SeqCst, against the fence in `is_abandoned`:
        // - ours first: a write that fails finds the device abandoned, and drops its block;
        // - theirs first: the block is not marked any more, and is dropped by the caller.
        fence!(SeqCst, "abandon: the device is abandoned before the look at the marks");
    }

    /// Returns whether the last handle is dropped. A caller has taken its mark off the block before.
    pub(crate) fn is_abandoned(&self) -> bool {
        // Ordering: SeqCst, against the fence in `abandon`; see there.
        fence!(SeqCst, "is_abandoned: the mark is taken off before");
        // Ordering: Relaxed; the fence orders it.
        self.abandoned.load(Ordering::Relaxed)
    }
}
