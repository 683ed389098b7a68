//! Forks at the moment of a first use: alone in its process, so that nothing was used before.

#[path = "common/child.rs"]
mod child;

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use percpu::{PerCpuCounter, PercpuRef, ReadWriteGate, RefBlock, capabilities, rcu};

use child::in_child;
use testkit::child::in_child_of;

/// One use of everything that has a global part. What would have to wait there may say so.
fn use_everything() {
    drop(rcu::pin());
    let _ = rcu::synchronize();
    drop(rcu::pin_send());
    PerCpuCounter::new().add(1);
    drop(ReadWriteGate::new(0_u64));
    drop(PercpuRef::new(|| ()));
    drop(RefBlock::try_new());
}

/// After `capabilities` nothing has a first use that a fork could catch half done.
#[test]
fn inv15_a_child_of_a_fork_at_the_first_use_goes_on() {
    for round in 0..400 {
        // A process that has not used the crate, since this one has not: `in_child` would.
        // SAFETY: as there, the child calls a closure and exits; glibc makes its allocator usable in it.
        let fork = || unsafe { libc::fork() };
        let went_on = in_child_of(fork, || {
            let _ = capabilities();
            let (there, forking) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    there.store(true, Relaxed);
                    while !forking.load(Relaxed) {
                        hint::spin_loop();
                    }
                    // A little later in the fork each time.
                    (0..round * 8).for_each(|_| hint::spin_loop());
                    use_everything();
                });
                while !there.load(Relaxed) {
                    hint::spin_loop();
                }
                forking.store(true, Relaxed);
                in_child(|| {
                    use_everything();
                    true
                })
            })
        });
        assert!(went_on, "round {round}");
    }
}
