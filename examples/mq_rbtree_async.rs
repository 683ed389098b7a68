//! Two queues between a task, on an executor of ten lines, and a thread that waits as threads do.
//!
//! Run:     cargo run -p examples --example mq_rbtree_async
//! Prints:  1000 questions to a task, and as many answers to a thread

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

use mq_rbtree::Queue;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let (waker, mut future) = (Arc::new(Unpark(thread::current())).into(), pin!(future));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

fn main() -> Result<(), mq_rbtree::BuildError> {
    let (questions, answers) = (Queue::<u64>::new(8)?, Queue::<u64>::new(8)?);
    let mut count = 0;
    thread::scope(|s| {
        // Waits while there is no room. After the close, what is in the queue is still received.
        s.spawn(|| (0..1_000).try_for_each(|n| questions.send(n, 3)).map(|()| questions.close()));
        s.spawn(|| (0..1_000).for_each(|n| assert_eq!(answers.receive(), Ok((2 * n, 3)))));
        block_on(async {
            while let Ok((n, priority)) = questions.receive_async().await {
                answers.send_async(2 * n, priority).await.unwrap();
                count += 1;
            }
        });
    });
    println!("{count} questions to a task, and as many answers to a thread");
    assert_eq!(count, 1_000);
    Ok(())
}
