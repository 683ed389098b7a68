//! Operations of a device that are in flight. The device is detached once it has ended and none is left.

use std::ops::Deref;

use percpu::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::source::Source;

/// Set once the device has ended: no operation begins any more.
const ENDED: u64 = 1 << 63;

/// The count of the operations of one device.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// The count, and `ENDED`.
    state: AtomicU64,
    /// The last handle has gone: a block whose write fails is dropped.
    abandoned: AtomicBool,
}

// Ordering: AcqRel, all changes of `state`; the last of them, by whichever thread, detaches the device, and what
// the operations have done comes before that.
impl InFlight {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU64::new(0), abandoned: AtomicBool::new(false) }
    }

    fn begin(&self) -> bool {
        // Ordering: Relaxed; the exchange tells whether it is still so.
        let mut seen = self.state.load(Ordering::Relaxed);
        while seen & ENDED == 0 {
            let (order, failed) = (Ordering::AcqRel, Ordering::Relaxed);
            match self.state.compare_exchange_weak(seen, seen + 1, order, failed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Returns whether it was the last of a device that has ended.
    fn end(&self) -> bool {
        self.state.fetch_sub(1, Ordering::AcqRel) == ENDED + 1
    }

    /// Refuses operations from now on. Returns whether none is in flight, to the first caller.
    pub(crate) fn refuse(&self) -> bool {
        self.state.fetch_or(ENDED, Ordering::AcqRel) == 0
    }

    /// How many operations are in flight, as of late.
    pub(crate) fn count(&self) -> usize {
        // Ordering: Relaxed; a measure.
        (self.state.load(Ordering::Relaxed) & !ENDED) as usize
    }

    /// Whether an operation is in flight.
    pub(crate) fn any(&self) -> bool {
        self.state.load(Ordering::Acquire) & !ENDED != 0
    }

    pub(crate) fn abandon(&self) {
        // Ordering: Relaxed; a fence follows, see `Shared::let_go`.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        // Ordering: Relaxed; behind a fence, see `Shared::let_go`.
        self.abandoned.load(Ordering::Relaxed)
    }
}

/// An operation of a device: it stays attached while this lives.
#[must_use = "the operation counts while this lives"]
pub(crate) struct Operation<S: Deref<Target = Source>>(S);

impl<S: Deref<Target = Source>> Operation<S> {
    /// `None` if the device has ended.
    pub(crate) fn begin(source: S) -> Option<Self> {
        source.in_flight.begin().then(|| Self(source))
    }
}

impl<S: Deref<Target = Source>> Deref for Operation<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S: Deref<Target = Source>> Drop for Operation<S> {
    fn drop(&mut self) {
        if self.0.in_flight.end() {
            self.0.detach_now();
        }
    }
}
