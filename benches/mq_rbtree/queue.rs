//! The interface of every implementation, and the loops that all of them run.
//!
//! A message is a number. What has priorities gives the highest first and the oldest of it; heaps have
//! a sequence number for that, which is part of what they cost.

use std::hint::black_box;
use std::sync::Arc;

use harness::{Case, Random};
use mq_rbtree::{Bitmap, Builder, Levels, RbTree};

/// An implementation. Static dispatch throughout.
pub(crate) trait Queue: Send + Sync + Sized + 'static {
    /// The name in the tables.
    const NAME: &'static str;

    /// An empty one for so many messages.
    fn new(most: usize) -> Self;

    /// Sends, and waits for room.
    fn send(&self, message: u64, priority: u32);

    /// Receives, and waits for a message.
    fn receive(&self) -> u64;
}

/// The message of `expect`: no call is refused.
pub(crate) const OPEN: &str = "open, below its limits, with memory, and no fork";

/// Levels that are found by a number.
pub(crate) trait Numbered: Levels<Priority = u32, Hint: Send + Sync> + Send {
    const NAME: &'static str;
}

impl Numbered for Bitmap {
    const NAME: &'static str = "mq-rbtree bitmap";
}

impl Numbered for RbTree<u32> {
    const NAME: &'static str = "mq-rbtree rbtree";
}

/// Ours: limits, statistics and waiters in the order of their arrival included.
impl<L: Numbered + 'static> Queue for mq_rbtree::Queue<u64, L> {
    const NAME: &'static str = L::NAME;

    fn new(most: usize) -> Self {
        Builder::new(most).build().expect("memory for a queue")
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        Self::send(self, message, priority).expect(OPEN);
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        Self::receive(self).expect(OPEN).0
    }
}

/// Ours for 0 to 32,767.
pub(crate) type Ours = mq_rbtree::Queue<u64, Bitmap>;

/// Ours for any key.
pub(crate) type Tree = mq_rbtree::Queue<u64, RbTree<u32>>;

/// Priorities one after the other, without order: the same for every implementation.
pub(crate) struct Priorities {
    random: Random,
    levels: u32,
}

impl Priorities {
    pub(crate) fn new(levels: u32) -> Self {
        Self { random: Random::new(1), levels }
    }

    /// The next.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> u32 {
        if self.levels == 1 { 0 } else { self.random.below(self.levels as usize) as u32 }
    }
}

/// Sends a message and receives one, always of one priority: the row `name/1`.
pub(crate) fn pair<'a, Q: Queue>(queue: Q, name: &str) -> Case<'a> {
    let queue = Arc::new(queue);
    Case::new(name, 1, move |_| {
        let queue = Arc::clone(&queue);
        move |n| {
            queue.send(n, 0);
            black_box(queue.receive());
        }
    })
}
