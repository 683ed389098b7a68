//! Sends that reach their deadline: of a thread, and of a task whose timer fires.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use mq_rbtree::{Queue, SendError, Wait};

use crate::panicking::poll;
use testkit::wait_until;

/// Sends a message of 8 bytes with a deadline. Calls `behind` when the send waits, and then `late`: for
/// a task between its last poll and its end.
pub(crate) type TimedSend =
    fn(&Queue<u32>, &mut dyn FnMut(), &mut dyn FnMut()) -> Result<(), SendError<u32>>;

pub(crate) const TIMED_SENDS: [TimedSend; 2] = [by_thread, by_task];

fn by_thread(
    queue: &Queue<u32>,
    behind: &mut dyn FnMut(),
    late: &mut dyn FnMut(),
) -> Result<(), SendError<u32>> {
    let others = queue.stats().waiting.0;
    thread::scope(|scope| {
        let wait = Wait::at_most(Duration::from_millis(300));
        let timed = scope.spawn(move || queue.send_with(8, 1, wait));
        wait_until(|| queue.stats().waiting.0 == others + 1);
        behind();
        late();
        timed.join().unwrap()
    })
}

fn by_task(
    queue: &Queue<u32>,
    behind: &mut dyn FnMut(),
    late: &mut dyn FnMut(),
) -> Result<(), SendError<u32>> {
    let is_over = Cell::new(false);
    let timer = poll_fn(|_| {
        if !is_over.get() {
            return Poll::Pending;
        }
        late();
        Poll::Ready(())
    });
    let mut timed = Box::pin(queue.send_async(8, 1).until(timer));
    assert!(poll(&mut timed, Waker::noop().clone()).is_pending());
    behind();
    is_over.set(true);
    match poll(&mut timed, Waker::noop().clone()) {
        Poll::Ready(sent) => sent,
        Poll::Pending => panic!("its time is over"),
    }
}
