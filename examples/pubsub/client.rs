//! A client: the context of a connection, with the bounded queue of its outbound lines.
//!
//! The drop policy: a publisher never waits for a subscriber. A message that finds no place in the queue
//! of a subscriber is dropped for this subscriber, and counted; messages that are queued already stay.
//! A line may take any free place but those that are reserved for the classes above its own, so a flood of
//! ordinary messages does not keep out urgent messages, answers and notices:
//!
//! | class | priority in the queue | reserved places | finds no place |
//! |---|---|---|---|
//! | notices | `NOTICE` | one for each subscription | cannot happen |
//! | answers to commands | `ANSWER` | `ANSWER_PLACES` | the commands of this client wait |
//! | urgent messages | `URGENT` to `MAX_PRIORITY` | `URGENT_PLACES` | dropped |
//! | other messages | 0 to `URGENT - 1` | none of `Limits::messages` | dropped |

use std::sync::Arc;

use mq_rbtree::{BuildError, Queue, SendRefused};

use crate::limits::Limits;
use crate::protocol::{MAX_PRIORITY, Message, Outbound};
use crate::totals::Counter;

/// The lowest priority of an urgent message.
pub(crate) const URGENT: u32 = 8;

/// The number of places that are reserved for urgent messages and the classes above.
pub(crate) const URGENT_PLACES: usize = 8;

const ANSWER: u32 = MAX_PRIORITY + 1;
const ANSWER_PLACES: usize = 8;
const NOTICE: u32 = ANSWER + 1;

/// What became of a message for one subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offer {
    Queued,
    Dropped,
    /// The subscriber is leaving.
    Closed,
}

/// The queue of a client is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// A connected client.
#[derive(Debug)]
pub(crate) struct Client {
    outbound: Queue<Outbound>,
    /// Messages that were dropped and that no `DROPPED` line has told of.
    dropped: Counter,
}

impl Client {
    pub(crate) fn new(limits: &Limits) -> Result<Client, BuildError> {
        let places = limits.messages + URGENT_PLACES + ANSWER_PLACES + limits.topics;
        let outbound = Queue::builder(places)
            .reserve(URGENT, URGENT_PLACES)
            .reserve(ANSWER, ANSWER_PLACES)
            .reserve(NOTICE, limits.topics)
            .build()?;
        Ok(Client { outbound, dropped: Counter::default() })
    }

    /// Queues a message if there is a place for it. Never waits.
    pub(crate) fn offer(&self, message: &Arc<Message>) -> Offer {
        let line = Outbound::Message(Arc::clone(message));
        match self.outbound.try_send(line, message.priority) {
            Ok(()) => Offer::Queued,
            Err(refused) if refused.reason == SendRefused::Closed => Offer::Closed,
            Err(_) => {
                self.dropped.add(1);
                Offer::Dropped
            }
        }
    }

    /// Queues the answer to a command. Waits while the client does not read its answers.
    pub(crate) async fn answer(&self, line: Outbound) -> Result<(), Closed> {
        self.outbound.send_async(line, ANSWER).await.map_err(|_| Closed)
    }

    /// Queues a notice that a topic has ended. Its place is reserved.
    pub(crate) fn end(&self, topic: &Arc<str>) {
        // The only other outcome is that the queue is closed, because the client leaves.
        let _ = self.outbound.try_send(Outbound::End(Arc::clone(topic)), NOTICE);
    }

    /// Takes the messages of a topic out of the queue.
    pub(crate) fn forget(&self, topic: &str) {
        self.outbound.drain_filter(
            |line, _| matches!(line, Outbound::Message(message) if message.topic == topic),
        );
    }

    /// Refuses lines from now on. The lines that are queued are still given out.
    pub(crate) fn close(&self) {
        self.outbound.close();
    }

    /// Returns the next line if there is one now.
    pub(crate) fn try_next(&self) -> Option<Outbound> {
        self.outbound.try_receive().ok().map(|(line, _)| line)
    }

    /// Returns the next line, or `None` once the queue is closed and empty.
    pub(crate) async fn next(&self) -> Option<Outbound> {
        self.outbound.receive_async().await.ok().map(|(line, _)| line)
    }

    /// Returns the number of messages that were dropped since the last call.
    pub(crate) fn take_dropped(&self) -> u64 {
        self.dropped.take()
    }
}
