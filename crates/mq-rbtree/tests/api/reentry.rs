//! User code that uses the queue that calls it.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use mq_rbtree::{Queue, SendRefused};

use crate::panicking::{panics, poll};

/// A message that inspects its queue when it is dropped.
struct InspectsQueue {
    queue: Weak<Queue<InspectsQueue>>,
    seen: Arc<AtomicUsize>,
}

impl Drop for InspectsQueue {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            // These calls would block for ever if the lock was held.
            let _ = (queue.len(), queue.is_closed());
            queue.validate();
        }
        self.seen.fetch_add(1, SeqCst);
    }
}

#[test]
fn a_message_may_use_its_queue_when_it_is_dropped() {
    let seen = Arc::new(AtomicUsize::new(0));
    let queue: Arc<Queue<InspectsQueue>> = Arc::new(Queue::new(8).unwrap());
    let message = || InspectsQueue { queue: Arc::downgrade(&queue), seen: Arc::clone(&seen) };
    let fill = || {
        for n in 0..8 - queue.len() as u32 {
            queue.try_send(message(), n).unwrap();
        }
    };
    fill();
    (0..8).for_each(|_| drop(queue.try_receive().unwrap()));
    fill();
    drop(queue.drain_filter(|_, _| true));
    fill();
    assert!(panics(|| queue.drain_filter(|_, priority| {
        assert!(priority > 3);
        true
    })));
    fill();
    let mut future = Box::pin(queue.send_async(message(), 1));
    let pending = poll(&mut future, Waker::noop().clone()).is_pending();
    drop(future);
    assert!(pending);
    let mut batch = (0..20).map(|_| (message(), 2)).collect();
    assert_eq!(queue.try_send_batch(&mut batch).unwrap_err().reason, SendRefused::Full);
    drop(batch);
    queue.close();
    assert_eq!(queue.try_send(message(), 1).unwrap_err().reason, SendRefused::Closed);
    let mut out = Vec::new();
    let _ = queue.try_receive_batch(&mut out, 8);
    drop(out);
    queue.validate();
    let before = seen.load(SeqCst);
    drop(queue);
    assert!(before > 40 && seen.load(SeqCst) >= before);
}

/// A waker that sends and receives on the queue that calls it.
#[test]
fn wakers_may_use_the_queue() {
    struct Uses(Weak<Queue<u32>>, AtomicUsize);
    impl Wake for Uses {
        fn wake(self: Arc<Self>) {
            let queue = self.0.upgrade().unwrap();
            queue.validate();
            let _ = (queue.try_receive(), queue.try_send(9, 9), queue.stats());
            self.1.fetch_add(1, SeqCst);
        }
    }
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(1).unwrap());
    let uses = Arc::new(Uses(Arc::downgrade(&queue), AtomicUsize::new(0)));
    let waker = || Waker::from(Arc::clone(&uses));
    let mut receive = Box::pin(queue.receive_async());
    assert!(poll(&mut receive, waker()).is_pending());
    queue.send(1, 1).unwrap();
    let mut send = Box::pin(queue.send_async(2, 2));
    assert!(poll(&mut send, waker()).is_pending());
    queue.try_receive().unwrap();
    assert_eq!(uses.1.load(SeqCst), 2);
    drop((send, receive));
    queue.drain();

    queue.validate();
}
