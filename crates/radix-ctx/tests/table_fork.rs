//! Tables in a fork child: of a parent that was at rest, and of one whose other threads were not.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/child.rs"]
mod child;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, LookupError, WaitError};

use child::in_child;

/// One fork at a time: another test's threads are not to be in the middle of things.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    println!("{}", percpu::capabilities());
    rcu::barrier().unwrap();
    turn
}

#[test]
fn inv19_the_child_of_a_quiet_parent_uses_the_table_on() {
    let _alone = alone();
    let table = CtxTable::builder().max_contexts(300).build().unwrap();
    let ids: Vec<Id> = (0..200).map(|value| table.insert(value).unwrap()).collect();
    let held = table.get_ref(ids[3]).unwrap();
    table.remove(ids[4]).unwrap();
    assert!(in_child(|| {
        assert!(ids.iter().enumerate().all(|(i, id)| i == 4 || table.with(*id, |v| *v) == Ok(i)));
        assert_eq!(table.with(ids[4], |_| ()), Err(LookupError::Stale));
        table.flush().unwrap();
        let id = table.insert(7).unwrap();
        assert_eq!((id.index(), id.generation()), (4, 2));
        table.remove(id).unwrap().wait().unwrap();
        table.remove(ids[3]).unwrap();
        table.flush().unwrap();
        assert_eq!((table.stats().referenced, *held), (1, 3));
        drop(held.clone());
        table.validate();
        for id in &ids[5..] {
            table.remove(*id).unwrap();
        }
        table.flush().unwrap();
        table.validate();
        table.len() == 3
    }));
    assert_eq!(table.len(), 199, "the parent's is its own");
    table.remove(ids[3]).unwrap();
    drop(held);
    assert_eq!(table.close_all(), Ok(198));
}

/// A context whose drop waits until it may end.
struct Slow(Arc<(AtomicBool, AtomicBool)>);

impl Drop for Slow {
    fn drop(&mut self) {
        self.0.0.store(true, Relaxed);
        while !self.0.1.load(Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Another thread reclaims at the moment of the fork: nobody in the child will end that.
#[test]
fn inv19_a_child_does_not_wait_for_a_reclaimer_that_it_does_not_have() {
    let _alone = alone();
    let table = Arc::new(CtxTable::new());
    let state = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
    let slow = table.insert(Slow(Arc::clone(&state))).unwrap();
    let quick = || Slow(Arc::new((AtomicBool::new(false), AtomicBool::new(true))));
    let other = table.insert(quick()).unwrap();
    let reclaimer = thread::spawn({
        let table = Arc::clone(&table);
        move || {
            table.remove(slow).unwrap();
            table.flush().unwrap();
        }
    });
    while !state.0.load(Relaxed) {
        thread::yield_now();
    }
    let held = in_child(|| {
        assert!(matches!(table.flush(), Err(WaitError::Forked(_))));
        // Also a thread of the child's, which may get the id of the one that is not there.
        let flushed = thread::scope(|scope| scope.spawn(|| table.flush()).join().unwrap());
        assert!(matches!(flushed, Err(WaitError::Forked(_))), "{flushed:?}");
        assert!(table.contains(other) && !table.contains(slow));
        let removal = table.remove(other).unwrap();
        let timeout = Duration::from_millis(20);
        assert!(matches!(removal.wait_timeout(timeout), Err(WaitError::Forked(_))));
        assert!(matches!(removal.wait(), Err(WaitError::Forked(_))));
        assert!(matches!(table.close_all(), Err(WaitError::Forked(_))));
        assert_eq!(table.poll(), 0);
        let id = table.insert(quick()).unwrap(); // there is room
        table.get_ref(id).is_ok() && table.with(id, |_| ()).is_ok()
    });
    state.1.store(true, Relaxed);
    reclaimer.join().unwrap();
    assert!(held);
    table.flush().unwrap();
    table.validate();
    assert_eq!(table.len(), 1);
}

/// Another thread's reference, which nobody puts in the child.
#[test]
fn inv19_a_child_does_not_wait_for_a_reference_that_nobody_puts() {
    let _alone = alone();
    let table = CtxTable::builder().max_index(0).build().unwrap();
    let id = table.insert(5).unwrap();
    let context = table.get_ref(id).unwrap();
    let (tell, told) = mpsc::channel();
    let waiter = thread::spawn(move || {
        tell.send(()).unwrap();
        CtxRef::wait_until(&context, |_| None::<()>) // inside of the waiters
    });
    told.recv().unwrap();
    thread::sleep(Duration::from_millis(20));
    assert!(in_child(|| {
        let removal = table.remove(id).unwrap();
        assert!(matches!(removal.wait(), Err(WaitError::Forked(_))));
        assert!(table.insert_wait(6).unwrap_err().errno() == libc::EOWNERDEAD);
        !table.contains(id)
    }));
    table.remove(id).unwrap().wait().unwrap();
    assert_eq!(waiter.join().unwrap(), Err(WaitError::Removed));
}

/// Forks at any moment: whatever the child is told, it must be told, and what it has is sound.
#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv19_fork_storm_beside_inserts_and_removals() {
    let _alone = alone();
    let table = CtxTable::new();
    let permanent: Vec<Id> = (0..100).map(|value| table.insert(value).unwrap()).collect();
    let stop = AtomicBool::new(false);
    let rounds = AtomicUsize::new(0);
    let until = std::time::Instant::now() + testkit::stress::stress_time(2);
    let mut forks = 0;
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let ids: Vec<Id> = (0..50).map(|v| table.insert(v).unwrap()).collect();
                    drop(table.get_ref(ids[7]).unwrap());
                    ids.iter().for_each(|id| _ = table.remove(*id).unwrap());
                    table.poll();
                    rounds.fetch_add(1, Relaxed);
                }
            });
        }
        let mut held = true;
        while held && testkit::stress::keep_running(until, || forks > 3 && rounds.load(Relaxed) > 3)
        {
            forks += 1;
            held = in_child(|| {
                for (value, id) in permanent.iter().enumerate() {
                    assert_eq!(table.with(*id, |v| *v), Ok(value));
                }
                let inserted = table.insert(1_000);
                if let Ok(id) = inserted {
                    assert_eq!(table.with(id, |v| *v), Ok(1_000));
                    drop(table.get_ref(id));
                    table.remove(id).unwrap();
                    assert_eq!(table.with(id, |_| ()), Err(LookupError::Stale));
                }
                let _ = table.flush();
                table.remove(permanent[5]).unwrap();
                let _ = table.close_all();
                !table.contains(permanent[5])
            });
        }
        stop.store(true, Relaxed);
        assert!(held, "child {forks}");
    });
    println!("{forks} forks during {rounds:?} rounds");
    assert!(forks > 3 && rounds.into_inner() > 3);
    table.flush().unwrap();
    table.validate();
    assert_eq!(table.len(), 100);
}
