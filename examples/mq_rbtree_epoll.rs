//! A queue beside sockets in an event loop: its descriptor is readable when it has messages.
//!
//! Run:     cargo run -p examples --example mq_rbtree_epoll
//! Prints:  10000 messages in order, and then the end

use std::os::fd::AsFd;
use std::thread;

use mq_rbtree::{Interest, Queue, Readiness, ReceiveError};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

const MESSAGES: u32 = 10_000;
const QUEUE: EventData = EventData::new_u64(7); // sockets have other numbers

/// The loop of a server; ends with the queue.
fn run(queue: &Queue<u32>) -> std::io::Result<u32> {
    let ready = Readiness::new(queue, Interest::Readable)?;
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, ready.as_fd(), QUEUE, EventFlags::IN)?;
    let (mut events, mut received) = (Vec::with_capacity(16), 0);
    loop {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for _ in events.drain(..) {
            ready.clear(); // first this, then receive until nothing is left: so none is missed
            loop {
                match queue.try_receive() {
                    Ok((message, _)) => assert_eq!(message, received),
                    Err(ReceiveError::Empty) => break,
                    Err(ReceiveError::Closed) => return Ok(received),
                    Err(error) => return Err(error.into()),
                }
                received += 1;
            }
        }
    }
}

fn main() -> std::io::Result<()> {
    let queue = Queue::new(256)?;
    let received = thread::scope(|s| {
        let server = s.spawn(|| run(&queue));
        (0..MESSAGES).for_each(|n| queue.send(n, 1).unwrap());
        queue.close();
        server.join().unwrap()
    })?;
    println!("{received} messages in order, and then the end");
    assert_eq!(received, MESSAGES);
    Ok(())
}
