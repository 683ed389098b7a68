//! mq-rbtree, operation by operation, with criterion's report in `target/criterion`:
//! `cargo bench --bench mq_rbtree_ops -- empty`. The rows that decide a target are in `mq_rbtree`.

mod ops;

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use mq_rbtree::{Bitmap, Queue, RbTree};

const PRIORITIES: u32 = 32_768;
const BATCH: u64 = 64;

/// The message of `expect`: no call is refused.
const OPEN: &str = "open, below its limits, with memory";

fn all(c: &mut Criterion) {
    let bitmap = Queue::<u64, Bitmap>::new(2048).expect(OPEN);
    let tree = Queue::<u64, RbTree<u32>>::with_keys(2048).expect(OPEN);
    ops::group!(c, "empty",
        "bitmap" => {
            bitmap.send(1, 7).expect(OPEN);
            bitmap.receive().expect(OPEN)
        },
        "rbtree" => {
            tree.send(1, 7).expect(OPEN);
            tree.receive().expect(OPEN)
        },
        "bitmap-refused" => black_box(bitmap.try_receive()).is_err(),
    );
    // Many messages in one call, and out of the queue in one.
    let mut messages: VecDeque<_> = (0..BATCH).map(|n| (n, 7)).collect();
    let mut out = Vec::with_capacity(BATCH as usize);
    ops::group!(c, "64_messages",
        "batch" => {
            bitmap.try_send_batch(&mut messages).expect(OPEN);
            bitmap.try_receive_batch(&mut out, BATCH as usize).expect(OPEN);
            messages.extend(out.drain(..));
        },
        "one-by-one" => {
            (0..BATCH).for_each(|n| bitmap.send(n, 7).expect(OPEN));
            (0..BATCH).for_each(|_| _ = black_box(bitmap.receive().expect(OPEN)));
        },
    );
    for n in 0..1000 {
        bitmap.send(1, n * 32).expect(OPEN);
        tree.send(1, n * 32).expect(OPEN);
    }
    let mut priority = 0;
    let mut next = || {
        priority = (priority + 12_345) % PRIORITIES; // in turn, and no neighbours
        priority
    };
    ops::group!(c, "beside_1000",
        "bitmap" => {
            bitmap.send(1, next()).expect(OPEN);
            bitmap.receive().expect(OPEN)
        },
        "rbtree" => {
            tree.send(1, next()).expect(OPEN);
            tree.receive().expect(OPEN)
        },
    );
}

criterion_group! { name = groups; config = ops::on_one_cpu(); targets = all }
criterion_main!(groups);
