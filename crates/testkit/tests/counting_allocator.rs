//! The allocator that counts for all threads.

use std::hint::black_box;
use std::thread;

use testkit::alloc::{CountingAllocator, counted};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// One test: a second one would be counted with it.
#[test]
fn all_threads_are_counted_while_it_is_on() {
    let (kept, counted_here) = counted(|| {
        drop(black_box(vec![0_u8; 5_000]));
        black_box(Vec::<u8>::with_capacity(1_000))
    });
    assert_eq!((counted_here.allocations, counted_here.bytes), (2, 1_000));
    let (kept, there) = counted(|| {
        let vecs = || (0..100).map(|_| black_box(Vec::<u8>::with_capacity(10_000))).collect();
        (kept, thread::spawn(vecs).join().unwrap()) as (Vec<u8>, Vec<Vec<u8>>)
    });
    assert!(there.allocations > 100 && there.bytes > 1_000_000, "{there:?}");
    let ((), nothing) = counted(|| ());
    assert_eq!((nothing.allocations, nothing.bytes), (0, 0));
    drop(kept);
}
