//! The peers, at the versions of `benches/Cargo.toml`. crossbeam and kanal have no priorities:
//! they show what a queue costs without them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs;
use std::future::Future;
use std::pin::pin;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

use parking_lot::{Condvar, Mutex};
use testkit::block_on::unparker;

use crate::kernel::{KernelQueue, MESSAGE_BYTES, Patience};
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

/// The kernel's own queue, by the system calls that `mq_send` and `mq_receive` make.
impl Queue for KernelQueue {
    const NAME: &'static str = "the kernel's queue";

    fn new(most: usize) -> Self {
        Self::new(kernel_room(most))
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let sent = Self::send(self, &message.to_ne_bytes(), priority, Patience::Forever);
        assert_eq!(sent, Ok(()));
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut bytes = [0; MESSAGE_BYTES];
        let received = Self::receive(self, &mut bytes, Patience::Forever);
        assert_eq!(received.map(|(length, _)| length), Ok(8));
        u64::from_ne_bytes(*bytes.first_chunk().expect("16 bytes"))
    }
}

/// Returns the number of messages that a queue of the kernel can hold here, up to `most`: `most` if the calling
/// thread can have an IPC namespace of its own, which the threads that it starts later share.
pub(crate) fn kernel_room(most: usize) -> usize {
    const LIMIT: &str = "/proc/sys/fs/mqueue/msg_max";
    static RAISED: Once = Once::new();
    RAISED.call_once(|| {
        // SAFETY: has no preconditions. Where it is refused the usual limit stays.
        if unsafe { libc::unshare(libc::CLONE_NEWIPC) } == 0 {
            let _usual_if_refused = fs::write(LIMIT, "4096");
        }
    });
    let limit = fs::read_to_string(LIMIT).expect("a kernel with message queues");
    most.min(limit.trim().parse().expect("a number"))
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
