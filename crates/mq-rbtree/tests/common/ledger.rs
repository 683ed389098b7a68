//! The record of a thread: which messages it has sent and received.

use std::collections::BTreeMap;
use std::task::Poll;

use mq_rbtree::{ReceiveError, SendRefused};

use crate::queue_ops::{EDGES, Got, Keyed, Numbered, Outcome, Sent};

/// A set of distinct numbers, represented by a count and a sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sum {
    pub(crate) count: u64,
    hash: u64,
}

impl Sum {
    fn add(&mut self, value: u64) {
        self.count += 1;
        let mixed = (value ^ value >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.hash = self.hash.wrapping_add(mixed ^ mixed >> 29);
    }
}

impl std::iter::Sum for Sum {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            count: a.count + b.count,
            hash: a.hash.wrapping_add(b.hash),
        })
    }
}

pub(crate) struct Ledger<L: Keyed> {
    /// Messages whose send succeeded.
    pub(crate) accepted: Sum,
    /// Messages received or drained.
    pub(crate) taken: Sum,
    /// The last serial received from each lane and priority.
    last: BTreeMap<(u64, L::Priority), u64>,
    pub(crate) open: bool,
}

impl<L: Keyed> Ledger<L> {
    pub(crate) fn new() -> Self {
        let (accepted, taken) = (Sum::default(), Sum::default());
        Self { accepted, taken, last: BTreeMap::new(), open: true }
    }

    /// Records the result of a step.
    pub(crate) fn check(&mut self, outcome: Outcome<'_, L>) {
        match outcome {
            Outcome::Sent { message, late, result } => self.sent(message, late, result),
            Outcome::PolledSend(message, Poll::Ready(result)) => self.sent(message, false, result),
            Outcome::SentBatch { batch, sent, result } => {
                batch[..sent].iter().for_each(|&message| self.sent(message, false, Ok(())));
                batch.get(sent).into_iter().for_each(|&next| self.sent(next, false, result));
            }
            Outcome::Received { late, got } => self.received(late, got),
            Outcome::PolledReceive(_, Poll::Ready(got)) => self.received(false, got),
            Outcome::ReceivedBatch { got: Ok(all), .. } => {
                all.into_iter().for_each(|message| self.received(false, Ok(message)));
            }
            Outcome::ReceivedBatch { got: Err(error), .. } => self.received(false, Err(error)),
            // A filter takes messages out of their order.
            Outcome::Drained { out, .. } => out.iter().for_each(|&(_, id)| self.taken.add(id)),
            _ => {}
        }
    }

    fn sent(&mut self, (_, id): Numbered<L>, late: bool, result: Sent) {
        match result {
            Ok(()) => self.accepted.add(id),
            Err(SendRefused::Closed) => self.open = false,
            Err(SendRefused::Timeout) => assert!(late),
            Err(SendRefused::Full | SendRefused::BadPriority { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    fn received(&mut self, late: bool, got: Got<L>) {
        match got {
            Ok((key, id)) => {
                self.taken.add(id);
                let (lane, level, serial) = (id >> 40, id >> 32 & 0xff, id & 0xffff_ffff);
                assert!(L::key(EDGES[level as usize]) == key);
                let last = self.last.insert((lane, key), serial).unwrap_or(0);
                assert!(last < serial, "{serial} of lane {lane} came after {last}");
            }
            Err(ReceiveError::Closed) => self.open = false,
            Err(error) => assert!(error == ReceiveError::Empty || late, "{error}"),
        }
    }
}
