//! The loops that turn an engine: the driver beside other tasks in an edge-triggered event loop such as
//! tokio's, the executor of one future, and the server of the calls of other threads.
//!
//! ```text
//!  wait for an edge ─► clear it ─► turn ─► readable? ─ no ─► wait for an edge
//!                                  ▲           └─ yes ─ run other tasks ─┐
//!                                  └─────────────────────────────────────┘
//! ```
//!
//! # Invariants
//!
//! 1. When the driver waits, the descriptor was not readable at some time after the edge was
//!    cleared. An event that makes it readable later makes another edge.
//! 2. [`serve`] ends after a turn that left nothing, by a look that finds neither a sender nor a queued
//!    call. The look comes after the turn, because the turn may have made a sender, or cleared the
//!    notification of the last one that left.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::task::{Poll, Wake, Waker};

use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::{Arc, check, order};

use crate::completion_state::Turn;
use crate::sys;

/// The state of the task that drives an engine. Only the engine's thread uses it.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    /// Set while a task drives the engine.
    driven: Cell<bool>,
    /// Set if a request was made since the last turn of the driver.
    is_wanted: Cell<bool>,
    /// The waker of the task, while it sleeps.
    waker: RefCell<Option<Waker>>,
}

impl Driver {
    pub(crate) fn is_driven(&self) -> bool {
        self.driven.get()
    }

    /// Begins or ends the time in which a task drives the engine.
    #[cfg(feature = "tokio")]
    pub(crate) fn set_driven(&self, driven: bool) {
        self.driven.set(driven);
        drop(self.replace_waker(None));
    }

    /// Asks for a turn. Returns the waker to call.
    #[must_use = "the driver may be asleep"]
    pub(crate) fn request_turn(&self) -> Option<Waker> {
        if self.is_wanted.replace(true) { None } else { self.replace_waker(None) }
    }

    /// Returns whether a turn was asked for since the last call.
    #[cfg(feature = "tokio")]
    pub(crate) fn take_request(&self) -> bool {
        self.is_wanted.take()
    }

    /// Replaces the waker. The caller drops the old one where user code may run.
    pub(crate) fn replace_waker(&self, waker: Option<Waker>) -> Option<Waker> {
        self.waker.replace(waker)
    }
}

/// Performs one round of a driver after an edge. Returns whether another round must follow without
/// an edge.
#[cfg(any(feature = "tokio", all(test, offlock_model)))]
#[must_use = "the engine may wait for another turn"]
pub(crate) fn round(
    clear_edge: impl FnOnce(),
    turn: impl FnOnce(),
    readable: impl FnOnce() -> bool,
) -> bool {
    clear_edge();
    turn();
    !check!("drive: the turn left nothing", !readable())
}

/// Polls a future that sets `woken` when it is to be polled again, until it is ready. `wait` turns the
/// engine and returns if a turn delivered something or the flag is set.
///
/// # Errors
///
/// Returns the error of `wait`.
pub(crate) fn block_on<T, E>(
    woken: &WokenFlag,
    mut poll: impl FnMut() -> Poll<T>,
    mut wait: impl FnMut() -> Result<(), E>,
) -> Result<T, E> {
    loop {
        if woken.take() {
            if let Poll::Ready(output) = poll() {
                return Ok(output);
            }
        }
        // Also if the future has woken itself, so that the I/O continues.
        wait()?;
    }
}

/// Turns an engine until it has no request and no call of another thread may come. `may_have_calls`
/// returns whether there is a sender or a queued call, by one look.
///
/// # Errors
///
/// Returns the error of `sleep`.
pub(crate) fn serve<E>(
    may_have_calls: impl Fn() -> bool,
    mut turn: impl FnMut() -> Turn,
    mut sleep: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    loop {
        let turn = turn();
        if turn.delivered > 0 {
            continue; // another turn may find more work
        }
        // Looked at after the turn: invariant 2.
        if turn.is_idle() && check!("serve: no call may come", !may_have_calls()) {
            return Ok(());
        }
        sleep()?;
    }
}

/// Whether a future was woken since it was last polled, and whether its thread sleeps.
#[derive(Debug)]
pub(crate) struct WokenFlag(AtomicU32);

/// The thread does not sleep, and the future was not woken since it was last polled.
const AWAKE: u32 = 0;
/// The thread sleeps, or is about to.
const ASLEEP: u32 = 1;
/// The future was woken.
const WOKEN: u32 = 2;

impl WokenFlag {
    /// Makes a flag that is set, because the first poll needs no wake-up.
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(WOKEN))
    }

    /// Resets the flag. Returns whether it was set.
    pub(crate) fn take(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `set`; it carries the writes of the waking
        // thread before the wake-up.
        self.0.swap(AWAKE, order!(Acquire, "take: the waking thread has written")) == WOKEN
    }

    /// Sets the flag. Returns whether the thread sleeps; the caller must then signal the kick. A wake-up
    /// by the engine's own thread, such as a completion, never needs it.
    #[must_use = "the engine may be asleep"]
    pub(crate) fn set(&self) -> bool {
        // Ordering: Release pairs with the Acquire in `take`; it carries the writes of the waking
        // thread.
        self.0.swap(WOKEN, order!(Release, "set: the waking thread has written")) == ASLEEP
    }

    /// Sleeps by `sleep`, unless the flag is set. A call of [`set`](Self::set) before the sleep prevents
    /// it, and one during the sleep signals the kick, which ends it.
    pub(crate) fn sleep<T>(&self, sleep: impl FnOnce() -> T) -> Option<T> {
        // Ordering: Relaxed, here and below; the flag is one word, so either this exchange sees the
        // wake-up or `set` sees the sleep. `take` acquires before the future is polled.
        let asleep = self.0.compare_exchange(AWAKE, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
        if !check!("sleep: the future was not woken", asleep.is_ok()) {
            return None;
        }
        let slept = sleep();
        _ = self.0.compare_exchange(ASLEEP, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
        Some(slept)
    }

    /// Returns whether the flag is set.
    pub(crate) fn is_set(&self) -> bool {
        // Ordering: Relaxed; a hint that ends the wait. `take` acquires before the future is polled.
        self.0.load(Ordering::Relaxed) == WOKEN
    }
}

/// Wakes a `block_on` from any thread: a flag and the engine's kick.
pub(crate) struct BlockOnWaker {
    pub(crate) woken: WokenFlag,
    pub(crate) kick: Arc<OwnedFd>,
}

impl Wake for BlockOnWaker {
    fn wake(self: std::sync::Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        if self.woken.set() {
            sys::signal(&self.kick);
        }
    }
}
