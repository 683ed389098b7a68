//! `parking_lot`'s lock interface over `std`'s locks, or a model checker's of the same shape.
//!
//! Not `parking_lot` itself: its waiting threads are listed in a table of the process, which a fork
//! child copies with the threads that it does not have, and follows into their stacks when locks
//! of its own are waited for. A futex has no such memory. Poison is ignored: what a panic leaves
//! behind is up to the structure, and a model fails on the panic itself.

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};

use super::imp::std_shaped;
use super::mutant;

/// A mutual exclusion lock, which a model checker knows.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std_shaped::Mutex<T>);

/// The right to use what a [`Mutex`] protects; unlocks on drop.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    /// `None` only inside [`Condvar::wait`], which has the guard borrowed mutably.
    held: Option<std_shaped::MutexGuard<'a, T>>,
}

/// The constructors: `const` where the locks below have such.
macro_rules! constructors {
    ($($const:tt)?) => {
        impl<T> Mutex<T> {
            /// Creates an unlocked mutex.
            #[track_caller]
            pub $($const)? fn new(value: T) -> Self {
                Self(std_shaped::Mutex::new(value))
            }
        }

        impl Condvar {
            /// Creates a condition variable nobody waits on.
            #[track_caller]
            pub $($const)? fn new() -> Self {
                Self(std_shaped::Condvar::new())
            }
        }
    };
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
constructors!(const);
#[cfg(any(offlock_loom, offlock_shuttle))]
constructors!();

impl<T> Mutex<T> {
    /// Takes the value out.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks, blocking until no other thread holds the mutex.
    #[track_caller]
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { held: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Locks if no thread holds the mutex. Never blocks.
    #[track_caller]
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        if mutant("mutex-try-lock-refuses") {
            return None;
        }
        match self.0.try_lock() {
            Ok(held) => Some(MutexGuard { held: Some(held) }),
            Err(TryLockError::Poisoned(poison)) => {
                Some(MutexGuard { held: Some(poison.into_inner()) })
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Reaches the value without locking: `&mut self` proves that nobody else can.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

const HELD: &str = "a guard outside Condvar::wait holds its lock";

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.held.as_deref().expect(HELD)
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_deref_mut().expect(HELD)
    }
}

/// A condition variable, which a model checker knows.
#[derive(Debug, Default)]
pub struct Condvar(std_shaped::Condvar);

impl Condvar {
    /// Unlocks, blocks until a notification, and locks again. It may also return without one.
    #[track_caller]
    #[inline]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.held.take().expect(HELD);
        guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    /// [`wait`](Self::wait), for `timeout` at most. No checker has time: in a model it is not over.
    #[track_caller]
    pub fn wait_timeout<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: std::time::Duration) {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        {
            let held = guard.held.take().expect(HELD);
            let woken = self.0.wait_timeout(held, timeout);
            guard.held = Some(woken.unwrap_or_else(PoisonError::into_inner).0);
        }
        #[cfg(any(offlock_loom, offlock_shuttle))]
        {
            let _ = timeout;
            self.wait(guard);
        }
    }

    /// Wakes one waiting thread, if there is one.
    #[track_caller]
    #[inline]
    pub fn notify_one(&self) {
        if mutant("condvar-notify-one-lost") {
            return;
        }
        self.0.notify_one();
    }

    /// Wakes every waiting thread.
    #[track_caller]
    #[inline]
    pub fn notify_all(&self) {
        if mutant("condvar-notify-all-wakes-one") {
            return self.0.notify_one();
        }
        self.0.notify_all();
    }
}
