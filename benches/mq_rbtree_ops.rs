//! mq-rbtree, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench mq_rbtree_ops           all groups
//! cargo bench --bench mq_rbtree_ops -- empty  one group
//! ```
//!
//! One thread, on one CPU. The rows that decide a target, and those with two threads, are in
//! `cargo bench --bench mq_rbtree`.

mod ops;

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use mq_rbtree::{Bitmap, Core, Queue, RbTree};

use self::ops::{on_one_cpu, row};

const PRIORITIES: u32 = 32_768;
const BATCH: u64 = 64;

/// The message of `expect`: no call is refused.
const OPEN: &str = "open, below its limits, with memory";

/// A message into an empty queue and out of it, and a look at an empty one.
fn empty(c: &mut Criterion) {
    let bitmap = Queue::<u64, Bitmap>::new(1024).expect(OPEN);
    let tree = Queue::<u64, RbTree<u32>>::with_keys(1024).expect(OPEN);
    let mut group = c.benchmark_group("empty");
    row!(group, "bitmap", {
        bitmap.send(1, 7).expect(OPEN);
        bitmap.receive().expect(OPEN)
    });
    row!(group, "rbtree", {
        tree.send(1, 7).expect(OPEN);
        tree.receive().expect(OPEN)
    });
    row!(group, "bitmap-refused", black_box(bitmap.try_receive()).is_err());
    group.finish();
}

/// A message into a queue with a thousand messages of different priorities, and one out of it.
fn beside(c: &mut Criterion) {
    let bitmap = Queue::<u64, Bitmap>::new(2048).expect(OPEN);
    let tree = Queue::<u64, RbTree<u32>>::with_keys(2048).expect(OPEN);
    for n in 0..1000 {
        let priority = n * 32;
        bitmap.send(1, priority).expect(OPEN);
        tree.send(1, priority).expect(OPEN);
    }
    let mut priority = 0;
    let mut next = || {
        priority = (priority + 12_345) % PRIORITIES; // in turn, and no neighbours
        priority
    };
    let mut group = c.benchmark_group("beside_1000");
    row!(group, "bitmap", {
        bitmap.send(1, next()).expect(OPEN);
        bitmap.receive().expect(OPEN)
    });
    row!(group, "rbtree", {
        tree.send(1, next()).expect(OPEN);
        tree.receive().expect(OPEN)
    });
    group.finish();
}

/// 64 messages in one call, and out of the queue in one.
fn batch(c: &mut Criterion) {
    let queue = Queue::<u64, Bitmap>::new(1024).expect(OPEN);
    let mut messages: VecDeque<_> = (0..BATCH).map(|n| (n, 7)).collect();
    let mut out = Vec::with_capacity(BATCH as usize);
    let mut group = c.benchmark_group("64_messages");
    row!(group, "batch", {
        queue.try_send_batch(&mut messages).expect(OPEN);
        queue.try_receive_batch(&mut out, BATCH as usize).expect(OPEN);
        messages.extend(out.drain(..));
    });
    row!(group, "one-by-one", {
        (0..BATCH).for_each(|n| queue.send(n, 7).expect(OPEN));
        (0..BATCH).for_each(|_| {
            black_box(queue.receive().expect(OPEN));
        });
    });
    group.finish();
}

/// What is left without the lock.
fn core(c: &mut Criterion) {
    let mut bitmap = Core::<u64, Bitmap>::new(16);
    let mut tree = Core::<u64, RbTree<u32>>::new(16);
    let mut group = c.benchmark_group("core");
    row!(group, "bitmap", {
        bitmap.push(black_box(7), 1).expect(OPEN);
        bitmap.pop()
    });
    row!(group, "rbtree", {
        tree.push(black_box(7), 1).expect(OPEN);
        tree.pop()
    });
    group.finish();
}

criterion_group! {
    name = groups;
    config = on_one_cpu();
    targets = empty, beside, batch, core
}
criterion_main!(groups);
