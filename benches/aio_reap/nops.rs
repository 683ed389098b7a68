//! One batch of NOPs there and back, by the ring alone and by each front end of the engine.

use std::cell::Cell;
use std::hint::black_box;
use std::io;
use std::rc::Rc;

use aio_reap::{CompletionQueue, Engine, Operation};
use io_uring::{IoUring, opcode};

/// The peer's ring, with the flags that the engine asks for where the kernel knows them.
pub(crate) fn ring(depth: usize) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer().setup_submit_all();
    builder.build(depth as u32).or_else(|_| IoUring::new(depth as u32))
}

/// Submits that many NOPs in one system call, and takes all of their completions.
#[inline(always)]
pub(crate) fn raw(ring: &mut IoUring, batch: usize) {
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

/// Sends that many NOPs through the engine, with a completion queue.
#[inline(always)]
pub(crate) fn queued(engine: &Engine, queue: &CompletionQueue<()>, batch: usize) {
    let plug = engine.plug();
    for token in 0..batch as u64 {
        engine.nop().enqueue(queue, token).expect("a slot");
    }
    drop(plug);
    let mut done = 0;
    loop {
        while let Some(completion) = queue.pop() {
            black_box((completion.token, completion.result.expect("a NOP")));
            done += 1;
        }
        if done == batch {
            return;
        }
        engine.wait(None).expect("wait");
    }
}

/// By callbacks, which count in `done`.
#[inline(always)]
pub(crate) fn called_back(engine: &Engine, done: &Rc<Cell<usize>>, batch: usize) {
    done.set(0);
    let plug = engine.plug();
    for _ in 0..batch {
        let done = Rc::clone(done);
        let count = move |result: Result<usize, aio_reap::RequestError>, ()| {
            black_box(result.expect("a NOP"));
            done.set(done.get() + 1);
        };
        engine.nop().callback(count).expect("a slot");
    }
    drop(plug);
    while done.get() < batch {
        engine.wait(None).expect("wait");
    }
}

/// By futures, as a program has it: one runs for many batches.
#[inline(always)]
pub(crate) fn awaited(
    engine: &Engine,
    operations: &mut Vec<Operation<()>>,
    batch: usize,
    batches: u64,
) {
    let all = async {
        for _ in 0..batches {
            let plug = engine.plug();
            for _ in 0..batch {
                operations.push(engine.nop().submit().expect("a slot"));
            }
            drop(plug);
            for operation in operations.drain(..) {
                black_box(operation.await.0.expect("a NOP"));
            }
        }
    };
    engine.block_on(all).expect("wait");
}
