//! `PercpuRef` on threads that exit, migrate or have no CPU id.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use offlock_percpu::PercpuRef;

use crate::ledger::{Account, Objects, beside_users, storm};
use crate::no_id::take_id;
use testkit::pin::{allowed_cpus, pin_to};

fn counting() -> (PercpuRef, Arc<AtomicUsize>) {
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    let refs = PercpuRef::new(move || {
        count.fetch_add(1, SeqCst);
    });
    (refs, released)
}

#[test]
fn inv07_a_second_kill_says_what_c_would() {
    let (refs, _) = counting();
    refs.kill().unwrap();
    let error: std::io::Error = refs.kill().unwrap_err().into();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
}

/// References taken on one CPU and put on another, by threads that end before the kill.
#[test]
fn inv15_exited_threads_leave_the_count_right() {
    let (refs, released) = counting();
    let cpus = allowed_cpus();
    let on = |cpu: usize, f: &(dyn Fn() + Sync)| {
        thread::scope(|scope| {
            scope.spawn(|| {
                pin_to(&[cpu]);
                f();
            });
        });
    };
    for round in 0..20 {
        on(cpus[round % cpus.len()], &|| refs.try_get().unwrap().leak());
    }
    refs.kill().unwrap();
    for round in 0..20 {
        assert_eq!(released.load(SeqCst), 0);
        // SAFETY: one of the references leaked above.
        on(cpus[(round + 1) % cpus.len()], &|| unsafe { PercpuRef::put(&refs) });
    }
    assert_eq!(released.load(SeqCst), 1);
}

/// A put in the destructor of a thread-local variable, late in the exit of the thread.
#[test]
fn inv15_a_reference_in_a_thread_local_is_put_at_exit() {
    thread_local! {
        static KEPT: RefCell<Vec<offlock_percpu::Reference<'static>>> = const { RefCell::new(Vec::new()) };
    }
    let (refs, released) = counting();
    let refs: &'static PercpuRef = Box::leak(Box::new(refs));
    for id in [true, false] {
        let keep = move || {
            if !id {
                take_id();
            }
            KEPT.with_borrow_mut(|kept| {
                kept.extend([refs.try_get(), refs.try_get()].into_iter().flatten())
            });
        };
        thread::spawn(keep).join().unwrap();
    }
    refs.kill().unwrap();
    assert_eq!(released.load(SeqCst), 1);
}

#[test]
fn inv07_a_forgotten_reference_keeps_the_count_from_zero_for_ever() {
    let (refs, released) = counting();
    std::mem::forget(refs.try_get());
    refs.kill().unwrap();
    assert!(!refs.is_zero());
    drop(refs);
    assert_eq!(released.load(SeqCst), 0);
    assert_eq!(Arc::strong_count(&released), 1, "the closure was dropped, not called");
}

#[test]
fn inv07_a_live_count_that_is_dropped_releases_nothing() {
    let (refs, released) = counting();
    drop(refs.try_get());
    drop(refs);
    assert_eq!(released.load(SeqCst), 0);
    assert_eq!(Arc::strong_count(&released), 1);
}

#[test]
fn inv11_a_panic_of_the_release_closure_reaches_whoever_put_last() {
    let refs = PercpuRef::new(|| panic!("from the closure"));
    let last = refs.try_get().unwrap();
    refs.kill().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(last))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(refs.is_zero() && refs.try_get().is_none());
}

/// Objects with one life each.
struct Alive(Vec<(PercpuRef, Arc<Account>)>);

impl Objects for Alive {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn account(&self, i: usize) -> &Account {
        &self.0[i].1
    }

    fn life(&self, _: usize) -> Option<u64> {
        Some(1)
    }

    fn try_get(&self, i: usize, life: u64, twice: bool) -> bool {
        let got = self.0[i].0.try_get().filter(|_| life == 1);
        got.map(|reference| {
            if twice {
                reference.clone().leak();
            }
            reference.leak();
        })
        .is_some()
    }

    fn put(&self, i: usize, _: u64) {
        // SAFETY: `try_get` leaked this reference.
        unsafe { PercpuRef::put(&self.0[i].0) };
    }
}

/// Kills each of `objects` new objects, and returns the numbers of gets and of objects.
fn round(objects: usize, users: u64, killers: usize) -> (u64, u64) {
    let object = |_| {
        let account = Arc::<Account>::default();
        account.begin(1);
        let released = Arc::clone(&account);
        (PercpuRef::new(move || released.end(1)), account)
    };
    let alive = Alive((0..objects).map(object).collect());
    let kill = || {
        let kill = |(refs, _): &(PercpuRef, _)| {
            thread::yield_now(); // so that users have the object meanwhile
            u64::from(refs.kill().is_ok())
        };
        thread::scope(|scope| {
            let all = &alive.0;
            let killers =
                (0..killers).map(|_| scope.spawn(move || all.iter().map(kill).sum::<u64>()));
            let killers: Vec<_> = killers.collect();
            killers.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        })
    };
    let (gets, kills) = beside_users(&alive, users, kill);
    assert_eq!(kills, objects as u64, "each object is killed once");
    for (refs, account) in &alive.0 {
        assert!(refs.is_zero() && account.has_ended(), "{refs:?}");
    }
    (gets, kills)
}

#[test]
#[ignore = "stress: five seconds of kills"]
fn stress_inv09_a_storm_of_kills_agrees_with_the_ledger() {
    storm(|_| round(64, 6, 2));
}

#[test]
#[ignore = "stress: five seconds of kills"]
fn stress_inv09_a_storm_of_kills_on_one_object_agrees_with_the_ledger() {
    storm(|_| round(1, 4, 4));
}
