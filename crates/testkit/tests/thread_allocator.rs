//! The allocator that counts and refuses for each thread.

use std::alloc::{Layout, alloc, dealloc, realloc};
use std::cell::Cell;
use std::thread;

use testkit::alloc::{
    Calls, ThreadAllocator, admitted_left, calls, process_bytes, refuse_after, refuse_first,
    thread_bytes, until_admitted,
};

thread_local! {
    static HOOKED: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: ThreadAllocator =
    ThreadAllocator::with_hook(|call| HOOKED.set(HOOKED.get() + call.total()));

/// Whether an allocation succeeds; it is freed at once.
fn succeeds() -> bool {
    Vec::<u8>::new().try_reserve_exact(std::hint::black_box(100)).is_ok()
}

#[test]
fn calls_and_bytes_are_those_of_the_thread() {
    let (bytes, hooked) = (thread_bytes(), HOOKED.get());
    let (vec, made) = calls(|| std::hint::black_box(Vec::<u8>::with_capacity(100)));
    assert_eq!((made, thread_bytes() - bytes), (Calls { allocated: 1, freed: 0 }, 100));
    assert!(process_bytes() >= 100);
    let ((), freed) = calls(|| drop(vec));
    assert_eq!((freed, thread_bytes() - bytes), (Calls { allocated: 0, freed: 1 }, 0));
    assert_eq!(HOOKED.get() - hooked, 2);
    let other = thread::spawn(|| std::hint::black_box(vec![0_u8; 1 << 20]));
    assert_eq!(other.join().unwrap().len(), 1 << 20);
}

#[test]
fn a_realloc_is_an_allocation_and_a_release() {
    let (small, large) = (Layout::new::<[u8; 8]>(), Layout::new::<[u8; 64]>());
    let bytes = thread_bytes();
    // SAFETY: the layout is not empty.
    let at = unsafe { alloc(small) };
    let (grown, made) = calls(|| {
        // SAFETY: `at` has the layout `small`, and the new size is not zero.
        unsafe { realloc(at, small, 64) }
    });
    assert_eq!((made, thread_bytes() - bytes), (Calls { allocated: 1, freed: 1 }, 64));
    // SAFETY: `realloc` returned it, for the size of `large`.
    unsafe { dealloc(grown, large) };
}

#[test]
fn refusals_come_after_those_admitted_and_end_with_the_call() {
    assert_eq!(refuse_after(2, || [(); 4].map(|()| succeeds())), [true, true, false, false]);
    assert_eq!(refuse_first(2, || [(); 3].map(|()| succeeds())), ([false, false, true], 2));
    assert_eq!(refuse_first(2, succeeds), (false, 1));
    assert!(succeeds());
    let left = refuse_after(3, || (succeeds(), admitted_left()));
    assert_eq!(left, (true, 2));
    // Two allocations, each of which fails once.
    let twice = |tries| if succeeds() && succeeds() { Ok(tries) } else { Err(tries + 1) };
    let mut failed = Vec::new();
    assert_eq!(until_admitted(0, twice, |admitted| failed.push(admitted)), 2);
    assert_eq!(failed, [0, 1]);
}
