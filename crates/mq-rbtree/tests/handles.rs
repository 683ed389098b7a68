//! Handles: the last of a side closes the queue; and what can be sent to other threads.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/until.rs"]
mod until;

use std::cell::Cell;
use std::sync::Arc;
use std::thread;

use mq_rbtree::{
    Bitmap, Builder, Core, Deadline, Queue, Quota, RbTree, Readiness, ReceiveError, ReceiveFuture,
    Receiver, SendFuture, SendRefused, Sender, Wait,
};

use until::wait_until;

#[test]
fn the_last_sender_closes_and_what_is_there_can_be_received() {
    let (sender, receiver) = Queue::<u32>::builder(4).channel().unwrap();
    let second = sender.clone();
    sender.send(1, 1).unwrap();
    drop(sender);
    assert_eq!(receiver.is_closed(), Ok(false), "one is left");
    second.send(2, 2).unwrap();
    drop(second);
    assert_eq!(receiver.is_closed(), Ok(true));
    let other = receiver.clone();
    assert_eq!((other.receive(), receiver.receive()), (Ok((2, 2)), Ok((1, 1))));
    assert_eq!(receiver.receive(), Err(ReceiveError::Closed));
    assert!(format!("{receiver:?}").starts_with("Receiver(Queue"));
}

#[test]
fn the_last_receiver_closes_and_drops_what_is_there() {
    let (sender, receiver) = Queue::<Arc<u32>>::builder(4).channel().unwrap();
    let message = Arc::new(1);
    (0..3).for_each(|n| sender.send(Arc::clone(&message), n).unwrap());
    let second = receiver.clone();
    drop(receiver);
    assert_eq!((Arc::strong_count(&message), sender.is_closed()), (4, Ok(false)));
    drop(second);
    assert_eq!((Arc::strong_count(&message), sender.is_closed()), (1, Ok(true)));
    assert_eq!((sender.len(), sender.stats().unwrap().received), (Ok(0), 3));
    let refused = sender.send(message, 1).unwrap_err();
    assert_eq!((*refused.value, refused.reason), (1, SendRefused::Closed));
    sender.validate();
}

#[test]
fn threads_that_wait_are_told_of_the_last_handle() {
    let (sender, receiver) = Queue::<u32>::builder(1).spin(false).channel().unwrap();
    let waiting = receiver.clone();
    let blocked = thread::spawn(move || waiting.receive());
    wait_until(|| receiver.stats().unwrap().waiting == (0, 1));
    drop(sender);
    assert_eq!(blocked.join().unwrap(), Err(ReceiveError::Closed));

    let (sender, receiver) = Queue::<u32>::builder(1).spin(false).channel().unwrap();
    sender.send(1, 1).unwrap();
    let waiting = sender.clone();
    let blocked = thread::spawn(move || waiting.send(2, 2));
    wait_until(|| sender.stats().unwrap().waiting == (1, 0));
    drop(receiver);
    let refused = blocked.join().unwrap().unwrap_err();
    assert_eq!((refused.value, refused.reason), (2, SendRefused::Closed));
    assert_eq!(sender.len(), Ok(0));
}

/// Many threads clone and drop handles; the queue closes when the last is gone, not before.
#[test]
fn handles_of_many_threads_close_once() {
    let message = Arc::new(());
    for _ in 0..200 {
        let (sender, receiver) = Queue::<Arc<()>>::builder(8).channel().unwrap();
        thread::scope(|scope| {
            for _ in 0..2 {
                let (sender, message) = (sender.clone(), Arc::clone(&message));
                scope.spawn(move || {
                    for n in 0..3 {
                        let sender = sender.clone();
                        let sent = sender.send_with(Arc::clone(&message), n, Wait::FOREVER);
                        assert!(sent.is_ok(), "a receiver is there");
                    }
                });
            }
            drop(sender);
            let received = std::iter::from_fn(|| receiver.clone().receive().ok()).count();
            assert_eq!(received, 6);
        });
    }
    assert_eq!(Arc::strong_count(&message), 1);
}

/// Whatever can cross threads does, if messages can; and nothing else.
#[test]
fn what_can_be_sent_and_shared() {
    fn both<T: Send + Sync>() {}
    fn send<T: Send>() {}
    both::<Queue<Cell<u8>>>();
    both::<Queue<Cell<u8>, RbTree<(u64, char)>>>();
    both::<Sender<Cell<u8>>>();
    both::<Receiver<Cell<u8>, RbTree<i8>>>();
    both::<(Quota, Deadline, Wait)>();
    send::<Core<Cell<u8>, Bitmap>>();
    send::<Core<Cell<u8>, RbTree<u8>>>();
    send::<ReceiveFuture<'static, Cell<u8>>>();
    send::<SendFuture<'static, Cell<u8>, RbTree<u8>>>();
    both::<Readiness<Arc<Queue<Cell<u8>>>, Cell<u8>>>();
    send::<Builder<Cell<u8>>>();
    // What may not: asked of the compiler in a way that compiles either way.
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
        Of::<ReceiveFuture<'static, NotSend>>::IS,
        Of::<SendFuture<'static, NotSend>>::IS,
        Of::<Core<NotSend>>::IS,
    ];
    assert_eq!(answers, [true, false, false, false, false, false, false]);
}
