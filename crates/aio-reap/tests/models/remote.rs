//! Letters of other threads to an engine, and the results back.
//!
//! [`Mailbox`] is the shipped type; the eventfd is a [`Notifier`].

use std::collections::VecDeque;
use std::task::{Wake, Waker};

use aio_reap::model::{Mailbox, SendError};
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::{Arc, is_planted, model, thread};

use super::Notifier;

pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("close: take what was sent", "remote::closing_answers_or_refuses_every_request"),
    ("send: the request is in its slot", "remote::inv06_each_request_wakes_the_engine"),
    ("remote-notifier-cleared-after-the-take", "remote::inv06_each_request_wakes_the_engine"),
    ("remote-last-sender-is-silent", "remote::serving_ends_with_the_last_sender"),
    ("remote-checks-for-senders-too-late", "remote::serving_takes_the_last_request"),
    ("remote-sleeps-by-an-older-check", "remote::serving_ends_with_the_last_sender"),
];

pub(super) const LOOM_ONLY: &[&str] = &["send: the request is in its slot"];

/// A letter that counts how often it is dropped.
struct Request {
    id: u32,
    drops: Arc<AtomicU32>,
}

impl Drop for Request {
    fn drop(&mut self) {
        // Ordering: Relaxed; read when all threads are joined.
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

struct Shared {
    mailbox: Mailbox<Request, u32>,
    notifier: Notifier,
    drops: Arc<AtomicU32>,
}

impl Shared {
    fn new(slots: usize) -> Arc<Self> {
        let (notifier, drops) = (Notifier::default(), Arc::new(AtomicU32::new(0)));
        Arc::new(Self { mailbox: Mailbox::new(slots), notifier, drops })
    }

    fn request(&self, id: u32) -> Request {
        Request { id, drops: Arc::clone(&self.drops) }
    }

    /// Sends and rings; the place, unless the mailbox is closed.
    fn send(&self, id: u32, awaited: bool) -> Option<u32> {
        match self.mailbox.send(self.request(id), awaited) {
            Ok(sent) => {
                if sent.notify {
                    self.notifier.notify();
                }
                Some(sent.index)
            }
            Err(SendError::Closed(request)) => {
                assert_eq!(request.id, id);
                None
            }
            Err(SendError::Full(_)) => panic!("there are places for all"),
        }
    }

    /// The engine: sleeps for the bell and answers letters, until `count` are through. Every letter
    /// is told ten times its number.
    fn answer(&self, count: usize) {
        let (mut done, mut queue) = (0, VecDeque::new());
        while done < count {
            self.notifier.wait();
            if is_planted("remote-notifier-cleared-after-the-take") {
                self.mailbox.take(&mut queue);
                self.notifier.clear();
            } else {
                self.notifier.clear();
                self.mailbox.take(&mut queue);
            }
            done += self.finish(&mut queue);
        }
    }

    fn finish(&self, queue: &mut VecDeque<u32>) -> usize {
        let count = queue.len();
        for index in queue.drain(..) {
            let result = self.mailbox.with(index, |request| request.id * 10);
            drop(self.mailbox.finish(index, result));
        }
        count
    }

    /// At the end: every letter is gone, once, and every place is free.
    fn check(&self, requests: u32) {
        assert_eq!(self.mailbox.free_len(), self.mailbox.capacity(), "a place is lost");
        // Ordering: Relaxed; all threads are joined.
        assert_eq!(self.drops.load(Ordering::Relaxed), requests, "a letter is lost, or gone twice");
    }
}

/// Wakes a thread that polls.
struct Task(Arc<Notifier>);

impl Wake for Task {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.notify();
    }
}

/// Polls until the result is there; parks meanwhile, as an executor does.
fn block_on(shared: &Shared, index: u32) -> (Request, u32) {
    let parked = Arc::new(Notifier::default());
    let waker = Waker::from(std::sync::Arc::new(Task(Arc::clone(&parked))));
    loop {
        if let Some(answer) = shared.mailbox.poll(index, &waker) {
            return answer;
        }
        parked.wait();
        parked.clear();
    }
}

/// `senders` threads send one letter each, and wait in one way or the other.
fn requests_are_answered(senders: u32, poll: bool) {
    model(move || {
        let shared = Shared::new(senders as usize);
        let threads: Vec<_> = (1..=senders)
            .map(|id| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let index = shared.send(id, true).expect("nobody closes");
                    let (request, result) = if poll {
                        block_on(&shared, index)
                    } else {
                        shared.mailbox.wait(index, None).expect("it waits for the result")
                    };
                    assert_eq!((request.id, result), (id, id * 10), "another's");
                })
            })
            .collect();
        shared.answer(senders as usize);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        shared.check(senders);
    });
}

/// Fails if who waits is told before the result is stored.
#[test]
fn inv06_no_wake_up_is_lost_between_the_result_and_parking() {
    requests_are_answered(1, false);
}

/// The same for who polls. Fails if the waker is stored by a look from before.
#[test]
fn inv06_no_wake_up_is_lost_between_the_result_and_a_poll() {
    requests_are_answered(1, true);
}

/// Fails if a sender does not ring because the queue was not empty when it first looked, if the
/// letters before it are not carried along, or if the engine answers the bell after it has looked.
#[test]
fn inv06_each_request_wakes_the_engine() {
    requests_are_answered(2, false);
}

/// A sender that is gone before the result, after it, or meanwhile. Fails if a result is lost in
/// between: the letter and its place with it.
#[test]
fn an_abandoned_request_leaves_nothing_behind() {
    model(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let index = shared.send(1, true).expect("nobody closes");
                drop(shared.mailbox.abandon(index));
            }
        });
        shared.answer(1);
        sender.join().unwrap();
        shared.check(1);
    });
}

/// Letters that nobody waits for come back to the engine, which has the last word.
#[test]
fn detached_requests_end_with_the_engine() {
    model(|| {
        let shared = Shared::new(2);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || (1..=2).for_each(|id| _ = shared.send(id, false))
        });
        shared.answer(2);
        sender.join().unwrap();
        shared.check(2);
    });
}

/// A letter that is sent while the mailbox closes is answered or comes back. Fails if closing drops
/// what was sent.
#[test]
fn closing_answers_or_refuses_every_request() {
    model(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                if let Some(index) = shared.send(1, true) {
                    drop(shared.mailbox.wait(index, None).expect("it waits for the result"));
                }
            }
        });
        let mut queue = VecDeque::new();
        shared.mailbox.take(&mut queue);
        shared.mailbox.close(&mut queue);
        shared.finish(&mut queue);
        sender.join().unwrap();
        assert!(shared.send(1, true).is_none() && !shared.mailbox.has_requests());
        shared.check(2);
    });
}

/// A sender sends `requests`, and is gone; the engine serves as long as there is a sender.
fn serve(requests: u32) {
    model(move || {
        let shared = Shared::new(1);
        shared.mailbox.add_sender();
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                (1..=requests).for_each(|id| _ = shared.send(id, false));
                if shared.mailbox.drop_sender() && !is_planted("remote-last-sender-is-silent") {
                    shared.notifier.notify();
                }
            }
        });
        let mut queue = VecDeque::new();
        loop {
            let mut alone = !shared.mailbox.has_senders();
            shared.notifier.clear();
            shared.mailbox.take(&mut queue);
            if is_planted("remote-checks-for-senders-too-late") {
                alone = !shared.mailbox.has_senders();
            }
            shared.finish(&mut queue);
            if alone {
                break;
            }
            // The last sender may have rung for what the answer above has silenced.
            if shared.mailbox.has_senders() || is_planted("remote-sleeps-by-an-older-check") {
                shared.notifier.wait();
            }
        }
        assert!(!shared.mailbox.has_requests(), "left behind");
        sender.join().unwrap();
        shared.check(requests);
    });
}

/// Fails if the engine is not told of the last sender's end, or looks for senders only before it
/// answers the bell.
#[test]
fn serving_ends_with_the_last_sender() {
    serve(0);
}

/// Fails if the engine looks for senders only after it has taken their letters.
#[test]
fn serving_takes_the_last_request() {
    serve(1);
}
