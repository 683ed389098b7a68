//! The threads of a round.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{ReceiveError, Received, Receiver, SendError, SendRefused, Sender};

use crate::ledger::Ledger;
use crate::wait::Wait;
use crate::{Keyed, PRIORITIES};
use testkit::block_on::{block_on, unparker};
use testkit::canary::{Canary, Census};
use testkit::rng::SeededRng;

pub(crate) struct Party<'a, L> {
    pub(crate) number: usize,
    pub(crate) rng: SeededRng,
    pub(crate) ledger: Ledger,
    pub(crate) census: &'a Census,
    pub(crate) steps: &'a AtomicU64,
    pub(crate) levels: std::marker::PhantomData<fn() -> L>,
}

/// The futures of each kind that one thread has at a time.
const FUTURES: usize = 3;

/// A waiting receive.
type Waiting<'q, L> = Pin<Box<dyn Future<Output = Result<Received<Canary, L>, ReceiveError>> + 'q>>;
/// A waiting send, and the number of its message.
type Numbered<'q> = (Pin<Box<dyn Future<Output = Result<(), SendError<Canary>>> + 'q>>, u64);

impl<L: Keyed> Party<'_, L> {
    fn message(&mut self, sender: usize) -> (Canary, L::Priority, u64) {
        let priority = self.rng.usize(..PRIORITIES);
        let bits = self.ledger.number(sender as u8, priority as u8).to_bits();
        (Canary::new(bits, self.census), L::key(priority), bits)
    }

    /// Records the result of a send. Returns false once the queue is closed.
    fn sent(&mut self, bits: u64, said: Result<(), SendError<Canary>>) -> bool {
        match said {
            Ok(()) => self.ledger.accepted.add(bits),
            Err(refused) => {
                assert_eq!(refused.value.read(), bits, "the message comes back");
                match refused.reason {
                    SendRefused::Full | SendRefused::Timeout => {}
                    SendRefused::Closed => return false,
                    other => panic!("{other}"),
                }
            }
        }
        true
    }

    /// Records a received message.
    fn record_received(&mut self, (message, key): Received<Canary, L>, in_order: bool) {
        let number = self.ledger.take(message.read(), in_order);
        assert!(L::key(number.priority.into()) == key);
    }

    /// Records the result of a receive. Returns false once the queue is closed.
    fn received(&mut self, said: Result<Received<Canary, L>, ReceiveError>) -> bool {
        match said {
            Ok(message) => self.record_received(message, true),
            Err(ReceiveError::Empty | ReceiveError::Timeout) => {}
            Err(ReceiveError::Closed) => return false,
            Err(other) => panic!("{other}"),
        }
        true
    }

    fn short_wait(&mut self) -> Wait {
        match self.rng.usize(..3) {
            0 => Wait::Until(Instant::now()),
            1 => Wait::No,
            _ => Wait::Until(Instant::now() + Duration::from_micros(self.rng.usize(..300) as u64)),
        }
    }

    fn wait(&mut self) -> Wait {
        if self.rng.usize(..2) == 0 { Wait::Forever } else { self.short_wait() }
    }

    /// Only sends. It may wait without a limit, because other threads receive until the end.
    pub(crate) fn send_until(&mut self, queue: &Sender<Canary, L>, over: &AtomicBool) {
        let mut open = true;
        while open && !over.load(Relaxed) {
            open = self.send_once(queue);
            self.steps.fetch_add(1, Relaxed);
        }
    }

    fn send_once(&mut self, queue: &Sender<Canary, L>) -> bool {
        let wait = self.wait();
        match self.rng.usize(..16) {
            0..9 => {
                let (message, key, bits) = self.message(self.number);
                let said = wait.send(queue, message, key);
                self.sent(bits, said)
            }
            9 => {
                let count = self.rng.usize(..100);
                let mut numbers = VecDeque::new();
                let mut batch = VecDeque::new();
                for _ in 0..count {
                    let (message, key, bits) = self.message(self.number);
                    numbers.push_back(bits);
                    batch.push_back((message, key));
                }
                let said = match wait {
                    Wait::Forever => queue.send_batch(&mut batch),
                    _ => queue.try_send_batch(&mut batch),
                };
                let sent = said.unwrap_or_else(|refused| refused.sent);
                assert_eq!((sent + batch.len(), said.is_ok()), (count, batch.is_empty()));
                numbers.drain(..sent).for_each(|bits| self.ledger.accepted.add(bits));
                assert!(batch.iter().map(|(message, _)| message.read()).eq(numbers));
                match said.map_err(|refused| refused.reason) {
                    Ok(_) | Err(SendRefused::Full | SendRefused::Timeout) => true,
                    Err(SendRefused::Closed) => false,
                    Err(other) => panic!("{other}"),
                }
            }
            10..13 => {
                let (message, key, bits) = self.message(self.number);
                let said = block_on(queue.send_async(message, key));
                self.sent(bits, said)
            }
            _ => {
                let (message, key, bits) = self.message(self.number);
                let polls = self.rng.usize(..3);
                match some_polls(queue.send_async(message, key), polls) {
                    Some(said) => self.sent(bits, said),
                    None => true,
                }
            }
        }
    }

    /// Only receives. It may wait without a limit, because other threads send until the end.
    pub(crate) fn receive_until(&mut self, queue: &Receiver<Canary, L>, over: &AtomicBool) {
        let mut open = true;
        while open && !over.load(Relaxed) {
            open = self.receive_once(queue);
            self.steps.fetch_add(1, Relaxed);
        }
    }

    fn receive_once(&mut self, queue: &Receiver<Canary, L>) -> bool {
        let wait = self.wait();
        match self.rng.usize(..32) {
            0..18 => self.received(wait.receive(queue)),
            18..20 => {
                let mut out = Vec::new();
                let most = 1 + self.rng.usize(..100);
                let got = match wait {
                    Wait::Forever => queue.receive_batch(&mut out, most),
                    _ => queue.try_receive_batch(&mut out, most),
                };
                match got {
                    Ok(count) => assert_eq!(count, out.len()),
                    Err(error) => return self.received(Err(error)),
                }
                out.into_iter().for_each(|message| self.record_received(message, true));
                true
            }
            20..25 => self.received(block_on(queue.receive_async())),
            25..30 => {
                let polls = self.rng.usize(..3);
                match some_polls(queue.receive_async(), polls) {
                    Some(said) => self.received(said),
                    None => true,
                }
            }
            30 => {
                // Not always the oldest of its priority.
                let odd = self.rng.usize(..2) as u64;
                let some = queue.drain_filter(|message, _| message.read() % 2 == odd);
                some.into_iter().for_each(|message| self.record_received(message, false));
                true
            }
            _ => {
                queue.drain().into_iter().for_each(|message| self.record_received(message, false));
                true
            }
        }
    }

    /// Sends and receives, with futures of its own on both sides. It never waits without a limit,
    /// because its own futures may hold the permit that another thread waits for.
    pub(crate) fn exchange_until(
        &mut self,
        sender: &Sender<Canary, L>,
        receiver: &Receiver<Canary, L>,
        no_more_sends: &AtomicBool,
        no_more_receives: &AtomicBool,
    ) {
        let waker = unparker();
        let mut cx = Context::from_waker(&waker);
        let mut sends: [Option<Numbered<'_>>; FUTURES] = Default::default();
        let mut receives: [Option<Waiting<'_, L>>; FUTURES] = Default::default();
        let mut open = true;
        while open && !no_more_sends.load(Relaxed) && !no_more_receives.load(Relaxed) {
            let (at, wait) = (self.rng.usize(..FUTURES), self.short_wait());
            match self.rng.usize(..16) {
                0..5 => {
                    // Each future counts as a sender of its own, because their order is open.
                    let (mut future, bits) = sends[at].take().unwrap_or_else(|| {
                        let (message, key, bits) = self.message(self.number + 1 + at);
                        (Box::pin(sender.send_async(message, key)), bits)
                    });
                    match future.as_mut().poll(&mut cx) {
                        Poll::Ready(said) => open = self.sent(bits, said),
                        Poll::Pending => sends[at] = Some((future, bits)),
                    }
                }
                5 => sends[at] = None,
                6..11 => {
                    let mut future =
                        receives[at].take().unwrap_or_else(|| Box::pin(receiver.receive_async()));
                    match future.as_mut().poll(&mut cx) {
                        Poll::Ready(said) => open = self.received(said),
                        Poll::Pending => receives[at] = Some(future),
                    }
                }
                11 => receives[at] = None,
                12 => {
                    let (message, key, bits) = self.message(self.number);
                    open = self.sent(bits, wait.send(sender, message, key));
                }
                13 => open = self.received(wait.receive(receiver)),
                _ => thread::park_timeout(Duration::from_micros(100)),
            }
            self.steps.fetch_add(1, Relaxed);
        }
    }
}

/// Polls a few times, and drops the future if that was not enough.
fn some_polls<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let waker = unparker();
    let mut cx = Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    for _ in 0..=polls {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return Some(output),
            Poll::Pending => thread::park_timeout(Duration::from_micros(50)),
        }
    }
    None
}
