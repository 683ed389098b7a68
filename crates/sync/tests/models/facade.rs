//! The facade itself: locks, conditions, quarantine, virtual CPUs.

use std::sync::atomic::{AtomicUsize as Uncounted, Ordering};

use offlock_sync::CpuId;
use offlock_sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{
    Arc, Condvar, Futex, Mutex, beside, check, fence, is_planted, model, order, step, thread,
    virtual_cpu as cpu,
};

/// A count that is read and written in two steps, so that only the lock makes it right. `try_lock`
/// refuses while the mutex is held, and never else.
#[test]
fn a_mutex_excludes() {
    fn add(count: &AtomicU64) {
        // Ordering: Relaxed here and below; the mutex orders them.
        let seen = count.load(Ordering::Relaxed);
        count.store(seen + 1, Ordering::Relaxed);
    }

    model(|| {
        let shared = Arc::new((Mutex::new(()), AtomicU64::new(0)));
        let other = beside(&shared, |(mutex, count)| {
            let _held = (!is_planted("add: without the lock")).then(|| mutex.lock());
            add(count);
        });
        let (mutex, count) = &*shared;
        let added = mutex.try_lock().map(|_held| {
            assert!(mutex.try_lock().is_none(), "held right here");
            add(count);
        });
        other.join().unwrap();
        let _held = mutex.try_lock().expect("no thread holds it any more");
        assert_eq!(count.load(Ordering::Relaxed), if added.is_some() { 2 } else { 1 });
    });
}

/// What threads sleep on until a flag is set: a condition variable, or a futex.
#[derive(Default)]
struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
    futex: Futex,
    flag: AtomicU64,
}

impl Bell {
    fn is_set(&self) -> bool {
        // Ordering: Relaxed; the lock or the futex carries it.
        self.flag.load(Ordering::Relaxed) == 1
    }

    /// Sleeps on the condition variable. The guard it waited with still holds the lock then.
    fn wait_for_ring(&self) {
        let mut rings = self.rings.lock();
        while !check!("wait: until the flag is set", self.is_set()) {
            self.rung.wait(&mut rings);
        }
        assert!(self.is_set(), "the wait ends when the flag is set");
        let seen = *rings;
        thread::yield_now();
        assert_eq!(*rings, seen, "no thread changes it while the guard is here");
    }

    /// Sets the flag under the lock, and notifies after it.
    fn ring(&self, notify: fn(&Condvar)) {
        let held =
            (!is_planted("give: the flag is set outside the lock")).then(|| self.rings.lock());
        self.flag.store(1, Ordering::Relaxed);
        drop(held);
        notify(&self.rung);
        *self.rings.lock() += 1;
    }

    /// Sleeps on the futex.
    fn wait_for_change(&self) {
        loop {
            let seen = self.futex.load();
            if self.is_set() {
                return;
            }
            self.futex.wait(seen);
        }
    }

    fn change(&self, wake: fn(&Futex)) {
        self.flag.store(1, Ordering::Relaxed);
        self.futex.advance();
        wake(&self.futex);
    }
}

/// Runs a model of so many sleepers and a thread that wakes them. Deadlocks if a wake-up is lost.
fn every_sleeper_returns(sleepers: usize, sleep: fn(&Bell), wake: fn(&Bell)) {
    model(move || {
        let bell = Arc::new(Bell::default());
        let sleepers: Vec<_> = (0..sleepers).map(|_| beside(&bell, sleep)).collect();
        wake(&bell);
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    });
}

#[test]
fn notify_one_wakes_the_waiter() {
    every_sleeper_returns(1, Bell::wait_for_ring, |bell| bell.ring(Condvar::notify_one));
}

#[test]
fn notify_all_wakes_every_waiter() {
    every_sleeper_returns(2, Bell::wait_for_ring, |bell| bell.ring(Condvar::notify_all));
}

/// A flag set before a change is seen behind it, and the change falls between no look and the sleep
/// after it.
#[test]
fn a_futex_wakes_a_thread_that_looked_early() {
    every_sleeper_returns(1, Bell::wait_for_change, |bell| bell.change(Futex::wake_one));
}

#[test]
fn a_futex_wakes_all() {
    every_sleeper_returns(2, Bell::wait_for_change, |bell| bell.change(Futex::wake_all));
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
            let held = (!is_planted("read: the lock is released early")).then_some(held);
            thread::yield_now();
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
    type Counted = (AtomicUsize, AtomicPtr<Watched<u64>>);

    fn read_and_put((owners, node): &Counted) {
        // Ordering: Relaxed; the node is older than both threads.
        let node = node.load(Ordering::Relaxed);
        // SAFETY: alive until the last put, and ours is to come.
        assert_eq!(**unsafe { &*node }, 7);
        // Ordering: Release pairs with the fence of the last put; it carries our read.
        if owners.fetch_sub(1, order!(Release, "put: after the owner's read")) == 1 {
            // Ordering: Acquire fence, pairs with the Release of every put.
            fence!(Acquire, "last put: before the free");
            // SAFETY: from `into_raw`, and only one put sees 1.
            free(unsafe { Box::from_raw(node) });
        }
    }

    model(|| {
        let node = AtomicPtr::new(Box::into_raw(Box::new(Watched::new(7))));
        let counted: Arc<Counted> = Arc::new((AtomicUsize::new(2), node));
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
