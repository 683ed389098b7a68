//! Calls of the crate inside an allocation of the same thread, which may interrupt any other call: by a
//! global allocator that counts, or a signal handler. A process that hangs has found a lock that its
//! holder takes again.
#![cfg(not(offlock_model))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::thread;

use offlock_percpu::{LgLock, PerCpuCounter, PercpuRef, capabilities, rcu};
use testkit::child::in_own_process;

static BYTES: PerCpuCounter = PerCpuCounter::new();
/// The same count in an atomic: the expected sum.
static TWIN: AtomicI64 = AtomicI64::new(0);

/// A live count.
static LIVE: OnceLock<PercpuRef> = OnceLock::new();

thread_local! {
    /// What the allocations of the thread call.
    static INSIDE: Cell<Option<fn(usize)>> = const { Cell::new(None) };
}

struct Calling;

// SAFETY: every call goes to the system's allocator, and what is called inside does not unwind.
unsafe impl GlobalAlloc for Calling {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // An exiting thread has no thread-local variables any more.
        if let Ok(Some(call)) = INSIDE.try_with(Cell::get) {
            call(layout.size());
        }
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are handed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static CALLING: Calling = Calling;

/// Ends the process if it hangs.
fn limit_time() {
    // SAFETY: takes a number and accesses no memory.
    unsafe { libc::alarm(60) };
}

#[test]
fn inv03_an_allocator_counts_once_its_counter_is_reserved() {
    in_own_process("inv03_an_allocator_counts_once_its_counter_is_reserved", || {
        limit_time();
        BYTES.reserve().unwrap();
        let count = |size: usize| {
            BYTES.add(size as i64);
            TWIN.fetch_add(size as i64, Relaxed);
        };
        let use_all = || {
            INSIDE.set(Some(count));
            println!("{}", capabilities());
            // Enough counters for the pool to grow under its lock, and to take their words back.
            let counters: Vec<_> = (0..20_000).map(|_| PerCpuCounter::new()).collect();
            counters.iter().for_each(PerCpuCounter::increment);
            let object = PercpuRef::new(|| drop(vec![1_u8; 9]));
            drop(object.try_get());
            object.kill().unwrap();
            LgLock::new(|_| Vec::new()).local().unwrap().push(1);
            rcu::Atomic::new(vec![1]).store(rcu::Owned::new(vec![2]));
            rcu::poll();
            INSIDE.set(None);
        };
        thread::scope(|scope| (0..4).for_each(|_| _ = scope.spawn(use_all)));
        assert_eq!(BYTES.sum(), TWIN.load(Relaxed));
        assert!(BYTES.sum() > 0);
    });
}

/// The first get of a process may interrupt the pool of words, which the first use of sections would
/// wait for.
#[test]
fn a_get_of_a_live_object_waits_for_nothing() {
    in_own_process("a_get_of_a_live_object_waits_for_nothing", || {
        limit_time();
        LIVE.set(PercpuRef::new(|| ())).unwrap();
        let mut all = Vec::with_capacity(100);
        INSIDE.set(Some(|_| drop(LIVE.get().unwrap().try_get().expect("live"))));
        all.extend((0..100).map(|_| PercpuRef::new(|| ())));
        INSIDE.set(None);
    });
}
