//! The expected behaviour of a queue, from its documentation alone.

use std::collections::{BTreeMap, VecDeque};

use mq_rbtree::SendRefused;

use super::{EDGES, Keyed, Limits};

pub(crate) struct Receiver {
    pub(crate) id: u64,
    ticket: u64,
    pub(crate) permit: bool,
}

pub(crate) struct Sender<P> {
    pub(crate) id: u64,
    key: P,
    ticket: u64,
    pub(crate) permit: bool,
}

pub(crate) struct Model<L: Keyed> {
    pub(crate) limits: Limits,
    pub(crate) reserves: Vec<(L::Priority, usize)>,
    stored: BTreeMap<L::Priority, VecDeque<u64>>,
    /// The messages in guards, which keep their places.
    pub(crate) guarded: Vec<(L::Priority, u64)>,
    pub(crate) closed: bool,
    pub(crate) receivers: Vec<Receiver>,
    pub(crate) senders: Vec<Sender<L::Priority>>,
    pub(crate) ids: u64,
    tickets: u64,
    pops: u32,
    last: Option<L::Priority>,
    sent: u64,
    received: u64,
    peak: usize,
}

impl<L: Keyed> Model<L> {
    pub(crate) fn new(limits: &Limits) -> Self {
        let mut kept = 0;
        let reserves = limits.reserves.iter().map_while(|&(edge, messages)| {
            kept += usize::from(messages);
            // The last edge is not valid for every kind of levels.
            let edge = usize::from(edge) % (EDGES.len() - 1);
            (kept < limits.messages).then(|| (L::key(EDGES[edge]), usize::from(messages)))
        });
        Self {
            reserves: reserves.collect(),
            limits: limits.clone(),
            stored: BTreeMap::new(),
            guarded: Vec::new(),
            closed: false,
            receivers: Vec::new(),
            senders: Vec::new(),
            ids: 0,
            tickets: 0,
            pops: 0,
            last: None,
            sent: 0,
            received: 0,
            peak: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.stored.values().map(VecDeque::len).sum()
    }

    /// Returns the number of places that are taken.
    fn taken(&self) -> usize {
        self.len() + self.guarded.len()
    }

    /// Returns whether no message will come any more.
    pub(crate) fn ended(&self) -> bool {
        self.closed && self.guarded.is_empty()
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
    pub(crate) fn accepts(&self, key: L::Priority) -> Result<(), SendRefused> {
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

    pub(crate) fn send(&mut self, key: L::Priority, stored: u64) -> Result<(), SendRefused> {
        self.accepts(key)?;
        self.stored.entry(key).or_default().push_back(stored);
        self.sent += 1;
        self.peak = self.peak.max(self.taken());
        self.wake_waiters();
        Ok(())
    }

    /// Takes a message. The unlock wakes the waiters, after all messages of a lock section.
    pub(crate) fn take(&mut self) -> Option<(L::Priority, u64)> {
        let (key, stored) = self.pop()?;
        self.received += 1;
        Some((key, stored))
    }

    /// Takes a message into a guard.
    pub(crate) fn guard(&mut self) -> Option<(L::Priority, u64)> {
        let (key, stored) = self.pop()?;
        self.guarded.push((key, stored));
        Some((key, stored))
    }

    pub(crate) fn accept(&mut self, which: usize) -> (L::Priority, u64) {
        let (key, stored) = self.guarded.swap_remove(which);
        self.received += 1;
        self.wake_waiters();
        (key, stored)
    }

    pub(crate) fn put_back(&mut self, which: usize) {
        let (key, stored) = self.guarded.swap_remove(which);
        self.stored.entry(key).or_default().push_front(stored);
        self.wake_waiters();
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

    pub(crate) fn drain(&mut self, wanted: impl Fn(u64) -> bool) -> Vec<(L::Priority, u64)> {
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

    pub(crate) fn new_receive(&mut self) -> u64 {
        self.ids += 1;
        // The future is on no list before its first poll: see `poll_receive`.
        self.receivers.push(Receiver { id: self.ids, ticket: 0, permit: true });
        self.ids
    }

    pub(crate) fn new_send(&mut self, key: L::Priority, id: u64) {
        self.senders.push(Sender { id, key, ticket: 0, permit: true });
    }

    fn ticket(&mut self, old: u64) -> u64 {
        self.tickets += u64::from(old == 0);
        if old == 0 { self.tickets } else { old }
    }

    pub(crate) fn receiver(&self, id: u64) -> &Receiver {
        self.receivers.iter().find(|waiter| waiter.id == id).unwrap()
    }

    pub(crate) fn sender(&self, id: u64) -> &Sender<L::Priority> {
        self.senders.iter().find(|waiter| waiter.id == id).unwrap()
    }

    /// Polls a receive. A task that waits in vain keeps its position.
    pub(crate) fn poll_receive(&mut self, id: u64) -> Option<(L::Priority, u64)> {
        let at = self.receivers.iter().position(|waiter| waiter.id == id).unwrap();
        let mut waiter = self.receivers.swap_remove(at);
        let taken = self.take();
        self.wake_waiters();
        if taken.is_none() {
            waiter.permit = self.ended();
            if !self.ended() {
                waiter.ticket = self.ticket(waiter.ticket);
            }
        }
        self.receivers.push(waiter);
        taken
    }

    pub(crate) fn poll_send(&mut self, id: u64) -> Result<(), SendRefused> {
        let at = self.senders.iter().position(|waiter| waiter.id == id).unwrap();
        let mut waiter = self.senders.swap_remove(at);
        let sent = self.send(waiter.key, waiter.id);
        if sent == Err(SendRefused::Full) {
            waiter.permit = false;
            waiter.ticket = self.ticket(waiter.ticket);
            self.senders.push(waiter);
            self.wake_waiters();
        } else {
            self.wake_waiters();
        }
        sent
    }

    /// Polls a send that has room but is refused for lack of memory: as if it were dropped.
    pub(crate) fn poll_send_short(&mut self, id: u64) {
        let at = self.senders.iter().position(|waiter| waiter.id == id).unwrap();
        let waiter = self.senders.swap_remove(at);
        assert_eq!(self.accepts(waiter.key), Ok(()));
        self.wake_waiters();
    }

    /// A receive that is dropped passes its wake-up on.
    pub(crate) fn drop_receive(&mut self, id: u64) {
        let at = self.receivers.iter().position(|waiter| waiter.id == id).unwrap();
        if self.receivers.swap_remove(at).permit {
            let listed = self.receivers.iter_mut().filter(|waiter| !waiter.permit);
            listed
                .min_by_key(|waiter| waiter.ticket)
                .into_iter()
                .for_each(|next| next.permit = true);
        }
    }

    /// A send that is dropped passes its wake-up on, also if that is of no use to the next one.
    pub(crate) fn drop_send(&mut self, id: u64) {
        let at = self.senders.iter().position(|waiter| waiter.id == id).unwrap();
        if self.senders.swap_remove(at).permit {
            let listed = self.senders.iter_mut().filter(|waiter| !waiter.permit);
            listed
                .min_by_key(|waiter| waiter.ticket)
                .into_iter()
                .for_each(|next| next.permit = true);
        }
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
        loop {
            let permits = self.receivers.iter().filter(|waiter| waiter.permit).count();
            if self.len() <= permits {
                break;
            }
            let listed = self.receivers.iter_mut().filter(|waiter| !waiter.permit);
            match listed.min_by_key(|waiter| waiter.ticket) {
                Some(first) => first.permit = true,
                None => break,
            }
        }
        while let Some(first) = self.first_admissible_sender() {
            self.senders[first].permit = true;
        }
    }

    /// Returns the first sender that may proceed. One that only a reserve keeps out does not block those
    /// behind it.
    fn first_admissible_sender(&self) -> Option<usize> {
        let permitted = || self.senders.iter().filter(|waiter| waiter.permit);
        let len = self.taken() + permitted().count();
        let mut listed: Vec<usize> =
            (0..self.senders.len()).filter(|&at| !self.senders[at].permit).collect();
        listed.sort_by_key(|&at| self.senders[at].ticket);
        listed.into_iter().find(|&at| len < self.len_limit(self.senders[at].key))
    }
}
