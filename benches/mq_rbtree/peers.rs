//! The peers, at the versions of `benches/Cargo.toml`. crossbeam and kanal have no priorities:
//! they show what a queue costs without them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

use parking_lot::{Condvar, Mutex};
use testkit::block_on::unparker;

use crate::queue::{OPEN, Queue};

thread_local! {
    static WAKER: Waker = unparker();
}

/// Runs a future on this thread, which sleeps while that is not ready.
#[inline(always)]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    WAKER.with(|waker| {
        let mut context = Context::from_waker(waker);
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(output) => return output,
                Poll::Pending => thread::park(),
            }
        }
    })
}

/// Messages with their priorities; the sequence number keeps those of one priority in order.
#[derive(Default)]
struct Heap {
    heap: BinaryHeap<(u32, Reverse<u64>, u64)>,
    sequence: u64,
}

/// A heap and two condition variables under parking_lot's lock, whose notify is a load if no thread waits.
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
        let sequence = Reverse(store.sequence);
        store.heap.push((priority, sequence, message));
        drop(store);
        self.came.notify_one();
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut store = self.store.lock();
        loop {
            if let Some((.., message)) = store.heap.pop() {
                drop(store);
                self.left.notify_one();
                return message;
            }
            self.came.wait(&mut store);
        }
    }
}

/// async-priority-channel, with a sequence number in its priorities: it keeps no order within one.
/// What can be done at once is not awaited.
pub(crate) struct AsyncPriority {
    sender: async_priority_channel::Sender<u64, (u32, Reverse<u64>)>,
    receiver: async_priority_channel::Receiver<u64, (u32, Reverse<u64>)>,
    sequence: AtomicU64,
}

impl Queue for AsyncPriority {
    const NAME: &'static str = "async-priority-channel";

    fn new(most: usize) -> Self {
        let (sender, receiver) = async_priority_channel::bounded(most as u64);
        Self { sender, receiver, sequence: AtomicU64::new(0) }
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        // Ordering: Relaxed; a number.
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let priority = (priority, Reverse(sequence));
        if self.sender.try_send(message, priority).is_err() {
            assert!(block_on(self.sender.send(message, priority)).is_ok(), "{OPEN}");
        }
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        match self.receiver.try_recv() {
            Ok((message, _)) => message,
            Err(_) => block_on(self.receiver.recv()).expect(OPEN).0,
        }
    }
}

/// A channel with two ends.
macro_rules! channel {
    ($(#[$doc:meta])* $name:ident, $text:literal, $crate_name:ident) => {
        $(#[$doc])*
        pub(crate) struct $name {
            sender: $crate_name::Sender<u64>,
            receiver: $crate_name::Receiver<u64>,
        }

        impl Queue for $name {
            const NAME: &'static str = $text;

            fn new(most: usize) -> Self {
                let (sender, receiver) = $crate_name::bounded(most);
                Self { sender, receiver }
            }

            #[inline(always)]
            fn send(&self, message: u64, _priority: u32) {
                self.sender.send(message).expect(OPEN);
            }

            #[inline(always)]
            fn receive(&self) -> u64 {
                self.receiver.recv().expect(OPEN)
            }
        }
    };
}

channel!(
    /// crossbeam's: an array with stamps.
    Crossbeam,
    "crossbeam-channel (no priority)",
    crossbeam_channel
);
channel!(
    /// kanal's: a lock and direct copies from stack to stack.
    Kanal,
    "kanal (no priority)",
    kanal
);
