//! A thread's place to sleep until another thread wakes it.

use std::cell::OnceCell;
use std::mem::ManuallyDrop;
use std::task::{RawWaker, RawWakerVTable, Waker};
use std::time::Duration;

use percpu::alloc::TryArc;
use percpu::sync::{Futex, step};

use crate::deadline::{Wait, sleep};

/// The futex of one thread. A waking thread holds a reference of its own, because the sleeping
/// thread may exit as soon as it sees the end of its wait.
#[derive(Debug)]
pub(crate) struct Parker {
    woken: Futex,
}

percpu::sync::thread_local! {
    static CURRENT: OnceCell<TryArc<Parker>> = OnceCell::default();
}

/// A thread without a parker looks again so often; a guess.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Parker {
    /// Returns the parker of the calling thread. Allocates once for each thread. Returns `None` if
    /// memory is exhausted: then [`poll`](Self::poll) serves.
    pub(crate) fn current() -> Option<TryArc<Self>> {
        let new = || TryArc::try_new(Self { woken: Futex::new() }).ok();
        let known = CURRENT.try_with(|own| {
            let parker = own.get().cloned().or_else(new)?;
            let _kept = own.set(parker.clone());
            Some(parker)
        });
        // During thread exit the thread-local variable may be gone already: then a new parker serves.
        known.unwrap_or_else(|_| new())
    }

    /// Sleeps until `is_done` returns true, or until the deadline.
    pub(crate) fn park(&self, wait: Wait, mut is_done: impl FnMut() -> bool) {
        loop {
            let seen = self.woken.load();
            step!(
                "park: check again before the sleep",
                if is_done() {
                    return;
                }
            );
            if wait.is_over() {
                return;
            }
            sleep(&self.woken, seen, wait);
        }
    }

    /// Waits as [`park`](Self::park) does, without a parker: looks again every millisecond.
    #[cold]
    pub(crate) fn poll(wait: Wait, mut is_done: impl FnMut() -> bool) {
        let futex = Futex::new(); // no other thread wakes it
        while !is_done() && !wait.is_over() {
            futex.wait_for(futex.load(), LOOK_AGAIN);
        }
    }

    /// Wakes the thread to check `is_done` again.
    pub(crate) fn unpark(&self) {
        self.woken.advance();
        self.woken.wake_one();
    }

    /// Returns a waker that wakes the thread. Allocates nothing.
    pub(crate) fn into_waker(this: TryArc<Self>) -> Waker {
        // SAFETY: each function of the table keeps the contract of its name: the data is the reference
        // that the waker owns.
        unsafe { Waker::from_raw(into_raw_waker(this)) }
    }
}

fn into_raw_waker(parker: TryArc<Parker>) -> RawWaker {
    RawWaker::new(TryArc::into_raw(parker), &VTABLE)
}

/// Returns the reference of a waker that keeps it.
///
/// # Safety
///
/// The data is that of a waker of this table, which lives on.
unsafe fn borrow(data: *const ()) -> ManuallyDrop<TryArc<Parker>> {
    // SAFETY: the data comes from `into_raw`, and this reference is not dropped.
    ManuallyDrop::new(unsafe { TryArc::from_raw(data) })
}

/// Returns the reference of a waker that ends.
///
/// # Safety
///
/// The data is that of a waker of this table, which is not used any more.
unsafe fn take(data: *const ()) -> TryArc<Parker> {
    // SAFETY: the data comes from `into_raw`, and its waker gives it up.
    unsafe { TryArc::from_raw(data) }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(
    // SAFETY: the waker that is cloned lives on.
    |data| into_raw_waker(TryArc::clone(&*unsafe { borrow(data) })),
    // SAFETY: the waker ends.
    |data| unsafe { take(data) }.unpark(),
    // SAFETY: the waker lives on.
    |data| unsafe { borrow(data) }.unpark(),
    // SAFETY: the waker ends.
    |data| drop(unsafe { take(data) }),
);
