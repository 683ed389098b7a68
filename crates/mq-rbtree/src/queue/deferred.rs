//! Actions deferred until after the unlock: wake-ups, signals and panics.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use offlock_sync::panics::drop_payload;
use offlock_sync::step;

use crate::core::Levels;
use crate::event::EventNotifier;
use crate::waiter::Wakeup;

/// The most wake-ups of one lock section. A thread that has more to wake locks again.
const MAX_WAKEUPS: usize = 4;

/// The payload of a panic.
pub(super) type Panic = Box<dyn Any + Send>;

/// Actions collected under the lock, to be run after the unlock.
///
/// It is declared before the lock's guard, so that an unwind drops it after the unlock; the drop
/// runs the actions. While it is empty it costs nothing.
pub(crate) struct Deferred {
    /// Whether more waiters can be served than there was room for.
    another_section: bool,
    actions: Option<Actions>,
}

#[derive(Default)]
struct Actions {
    wakeups: [Option<Wakeup>; MAX_WAKEUPS],
    count: usize,
    notifiers: [Option<Arc<EventNotifier>>; 2],
    /// The first panic of a waker, or of the caller's own code under the lock.
    /// It resumes after the unlock.
    panic: Option<Panic>,
    /// The panic of another thread's comparison, which that thread will repeat. It is only dropped.
    discarded: Option<Panic>,
}

impl Deferred {
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self { another_section: false, actions: None }
    }

    fn actions(&mut self) -> &mut Actions {
        self.actions.get_or_insert_default()
    }

    /// Returns whether there is room for another wake-up.
    pub(crate) fn has_room(&self) -> bool {
        let full = |full: &Actions| full.count == MAX_WAKEUPS || full.discarded.is_some();
        !self.actions.as_ref().is_some_and(full)
    }

    /// Adds a wake-up. The caller has checked that there is room.
    pub(crate) fn wake(&mut self, wakeup: Option<Wakeup>) {
        if wakeup.is_some() {
            let actions = self.actions();
            actions.wakeups[actions.count] = wakeup;
            actions.count += 1;
        }
    }

    /// Stores a panic to be dropped after the unlock. The caller has checked that there is room.
    pub(crate) fn discard(&mut self, panic: Panic) {
        self.actions().discarded = Some(panic);
    }

    /// Stores a panic of the caller's own code, to be resumed after the unlock.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_panic(&mut self, panic: Panic) {
        self.actions().panic = Some(panic);
    }

    /// Takes the panic that would be resumed.
    pub(crate) fn take_panic(&mut self) -> Option<Panic> {
        self.actions.as_mut()?.panic.take()
    }

    /// Drops the panic that would be resumed.
    pub(crate) fn drop_panic(&mut self) {
        self.take_panic().into_iter().for_each(drop_payload);
    }

    pub(crate) fn signal(&mut self, direction: usize, notifier: Arc<EventNotifier>) {
        self.actions().notifiers[direction] = Some(notifier);
    }

    /// Requests another lock section.
    pub(crate) fn request_section(&mut self) {
        step!("wakes: lock again for the remaining waiters", self.another_section = true);
    }

    /// Runs the actions; the lock is not held. Returns whether another lock section was requested.
    ///
    /// A panic of one action does not stop the others. It is resumed by
    /// [`resume_panic`](Self::resume_panic), or on drop.
    #[inline(always)]
    pub(crate) fn run(&mut self) -> bool {
        if self.actions.is_some() {
            self.run_all();
        }
        mem::take(&mut self.another_section)
    }

    /// Resumes the panic of an action.
    #[inline(always)]
    pub(crate) fn resume_panic(&mut self) {
        if let Some(panic) = self.take_panic() {
            resume_unwind(panic);
        }
    }

    #[cold]
    #[inline(never)]
    fn run_all(&mut self) {
        let actions = mem::take(self.actions());
        let Actions { wakeups, notifiers, mut panic, mut discarded, .. } = actions;
        for notifier in notifiers.into_iter().flatten() {
            notifier.signal();
        }
        let mut call = |call: &mut dyn FnMut()| match (catch_unwind(AssertUnwindSafe(call)), &panic)
        {
            (Ok(()), _) => {}
            (Err(caught), None) => panic = Some(caught),
            (Err(caught), Some(_)) => drop_payload(caught),
        };
        for wakeup in wakeups.into_iter().flatten() {
            match wakeup {
                Wakeup::Thread(_) => wakeup.wake(),
                Wakeup::Task(_) => {
                    let mut wakeup = Some(wakeup);
                    call(&mut || wakeup.take().into_iter().for_each(Wakeup::wake));
                }
            }
        }
        call(&mut || drop(discarded.take()));
        self.actions().panic = panic;
    }

    /// Runs the actions that were collected before a panic under the lock, and resumes their own.
    #[cold]
    #[inline(never)]
    fn run_at_drop(&mut self) {
        self.run_all();
        if let Some(panic) = self.take_panic() {
            if !std::thread::panicking() {
                resume_unwind(panic);
            }
            drop_payload(panic);
        }
    }
}

/// Runs comparisons of priorities. Returns their panic, if they are the user's.
#[inline(always)]
pub(super) fn catch_comparison<L: Levels, R>(compare: impl FnOnce() -> R) -> Result<R, Panic> {
    if L::COMPARES { catch_unwind(AssertUnwindSafe(compare)) } else { Ok(compare()) }
}

/// Drops a message whose comparison has panicked, and resumes that panic. The lock is not held.
///
/// The destructor of the message does not run in the unwind, where its own panic would end the process.
#[cold]
#[inline(never)]
pub(super) fn drop_and_unwind<M>(message: M, panic: Panic) -> ! {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(message))) {
        drop_payload(second);
    }
    resume_unwind(panic)
}

impl Drop for Deferred {
    #[inline(always)]
    fn drop(&mut self) {
        if self.actions.is_some() {
            self.run_at_drop();
        }
    }
}
