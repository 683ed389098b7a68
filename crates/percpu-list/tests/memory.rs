//! Memory: allocations that fail, memory that is freed, and when the list allocates. The allocator
//! of this program refuses, counts, and checks whether its caller holds a lock of the list.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use percpu_list::{Entry, PerCpuList, Refused};
use testkit::alloc::{ThreadAllocator, calls, thread_bytes, until_admitted};
use testkit::pin::{allowed_cpus, current_cpu, pin_to};
use testkit::watchdog::watched;

thread_local! {
    /// The list whose locks must be free during an allocation.
    static PROBE: Cell<Option<&'static PerCpuList<Value>>> = const { Cell::new(None) };
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// The number of allocations that were probed: the progress that the watchdog sees.
static LOOKS: AtomicU64 = AtomicU64::new(0);

type Value = Box<usize>;

/// Locks everything that the list has. If this thread holds a lock, that never ends, and the watchdog
/// ends the program.
fn look() {
    let Some(list) = PROBE.take() else { return };
    LOOKS.fetch_add(1, Relaxed);
    match list.lock_all() {
        Ok(snapshot) => drop(snapshot),
        Err(_) => HELD.set(HELD.get() + 1),
    }
    drop(list.iter().next());
    PROBE.set(Some(list));
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(|_| look());

/// Runs `f`, and returns how often the allocator was called while this thread had a snapshot.
fn probed(f: impl FnOnce(&PerCpuList<Value>)) -> u32 {
    let list: &'static PerCpuList<Value> = Box::leak(Box::default());
    HELD.set(0);
    PROBE.set(Some(list));
    watched(
        || LOOKS.load(Relaxed),
        || "the allocator was called with a lock held".into(),
        || f(list),
    );
    PROBE.set(None);
    HELD.get()
}

/// Checks the probe: it finds an allocation under a snapshot.
#[test]
fn the_watch_sees_an_allocation_under_a_lock() {
    let held = probed(|list| {
        let snapshot = list.lock_all().unwrap();
        drop(Box::new(7));
        drop(snapshot);
    });
    assert!(held >= 2);
}

/// Inserts the value of a number while each of its allocations fails, in a list with `full` values.
fn refused<T: PartialEq + Send + Sync>(full: usize, new: impl Fn(usize) -> T) {
    let list = PerCpuList::new();
    let entries: Vec<_> = (0..full).map(|n| list.insert(new(n)).ok().unwrap()).collect();
    let insert = |value| {
        list.insert(value).map_err(|error| {
            assert_eq!(error.reason, Refused::NoMemory);
            error.value
        })
    };
    let inserted = until_admitted(new(usize::MAX), insert, |_| {
        list.validate();
        assert_eq!(list.len(), full);
    });
    list.validate();
    assert!(list.len() == full + 1 && *inserted == new(usize::MAX));
    assert!(entries.iter().enumerate().all(|(n, entry)| **entry == new(n) && entry.is_linked()));
}

/// A slot needs a block at these lengths: one of 8 cells, then some of 64. A value of more than 256 bytes is
/// allocated before its block.
#[test]
fn inv01_a_refused_allocation_changes_nothing_and_gives_the_value_back() {
    pin_to(&[current_cpu()]);
    for full in [0, 8, 72, 328] {
        refused(full, Box::new);
    }
    refused(0, |n| [n; 64]);
}

/// Slots grow and are trimmed.
#[test]
fn inv01_nothing_is_allocated_or_freed_under_a_lock() {
    pin_to(&[current_cpu()]);
    let held = probed(|list| {
        let fill =
            || -> Vec<Entry<_>> { (0..5000).map(|n| list.insert(Box::new(n)).unwrap()).collect() };
        drop(fill()); // each entry alone
        let entries = fill();
        let mut walk = list.iter();
        drop(walk.next().unwrap());
        drop(entries); // some are pinned
        drop(walk);
        list.trim().unwrap();
        let entries = fill();
        assert_eq!(list.drain().count(), 5000);
        drop(entries);
        list.trim().unwrap();
        for cpu in allowed_cpus() {
            let entries = fill();
            pin_to(&[cpu]);
            drop(entries); // by another CPU, which is counted
        }
    });
    assert_eq!(held, 0, "the allocator was called with a lock held");
}

/// A thread that waits for its first lock allocates nothing: the wait may be one with another lock held.
#[test]
fn inv01_a_wait_for_a_lock_allocates_nothing() {
    let list = PerCpuList::<u64>::new();
    let (first, second) = (list.insert(1).unwrap(), list.insert(2).unwrap());
    let snapshot = list.lock_all().unwrap();
    thread::scope(|scope| {
        let waits: [Box<dyn FnOnce() + Send>; 3] = [
            Box::new(|| drop(first)),
            Box::new(|| drop(list.lock_all().unwrap())),
            Box::new(|| list.close().unwrap()),
        ];
        let waiters = waits.map(|wait| {
            scope.spawn(move || {
                let _ = offlock_percpu::current_cpu();
                calls(wait).1.allocated
            })
        });
        thread::sleep(Duration::from_millis(50)); // so that all wait, most likely
        drop(snapshot);
        assert_eq!(waiters.map(|waiter| waiter.join().unwrap()), [0; 3]);
    });
    drop(second);
}

/// The drop of a list frees its memory and that of its values, whatever is on the list.
#[test]
fn inv13_no_byte_is_left_of_a_list() {
    let cpus = allowed_cpus();
    drop(PerCpuList::<u8>::new()); // allocates what a process allocates once
    let before = thread_bytes();
    for many in [0, 1, 9, 600, 3000] {
        {
            let list = PerCpuList::new();
            let fill = || -> Vec<_> {
                let mut entries = Vec::new();
                for part in [0..many / 2, many / 2..many] {
                    pin_to(&[cpus[part.start % cpus.len()]]);
                    entries.extend(part.map(|n| list.insert(Box::new(n)).unwrap()));
                }
                entries
            };
            let entries = fill();
            assert_eq!(list.drain().take(many / 2).count(), many / 2);
            drop(entries);
            let mut entries = fill();
            let found = entries.pop().map(|entry| entry.share());
            drop(list);
            drop((entries, found)); // the last of them frees the list
        }
        assert_eq!(thread_bytes(), before, "{many}");
    }
}

/// Blocks do not keep the values of removed entries, and a trim frees those without entries.
#[test]
fn inv01_a_trim_gives_memory_back() {
    pin_to(&[current_cpu()]);
    let list = PerCpuList::new();
    let value = Rc::new(());
    let fill =
        |many| -> Vec<_> { (0..many).map(|_| list.insert(Rc::clone(&value)).unwrap()).collect() };
    drop(fill(1));
    let few = thread_bytes(); // one block
    let entries = fill(5_000);
    let allocated = thread_bytes() - few - (entries.capacity() * size_of_val(&entries[0])) as i64;
    assert!((5_000 * 13..5_000 * 16).contains(&allocated), "{allocated} bytes");
    drop(entries);
    assert_eq!(Rc::strong_count(&value), 1);
    list.trim().unwrap();
    assert_eq!(thread_bytes(), few);
    let mut entries = fill(5_000);
    let full = thread_bytes();
    entries.truncate(2_500);
    let found = list.iter().nth(2_000);
    entries.truncate(1_000);
    list.trim().unwrap();
    assert!(full - thread_bytes() > 3_500 * 14 - 2 * 1_024);
    drop((found, entries));
    list.trim().unwrap();
    assert!(thread_bytes() <= few);
    for _ in 0..100 {
        drop(fill(20));
    }
    list.validate();
}
