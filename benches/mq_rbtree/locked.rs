//! What a program writes with a lock: a heap and two condition variables.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use parking_lot::{Condvar, Mutex};

use crate::queue::Queue;

/// A heap: the sequence number keeps messages of one priority in order.
#[derive(Default)]
struct Heap {
    heap: BinaryHeap<Entry>,
    sequence: u64,
}

struct Entry {
    order: (u32, Reverse<u64>),
    message: u64,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order.cmp(&other.order)
    }
}

/// The heap under parking_lot's lock, whose notify is a load if no thread waits.
pub(crate) struct PlHeap {
    store: Mutex<Heap>,
    came: Condvar,
    left: Condvar,
    most: usize,
}

impl Queue for PlHeap {
    const NAME: &'static str = "parking_lot BinaryHeap";

    fn new(most: usize) -> Self {
        Self { store: Mutex::default(), came: Condvar::new(), left: Condvar::new(), most }
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let mut store = self.store.lock();
        while store.heap.len() >= self.most {
            self.left.wait(&mut store);
        }
        store.sequence += 1;
        let order = (priority, Reverse(store.sequence));
        store.heap.push(Entry { order, message });
        drop(store);
        self.came.notify_one();
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut store = self.store.lock();
        loop {
            if let Some(entry) = store.heap.pop() {
                drop(store);
                self.left.notify_one();
                return entry.message;
            }
            self.came.wait(&mut store);
        }
    }
}
