//! Without memory, operations return that as their error, or need none.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::fmt::Debug;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{
    Bitmap, BuildError, Core, Interest, Levels, Queue, RbTree, Readiness, ReceiveError, SendRefused,
};

use testkit::alloc::{refuse_after, refuse_first};
use testkit::wait_until;

/// Runs `make` with memory for no allocation, for one, and so on, until it succeeds. Returns how many
/// it needs; without them it returns `error`.
fn needed<R, E: PartialEq + Debug>(error: &E, make: impl Fn() -> Result<R, E>) -> usize {
    let refused = |&admitted: &usize| match refuse_after(admitted, &make) {
        Ok(_) => false,
        Err(reason) => {
            assert_eq!(&reason, error);
            true
        }
    };
    (0..).take_while(refused).count()
}

#[test]
fn a_queue_without_memory_is_not_made() {
    fn core<L: Levels>() -> usize {
        needed(&libc::ENOMEM, || Core::<u8, L>::try_new(3).map_err(|error| error.errno()))
    }
    assert_eq!((core::<Bitmap>(), core::<RbTree<u8>>()), (3, 2));
    let error = &BuildError::NoMemory;
    let builder = || Queue::<u8>::builder(8);
    assert_eq!(needed(error, || Queue::<u8>::new(8)), 4);
    assert_eq!(needed(error, || builder().channel()), 5);
    assert_eq!(needed(error, || builder().no_alloc().build()), 5);
    assert_eq!(needed(error, || builder().reserve(5, 1).reserve(6, 1).build()), 4);
    assert_eq!(needed(error, || Queue::<u8, RbTree<u8>>::with_keys(8)), 2);
}

#[test]
fn what_was_passed_in_comes_back_if_there_is_no_memory() {
    let queue: Queue<u8> = Queue::new(8).unwrap();
    let ready = || {
        Readiness::new(&queue, Interest::Readable).map_err(|error| {
            assert!(std::ptr::eq(error.queue, &queue));
            error.reason.raw_os_error()
        })
    };
    assert_eq!(needed(&Some(libc::ENOMEM), ready), 1);
    queue.validate();
}

/// A batch uses the room that its vector has.
#[test]
fn a_batch_without_memory_takes_what_has_room() {
    let queue: Queue<u32> = Queue::new(8).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    for async_batch in [false, true] {
        let mut receive = |out: &mut Vec<_>| match async_batch {
            false => queue.try_receive_batch(out, 8),
            true => match pin!(queue.receive_batch_async(out, 8)).poll(&mut cx) {
                Poll::Ready(result) => result,
                Poll::Pending => Err(ReceiveError::Empty),
            },
        };
        let mut out = Vec::new();
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        (0..8).for_each(|n| queue.send(n, 8 - n).unwrap());
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!((queue.len(), out.capacity()), (8, 0), "no message was taken");
        out.reserve_exact(3);
        let room = out.capacity();
        assert_eq!(refuse_after(0, || receive(&mut out)), Ok(room));
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!(receive(&mut out), Ok(8 - room));
        assert!(out.iter().map(|&(n, _)| n).eq(0..8));
        let mut with_room = Vec::with_capacity(1);
        assert_eq!(refuse_after(0, || receive(&mut with_room)), Err(ReceiveError::Empty));
    }
    queue.validate();
}

/// More allocations than any test asks for.
const ALL: usize = usize::MAX - 1;

/// The first wait of a thread allocates the memory by which it is woken. Without that memory it looks
/// again from time to time.
#[test]
fn the_first_wait_of_a_thread_without_memory_ends_in_time() {
    let queue: Queue<u32> = Queue::builder(1).spin(false).build().unwrap();
    let soon = || Instant::now() + Duration::from_millis(5);
    thread::scope(|scope| {
        // Each thread begins with refused allocations, as many as its waits ask for.
        let times_out = scope.spawn(|| {
            let start = Instant::now();
            let received = refuse_first(ALL, || queue.receive_deadline(soon())).0;
            let lent = refuse_first(ALL, || queue.receive_guard_deadline(soon()).map(drop)).0;
            assert!(start.elapsed() >= Duration::from_millis(10));
            (received, lent)
        });
        let timeout = ReceiveError::Timeout;
        assert_eq!(times_out.join().unwrap(), (Err(timeout), Err(timeout)));

        let receives = scope.spawn(|| refuse_first(ALL, || queue.receive()));
        wait_until(|| queue.stats().waiting == (0, 1));
        queue.send(1, 1).unwrap();
        let (received, refused) = receives.join().unwrap();
        assert_eq!(received, Ok((1, 1)));
        assert!(refused >= 1);

        let lends = || queue.receive_guard().map(mq_rbtree::MessageGuard::accept);
        let lends = scope.spawn(move || refuse_first(ALL, lends));
        wait_until(|| queue.stats().waiting == (0, 1));
        queue.send(2, 2).unwrap();
        let (received, refused) = lends.join().unwrap();
        assert_eq!(received, Ok((2, 2)));
        assert!(refused >= 1);

        queue.send(3, 3).unwrap();
        let refused = scope.spawn(|| refuse_first(ALL, || queue.send_deadline(4, 4, soon())).0);
        let refused = refused.join().unwrap().unwrap_err();
        assert_eq!((refused.value, refused.reason), (4, SendRefused::Timeout));
        let sends = scope.spawn(|| refuse_first(ALL, || queue.send(5, 5)).0);
        wait_until(|| queue.stats().waiting == (1, 0));
        assert_eq!(queue.receive(), Ok((3, 3)));
        assert!(sends.join().unwrap().is_ok());
        assert_eq!(queue.receive(), Ok((5, 5)));
    });
    queue.validate();
}
