//! Models of the calls of other threads, and of their responses.
//!
//! [`CallQueue`], [`response`] and [`serve`] are the shipped code. The eventfd is a [`Notifier`].

use std::cell::Cell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;

use crate::calls::{CallQueue, response};
use crate::completion_state::Turn;
use crate::drive::serve;
use offlock_sync::{Arc, Futex, is_planted, model, thread};

use super::{Notifier, thoroughly};

pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("send: an older call has woken the engine", "remote::inv06_each_call_wakes_the_engine"),
    ("remote-notifier-cleared-after-the-take", "remote::inv06_each_call_wakes_the_engine"),
    ("end: wake the task", "remote::inv06_a_response_wakes_its_task"),
    ("close: take what was sent", "remote::closing_runs_or_refuses_every_call"),
    ("drop_sender: wake the engine", "remote::serving_ends_with_the_last_sender"),
    ("serve: no call may come", "remote::serving_takes_the_call_of_a_sender_that_a_turn_makes"),
    ("may_have_calls: none is queued", "remote::serving_takes_the_last_call"),
];

/// The number of a call, and what its sender waits for.
type Call = (u32, Arc<Notifier>);

struct Shared {
    queue: CallQueue<Call>,
    notifier: Arc<Notifier>,
}

impl Shared {
    fn new(capacity: usize) -> Arc<Self> {
        let notifier = Arc::new(Notifier::default());
        let kick = Arc::clone(&notifier);
        Arc::new(Self { queue: CallQueue::new(capacity, move || kick.notify()), notifier })
    }

    /// Sends a call. Returns what the engine signals when it has run, or `None` if the queue is
    /// closed.
    fn send(&self, number: u32) -> Option<Arc<Notifier>> {
        let ran = Arc::new(Notifier::default());
        let sent = self.queue.send((number, Arc::clone(&ran)), |call| call);
        sent.is_ok().then_some(ran)
    }

    /// Acts as the engine: sleeps for the notifier, and runs `count` calls. Returns their numbers.
    fn run(&self, count: usize) -> Vec<u32> {
        let (mut ran, mut calls) = (Vec::new(), VecDeque::new());
        while ran.len() < count {
            self.notifier.wait();
            if is_planted("remote-notifier-cleared-after-the-take") {
                self.queue.take(&mut calls);
                self.notifier.clear();
            } else {
                self.notifier.clear();
                self.queue.take(&mut calls);
            }
            run_all(&mut calls, &mut ran);
        }
        ran
    }
}

fn run_all(calls: &mut VecDeque<Call>, ran: &mut Vec<u32>) {
    for (number, sender) in calls.drain(..) {
        ran.push(number);
        sender.notify();
    }
}

/// Two threads send a call each. Fails if one of the calls wakes no engine that sleeps, or if
/// the engine clears the notifier after it took the calls.
#[test]
fn inv06_each_call_wakes_the_engine() {
    model(|| {
        let shared = Shared::new(2);
        let threads: Vec<_> = (1..=2)
            .map(|number| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || drop(shared.send(number).expect("the queue is open")))
            })
            .collect();
        let mut ran = shared.run(2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        ran.sort_unstable();
        assert_eq!((ran, shared.queue.has_calls()), (vec![1, 2], false), "lost or repeated");
    });
}

/// One thread sends a call after the first has run, so the engine sleeps in between.
#[test]
fn inv06_calls_one_by_one_wake_the_engine() {
    thoroughly(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || (1..=2).for_each(|number| shared.send(number).expect("it is open").wait())
        });
        assert_eq!(shared.run(2), [1, 2]);
        sender.join().unwrap();
    });
}

/// Polls until there is a result, and sleeps in between.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let sleep = |woken: &Futex, seen| {
        woken.wait(seen);
        true
    };
    let output = offlock_sync::block_on(|context| future.as_mut().poll(context), sleep);
    output.expect("it sleeps until there is one")
}

/// A response, or the drop of its responder, wakes the task. Fails if a poll stores its waker after an
/// older check, or if the waker is taken before the response is stored.
#[test]
fn inv06_a_response_wakes_its_task() {
    for answered in [true, false] {
        thoroughly(move || {
            let (responder, response) = response();
            let engine = thread::spawn(move || {
                if answered {
                    responder.send(5).unwrap();
                } else {
                    drop(responder);
                }
            });
            assert_eq!(block_on(response).ok(), answered.then_some(5));
            engine.join().unwrap();
        });
    }
}

/// A response that is dropped meanwhile gets its value or leaves it to the sender.
#[test]
fn inv16_a_dropped_response_loses_no_value() {
    thoroughly(|| {
        let (responder, response) = response();
        let value = Arc::new(());
        let engine = thread::spawn({
            let value = Arc::clone(&value);
            move || drop(responder.send(value))
        });
        drop(response);
        engine.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1, "the value is leaked");
    });
}

/// A call that is sent while the queue closes runs or is refused. Fails if the close loses it.
#[test]
fn closing_runs_or_refuses_every_call() {
    thoroughly(|| {
        let shared = Shared::new(1);
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                if let Some(ran) = shared.send(1) {
                    ran.wait();
                }
            }
        });
        let (mut calls, mut ran) = (VecDeque::new(), Vec::new());
        shared.queue.take(&mut calls);
        shared.queue.close(&mut calls);
        run_all(&mut calls, &mut ran);
        sender.join().unwrap();
        assert!(shared.send(2).is_none() && !shared.queue.has_calls());
    });
}

/// A sender sends `calls` and is dropped. The engine serves as long as there is a sender. With
/// `made_by_turn` the first turn makes the sender.
///
/// A turn clears the notifier only after a sleep, like the engine's own `clear`.
fn serve_until_the_end(calls: u32, made_by_turn: bool) {
    thoroughly(move || {
        let shared = Shared::new(1);
        let add_sender = || {
            shared.queue.add_sender();
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                (1..=calls).for_each(|number| _ = shared.send(number));
                shared.queue.drop_sender();
            })
        };
        let mut sender = (!made_by_turn).then(add_sender);
        let (slept, mut taken, mut ran) = (Cell::new(false), VecDeque::new(), Vec::new());
        let turn = || {
            if slept.take() {
                shared.notifier.clear();
            }
            shared.queue.take(&mut taken);
            run_all(&mut taken, &mut ran);
            sender.get_or_insert_with(add_sender);
            Turn { delivered: 0, pending: 0, in_flight: 0 }
        };
        let sleep = || {
            shared.notifier.wait();
            slept.set(true);
            Ok::<(), Infallible>(())
        };
        _ = serve(|| shared.queue.may_have_calls(), turn, sleep);
        assert_eq!(ran.len(), calls as usize, "left behind");
        sender.expect("there was one").join().unwrap();
    });
}

/// Fails if the drop of the last sender does not notify.
#[test]
fn serving_ends_with_the_last_sender() {
    serve_until_the_end(0, false);
}

/// Fails if the engine looks for senders but not for their calls after the turn, or if it looks before
/// the turn, which may clear the last notification.
#[test]
fn serving_takes_the_last_call() {
    serve_until_the_end(1, false);
}

/// Fails if the engine does not look for calls that may come after a turn that left nothing.
#[test]
fn serving_takes_the_call_of_a_sender_that_a_turn_makes() {
    serve_until_the_end(1, true);
}
