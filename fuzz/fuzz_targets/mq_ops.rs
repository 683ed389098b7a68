//! Queues of both kinds of levels against the model of `crates/mq-rbtree/tests`: messages are really
//! dropped, under the address sanitizer, and memory runs out.
#![no_main]

#[path = "../../crates/mq-rbtree/tests/queue_ops/mod.rs"]
mod queue_ops;

use testkit::alloc::ThreadAllocator;
use testkit::block_on;

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::with_hook(queue_ops::watch::probe);

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    queue_ops::bytes::run(input);
});
