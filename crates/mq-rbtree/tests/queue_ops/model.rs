//! The expected behaviour of a queue, from its documentation alone.

use std::collections::{BTreeMap, VecDeque};
use std::task::Poll;

use mq_rbtree::{ReceiveError, SendRefused};

use super::{Keyed, Limits, Outcome};

/// A future that waits. The key is the priority of a sender's message.
pub(crate) struct Waiter<K> {
    id: u64,
    key: K,
    /// The order of the waiters; 0 before the first poll that finds nothing.
    ticket: u64,
    pub(crate) permit: bool,
}

impl<K> Waiter<K> {
    fn find(waiters: &[Self], id: u64) -> &Self {
        waiters.iter().find(|waiter| waiter.id == id).unwrap()
    }

    /// Removes a waiter. One that is unknown is about to be polled for the first time.
    fn remove(waiters: &mut Vec<Self>, id: u64, key: K) -> Self {
        let at = waiters.iter().position(|waiter| waiter.id == id);
        at.map_or(Self { id, key, ticket: 0, permit: true }, |at| waiters.swap_remove(at))
    }

    fn permits(waiters: &[Self]) -> usize {
        waiters.iter().filter(|waiter| waiter.permit).count()
    }

    pub(crate) fn listed(waiters: &[Self]) -> usize {
        waiters.len() - Self::permits(waiters)
    }

    /// Gives a permit to the first waiter that has none. Returns false if all have one.
    fn wake_first(waiters: &mut [Self]) -> bool {
        let listed = waiters.iter_mut().filter(|waiter| !waiter.permit);
        let first = listed.min_by_key(|waiter| waiter.ticket);
        first.map(|first| first.permit = true).is_some()
    }

    /// Removes a waiter that is dropped. It passes its wake-up on, also if that is of no use to the next one.
    fn cancel(waiters: &mut Vec<Self>, id: u64) {
        let at = waiters.iter().position(|waiter| waiter.id == id).unwrap();
        if waiters.swap_remove(at).permit {
            Self::wake_first(waiters);
        }
    }
}

pub(crate) struct Model<L: Keyed> {
    pub(crate) limits: Limits,
    reserves: Vec<(L::Priority, usize)>,
    stored: BTreeMap<L::Priority, VecDeque<u64>>,
    /// The messages in guards, which keep their places.
    pub(crate) guarded: Vec<(L::Priority, u64)>,
    pub(crate) closed: bool,
    pub(crate) receivers: Vec<Waiter<()>>,
    pub(crate) senders: Vec<Waiter<L::Priority>>,
    tickets: u64,
    pops: u32,
    last: Option<L::Priority>,
    sent: u64,
    received: u64,
    peak: usize,
    /// Whether the descriptors are readable, of those that exist: for messages, and for room.
    pub(crate) signalled: [bool; 2],
}

impl<L: Keyed> Model<L> {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            reserves: limits.reserves::<L>(),
            limits: limits.clone(),
            stored: BTreeMap::new(),
            guarded: Vec::new(),
            closed: false,
            receivers: Vec::new(),
            senders: Vec::new(),
            tickets: 0,
            pops: 0,
            last: None,
            sent: 0,
            received: 0,
            peak: 0,
            signalled: [false; 2],
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.stored.values().map(VecDeque::len).sum()
    }

    /// Returns the number of places that are taken.
    pub(crate) fn taken(&self) -> usize {
        self.len() + self.guarded.len()
    }

    /// Returns whether no message will come any more.
    pub(crate) fn ended(&self) -> bool {
        self.closed && self.guarded.is_empty()
    }

    /// Returns the error of a receive that finds no message.
    fn none(&self, error: ReceiveError) -> ReceiveError {
        if self.ended() { ReceiveError::Closed } else { error }
    }

    /// Signals the descriptors for which there is something now.
    pub(crate) fn signal(&mut self) {
        self.signalled[0] |= self.len() > 0 || self.ended();
        self.signalled[1] |= self.taken() < self.limits.messages || self.closed;
    }

    pub(crate) fn levels(&self) -> usize {
        self.stored.len()
    }

    pub(crate) fn counted(&self) -> (u64, u64, usize) {
        (self.sent, self.received, self.peak)
    }

    fn len_limit(&self, key: L::Priority) -> usize {
        let reserved: usize =
            self.reserves.iter().filter(|(from, _)| key < *from).map(|r| r.1).sum();
        self.limits.messages - reserved
    }

    /// Returns whether a message is accepted now, apart from missing memory.
    fn accepts(&self, key: L::Priority) -> Result<(), SendRefused> {
        if !L::is_key(key) {
            let priority = L::check(key).expect_err("an invalid priority");
            return Err(SendRefused::BadPriority { priority });
        }
        if self.closed {
            return Err(SendRefused::Closed);
        }
        if self.taken() >= self.len_limit(key) {
            return Err(SendRefused::Full);
        }
        Ok(())
    }

    fn send(&mut self, key: L::Priority, stored: u64) -> Result<(), SendRefused> {
        self.accepts(key)?;
        self.stored.entry(key).or_default().push_back(stored);
        self.sent += 1;
        self.peak = self.peak.max(self.taken());
        self.wake_waiters();
        Ok(())
    }

    /// Takes a message. The unlock wakes the waiters, after all messages of a lock section.
    fn take(&mut self) -> Option<(L::Priority, u64)> {
        let (key, stored) = self.pop()?;
        self.received += 1;
        Some((key, stored))
    }

    fn pop(&mut self) -> Option<(L::Priority, u64)> {
        let highest = *self.stored.keys().next_back()?;
        let mut key = highest;
        if let Some(every) = self.limits.ageing {
            self.pops += 1;
            if self.pops == every {
                self.pops = 0;
                let below = self.last.and_then(|last| self.stored.range(..last).next_back());
                key = below.map_or(highest, |(key, _)| *key);
                self.last = Some(key);
            }
        }
        let fifo = self.stored.get_mut(&key)?;
        let stored = fifo.pop_front()?;
        if fifo.is_empty() {
            self.stored.remove(&key);
        }
        Some((key, stored))
    }

    fn drain(&mut self, wanted: &dyn Fn(u64) -> bool) -> Vec<(L::Priority, u64)> {
        let mut out = Vec::new();
        for (key, fifo) in self.stored.iter_mut().rev() {
            fifo.retain(|&stored| {
                if wanted(stored) {
                    out.push((*key, stored));
                }
                !wanted(stored)
            });
        }
        self.stored.retain(|_, fifo| !fifo.is_empty());
        self.received += out.len() as u64;
        self.wake_waiters();
        out
    }

    /// Lists a waiter that has found nothing. One that was listed before keeps its position.
    fn list<K>(tickets: &mut u64, waiters: &mut Vec<Waiter<K>>, mut waiter: Waiter<K>) {
        if waiter.ticket == 0 {
            *tickets += 1;
            waiter.ticket = *tickets;
        }
        waiter.permit = false;
        waiters.push(waiter);
    }

    pub(crate) fn receiver(&self, id: u64) -> &Waiter<()> {
        Waiter::find(&self.receivers, id)
    }

    pub(crate) fn sender(&self, id: u64) -> &Waiter<L::Priority> {
        Waiter::find(&self.senders, id)
    }

    /// Wakes the waiters that can proceed.
    pub(crate) fn wake_waiters(&mut self) {
        if self.closed {
            self.senders.iter_mut().for_each(|waiter| waiter.permit = true);
        }
        if self.ended() {
            self.receivers.iter_mut().for_each(|waiter| waiter.permit = true);
            return;
        }
        while Waiter::permits(&self.receivers) < self.len() {
            if !Waiter::wake_first(&mut self.receivers) {
                break;
            }
        }
        while let Some(first) = self.first_admissible_sender() {
            self.senders[first].permit = true;
        }
    }

    /// Returns the first sender that may proceed. One that only a reserve keeps out does not block those
    /// behind it.
    fn first_admissible_sender(&self) -> Option<usize> {
        let len = self.taken() + Waiter::permits(&self.senders);
        let is_admissible = |at: &usize| {
            let waiter = &self.senders[*at];
            !waiter.permit && len < self.len_limit(waiter.key)
        };
        let admissible = (0..self.senders.len()).filter(is_admissible);
        admissible.min_by_key(|&at| self.senders[at].ticket)
    }

    pub(crate) fn check(&mut self, outcome: Outcome<'_, L>) {
        match outcome {
            Outcome::Sent { message: (key, _), result: Err(SendRefused::NoMemory), .. } => {
                assert_eq!(self.accepts(key), Ok(()));
                self.wake_waiters();
            }
            Outcome::Sent { message: (key, id), late, result } => {
                let expected = match self.send(key, id) {
                    Err(SendRefused::Full) if late => Err(SendRefused::Timeout),
                    other => other,
                };
                assert_eq!(result, expected);
            }
            Outcome::SentBatch { batch, sent, result } => {
                let (mut expected, mut count) = (Ok(()), 0);
                for &(key, id) in batch {
                    expected = self.send(key, id);
                    if expected.is_err() {
                        break;
                    }
                    count += 1;
                }
                assert_eq!((sent, result), (count, expected));
            }
            Outcome::Received { late, got } => {
                let refused = if late { ReceiveError::Timeout } else { ReceiveError::Empty };
                let expected = self.take();
                assert_eq!(got, expected.ok_or(self.none(refused)));
            }
            Outcome::ReceivedBatch { most, got } => {
                let mut expected = Vec::new();
                for n in 0..most.min(self.limits.messages) {
                    if n > 0 && n % 64 == 0 {
                        self.wake_waiters(); // a lock section has taken 64
                    }
                    let Some(next) = self.take() else { break };
                    expected.push(next);
                }
                let refused = expected.is_empty() && most > 0;
                let why = self.none(ReceiveError::Empty);
                assert_eq!(got, if refused { Err(why) } else { Ok(expected) });
            }
            Outcome::Drained { wanted, out } => assert_eq!(out, self.drain(wanted)),
            Outcome::PolledReceive(id, polled) => {
                let waiter = Waiter::remove(&mut self.receivers, id, ());
                let expected = match self.take() {
                    Some(message) => Poll::Ready(Ok(message)),
                    None if self.ended() => Poll::Ready(Err(ReceiveError::Closed)),
                    None => Poll::Pending,
                };
                self.wake_waiters();
                if expected.is_pending() {
                    Self::list(&mut self.tickets, &mut self.receivers, waiter);
                }
                assert_eq!(polled, expected);
            }
            Outcome::PolledSend((key, id), polled) => {
                let waiter = Waiter::remove(&mut self.senders, id, key);
                let without_memory = Poll::Ready(Err(SendRefused::NoMemory));
                let expected = match self.accepts(key) {
                    Ok(()) if polled == without_memory => without_memory,
                    Ok(()) => Poll::Ready(self.send(key, id)),
                    Err(SendRefused::Full) => Poll::Pending,
                    refused => Poll::Ready(refused),
                };
                if expected.is_pending() {
                    Self::list(&mut self.tickets, &mut self.senders, waiter);
                }
                self.wake_waiters();
                assert_eq!(polled, expected);
            }
            Outcome::DroppedReceive(id) => Waiter::cancel(&mut self.receivers, id),
            Outcome::DroppedSend(id) => Waiter::cancel(&mut self.senders, id),
            Outcome::Guarded(got) => {
                let expected = self.pop();
                self.guarded.extend(expected);
                assert_eq!(got, expected.ok_or(self.none(ReceiveError::Empty)));
            }
            Outcome::Accepted(which, message) => {
                assert_eq!(message, self.guarded.swap_remove(which));
                self.received += 1;
                self.wake_waiters();
            }
            Outcome::PutBack(which) => {
                let (key, stored) = self.guarded.swap_remove(which);
                self.stored.entry(key).or_default().push_front(stored);
                self.wake_waiters();
            }
            Outcome::Cleared(direction) => self.signalled[direction as usize] = false,
            Outcome::Len(len) => assert_eq!(len, self.len()),
            Outcome::Closed(was_open) => {
                assert_eq!(was_open, !std::mem::replace(&mut self.closed, true));
            }
        }
    }
}
