//! Allocations: the steady state makes none, a failed one is reported, and the crate may be called inside
//! of one.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::thread;

use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_percpu::{AllocError, CpuId, LgLock, PerCpu, PerCpuCounter, PercpuRef, capabilities};
use testkit::alloc::{Calls, ThreadAllocator, calls, refuse_after};
use testkit::child::in_own_process;

thread_local! {
    /// What the allocations of the thread call.
    static INSIDE: Cell<fn(Calls)> = const { Cell::new(|_| ()) };
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(|call| INSIDE.get()(call));

#[test]
fn what_is_not_rcu_allocates_when_made_and_never_after() {
    let counter = PerCpuCounter::new();
    counter.increment(); // allocates the words
    let slots = PerCpu::new(|_| Cell::new(0));
    let lock = LgLock::new(|_| 0_u64);
    let refs = PercpuRef::new(|| ());
    let last = CpuId::new(lock.capacity() as u32 - 1);
    let ((), made) = calls(|| {
        for n in 0..100 {
            counter.add(n);
            slots.local().set(n);
            *lock.local().unwrap() += 1;
            *lock.local_on(last).unwrap() += 1;
            drop(lock.global().unwrap());
            let held = refs.try_get().unwrap();
            drop((held.clone(), refs.try_get()));
            drop(held);
        }
        refs.kill().unwrap();
    });
    assert!(refs.is_zero());
    assert_eq!(made, Calls::NONE);
}

/// RCU allocates each node, and once the thread's slot and the bags.
#[test]
fn readers_and_writers_under_rcu_allocate_nothing_but_nodes() {
    const NODES: u64 = 2_500; // more than a bag holds
    let node = |n| Owned::new(n);
    let shared = Atomic::new(0);
    shared.store(node(1));
    drop(rcu::pin());
    rcu::poll();

    let mut nodes: Vec<_> = (0..NODES).map(node).collect();
    let ((), made) = calls(|| {
        while let Some(node) = nodes.pop() {
            let guard = (rcu::pin(), rcu::pin());
            let old = shared.swap(node);
            let period = rcu::start_grace_period();
            assert!(!period.poll(), "this thread holds a guard");
            drop((old, guard)); // retires the old node
            if nodes.len() % 500 == 0 {
                rcu::poll();
                rcu::synchronize().unwrap();
                while !period.poll() {
                    thread::yield_now(); // to another test's readers
                }
            }
        }
        rcu::synchronize().unwrap();
        rcu::poll();
    });
    assert_eq!(made, Calls { allocated: 0, freed: NODES }, "the nodes only");
}

/// Pins when its thread ends: after the thread's RCU slot was released, because it was created before.
struct Late;

impl Drop for Late {
    fn drop(&mut self) {
        drop(rcu::pin());
    }
}

/// Other tests may take the slots of a few threads that have ended.
#[test]
fn a_new_thread_reads_in_the_slot_of_one_that_has_ended() {
    thread_local!(static LATE: Late = const { Late });
    let first_pin = || LATE.with(|_| calls(|| drop(rcu::pin())).1);
    let mut made = (0..50).map(|_| thread::spawn(first_pin).join().unwrap());
    assert!(made.any(|made| made == Calls::NONE));
}

#[test]
fn what_cannot_be_allocated_is_said() {
    let _ = offlock_percpu::possible_cpus(); // allocates here, not below
    let slots = refuse_after(0, || PerCpu::<u8>::try_new(|_| unreachable!("not called")).err());
    let error: AllocError = slots.expect("the allocation was refused");
    assert_eq!(error.errno(), libc::ENOMEM);
}

/// The words of a counter are counted in a list of their pool, which grows now and then.
#[test]
fn a_counter_counts_while_memory_is_out() {
    let _ = capabilities(); // allocates here, not below
    let counters: Vec<_> = (0..100_000).map(|_| PerCpuCounter::new()).collect();
    let refused = refuse_after(0, || {
        let refused = counters.iter().find(|counter| counter.reserve().is_err());
        refused.inspect(|counter| counter.add(3))
    });
    let counter = refused.expect("an allocation was refused");
    assert_eq!(counter.sum(), 3);
    counter.increment();
    assert_eq!((counter.reserve(), counter.sum()), (Ok(()), 4));
}

/// Runs `f` in a process of its own, which ends if it hangs: it has found a lock that its holder takes
/// again.
fn in_limited_process(name: &str, f: impl FnOnce()) {
    in_own_process(name, || {
        // SAFETY: takes a number and accesses no memory.
        unsafe { libc::alarm(60) };
        f();
    });
}

/// A call inside an allocation may interrupt any other call of the same thread: by a global allocator
/// that counts, or a signal handler.
#[test]
fn inv03_an_allocator_counts_once_its_counter_is_reserved() {
    static COUNT: PerCpuCounter = PerCpuCounter::new();
    /// The same count in an atomic: the expected sum.
    static TWIN: AtomicI64 = AtomicI64::new(0);
    in_limited_process("inv03_an_allocator_counts_once_its_counter_is_reserved", || {
        COUNT.reserve().unwrap();
        let count = |call: Calls| {
            COUNT.add(call.total() as i64);
            TWIN.fetch_add(call.total() as i64, Relaxed);
        };
        let use_all = || {
            // Enough counters for the pool to grow under its lock. The first call inside of an allocation comes
            // from there: it must not be the one that looks for sections, which would wait for the pool.
            let counters: Vec<_> = (0..20_000).map(|_| PerCpuCounter::new()).collect();
            INSIDE.set(count);
            counters.iter().for_each(|counter| counter.reserve().unwrap());
            drop(counters);
            println!("{}", capabilities());
            let object = PercpuRef::new(|| drop(vec![1_u8; 9]));
            drop(object.try_get());
            object.kill().unwrap();
            LgLock::new(|_| Vec::new()).local().unwrap().push(1);
            Atomic::new(vec![1]).store(Owned::new(vec![2]));
            rcu::poll();
            INSIDE.set(|_| ());
        };
        thread::scope(|scope| (0..4).for_each(|_| _ = scope.spawn(use_all)));
        assert_eq!(COUNT.sum(), TWIN.load(Relaxed));
        assert!(COUNT.sum() > 0);
    });
}

/// The first get of a process may interrupt the pool of words, which the first use of sections would
/// wait for.
#[test]
fn a_get_of_a_live_object_waits_for_nothing() {
    static LIVE: OnceLock<PercpuRef> = OnceLock::new();
    in_limited_process("a_get_of_a_live_object_waits_for_nothing", || {
        LIVE.set(PercpuRef::new(|| ())).unwrap();
        let mut all = Vec::with_capacity(100);
        INSIDE.set(|_| drop(LIVE.get().unwrap().try_get().expect("live")));
        all.extend((0..100).map(|_| PercpuRef::new(|| ())));
        INSIDE.set(|_| ());
    });
}
