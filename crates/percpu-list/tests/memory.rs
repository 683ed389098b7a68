//! Memory: allocations that fail, memory that is freed, and when the list allocates. The allocator
//! of this program refuses, counts, and checks whether its caller holds a slot.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use percpu_list::{AllocError, Entry, LockError, PerCpuList, Ref, Refused};
use testkit::alloc::{ThreadAllocator, end_refusals, refuse_after, thread_bytes};
use testkit::pin::{allowed_cpus, current_cpu, on, pin_to};

thread_local! {
    /// The list whose slots must be free during an allocation.
    static PROBE: Cell<Option<&'static Probe>> = const { Cell::new(None) };
    static HELD: Cell<u32> = const { Cell::new(0) };
}

type Value = Box<usize>;

/// A list, and references to values that are off it, one for each slot. The removal of one locks its
/// slot, and shows whether this thread holds it.
struct Probe {
    list: PerCpuList<Value>,
    slots: Vec<Ref<Value>>,
}

fn look() {
    let Some(probe) = PROBE.take() else { return };
    for found in &probe.slots {
        if probe.list.remove(found) == Err(LockError::Deadlock) {
            HELD.set(HELD.get() + 1);
        }
    }
    PROBE.set(Some(probe));
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(|_| look());

/// Runs `f`, and returns how often the allocator was called with a lock of the list held.
fn watched(f: impl FnOnce(&PerCpuList<Value>)) -> u32 {
    let list = PerCpuList::new();
    let off = |cpu| on(cpu, || list.insert(Box::new(0)).unwrap().into_ref().unwrap());
    let slots = allowed_cpus().into_iter().map(off).collect();
    let probe = Box::into_raw(Box::new(Probe { list, slots }));
    HELD.set(0);
    // SAFETY: the probe is freed below, after the last use.
    let shared: &'static Probe = unsafe { &*probe };
    PROBE.set(Some(shared));
    f(&shared.list);
    PROBE.set(None);
    // SAFETY: the pointer is from `into_raw` above.
    drop(unsafe { Box::from_raw(probe) });
    HELD.get()
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

/// Checks the probe: it finds an allocation under a snapshot.
#[test]
fn the_watch_sees_an_allocation_under_a_lock() {
    let held = watched(|list| {
        let snapshot = list.lock_all().unwrap();
        drop(Box::new(7));
        drop(snapshot);
    });
    assert!(held >= 2);
}

#[test]
fn inv01_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    pin_to(&[current_cpu()]);
    for full in FULL {
        let list = PerCpuList::new();
        let entries: Vec<_> = (0..full).map(|n| list.insert(Box::new(n)).unwrap()).collect();
        let mut value = Some(Box::new(usize::MAX));
        let mut inserted = None;
        let insert = || match enough(list.insert(value.take().unwrap())) {
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

/// An array grows and shrinks, in all the ways that change it.
#[test]
fn inv01_nothing_is_allocated_or_freed_under_a_lock() {
    pin_to(&[current_cpu()]);
    let held = watched(|list| {
        let fill =
            || -> Vec<Entry<_>> { (0..5000).map(|n| list.insert(Box::new(n)).unwrap()).collect() };
        drop(fill()); // each entry alone
        let entries = fill();
        let mut walk = list.iter();
        drop(walk.next().unwrap().unwrap());
        drop(entries); // leaves holes
        drop(walk);
        let entries = fill();
        assert_eq!(list.drain().count(), 5000);
        drop(entries);
        for cpu in allowed_cpus() {
            let entries = fill();
            on(cpu, || drop(entries)); // by another CPU, which is counted
        }
    });
    assert_eq!(held, 0, "the allocator was called with a lock held");
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
    let cpus = allowed_cpus();
    drop(PerCpuList::<u8>::new()); // allocates what a process allocates once
    let before = thread_bytes();
    for many in [0, 1, 9, 600, 3000] {
        let began = DROPPED.load(Relaxed);
        let made = Cell::new(0);
        {
            let list = PerCpuList::new();
            let fill = || -> Vec<_> {
                made.set(made.get() + many);
                let mut entries = Vec::new();
                for part in [0..many / 2, many / 2..many] {
                    pin_to(&[cpus[part.start % cpus.len()]]);
                    entries.extend(part.map(|n| list.insert(value(n as u64)).unwrap()));
                }
                entries
            };
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

/// Slots do not keep the values of removed entries, and they keep a bounded number of nodes.
#[test]
fn spare_nodes_have_no_values() {
    pin_to(&[current_cpu()]);
    let list = PerCpuList::new();
    let value = Rc::new(());
    let come_and_go = || {
        let entries = [(); 20].map(|()| list.insert(Rc::clone(&value)).unwrap());
        drop(entries);
        assert_eq!(Rc::strong_count(&value), 1);
    };
    let before = thread_bytes();
    come_and_go();
    let used = thread_bytes();
    // A node is 32 bytes beside its value, and the pool keeps 16.
    assert!(used - before >= 16 * (32 + size_of::<Rc<()>>()) as i64);
    for _ in 0..100 {
        come_and_go();
        assert_eq!(thread_bytes(), used);
    }
    list.validate();
}
