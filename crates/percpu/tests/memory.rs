//! Allocations: the steady state makes none, and a failed one is reported.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::thread;

use offlock_percpu::PercpuRef;
use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_percpu::{AllocError, CpuId, LgLock, PerCpu, PerCpuCounter};
use testkit::alloc::{Calls, ThreadAllocator, calls, refuse_after};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

#[test]
fn counters_allocate_when_made_and_never_after() {
    let counter = PerCpuCounter::new();
    counter.increment(); // allocates the words
    let slots = PerCpu::new(|_| Cell::new(0));
    let ((), made) = calls(|| {
        for n in 0..1_000 {
            counter.add(n);
            if n % 7 == 0 {
                slots.local().set(n);
            }
        }
    });
    assert_eq!(made, Calls::NONE);
}

#[test]
fn locks_and_references_allocate_when_made_and_never_after() {
    let lock = LgLock::new(|_| 0_u64);
    let refs = PercpuRef::new(|| ());
    let last = CpuId::new(lock.capacity() as u32 - 1);
    let ((), made) = calls(|| {
        for _ in 0..100 {
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

/// Other tests may take the slots of a few threads that have ended.
#[test]
fn a_new_thread_reads_in_the_slot_of_one_that_has_ended() {
    let first_pin = || calls(|| drop(rcu::pin())).1;
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
    let _ = offlock_percpu::capabilities(); // allocates here, not below
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
