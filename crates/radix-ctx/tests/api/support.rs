//! What the tests of a table share. `tests/table_memory.rs` includes it too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use offlock_percpu::rcu;

/// Waits for the other tests of this process, because it has one RCU domain: a test would reclaim the contexts
/// that another one has removed. Drops the contexts that they have left.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    drain();
    turn
}

/// Drops every retired object. No thread holds a guard, and no other thread polls.
pub(crate) fn drain() {
    while rcu::stats().pending != 0 {
        let _panic = catch_unwind(rcu::poll); // of the drop of a context
        thread::yield_now();
    }
}

/// A context whose drop calls a function.
pub(crate) struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl OnDrop {
    pub(crate) fn call(f: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(f)))
    }

    pub(crate) fn nothing() -> Self {
        Self(None)
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(f) = self.0.take() {
            f();
        }
    }
}

/// Returns whether `f` panics.
pub(crate) fn panics<R>(f: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

/// Runs `f` while another thread holds a guard, until `f` drops the sender.
pub(crate) fn beside_reader<R>(f: impl FnOnce(mpsc::Sender<()>) -> R) -> R {
    let (pinned, is_pinned) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _guard = rcu::pin();
            pinned.send(()).unwrap();
            let _ = ended.recv();
        });
        is_pinned.recv().unwrap();
        f(end)
    })
}

/// Runs `f` on another thread. Ends the process if it does not end in time.
pub(crate) fn in_time<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || sender.send(f()));
        receiver.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| std::process::abort())
    })
}
