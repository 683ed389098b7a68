//! What the server counted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters since the start of the server. Each is exact once the connections have ended.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Connections that became clients.
    pub(crate) clients: Counter,
    /// Messages that a client published.
    pub(crate) published: Counter,
    /// Messages that were put into the queue of a subscriber: one message counts for each of them.
    pub(crate) queued: Counter,
    /// Messages that were dropped for a subscriber because its queue was full, counted likewise.
    pub(crate) dropped: Counter,
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [clients, published, queued, dropped] =
            [&self.clients, &self.published, &self.queued, &self.dropped].map(Counter::get);
        write!(
            f,
            "{clients} clients, {published} messages published: {queued} queued for a subscriber, \
             {dropped} dropped"
        )
    }
}

/// A number of events.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, events: u64) {
        self.0.fetch_add(events, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Returns the number and sets it to 0.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Relaxed)
    }
}
