//! Models of the mailbox: requests of other threads to an engine, and their results.
//!
//! [`Mailbox`] is the shipped type. The eventfd is a [`Notifier`].

use std::cell::Cell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::task::{Wake, Waker};

use aio_reap::model::{Mailbox, SendError, Served, serve};
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::{Arc, is_planted, model, thread};

use super::{Notifier, thoroughly};

pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("close: take what was sent", "remote::closing_answers_or_refuses_every_request"),
    ("send: the request is in its slot", "remote::inv06_each_request_wakes_the_engine"),
    ("take_all: the chain is linked", "remote::inv06_each_request_wakes_the_engine"),
    ("remote-notifier-cleared-after-the-take", "remote::inv06_each_request_wakes_the_engine"),
    ("remote-last-sender-is-silent", "remote::serving_ends_with_the_last_sender"),
    ("serve: no sender is left", "remote::serving_takes_the_last_request"),
    ("serve: a sender will notify", "remote::serving_takes_the_last_request"),
    ("drop_sender: its requests are sent", "remote::serving_takes_the_last_request"),
    ("has_senders: the last request is sent", "remote::serving_takes_the_last_request"),
    ("remote-notifier-cleared-after-the-cancels", "remote::inv21_a_cancellation_wakes_the_engine"),
];

pub(super) const LOOM_ONLY: &[&str] = &[
    "send: the request is in its slot",
    "take_all: the chain is linked",
    "drop_sender: its requests are sent",
    "has_senders: the last request is sent",
];

/// A request that counts its drops.
struct Request {
    id: u32,
    drops: Arc<AtomicU32>,
}

impl Drop for Request {
    fn drop(&mut self) {
        // Ordering: Relaxed; it is read after all threads are joined.
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

    /// Sends a request and notifies. Returns the slot, or `None` if the mailbox is closed.
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
            Err(SendError::Full(_)) => panic!("there is a slot for each"),
        }
    }

    /// Acts as the engine: sleeps for the notifier and finishes `count` requests. The result of a
    /// request is ten times its id.
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

    /// Checks at the end that every request was dropped once, and every slot is free.
    fn check(&self, requests: u32) {
        assert_eq!(self.mailbox.free_len(), self.mailbox.capacity(), "a slot is lost");
        // Ordering: Relaxed; all threads are joined.
        assert_eq!(
            self.drops.load(Ordering::Relaxed),
            requests,
            "a request is lost, or dropped twice"
        );
    }
}

/// The waker of a thread that polls.
struct Task(Arc<Notifier>);

impl Wake for Task {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.notify();
    }
}

/// Polls until there is a result, and parks in between, like an executor.
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

/// `senders` threads send one request each, and poll or block for the result.
fn requests_are_answered(senders: u32, poll: bool) {
    let run = move || {
        let shared = Shared::new(senders as usize);
        let threads: Vec<_> = (1..=senders)
            .map(|id| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let index = shared.send(id, true).expect("the mailbox stays open");
                    let (request, result) = if poll {
                        block_on(&shared, index)
                    } else {
                        shared.mailbox.wait(index, None).expect("it waits for the result")
                    };
                    assert_eq!(
                        (request.id, result),
                        (id, id * 10),
                        "the result of another request"
                    );
                })
            })
            .collect();
        shared.answer(senders as usize);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        shared.check(senders);
    };
    match senders {
        1 => thoroughly(run),
        _ => model(run), // seconds with three preemptions
    }
}

/// Fails if a waiting sender is woken before the result is stored.
#[test]
fn inv06_no_wake_up_is_lost_between_the_result_and_parking() {
    requests_are_answered(1, false);
}

/// Fails if the waker is stored after an older check for the result.
#[test]
fn inv06_no_wake_up_is_lost_between_the_result_and_a_poll() {
    requests_are_answered(1, true);
}

/// Fails if a sender does not notify because the queue was not empty at its first load, if the
/// older requests are not carried along, or if the engine clears the notifier after it took the
/// requests.
#[test]
fn inv06_each_request_wakes_the_engine() {
    requests_are_answered(2, false);
}

/// A sender stops waiting before the result, after it, or at the same time. Fails if the request
/// and its slot are lost.
#[test]
fn an_abandoned_request_leaves_nothing_behind() {
    thoroughly(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let index = shared.send(1, true).expect("the mailbox stays open");
                drop(shared.mailbox.abandon(index));
            }
        });
        shared.answer(1);
        sender.join().unwrap();
        shared.check(1);
    });
}

/// Requests without a waiting sender come back to the engine.
#[test]
fn detached_requests_end_with_the_engine() {
    thoroughly(|| {
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

/// A request that is sent while the mailbox closes is answered or comes back. Fails if the close
/// loses sent requests.
#[test]
fn closing_answers_or_refuses_every_request() {
    thoroughly(|| {
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

/// A sender sends `requests` and is dropped. The engine serves as long as there is a sender.
///
/// [`serve`] is the shipped loop. A turn clears the notifier only after a sleep: the engine's own
/// `clear` makes no system call, and so orders nothing, before it has slept on the kick.
fn serve_until_the_end(requests: u32) {
    thoroughly(move || {
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
        let (slept, mut queue) = (Cell::new(false), VecDeque::new());
        let turn = || {
            if slept.take() {
                shared.notifier.clear();
            }
            shared.mailbox.take(&mut queue);
            shared.finish(&mut queue);
            Served::Idle
        };
        let sleep = || {
            shared.notifier.wait();
            slept.set(true);
            Ok::<(), Infallible>(())
        };
        _ = serve(|| shared.mailbox.has_senders(), turn, sleep);
        assert_eq!(shared.mailbox.free_len(), shared.mailbox.capacity(), "left behind");
        sender.join().unwrap();
        shared.check(requests);
    });
}

/// Fails if the drop of the last sender does not notify.
#[test]
fn serving_ends_with_the_last_sender() {
    serve_until_the_end(0);
}

/// Fails if the engine checks for senders only after it took their requests, or if it sleeps by a
/// check from before the turn, which may have cleared the last notification.
#[test]
fn serving_takes_the_last_request() {
    serve_until_the_end(1);
}

/// An engine that sleeps learns that a request is to be cancelled, wherever the request is. Fails
/// with a deadlock if the notifier is cleared after the engine has looked.
#[test]
fn inv21_a_cancellation_wakes_the_engine() {
    thoroughly(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let index = shared.send(7, true).expect("the mailbox stays open");
                if shared.mailbox.cancel(index).expect("only a cancellation ends the request") {
                    shared.notifier.notify();
                }
                drop(shared.mailbox.wait(index, None));
            }
        });
        let (mut queue, mut taken, mut cancelled) = (VecDeque::new(), None, false);
        while !cancelled {
            let late = is_planted("remote-notifier-cleared-after-the-cancels");
            shared.notifier.wait();
            if !late {
                shared.notifier.clear();
            }
            shared.mailbox.take(&mut queue);
            if let Some(index) = queue.pop_front() {
                taken = Some(index);
                cancelled = shared.mailbox.is_cancelled(index);
            }
            if !cancelled && shared.mailbox.has_cancels() {
                shared.mailbox.take_cancels(|index| {
                    cancelled = taken == Some(index);
                    cancelled
                });
            }
            if late {
                shared.notifier.clear();
            }
        }
        drop(shared.mailbox.finish(taken.expect("it was cancelled"), 0));
        sender.join().unwrap();
        shared.check(1);
    });
}
