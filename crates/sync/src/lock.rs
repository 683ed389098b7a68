//! The lock interface of `parking_lot`, over the locks of `std` or of a model checker.
//!
//! For the models, and for locks that a memory allocator may reach: `parking_lot` allocates when a
//! thread first waits, `std` does not. Poison is ignored: each data structure says what a panic
//! leaves behind, and a model fails on the panic itself.

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};

use super::imp::std_shaped;
use super::label::step;
use crate::const_fn;

/// A mutual exclusion lock: `std`'s, or the model checker's.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std_shaped::Mutex<T>);

/// Access to the value of a locked [`Mutex`]; unlocks on drop.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    /// `None` only during [`Condvar::wait`] and [`Condvar::wait_for`], which borrow the guard
    /// mutably.
    held: Option<std_shaped::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    const_fn! {
        /// Creates an unlocked mutex.
        #[track_caller]
        pub const fn new(value: T) -> Self {
            Self(std_shaped::Mutex::new(value))
        }
    }

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
        match self.0.try_lock() {
            Ok(held) => Some(MutexGuard { held: Some(held) }),
            Err(TryLockError::Poisoned(poison)) => {
                Some(MutexGuard { held: Some(poison.into_inner()) })
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the value without locking: `&mut self` proves that no guard exists.
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

/// A condition variable: `std`'s, or the model checker's.
#[derive(Debug, Default)]
pub struct Condvar(std_shaped::Condvar);

impl Condvar {
    const_fn! {
        /// Creates a condition variable without waiting threads.
        #[track_caller]
        pub const fn new() -> Self {
            Self(std_shaped::Condvar::new())
        }
    }

    /// Unlocks, blocks until a notification, and locks again. May wake without a notification.
    #[track_caller]
    #[inline]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.held.take().expect(HELD);
        guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits like [`wait`](Self::wait), but at most for `timeout`.
    ///
    /// A model has no clock, so the timeout never ends the wait there.
    #[track_caller]
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: std::time::Duration) {
        #[cfg(not(offlock_model))]
        {
            let held = guard.held.take().expect(HELD);
            let woken = self.0.wait_timeout(held, timeout);
            guard.held = Some(woken.unwrap_or_else(PoisonError::into_inner).0);
        }
        #[cfg(offlock_model)]
        {
            let _ = timeout;
            self.wait(guard);
        }
    }

    /// Wakes one waiting thread, if there is one.
    #[track_caller]
    #[inline]
    pub fn notify_one(&self) {
        step!("condvar: wake one", self.0.notify_one());
    }

    /// Wakes every waiting thread.
    #[track_caller]
    #[inline]
    pub fn notify_all(&self) {
        step!("condvar: wake all", self.0.notify_all());
    }
}
