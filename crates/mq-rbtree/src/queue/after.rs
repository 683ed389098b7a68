//! What is done after the unlock: threads and tasks woken, notifications made.

use std::any::Any;
use std::mem::{self, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use percpu::panics::drop_payload;
use percpu::sync::{Arc, step};

use crate::event::Bell;
use crate::waiter::Wake;

/// Most wakes of one section of the lock; whoever has more to wake locks again.
const MOST: usize = 4;

/// A notification: called once.
pub(crate) type Notification = Box<dyn FnOnce() + Send>;

/// Collected under the lock, declared before its guard: what a panic keeps from being run is run when
/// it is dropped, after the unlock as well. Empty it costs nothing.
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
    /// The first of a waker or notification.
    panic: Option<Box<dyn Any + Send>>,
    /// Of a comparison under the lock that is somebody else's: only to be dropped.
    discarded: Option<Box<dyn Any + Send>>,
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
        if !self.any {
            return true;
        }
        let tasks = self.tasks();
        tasks.count < MOST && tasks.discarded.is_none()
    }

    /// There is room.
    pub(crate) fn wake(&mut self, wake: Option<Wake>) {
        if wake.is_some() {
            let tasks = self.tasks();
            tasks.wakes[tasks.count] = wake;
            tasks.count += 1;
        }
    }

    /// Keeps what must be dropped after the unlock. There is room.
    pub(crate) fn discard(&mut self, panic: Box<dyn Any + Send>) {
        self.tasks().discarded = Some(panic);
    }

    /// Has the caller's own panic go on after the unlock.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_panic(&mut self, panic: Box<dyn Any + Send>) {
        self.tasks().panic = Some(panic);
    }

    /// Whether a panic is to go on.
    pub(crate) fn panics(&mut self) -> bool {
        self.any && self.tasks().panic.is_some()
    }

    /// That panic.
    pub(crate) fn take_panic(&mut self) -> Option<Box<dyn Any + Send>> {
        if self.any { self.tasks().panic.take() } else { None }
    }

    pub(crate) fn set_notification(&mut self, notification: Option<Notification>) {
        self.tasks().notification = notification;
    }

    pub(crate) fn ring(&mut self, which: usize, bell: Arc<Bell>) {
        self.tasks().bells[which] = Some(bell);
    }

    /// Asks for another section of the lock.
    pub(crate) fn come_again(&mut self) {
        step!("wakes: another section for the rest", self.again = true);
    }

    /// Does it all. The lock is not held. Returns whether it must be locked again.
    ///
    /// What panics keeps nothing else from being done; the panic goes on by [`go_on`](Self::go_on), or when
    /// `self` is dropped.
    #[inline(always)]
    pub(crate) fn run(&mut self) -> bool {
        if self.any {
            self.run_all();
        }
        mem::take(&mut self.again)
    }

    /// Lets a panic of what was done go on.
    #[inline(always)]
    pub(crate) fn go_on(&mut self) {
        if self.any {
            self.go_on_with_any();
        }
    }

    #[cold]
    #[inline(never)]
    fn go_on_with_any(&mut self) {
        if let Some(panic) = self.tasks().panic.take() {
            resume_unwind(panic);
        }
    }

    #[cold]
    #[inline(never)]
    fn run_all(&mut self) {
        let tasks = mem::take(self.tasks());
        let Tasks { wakes, notification, bells, mut panic, mut discarded, count: _ } = tasks;
        for bell in bells.into_iter().flatten() {
            bell.ring();
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
        self.tasks().panic = panic;
    }

    /// Does what was collected before a panic under the lock, and lets a panic of its own go on.
    #[cold]
    #[inline(never)]
    fn end(&mut self) {
        self.run_all();
        let panic = self.tasks().panic.take();
        // SAFETY: written, as `any` says; nobody uses it any more.
        unsafe { self.tasks.assume_init_drop() };
        if let Some(panic) = panic {
            if !std::thread::panicking() {
                resume_unwind(panic);
            }
            drop_payload(panic);
        }
    }
}

impl Drop for After {
    #[inline(always)]
    fn drop(&mut self) {
        if self.any {
            self.end();
        }
    }
}
