//! Handles: the last one of a side closes the queue; and which types are `Send` and `Sync`.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::panic::RefUnwindSafe;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{
    Bitmap, Builder, Core, Queue, RbTree, Readiness, ReceiveError, Receiver, SendRefused, Sender,
};

#[test]
fn the_last_sender_closes_and_remaining_messages_are_received() {
    let (sender, receiver) = Queue::<u32>::builder(4).channel().unwrap();
    let second = sender.clone();
    assert!(std::ptr::eq(&*sender, &*receiver));
    sender.send(1, 1).unwrap();
    drop(sender);
    assert!(!receiver.is_closed(), "one is left");
    second.send(2, 2).unwrap(); // through the ring, which has memory since the first
    let shown = "Sender(Queue { len: 2, closed: false, max_messages: 4, .. })";
    assert_eq!(format!("{second:?}"), shown);
    drop(second);
    assert!(receiver.is_closed());
    let other = receiver.clone();
    assert_eq!((other.receive(), receiver.receive()), (Ok((2, 2)), Ok((1, 1))));
    assert_eq!(receiver.receive(), Err(ReceiveError::Closed));
    assert!(format!("{receiver:?}").starts_with("Receiver(Queue"));
}

#[test]
fn the_last_receiver_closes_and_drops_the_messages() {
    let (sender, receiver) = Queue::<Arc<u32>>::builder(4).channel().unwrap();
    let message = Arc::new(1);
    (0..3).for_each(|n| sender.send(Arc::clone(&message), n).unwrap());
    let second = receiver.clone();
    drop(receiver);
    assert_eq!((Arc::strong_count(&message), sender.is_closed()), (4, false));
    drop(second);
    assert_eq!((Arc::strong_count(&message), sender.is_closed()), (1, true));
    assert_eq!((sender.len(), sender.stats().received), (0, 3));
    let refused = sender.send(message, 1).unwrap_err();
    assert_eq!((*refused.value, refused.reason), (1, SendRefused::Closed));
    sender.validate();
}

#[test]
fn a_receiver_iterates() {
    let (sender, receiver) = Queue::<u32>::builder(8).channel().unwrap();
    (0..4).for_each(|n| sender.send(n, n).unwrap());
    drop(sender);
    let mut again = (&receiver).into_iter();
    assert!(again.by_ref().map(|(n, _)| n).eq([3, 2, 1, 0]));
    assert_eq!(again.next(), None);
    assert!(format!("{again:?}").starts_with("Iter(Receiver(Queue"));

    // The stream waits for each message, and drops the handle with itself.
    let (sender, receiver) = Queue::<u32>::builder(1).channel().unwrap();
    let sum = thread::spawn(move || receiver.into_iter().take(3).map(|(n, _)| n).sum::<u32>());
    (1..4).for_each(|n| sender.send(n, 1).unwrap());
    assert_eq!((sum.join().unwrap(), sender.is_closed()), (6, true));
}

/// Returns whether the drop has dropped all messages.
fn drops_the_last_receiver(publish_during_the_drop: bool) -> bool {
    let message = Arc::new(());
    let (sender, receiver) = Queue::builder(8).channel().unwrap();
    (0..8).for_each(|_| sender.try_send(Arc::clone(&message), 0).unwrap());
    receiver.drain();
    sender.try_send(Arc::clone(&message), 5).unwrap();
    let mut publish = sender.claim(Arc::clone(&message), 5);
    sender.try_send(Arc::clone(&message), 9).unwrap();
    let took = thread::scope(|scope| {
        if publish_during_the_drop {
            let publish = publish.take().unwrap();
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(5));
                publish();
            });
        }
        let begin = Instant::now();
        drop(receiver);
        begin.elapsed()
    });
    assert!(took < Duration::from_secs(60));
    let all = Arc::strong_count(&message) == 1;
    assert!(all || took >= Duration::from_millis(50), "the drop gave up after {took:?}");
    publish.into_iter().for_each(|publish| publish());
    assert_eq!(sender.stats().timeouts, 0, "the drop is no receive");
    drop(sender);
    assert_eq!(Arc::strong_count(&message), 1);
    all
}

/// On a busy machine the sender may run so late that the drop has given up.
#[test]
fn the_drop_of_the_last_receiver_waits_for_a_sender_that_was_preempted() {
    assert!((0..100).any(|_| drops_the_last_receiver(true)));
}

/// The messages behind such a sender are left to the drop of the queue.
#[test]
fn inv22_the_drop_of_the_last_receiver_ends_beside_a_stopped_sender() {
    drops_the_last_receiver(false);
}

/// A message in a guard keeps its place, and is dropped with the guard or the queue.
#[test]
fn the_drop_of_the_last_receiver_does_not_wait_for_a_guard() {
    let (sender, receiver) = Queue::builder(2).channel().unwrap();
    sender.send("lent", 9).unwrap();
    sender.send("dropped", 1).unwrap();
    let guard = sender.receive_guard().unwrap();
    drop(receiver);
    assert_eq!(sender.stats().timeouts, 0, "nothing was waited for");
    assert_eq!((sender.len(), sender.stats().guarded, sender.is_closed()), (0, 1, true));
    drop(guard);
    assert_eq!(sender.try_receive(), Ok(("lent", 9)));
}

/// The types are `Send` and `Sync` exactly if the messages allow it.
#[test]
fn handles_are_send_and_sync() {
    fn both<T: Send + Sync>() {}
    fn send<T: Send>() {}
    fn unwind_safe<T: RefUnwindSafe>() {}
    both::<Queue<Cell<u8>>>();
    unwind_safe::<Queue<Cell<u8>, RbTree<u64>>>(); // it works after a panic
    both::<Queue<Cell<u8>, RbTree<(u64, char)>>>();
    both::<Sender<Cell<u8>>>();
    both::<Receiver<Cell<u8>, RbTree<i8>>>();
    send::<Core<Cell<u8>, Bitmap>>();
    send::<Core<Cell<u8>, RbTree<u8>>>();
    fn sends<T: Send>(_: T) {}
    let queue: Queue<Cell<u8>> = Queue::new(1).unwrap();
    sends((queue.receive_async(), queue.send_async(Cell::new(1), 1), queue.receive_guard_async()));
    both::<Readiness<Arc<Queue<Cell<u8>>>>>();
    both::<Readiness<Sender<Cell<u8>>>>();
    send::<Builder<Cell<u8>>>();
    // Checks that a type lacks a trait, in a way that compiles whether it has the trait or not.
    trait Ask<A> {
        const IS: bool = false;
    }
    struct Of<T>(std::marker::PhantomData<T>);
    impl<T> Ask<()> for Of<T> {}
    impl<T: Send> Of<T> {
        const IS: bool = true;
    }
    type NotSend = std::rc::Rc<u8>;
    let answers = [
        Of::<Queue<Cell<u8>>>::IS,
        Of::<Queue<NotSend>>::IS,
        Of::<&Queue<NotSend>>::IS,
        Of::<Sender<NotSend>>::IS,
        Of::<Core<NotSend>>::IS,
    ];
    assert_eq!(answers, [true, false, false, false, false]);
}
