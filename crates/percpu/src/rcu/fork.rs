//! What a `fork` child finds: its registry keeps only the caller.
//!
//! `pthread_atfork` handlers take the turn and the bags before the fork and give them back on both
//! sides, so that the child's copy is whole. There every slot but the caller's is freed: the threads
//! that had them do not exist. `Send` guards are another matter: nobody knows which thread held one,
//! so the child goes on counting them all; where it would wait for one, it says
//! [`Forked`](crate::Forked).
//!
//! A child made without the handlers (a raw `clone`, `_Fork`) may find locks taken for ever: what
//! retires goes on, [`poll`](super::poll) does nothing, and what would wait says `Forked`.

use std::time::Duration;

use super::domain::{Lock, domain};
use crate::fork::Generation;
use crate::sync::native::OnceLock;
use crate::sync::native::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{thread, thread_id};

/// The generation in which the handlers ran last.
static PREPARED: AtomicU64 = AtomicU64::new(0);
/// There were `Send` guards at the fork.
static GUARDS: AtomicBool = AtomicBool::new(false);

/// Yields before a fork goes on without a lock. A guess: seconds.
const PATIENCE: u32 = 1 << 20;

unsafe extern "C" {
    // Not in libc for Linux.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

/// Registers the handlers, once.
pub(super) fn watch() {
    static WATCHED: OnceLock<()> = OnceLock::new();
    if cfg!(any(offlock_loom, offlock_shuttle)) {
        return;
    }
    WATCHED.get_or_init(|| {
        // Ordering: Relaxed, here and below; written while there is one thread, or by the one that
        // initialises.
        PREPARED.store(Generation::current().number(), Relaxed);
        // SAFETY: the handlers live as long as the program. On failure (no memory) a child is one
        // that nobody prepared, which is defined.
        unsafe { pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

unsafe extern "C" fn prepare() {
    let (domain, me) = (domain(), thread_id());
    lock_patiently(&domain.turn, me);
    domain.reclaim.lock_all(me);
}

unsafe extern "C" fn parent() {
    let (domain, me) = (domain(), thread_id());
    domain.reclaim.unlock_all(me);
    domain.turn.unlock_as(me);
}

unsafe extern "C" fn child() {
    let domain = domain();
    domain.registry.keep_only_this_thread();
    domain.reclaim.forget_other_batches();
    GUARDS.store(domain.send_guards() != 0, Relaxed);
    PREPARED.store(Generation::current().number(), Relaxed);
    // SAFETY: a handler like this one, without conditions.
    unsafe { parent() };
}

/// Takes the lock for the thread `who`, or gives up: then the child has a lock that stays taken.
pub(super) fn lock_patiently(lock: &Lock, who: u64) {
    for _ in 0..PATIENCE {
        if lock.try_lock_as(who) {
            return;
        }
        thread::yield_now();
    }
}

/// True in a fork child whose handlers did not run.
pub(super) fn is_unprepared() -> bool {
    Generation::current().number() != PREPARED.load(Relaxed)
}

/// True in a fork child that may have inherited `Send` guards of threads it does not have.
pub(super) fn may_have_lost_guards() -> bool {
    GUARDS.load(Relaxed)
}

/// All inherited guards are gone.
pub(super) fn no_lost_guards() {
    GUARDS.store(false, Relaxed);
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
pub(super) fn sleep(time: Duration) {
    thread::sleep(time);
}

#[cfg(any(offlock_loom, offlock_shuttle))]
pub(super) fn sleep(_: Duration) {
    thread::yield_now();
}
