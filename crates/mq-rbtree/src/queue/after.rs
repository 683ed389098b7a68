//! What is done after the unlock: threads and tasks woken, notifications made.

use std::mem::{self, MaybeUninit};

use percpu::sync::Arc;

use super::readiness::Bell;
use crate::waiter::Wake;

/// Most wakes of one section of the lock; whoever has more to wake locks again.
const MOST: usize = 4;

/// A notification: called once.
pub(crate) type Notification = Box<dyn FnOnce() + Send>;

/// Collected under the lock, declared before its guard: also what is not run is dropped after the
/// unlock. Empty it costs nothing.
pub(crate) struct After {
    /// Whether there is something in `tasks`, which is written then.
    any: bool,
    /// Something under the lock can go on that found no room here.
    again: bool,
    tasks: MaybeUninit<Tasks>,
}

#[derive(Default)]
struct Tasks {
    wakes: [Option<Wake>; MOST],
    count: usize,
    notification: Option<Notification>,
    bells: [Option<Arc<Bell>>; 2],
}

impl After {
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { any: false, again: false, tasks: MaybeUninit::uninit() }
    }

    fn tasks(&mut self) -> &mut Tasks {
        if !self.any {
            self.tasks.write(Tasks::default());
            self.any = true;
        }
        // SAFETY: written above, or before `any` was set.
        unsafe { self.tasks.assume_init_mut() }
    }

    /// Whether there is room for one more wake.
    pub(crate) fn has_room(&mut self) -> bool {
        !self.any || self.tasks().count < MOST
    }

    /// There is room.
    pub(crate) fn wake(&mut self, wake: Option<Wake>) {
        if wake.is_some() {
            let tasks = self.tasks();
            tasks.wakes[tasks.count] = wake;
            tasks.count += 1;
        }
    }

    pub(crate) fn set_notification(&mut self, notification: Option<Notification>) {
        self.tasks().notification = notification;
    }

    pub(crate) fn ring(&mut self, which: usize, bell: Arc<Bell>) {
        self.tasks().bells[which] = Some(bell);
    }

    /// Asks for another section of the lock.
    pub(crate) fn come_again(&mut self) {
        self.again = true;
    }

    /// Does it all. The lock is not held. Returns whether it must be locked again.
    #[inline(always)]
    pub(crate) fn run(&mut self) -> bool {
        if self.any {
            self.run_all();
        }
        mem::take(&mut self.again)
    }

    #[cold]
    fn run_all(&mut self) {
        let tasks = mem::take(self.tasks());
        for bell in tasks.bells.into_iter().flatten() {
            bell.ring();
        }
        for wake in tasks.wakes.into_iter().flatten() {
            wake.wake();
        }
        if let Some(notification) = tasks.notification {
            notification();
        }
    }
}

impl Drop for After {
    #[inline(always)]
    fn drop(&mut self) {
        if self.any {
            // SAFETY: written, as `any` says; nobody uses it any more.
            unsafe { self.tasks.assume_init_drop() };
        }
    }
}
