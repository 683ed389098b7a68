//! The allocator that counts for all threads.

use std::hint::black_box;
use std::thread;

use testkit::alloc::{CountingAllocator, counted};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// One test: a second one would be counted with it. The main thread of the test harness may allocate
/// meanwhile, so that only one of a few counts must be exact.
#[test]
fn all_threads_are_counted_while_it_is_on() {
    let (mut kept, mut seen) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (vec, counted_here) = counted(|| {
            drop(black_box(vec![0_u8; 5_000]));
            black_box(Vec::<u8>::with_capacity(1_000))
        });
        kept = vec;
        seen.push((counted_here.allocations, counted_here.bytes));
    }
    assert!(seen.contains(&(2, 1_000)), "{seen:?}");
    let (kept, there) = counted(|| {
        let vecs = || (0..100).map(|_| black_box(Vec::<u8>::with_capacity(10_000))).collect();
        (kept, thread::spawn(vecs).join().unwrap()) as (Vec<u8>, Vec<Vec<u8>>)
    });
    assert!(there.allocations > 100 && there.bytes > 1_000_000, "{there:?}");
    let nothing = [(); 4].map(|()| counted(|| ()).1).map(|here| (here.allocations, here.bytes));
    assert!(nothing.contains(&(0, 0)), "{nothing:?}");
    drop(kept);
}
