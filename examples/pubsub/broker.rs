//! What connections share: the clients, the topics, and how a message gets from one to the others.

use std::sync::Arc;

use percpu_list::LockError;
use radix_ctx::CtxTable;

use crate::client::{Client, Offer};
use crate::limits::Limits;
use crate::protocol::Message;
use crate::topics::Topics;
use crate::totals::Totals;

/// The state of the server.
#[derive(Debug)]
pub(crate) struct Broker {
    /// The clients. The id of a context is the public id of the client.
    pub(crate) clients: CtxTable<Client>,
    pub(crate) topics: Topics,
    pub(crate) limits: Limits,
    pub(crate) totals: Arc<Totals>,
}

/// For how many subscribers a message was queued and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) queued: u64,
    pub(crate) dropped: u64,
}

impl Broker {
    /// Queues a message for each subscriber of its topic.
    pub(crate) fn publish(&self, message: &Arc<Message>) -> Result<Sent, LockError> {
        let mut sent = Sent::default();
        if let Some(subscribers) = self.topics.subscribers(&message.topic) {
            for id in &*subscribers {
                // The id is stale if the subscriber has left since the walk found it.
                match self.clients.with(*id?, |client| client.offer(message)) {
                    Ok(Offer::Queued) => sent.queued += 1,
                    Ok(Offer::Dropped) => sent.dropped += 1,
                    Ok(Offer::Closed) | Err(_) => {}
                }
            }
        }
        self.totals.published.add(1);
        self.totals.queued.add(sent.queued);
        self.totals.dropped.add(sent.dropped);
        Ok(sent)
    }
}
