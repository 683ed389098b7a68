//! A work queue with retries, whose shutdown loses no job: see `work_queue.md`.
//!
//! Run:     cargo run -p examples --example work_queue
//! Prints, for example:  2000 jobs: 1200 done, 4 given up, 64 saved for the next start, 732 refused

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError};

const JOBS: u32 = 2_000;
const WORKERS: usize = 2;
const ATTEMPTS: u32 = 3;
/// The time that the workers have for the queued jobs after the shutdown begins.
const GRACE: Duration = Duration::from_millis(1);

#[derive(Debug)]
struct Job {
    number: u32,
    attempts: u32,
}

/// The ends of the jobs.
#[derive(Default)]
struct Ended {
    done: Vec<u32>,
    given_up: Vec<u32>,
    saved: Vec<u32>,
    refused: Vec<u32>,
}

/// Each tenth job fails once, each 250th panics each time.
fn run(job: &Job) -> Result<(), &'static str> {
    thread::sleep(Duration::from_micros(50));
    assert!(!job.number.is_multiple_of(250), "a bug");
    if job.number.is_multiple_of(10) && job.attempts == 1 {
        Err("the network is down")
    } else {
        Ok(())
    }
}

/// Runs jobs until the queue is closed and empty, or the time in `stop` has come.
fn work(queue: &Queue<Job>, ended: &Mutex<Ended>, stop: &Mutex<Option<Instant>>) {
    while stop.lock().unwrap().is_none_or(|stop| Instant::now() < stop) {
        let mut job = match queue.receive_guard() {
            Ok(job) => job,
            Err(ReceiveError::Closed) => return,
            Err(error) => panic!("{error}"),
        };
        job.attempts += 1; // goes back with the message
        let result = catch_unwind(AssertUnwindSafe(|| run(&job)));
        if let Ok(Ok(())) = result {
            ended.lock().unwrap().done.push(job.accept().0.number);
        } else if job.attempts == ATTEMPTS {
            ended.lock().unwrap().given_up.push(job.accept().0.number);
        } // otherwise the drop puts it back, in front of its priority, also into a closed queue
    }
}

/// Sends jobs until the queue is closed. A refused job comes back.
fn produce(queue: &Queue<Job>, ended: &Mutex<Ended>) {
    for number in 1..=JOBS {
        let priority = if number.is_multiple_of(8) { 9 } else { 1 };
        if let Err(refused) = queue.send(Job { number, attempts: 0 }, priority) {
            ended.lock().unwrap().refused.push(refused.value.number);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    std::panic::set_hook(Box::new(|_| ())); // the panics are caught, and expected
    let queue = Queue::builder(64).build()?;
    let (ended, stop) = (Mutex::new(Ended::default()), Mutex::new(None));
    thread::scope(|s| {
        for _ in 0..WORKERS {
            s.spawn(|| work(&queue, &ended, &stop));
        }
        s.spawn(|| produce(&queue, &ended));
        while ended.lock().unwrap().done.len() < 1_000 {
            thread::sleep(Duration::from_millis(1));
        }
        // The shutdown: the workers have this long for the queue, and senders get their jobs back.
        *stop.lock().unwrap() = Some(Instant::now() + GRACE);
        queue.close(); // ends the waits of senders and workers
    });
    let mut ended = ended.into_inner()?;
    // The workers have ended, so no guard is left whose job would come back after the drain.
    ended.saved = queue.drain().into_iter().map(|(job, _)| job.number).collect();

    let Ended { done, given_up, saved, refused } = &ended;
    println!(
        "{JOBS} jobs: {} done, {} given up, {} saved for the next start, {} refused",
        done.len(),
        given_up.len(),
        saved.len(),
        refused.len()
    );
    let mut all = [&done[..], given_up, saved, refused].concat();
    all.sort_unstable();
    assert!(all.into_iter().eq(1..=JOBS), "each job has ended once");
    assert!(done.len() >= 1_000);
    Ok(())
}
