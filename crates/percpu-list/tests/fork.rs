//! Lists in a fork child: of a parent that was at rest, and of one whose other threads were not.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/child.rs"]
mod child;

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use percpu_list::{
    CpuId, Domain, IntrusiveList, Link, LockError, PerCpuList, Refused, RemoveError, linked,
};

use child::in_child;

const CPU: CpuId = CpuId::new(0);

struct Item(Link);
linked!(Item => 0);

/// One fork at a time: another test's threads are not to be in the middle of things.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn item(domain: &Domain) -> Pin<Box<Item>> {
    Box::pin(Item(Link::new(domain)))
}

/// Runs `f` in a child of a process in which another thread is inside the first slot of `domain`.
fn beside_a_locked_walk(domain: &Domain, f: impl FnOnce() -> bool) -> bool {
    let list = IntrusiveList::new_in(domain);
    let item = item(domain);
    list.insert_on(CPU, item.as_ref()).unwrap();
    let (inside, done) = (Barrier::new(2), AtomicBool::new(false));
    let mut held = false;
    thread::scope(|scope| {
        scope.spawn(|| {
            list.for_each(|_| {
                inside.wait();
                while !done.load(Relaxed) {
                    thread::yield_now();
                }
            })
            .unwrap();
        });
        inside.wait();
        // What `f` has is dropped after the unlock.
        let mut f = Some(f);
        held = in_child(|| f.take().is_some_and(|f| f()));
        done.store(true, Relaxed);
        drop(f);
    });
    held
}

#[test]
fn inv09_the_child_of_a_quiet_parent_uses_lists_on() {
    let _alone = alone();
    let list = PerCpuList::new();
    let entries: Vec<_> = (0..100).map(|n| list.insert(n).unwrap()).collect();
    let items = IntrusiveList::new();
    let item = item(items.domain());
    items.insert(item.as_ref()).unwrap();
    assert!(in_child(|| {
        assert_eq!(list.lock_all().unwrap().len(), 100);
        assert_eq!(list.iter().count(), 100);
        let more = list.insert(7).unwrap();
        assert!(more.remove().unwrap());
        list.validate();
        assert_eq!((items.remove(&item), items.remove(&item)), (Ok(true), Ok(false)));
        assert_eq!(list.drain().count(), 100);
        list.is_empty()
    }));
    assert_eq!(list.len(), entries.len(), "the parent's is its own");
    assert!(item.0.is_linked());
}

/// Another thread holds a slot at the moment of the fork: nobody in the child will unlock it.
#[test]
fn inv09_a_child_does_not_wait_for_a_slot_that_nobody_unlocks() {
    let _alone = alone();
    let domain = Domain::new();
    let list = Box::new(PerCpuList::new_in(&domain));
    let entries: Vec<_> = (0..3).map(|n| list.insert_on(CPU, n).unwrap()).collect();
    let items = IntrusiveList::new_in(&domain);
    let (linked, other) = (item(&domain), item(&domain));
    items.insert_on(CPU, linked.as_ref()).unwrap();
    let forked = |error: LockError| matches!(error, LockError::Forked(_));
    let held = beside_a_locked_walk(&domain, || {
        let error = list.insert_on(CPU, 7).unwrap_err();
        assert!(matches!(error.reason, Refused::Lock(LockError::Forked(_))) && error.value == 7);
        assert_eq!(error.errno(), libc::EOWNERDEAD);
        assert!(forked(list.lock_all().map(drop).unwrap_err()));
        assert!(forked(list.for_each(|_| ()).unwrap_err()));
        assert!(forked(list.iter().next().unwrap().map(drop).unwrap_err()));
        assert!(forked(list.drain().next().unwrap().map(drop).unwrap_err()));
        assert!(forked(list.flush().unwrap_err()) && forked(list.close().unwrap_err()));
        let mut entries = entries.into_iter();
        let RemoveError { entry, reason } = entries.next().unwrap().remove().unwrap_err();
        assert!(forked(reason) && entry.is_linked());
        let RemoveError { entry, reason } = entry.try_remove().unwrap_err();
        assert!(forked(reason));
        drop(entry); // deferred, for nobody
        drop(entries);
        assert_eq!(list.len(), 3);

        let error = items.insert_on(CPU, other.as_ref()).unwrap_err();
        assert!(matches!(error, Refused::Lock(LockError::Forked(_))));
        assert!(forked(items.remove(&linked).unwrap_err()));
        assert!(forked(linked.0.try_remove().unwrap_err()));
        assert!(forked(items.retain(|_| false).unwrap_err()));
        assert!(forked(items.lock_all().map(drop).unwrap_err()));
        // Another domain is as good as ever.
        drop(PerCpuList::new().insert(1).unwrap());
        drop(other);
        // What was being changed is left alone, and the rest ends.
        drop(items);
        linked.0.is_linked()
    });
    assert!(held);
}

/// The same, of the owning list itself: values in the slot are leaked, those elsewhere dropped.
#[test]
fn inv13_a_child_drops_a_list_whose_slot_was_locked() {
    let _alone = alone();
    let domain = Domain::new();
    let list = PerCpuList::new_in(&domain);
    let last = CpuId::new(percpu::sync::cpu::possible() as u32 - 1);
    let value = Arc::new(());
    for cpu in [CPU, last] {
        std::mem::forget(list.insert_on(cpu, Arc::clone(&value)).unwrap());
    }
    let held = beside_a_locked_walk(&domain, || {
        drop(list);
        Arc::strong_count(&value) == if last == CPU { 3 } else { 2 }
    });
    assert!(held);
}

const CHILD: &str = "PERCPU_LIST_CHILD";

#[test]
fn inv09_an_item_that_cannot_leave_its_list_in_a_child_ends_that() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    if std::env::var_os(CHILD).is_some() {
        let domain = Domain::new();
        let list = IntrusiveList::new_in(&domain);
        let linked = item(&domain);
        list.insert_on(CPU, linked.as_ref()).unwrap();
        let held = beside_a_locked_walk(&domain, || {
            drop(linked);
            true
        });
        assert!(!held, "the child of the child was to abort");
        // SAFETY: ends this process as its child ended.
        unsafe { libc::abort() };
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg("inv09_an_item_that_cannot_leave_its_list_in_a_child_ends_that")
        .env(CHILD, "1")
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&child.stderr);
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{says}");
    assert!(says.contains("cannot leave it: the slot was taken before a fork"), "{says}");
}

/// Forks at any moment: whatever the child is told, it must be told, and what it has is sound.
#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv13_fork_storm_beside_churn() {
    let _alone = alone();
    let until = Instant::now() + testkit::stress::stress_time(2);
    let rounds = AtomicUsize::new(0);
    let mut forks = 0;
    while testkit::stress::keep_running(until, || forks > 3 && rounds.load(Relaxed) > 3) {
        let domain = Domain::new();
        let list = Arc::new(PerCpuList::new_in(&domain));
        let kept: Vec<_> = (0..50).map(|n| list.insert(Box::new(n)).unwrap()).collect();
        let stop = AtomicBool::new(false);
        let mut held = true;
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        let some: Vec<_> =
                            (0..40).map(|n| list.insert(Box::new(n)).unwrap()).collect();
                        drop(some);
                        rounds.fetch_add(1, Relaxed);
                    }
                });
            }
            for _ in 0..20 {
                forks += 1;
                held &= in_child(|| {
                    let seen = list.iter().take_while(Result::is_ok).count();
                    assert!(kept.iter().enumerate().all(|(n, entry)| ***entry == n));
                    if let Ok(snapshot) = list.lock_all() {
                        assert!(snapshot.len() >= 50 && seen <= snapshot.len() + 120);
                    }
                    drop(list.insert(Box::new(1)));
                    // SAFETY: as below; the parent's vector is its own.
                    drop(unsafe { std::ptr::read(&kept) });
                    // SAFETY: this process has one thread, and it uses the list no more. The others'
                    // entries are forgotten ones here.
                    drop(unsafe { std::ptr::read(Arc::as_ptr(&list)) });
                    true
                });
                if !held {
                    break;
                }
            }
            stop.store(true, Relaxed);
        });
        assert!(held, "child {forks}");
        list.validate();
    }
    println!("{forks} forks during {rounds:?} rounds");
    assert!(forks > 3 && rounds.into_inner() > 3);
}
