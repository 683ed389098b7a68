//! The crate and the allocator: nothing is allocated in the steady state, and an allocation that fails is
//! reported.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Barrier;
use std::thread;

use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_percpu::{AllocError, CpuId, LgLock, PerCpu, PerCpuCounter};
use offlock_percpu::{PercpuRef, ReadWriteGate, ReinitRefused};

/// The system's allocator, which counts the calling thread's calls and may refuse it.
struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// Allocations of this size and more fail.
    static REFUSED_FROM: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn count() {
    // A thread that is ending has no thread-locals any more, and no test looks at it.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call goes to `System` as it came, or fails, which is an allocator's right; what is
// counted is in thread-locals that need no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        if REFUSED_FROM.try_with(Cell::get).is_ok_and(|from| layout.size() >= from) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promised for us.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller promised for us; `at` came from `System`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls of the allocator that `f` makes.
fn calls<R>(f: impl FnOnce() -> R) -> (u64, R) {
    let before = CALLS.get();
    let result = f();
    (CALLS.get() - before, result)
}

#[test]
fn counters_allocate_when_made_and_never_after() {
    let counter = PerCpuCounter::new();
    counter.increment(); // takes the words
    let slots = PerCpu::new(|_| Cell::new(0));
    let (calls, ()) = calls(|| {
        for n in 0..1_000 {
            counter.add(n);
            if n % 7 == 0 {
                counter.fold(offlock_percpu::current_cpu());
                slots.local().set(n);
            }
        }
    });
    assert_eq!(calls, 0);
}

#[test]
fn locks_gates_and_references_allocate_when_made_and_never_after() {
    let lock = LgLock::new(|_| 0_u64);
    let gate = ReadWriteGate::new(0_u64).unwrap();
    let refs = PercpuRef::new(|| ()).unwrap();
    let (first, last) = (CpuId::new(0), CpuId::new(lock.capacity() as u32 - 1));
    let (calls, ()) = calls(|| {
        for _ in 0..100 {
            *lock.local().unwrap() += 1;
            *lock.local_on(last).unwrap() += 1;
            if first != last {
                drop(lock.pair(last, first).unwrap());
            }
            drop(lock.global().unwrap());
            assert_eq!(*gate.read().unwrap(), *gate.try_read().unwrap());
            let mut writer = gate.write().unwrap();
            *writer += 1;
            drop(writer.downgrade());
            let held = refs.try_get().unwrap();
            drop((held.clone(), refs.try_get()));
            refs.switch_to_atomic();
            refs.switch_to_percpu();
            refs.kill().unwrap();
            refs.resurrect().unwrap();
            drop(held);
        }
        refs.kill().unwrap();
    });
    assert!(refs.is_zero());
    assert_eq!(calls, 0);
}

/// RCU asks for memory when a node is made, and once: for the thread's slot, the bags and the
/// counters of `Send` guards.
#[test]
fn readers_and_writers_under_rcu_allocate_nothing_but_nodes() {
    const NODES: u64 = 2_500; // more than a bag has
    let node = |n| Owned::new(n);
    let shared = Atomic::new(0);
    shared.store(node(1));
    drop((rcu::pin(), rcu::pin_send()));
    rcu::barrier().unwrap();

    let mut nodes: Vec<_> = (0..NODES).map(node).collect();
    let (calls, ()) = calls(|| {
        while let Some(node) = nodes.pop() {
            let guard = (rcu::pin(), rcu::pin(), rcu::pin_send());
            let found = shared.load(&guard.0);
            let old = shared.compare_exchange(found, node, &guard.2).unwrap();
            let period = rcu::start_grace_period();
            assert!(!period.poll(), "we are in the way");
            drop((old, guard)); // retires the old one
            if nodes.len() % 500 == 0 {
                rcu::poll();
                rcu::synchronize().unwrap();
                rcu::set_bounds(rcu::bounds());
                while !period.poll() {
                    thread::yield_now(); // to another test's readers
                }
                assert!(rcu::stats().grace_periods > 0);
            }
        }
        rcu::barrier().unwrap();
    });
    assert_eq!(calls, NODES, "each frees the one before, and that is all");
}

#[test]
fn what_cannot_be_allocated_is_said() {
    let _ = offlock_percpu::topology(); // not what is refused
    REFUSED_FROM.set(128);
    let slots = PerCpu::<u8>::try_new(|_| unreachable!("not called")).err();
    let lock = LgLock::<u8>::try_new(|_| unreachable!("not called")).err();
    REFUSED_FROM.set(usize::MAX);
    let errors: [Option<AllocError>; 2] = [slots, lock];
    assert!(errors.iter().all(Option::is_some), "{errors:?}");
    assert_eq!(errors[0].unwrap().errno(), libc::ENOMEM);
}

/// What was to be kept comes back where there is no memory to keep it.
#[test]
fn what_is_refused_for_want_of_memory_comes_back() {
    fn refused<R>(from: usize, f: impl FnOnce() -> R) -> R {
        REFUSED_FROM.set(from);
        let result = f();
        REFUSED_FROM.set(usize::MAX);
        result
    }
    let _ = offlock_percpu::capabilities(); // not what is refused
    const LARGE: usize = 100;
    let text = [b'x'; LARGE];
    let released = move || assert_eq!(text[7], b'x');

    let refs = refused(LARGE, || PercpuRef::new(released).map(drop));
    refs.expect_err("too large").into_inner()(); // the closure itself
    let refs = PercpuRef::new(|| ()).unwrap();
    let many = refused(0, || PercpuRef::kill_many(&[&refs], |_, _| unreachable!("not refused")));
    assert_eq!((many, refs.try_get().is_some()), (Err(AllocError::new()), true));
    refs.kill().unwrap();
    let error = refused(LARGE, || refs.reinit(released)).unwrap_err();
    assert_eq!((error.why(), error.errno()), (AllocError::new().into(), libc::ENOMEM));
    assert!(matches!(error.why(), ReinitRefused::Alloc(_)) && refs.is_zero());
    error.into_release()();

    let error = refused(LARGE, || Owned::try_new(text).map(drop)).unwrap_err();
    assert_eq!((error.0, error.errno()), (text, libc::ENOMEM));
    assert_eq!(refused(LARGE, || Atomic::try_new(text).map(drop)).unwrap_err().0, text);
    let error = refused(LARGE, || rcu::try_defer(0, released)).unwrap_err();
    assert_eq!(error.errno(), libc::ENOMEM);
    (error.0)();

    // A thread needs memory at its first pin only, and none if one that has ended left its slot. So
    // many at once find some that never were.
    let together = Barrier::new(16);
    let refusals = thread::scope(|scope| {
        let threads = [(); 16].map(|()| {
            scope.spawn(|| {
                let first = refused(128, rcu::try_pin);
                together.wait();
                assert_eq!(rcu::is_pinned(), first.is_ok());
                let is_refused = first.is_err();
                drop((first, rcu::try_pin().unwrap()));
                assert!(refused(0, rcu::try_pin).is_ok());
                usize::from(is_refused)
            })
        });
        threads.map(|thread| thread.join().unwrap()).into_iter().sum::<usize>()
    });
    assert!(refusals > 0);
}
