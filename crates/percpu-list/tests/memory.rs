//! Memory: allocations that fail, memory that is freed, and when the lists allocate. The allocator
//! of this program refuses, counts, and checks whether its caller holds a slot.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use percpu_list::{AllocError, CpuId, Domain, LockError, PerCpuList, Refused, SlotPolicy};
use testkit::alloc::{Calls, ThreadAllocator, calls, end_refusals, refuse_after, thread_bytes};

thread_local! {
    /// The probe of the domain whose slots must be free during an allocation.
    static PROBE: Cell<Option<&'static Probe>> = const { Cell::new(None) };
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// A list of a domain that has no entries. Walking it shows whether this thread holds a slot.
struct Probe {
    list: PerCpuList<u8>,
}

fn look() {
    let Some(probe) = PROBE.take() else { return };
    if probe.list.for_each(|_| ()) == Err(LockError::Deadlock) {
        HELD.set(HELD.get() + 1);
    }
    PROBE.set(Some(probe));
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(|_| look());

fn cpus() -> impl Iterator<Item = CpuId> {
    (0..percpu::sync::cpu::possible() as u32).map(CpuId::new)
}

/// Runs `f`, and checks that it allocates and frees nothing under a lock of the domain.
fn watched<R>(domain: &Domain, f: impl FnOnce() -> R) -> R {
    let list = PerCpuList::new_in(domain);
    cpus().for_each(|cpu| drop(list.insert_on(cpu, 0).unwrap())); // so that each slot has a shard
    let probe = Box::into_raw(Box::new(Probe { list }));
    HELD.set(0);
    // SAFETY: the probe is freed below, after the last use.
    PROBE.set(Some(unsafe { &*probe }));
    let result = f();
    PROBE.set(None);
    assert_eq!(HELD.get(), 0, "the allocator was called with a lock held");
    // SAFETY: the pointer is from `into_raw` above.
    drop(unsafe { Box::from_raw(probe) });
    result
}

/// Refuses the first allocation of `f`, then the second, and so on until it succeeds. `f` returns
/// whether it was refused, and `check` checks that it changed nothing.
fn fails_cleanly(mut f: impl FnMut() -> bool, mut check: impl FnMut()) {
    for refused in 0..100 {
        let was_refused = refuse_after(refused, &mut f);
        check();
        if !was_refused {
            assert!(refused > 0, "nothing was allocated: the case is void");
            return;
        }
    }
    panic!("refused for ever");
}

/// Ends the refusals, so that the check of `result` may allocate.
fn enough<R>(result: R) -> R {
    end_refusals();
    result
}

/// The lengths at which an array grows: first cells, larger first segments, segments and
/// directories.
const FULL: [usize; 8] = [0, 8, 32, 128, 512, 1024, 1536, 3584];

/// Checks the probe: it finds an allocation in a locked walk.
#[test]
fn the_watch_sees_an_allocation_under_a_lock() {
    let list = PerCpuList::new();
    let _entry = list.insert(1).unwrap();
    let seen = std::panic::catch_unwind(|| {
        watched(list.domain(), || list.for_each(|n| drop(Box::new(*n))).unwrap());
    });
    PROBE.set(None);
    assert!(seen.is_err() && HELD.get() >= 2);
}

#[test]
fn inv01_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    for full in FULL {
        let list = PerCpuList::new();
        let cpu = CpuId::new(0);
        let entries: Vec<_> =
            (0..full).map(|n| list.insert_on(cpu, Box::new(n)).unwrap()).collect();
        let mut value = Some(Box::new(usize::MAX));
        let mut inserted = None;
        let insert = || match enough(list.insert_on(cpu, value.take().unwrap())) {
            Ok(entry) => {
                inserted = Some(entry);
                false
            }
            Err(error) => {
                assert_eq!(error.reason, Refused::Alloc(AllocError::new()));
                value = Some(error.value);
                true
            }
        };
        let mut lens = Vec::with_capacity(100);
        fails_cleanly(insert, || {
            list.validate();
            lens.push(list.len());
        });
        let last = lens.pop();
        assert!(lens.iter().all(|len| *len == full) && last == Some(full + 1));
        assert_eq!(**inserted.as_deref().unwrap(), usize::MAX);
        assert!(entries.iter().enumerate().all(|(n, entry)| ***entry == n && entry.is_linked()));
    }
}

#[test]
fn a_list_says_that_memory_is_out() {
    let domain = Domain::new();
    fails_cleanly(|| PerCpuList::<u8>::try_new_in(&domain).is_err(), || ());
    for policy in [SlotPolicy::PerCpu, SlotPolicy::PerNode, SlotPolicy::Fixed(2)] {
        fails_cleanly(|| Domain::try_with_policy(policy).is_err(), || ());
    }
    fails_cleanly(|| PerCpuList::<u8>::try_new().is_err(), || ());
}

/// An array grows and shrinks, in all the ways that change it.
#[test]
fn inv01_nothing_is_allocated_or_freed_under_a_lock() {
    for policy in [SlotPolicy::PerCpu, SlotPolicy::Fixed(1)] {
        let domain = Domain::with_policy(policy);
        watched(&domain, || {
            let list = PerCpuList::new_in(&domain);
            let fill = || -> Vec<_> {
                (0..5000).map(|n| list.insert_on(CpuId::new(0), Box::new(n)).unwrap()).collect()
            };
            drop(fill()); // each entry alone
            let entries = fill();
            entries.into_iter().for_each(|entry| entry.defer_remove());
            list.flush().unwrap();
            let entries = fill();
            entries.into_iter().for_each(|entry| entry.defer_remove());
            drop(list.lock_all().unwrap());
            let entries = fill();
            let mut walk = list.iter();
            drop(walk.next().unwrap().unwrap());
            drop(entries); // leaves holes
            drop(walk);
            let entries = fill();
            assert_eq!(list.drain().count(), 5000);
            drop(entries);
            fill().into_iter().for_each(std::mem::forget);
            drop(list);
        });
    }
}

/// A signal handler may interrupt an allocation, so the functions for handlers do not allocate.
#[test]
fn inv14_what_is_for_signal_handlers_calls_no_allocator() {
    let domain = Domain::new();
    let last = cpus().last().unwrap();
    let quietly = |f: &mut dyn FnMut()| {
        assert_eq!(calls(f).1, Calls::NONE);
    };
    let list = Arc::new(PerCpuList::new_in(&domain));
    let mut entries: Vec<_> =
        (0..5000).map(|n| Some(list.insert_arc_on(last, Box::new(n)).unwrap())).collect();
    quietly(&mut || entries.iter_mut().for_each(|entry| entry.take().unwrap().defer_remove()));
    list.flush().unwrap();
    assert_eq!(list.len(), 0);
}

/// The drop of a list frees its memory, whatever is on the list.
#[test]
fn inv13_no_byte_is_left_of_a_list() {
    static DROPPED: AtomicI64 = AtomicI64::new(0);
    struct Counted(#[expect(dead_code, reason = "memory of its own")] Box<u64>);
    impl Drop for Counted {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Relaxed);
        }
    }
    let value = |n| Counted(Box::new(n));
    drop(PerCpuList::<u8>::new()); // allocates what a process allocates once
    let before = thread_bytes();
    for many in [0, 1, 9, 600, 3000] {
        let began = DROPPED.load(Relaxed);
        let made = Cell::new(0);
        {
            let list = PerCpuList::new();
            let fill = || -> Vec<_> {
                made.set(made.get() + many);
                let cpu = |n| CpuId::new((n % cpus().count() as u64) as u32);
                (0..many as u64).map(|n| list.insert_on(cpu(n), value(n)).unwrap()).collect()
            };
            fill().into_iter().for_each(|entry| entry.defer_remove());
            let entries = fill();
            assert_eq!(list.drain().take(many / 2).count(), many / 2);
            drop(entries);
            let mut entries = fill();
            let kept = entries.pop().map(|entry| entry.into_ref().unwrap());
            entries.into_iter().for_each(std::mem::forget);
            drop(list);
            assert_eq!(
                DROPPED.load(Relaxed) - began,
                made.get() as i64 - i64::from(kept.is_some())
            );
        }
        {
            let list = Arc::new(PerCpuList::new());
            let entries: Vec<_> =
                (0..many as u64).map(|n| list.insert_arc(value(n)).unwrap()).collect();
            made.set(made.get() + many);
            drop(list);
            drop(entries); // the last entry drops the list
        }
        assert_eq!(DROPPED.load(Relaxed) - began, made.get() as i64);
        assert_eq!(thread_bytes(), before, "{many}");
    }
}

/// Slots do not keep the values of removed entries, and after a flush they keep no nodes.
#[test]
fn spare_nodes_have_no_values_and_a_flush_frees_them() {
    const CPU: CpuId = CpuId::new(0);
    let list = PerCpuList::new();
    let value = Rc::new(());
    let come_and_go = || {
        let entries = [(); 20].map(|()| list.insert_on(CPU, Rc::clone(&value)).unwrap());
        drop(entries);
        assert_eq!(Rc::strong_count(&value), 1);
    };
    come_and_go();
    list.flush().unwrap();
    let before = thread_bytes(); // after the list and its array in that slot were allocated
    for _ in 0..100 {
        come_and_go();
        // A node is 32 bytes beside its value, and the pool keeps 16.
        assert_eq!(thread_bytes() - before, 16 * (32 + size_of::<Rc<()>>()) as i64);
    }
    list.flush().unwrap();
    assert_eq!(thread_bytes(), before);
    list.validate();
}
