//! The peer underneath: the io-uring crate, with nothing but a loop around it.

use std::hint::black_box;
use std::io;

use io_uring::{IoUring, opcode};

/// What its ring is set up with: what the engine asks for.
pub(crate) const FLAGS: &str = "io_uring: COOP_TASKRUN | TASKRUN_FLAG | SINGLE_ISSUER | SUBMIT_ALL, where the kernel knows them";

/// A ring of `depth`, with [`FLAGS`].
pub(crate) fn ring(depth: usize) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer().setup_submit_all();
    builder.build(depth as u32).or_else(|_| IoUring::new(depth as u32))
}

/// Submits that many NOPs in one system call, and takes all of their completions.
#[inline(always)]
pub(crate) fn nops(ring: &mut IoUring, batch: usize) {
    let mut queue = ring.submission();
    for token in 0..batch as u64 {
        let entry = opcode::Nop::new().build().user_data(token);
        // SAFETY: a NOP refers to no buffer and no descriptor.
        unsafe { queue.push(&entry) }.expect("the ring is empty and a batch fits");
    }
    drop(queue);
    ring.submit().expect("submit");
    let mut done = 0;
    loop {
        for completion in ring.completion() {
            black_box((completion.user_data(), completion.result()));
            done += 1;
        }
        if done == batch {
            return;
        }
        ring.submit_and_wait(1).expect("wait");
    }
}
