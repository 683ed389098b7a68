//! What is done after the unlock: threads and tasks woken, notifications made.

use std::any::Any;
use std::mem::{self, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use percpu::panics::drop_payload;
use percpu::sync::{Arc, step};

use crate::event::EventNotifier;
use crate::waiter::Wake;

/// Most wakes of one section of the lock; whoever has more to wake locks again.
const MAX_WAKES: usize = 4;

/// A notification: called once.
pub(crate) type Notification = Box<dyn FnOnce() + Send>;

/// Collected under the lock, declared before its guard: what a panic keeps from being run is run when
/// it is dropped, after the unlock as well. Empty it costs nothing.
pub(crate) struct Deferred {
    /// Whether there is something in `actions`, which is written then.
    initialized: bool,
    /// Something under the lock can go on that found no room here.
    another_section: bool,
    actions: MaybeUninit<Actions>,
}

#[derive(Default)]
struct Actions {
    wakes: [Option<Wake>; MAX_WAKES],
    count: usize,
    notification: Option<Notification>,
    notifiers: [Option<Arc<EventNotifier>>; 2],
    /// The first of a waker or notification.
    panic: Option<Box<dyn Any + Send>>,
    /// Of a comparison under the lock that is somebody else's: only to be dropped.
    discarded: Option<Box<dyn Any + Send>>,
}

impl Deferred {
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { initialized: false, another_section: false, actions: MaybeUninit::uninit() }
    }

    fn actions(&mut self) -> &mut Actions {
        if !self.initialized {
            self.actions.write(Actions::default());
            self.initialized = true;
        }
        // SAFETY: written above, or before `initialized` was set.
        unsafe { self.actions.assume_init_mut() }
    }

    /// Whether there is room for one more wake.
    pub(crate) fn has_room(&mut self) -> bool {
        if !self.initialized {
            return true;
        }
        let actions = self.actions();
        actions.count < MAX_WAKES && actions.discarded.is_none()
    }

    /// There is room.
    pub(crate) fn wake(&mut self, wake: Option<Wake>) {
        if wake.is_some() {
            let actions = self.actions();
            actions.wakes[actions.count] = wake;
            actions.count += 1;
        }
    }

    /// Keeps what must be dropped after the unlock. There is room.
    pub(crate) fn discard(&mut self, panic: Box<dyn Any + Send>) {
        self.actions().discarded = Some(panic);
    }

    /// Has the caller's own panic go on after the unlock.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_panic(&mut self, panic: Box<dyn Any + Send>) {
        self.actions().panic = Some(panic);
    }

    /// Whether a panic is to go on.
    pub(crate) fn panics(&mut self) -> bool {
        self.initialized && self.actions().panic.is_some()
    }

    /// That panic.
    pub(crate) fn take_panic(&mut self) -> Option<Box<dyn Any + Send>> {
        if self.initialized { self.actions().panic.take() } else { None }
    }

    pub(crate) fn set_notification(&mut self, notification: Option<Notification>) {
        self.actions().notification = notification;
    }

    pub(crate) fn signal(&mut self, direction: usize, notifier: Arc<EventNotifier>) {
        self.actions().notifiers[direction] = Some(notifier);
    }

    /// Asks for another section of the lock.
    pub(crate) fn request_section(&mut self) {
        step!("wakes: lock again for the remaining waiters", self.another_section = true);
    }

    /// Does it all. The lock is not held. Returns whether it must be locked again.
    ///
    /// What panics keeps nothing else from being done; the panic goes on by [`resume_panic`](Self::resume_panic), or when
    /// `self` is dropped.
    #[inline(always)]
    pub(crate) fn run(&mut self) -> bool {
        if self.initialized {
            self.run_all();
        }
        mem::take(&mut self.another_section)
    }

    /// Lets a panic of what was done go on.
    #[inline(always)]
    pub(crate) fn resume_panic(&mut self) {
        if self.initialized {
            self.resume_panic_slow();
        }
    }

    #[cold]
    #[inline(never)]
    fn resume_panic_slow(&mut self) {
        if let Some(panic) = self.actions().panic.take() {
            resume_unwind(panic);
        }
    }

    #[cold]
    #[inline(never)]
    fn run_all(&mut self) {
        let actions = mem::take(self.actions());
        let Actions { wakes, notification, notifiers, mut panic, mut discarded, count: _ } =
            actions;
        for notifier in notifiers.into_iter().flatten() {
            notifier.signal();
        }
        let mut call = |call: &mut dyn FnMut()| match (catch_unwind(AssertUnwindSafe(call)), &panic)
        {
            (Ok(()), _) => {}
            (Err(caught), None) => panic = Some(caught),
            (Err(caught), Some(_)) => drop_payload(caught),
        };
        for wake in wakes.into_iter().flatten() {
            match wake {
                Wake::Thread(_) => wake.wake(),
                Wake::Task(_) => {
                    let mut wake = Some(wake);
                    call(&mut || wake.take().into_iter().for_each(Wake::wake));
                }
            }
        }
        call(&mut || drop(discarded.take()));
        let mut notification = notification;
        if notification.is_some() {
            call(&mut || notification.take().into_iter().for_each(|notify| notify()));
        }
        self.actions().panic = panic;
    }

    /// Does what was collected before a panic under the lock, and lets a panic of its own go on.
    #[cold]
    #[inline(never)]
    fn run_at_drop(&mut self) {
        self.run_all();
        let panic = self.actions().panic.take();
        // SAFETY: written, as `initialized` says; nobody uses it any more.
        unsafe { self.actions.assume_init_drop() };
        if let Some(panic) = panic {
            if !std::thread::panicking() {
                resume_unwind(panic);
            }
            drop_payload(panic);
        }
    }
}

impl Drop for Deferred {
    #[inline(always)]
    fn drop(&mut self) {
        if self.initialized {
            self.run_at_drop();
        }
    }
}
