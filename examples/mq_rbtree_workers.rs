//! A work queue with priorities between threads: urgent work overtakes, closing lets the rest finish.
//!
//! Run:     cargo run -p examples --example mq_rbtree_workers
//! Prints:  2 workers, 3001 jobs

use std::thread;

use mq_rbtree::{Queue, ReceiveError, SendRefused};

const WORKERS: usize = 2;
const JOBS: u32 = 1_000; // per producer
const PRODUCERS: [u32; 3] = [1, 5, 9]; // by the priority of their jobs

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Room for 64 jobs; a producer that finds none waits.
    let (sender, receiver) = Queue::builder(64).channel()?;

    // The highest priority comes first, and the oldest of it before the others.
    for (job, priority) in [(1, 1), (2, 9), (3, 9)] {
        sender.send(job, priority)?;
    }
    assert_eq!([receiver.receive()?, receiver.receive()?], [(2, 9), (3, 9)]);

    let done: usize = thread::scope(|s| {
        for priority in PRODUCERS {
            let sender = sender.clone();
            s.spawn(move || (0..JOBS).try_for_each(|job| sender.send(job, priority)));
        }
        let workers = [(); WORKERS].map(|()| s.spawn(|| receiver.iter().count()));
        drop(sender); // once the producers have dropped theirs the queue closes, and is emptied
        workers.map(|worker| worker.join().unwrap()).iter().sum()
    });
    assert_eq!(receiver.receive(), Err(ReceiveError::Closed));
    println!("{WORKERS} workers, {done} jobs");
    assert_eq!(done, 1 + PRODUCERS.len() * JOBS as usize);

    // The other way to end: refuse what comes, and take what is left.
    let queue: Queue<u32> = Queue::new(8)?;
    queue.send(1, 1)?;
    queue.close();
    let refused = queue.send(7, 3).unwrap_err(); // with the value
    assert_eq!((refused.value, refused.reason), (7, SendRefused::Closed));
    assert_eq!(queue.drain(), [(1, 1)]);
    Ok(())
}
