//! The facade itself: locks, conditions, quarantine, virtual CPUs.

use std::sync::atomic::{AtomicUsize as Uncounted, Ordering};

use offlock_sync::CpuId;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{
    Arc, Condvar, Futex, Mutex, check, fence, is_planted, model, order, step, thread,
    virtual_cpu as cpu,
};

use super::beside;

/// A count that is read and written in two steps, so that only the lock makes it right.
#[test]
fn a_mutex_excludes() {
    model(|| {
        let shared = Arc::new((Mutex::new(()), AtomicU64::new(0)));
        let add = |shared: &(Mutex<()>, AtomicU64)| {
            let held = (!is_planted("add: without the lock")).then(|| shared.0.lock());
            // Ordering: Relaxed here and below; the mutex orders them.
            let seen = shared.1.load(Ordering::Relaxed);
            shared.1.store(seen + 1, Ordering::Relaxed);
            drop(held);
        };
        let other = beside(&shared, add);
        add(&shared);
        other.join().unwrap();
        assert_eq!(shared.1.load(Ordering::Relaxed), 2);
    });
}

/// `try_lock` refuses while the mutex is held, by whomever, and never else.
#[test]
fn try_lock_refuses_exactly_while_held() {
    model(|| {
        let mutex = Arc::new(Mutex::new(0));
        let other = beside(&mutex, |mutex| *mutex.lock() += 1);
        let before = mutex.try_lock().map(|mut value| {
            assert!(mutex.try_lock().is_none(), "held right here");
            *value += 10;
        });
        other.join().unwrap();
        let value = *mutex.try_lock().expect("no thread holds it any more");
        assert_eq!(value, if before.is_some() { 11 } else { 1 });
    });
}

/// A flag set under the lock and a notification after it: the waiter returns, and the guard it
/// waited with still holds the lock. Deadlocks if the wake-up is lost.
#[test]
fn notify_one_wakes_the_waiter() {
    model(|| {
        let shared = Arc::new((Mutex::new(0), Condvar::new(), AtomicU64::new(0)));
        let giver = beside(&shared, |(mutex, ready, given)| {
            if is_planted("give: the flag is set outside the lock") {
                given.store(1, Ordering::SeqCst);
            } else {
                let mut value = mutex.lock();
                *value += 1;
                given.store(1, Ordering::SeqCst);
            }
            ready.notify_one();
            *mutex.lock() += 10;
        });
        let (mutex, ready, given) = &*shared;
        let mut value = mutex.lock();
        while given.load(Ordering::SeqCst) == 0 {
            ready.wait(&mut value);
        }
        let seen = *value;
        thread::yield_now();
        assert_eq!(*value, seen, "no thread changes it while the guard is here");
        drop(value);
        giver.join().unwrap();
    });
}

/// Both waiters return after one `notify_all`.
#[test]
fn notify_all_wakes_every_waiter() {
    model(|| {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let wait = |shared: &(Mutex<bool>, Condvar)| {
            let mut go = shared.0.lock();
            while !check!("wait: until the flag is set", *go) {
                shared.1.wait(&mut go);
            }
            assert!(*go, "the wait ends when the flag is set");
        };
        let waiters = [(); 2].map(|()| beside(&shared, wait));
        *shared.0.lock() = true;
        shared.1.notify_all();
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// Sleeps until the flag beside the futex is up.
fn sleep_until_up((futex, flag): &(Futex, AtomicU64)) {
    loop {
        let seen = futex.load();
        // Ordering: Relaxed; the futex carries it.
        if flag.load(Ordering::Relaxed) == 1 {
            return;
        }
        futex.wait(seen);
    }
}

/// A flag set before a change is seen behind it, and the change falls between no look and the sleep
/// after it. Deadlocks otherwise.
#[test]
fn a_futex_wakes_who_looked_before_the_change() {
    model(|| {
        let shared = Arc::new((Futex::new(), AtomicU64::new(0)));
        let sleeper = beside(&shared, sleep_until_up);
        // Ordering: Relaxed; the futex carries it.
        shared.1.store(1, Ordering::Relaxed);
        shared.0.advance();
        shared.0.wake_one();
        sleeper.join().unwrap();
    });
}

/// Both sleepers return after one `wake_all`.
#[test]
fn a_futex_wakes_all() {
    model(|| {
        let shared = Arc::new((Futex::new(), AtomicU64::new(0)));
        let sleepers = [(); 2].map(|()| beside(&shared, sleep_until_up));
        // Ordering: Relaxed; the futex carries it.
        shared.1.store(1, Ordering::Relaxed);
        shared.0.advance();
        shared.0.wake_all();
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    });
}

/// A node that a reader reaches under a lock and a writer unlinks under it, then frees.
#[test]
fn a_node_unlinked_under_the_lock_may_be_freed_after_it() {
    model(|| {
        let node = Box::into_raw(Box::new(Watched::new(7_u64)));
        let shared = Arc::new((Mutex::new(()), AtomicPtr::new(node)));
        let reader = beside(&shared, |(mutex, node)| {
            let held = mutex.lock();
            // Ordering: Relaxed; the mutex orders it, and carries the node.
            let node = node.load(Ordering::Relaxed);
            let held = if is_planted("read: the lock is released early") {
                drop(held);
                thread::yield_now();
                None
            } else {
                Some(held)
            };
            // SAFETY: null, or a node that cannot be unlinked before `held` goes.
            if let Some(node) = unsafe { node.as_ref() } {
                assert_eq!(**node, 7);
            }
            drop(held);
        });
        let unlink = || {
            let _held = shared.0.lock();
            // Ordering: Relaxed; the mutex orders it.
            shared.1.store(std::ptr::null_mut(), Ordering::Relaxed);
        };
        step!("free: unlink the node first", unlink());
        // SAFETY: ours from `into_raw`, freed once, and unlinked: no reader can find it.
        free(unsafe { Box::from_raw(node) });
        unlink();
        reader.join().unwrap();
    });
}

/// The last of two owners frees the node. The model fails under loom if the put is weakened to
/// Relaxed or the fence is skipped: then nothing orders one owner's read before the other's free.
#[test]
fn the_last_put_frees_after_every_read() {
    struct Counted {
        owners: AtomicUsize,
        node: *mut Watched<u64>,
    }
    // SAFETY: the node is shared for reading, and freed by the one thread that puts last.
    unsafe impl Send for Counted {}
    // SAFETY: threads that share it only read the node, until the put that sees 1, which frees it.
    unsafe impl Sync for Counted {}

    fn read_and_put(counted: &Counted) {
        // SAFETY: alive until the last put, and ours is to come.
        let node = unsafe { &*counted.node };
        assert_eq!(**node, 7);
        // Ordering: Release pairs with the fence of the last put; it carries our read.
        if counted.owners.fetch_sub(1, order!(Release, "put: after the owner's read")) == 1 {
            // Ordering: Acquire fence, pairs with the Release of every put.
            fence!(Acquire, "last put: before the free");
            // SAFETY: from `into_raw`, and only one put sees 1.
            free(unsafe { Box::from_raw(counted.node) });
        }
    }

    model(|| {
        let node = Box::into_raw(Box::new(Watched::new(7)));
        let counted = Arc::new(Counted { owners: AtomicUsize::new(2), node });
        let other = beside(&counted, read_and_put);
        read_and_put(&counted);
        other.join().unwrap();
    });
}

/// Frees a node, and returns it. Its memory is still there, in quarantine.
fn freed() -> *mut Watched<u64> {
    let node = Box::into_raw(Box::new(Watched::new(7)));
    // SAFETY: from `into_raw`.
    free(unsafe { Box::from_raw(node) });
    node
}

/// A use that comes after the free in every schedule: the value is dropped, and the canary says so.
#[test]
#[should_panic(expected = "use after free: the canary is dead")]
fn a_use_after_free_is_caught() {
    model(|| {
        // SAFETY: none; this is the bug.
        let node = unsafe { &*freed() };
        let _late = **node;
    });
}

#[test]
#[should_panic(expected = "free after free: the canary is dead")]
fn a_double_free_is_caught() {
    // SAFETY: none; this is the bug.
    model(|| free(unsafe { Box::from_raw(freed()) }));
}

/// `free` drops the value then and there, and once; what is left of it is poison.
#[test]
fn free_drops_the_value_once_and_keeps_the_memory() {
    static DROPS: Uncounted = Uncounted::new(0);

    struct Dropped(u64);
    impl Drop for Dropped {
        fn drop(&mut self) {
            assert_eq!(self.0, 7, "a second drop would find poison");
            DROPS.fetch_add(1, Ordering::Relaxed);
        }
    }

    model(|| {
        let before = DROPS.load(Ordering::Relaxed);
        let node = Box::into_raw(Box::new(Watched::new(Dropped(7))));
        // SAFETY: ours from `into_raw`, and alive.
        let watched = unsafe { &*node };
        let value: *const u64 = &watched.0;
        // SAFETY: ours from `into_raw`.
        free(unsafe { Box::from_raw(node) });
        assert_eq!(DROPS.load(Ordering::Relaxed), before + 1);
        // SAFETY: quarantine keeps the memory until the next run, and any bytes are a `u64`.
        assert_eq!(unsafe { value.read() }, 0xdbdb_dbdb_dbdb_dbdb);
    });
}

/// Each thread of a model is on the CPU it was put on, whatever the others do.
#[test]
fn a_virtual_cpu_belongs_to_its_thread() {
    model(|| {
        assert_eq!(cpu::possible(), 2);
        cpu::set_current(CpuId::new(1));
        let other = thread::spawn(|| {
            assert_eq!(cpu::current(), CpuId::new(0), "a new thread starts on CPU 0");
            thread::yield_now();
            assert_eq!(cpu::current(), CpuId::new(0));
        });
        thread::yield_now();
        assert_eq!(cpu::current(), CpuId::new(1));
        cpu::set_current(CpuId::new(0));
        assert_eq!(cpu::current(), CpuId::new(0), "moved");
        other.join().unwrap();
    });
}

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("add: without the lock", "facade::a_mutex_excludes"),
    ("condvar: wake all", "facade::notify_all_wakes_every_waiter"),
    ("condvar: wake one", "facade::notify_one_wakes_the_waiter"),
    ("give: the flag is set outside the lock", "facade::notify_one_wakes_the_waiter"),
    ("free: unlink the node first", "facade::a_node_unlinked_under_the_lock_may_be_freed_after_it"),
    ("futex: the condition has changed", "facade::a_futex_wakes_who_looked_before_the_change"),
    ("futex: no change", "facade::a_futex_wakes_who_looked_before_the_change"),
    ("futex: wake all", "facade::a_futex_wakes_all"),
    ("last put: before the free", "facade::the_last_put_frees_after_every_read"),
    ("put: after the owner's read", "facade::the_last_put_frees_after_every_read"),
    ("free: mark the node as dead", "facade::a_double_free_is_caught"),
    ("free: mark the node as dead", "facade::a_use_after_free_is_caught"),
    (
        "read: the lock is released early",
        "facade::a_node_unlinked_under_the_lock_may_be_freed_after_it",
    ),
    ("wait: until the flag is set", "facade::notify_all_wakes_every_waiter"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &[
    "futex: the condition has changed",
    "last put: before the free",
    "put: after the owner's read",
];
