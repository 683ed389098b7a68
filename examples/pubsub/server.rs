//! The server: its tables, the accept loop, and the end.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use percpu_list::LockError;
use radix_ctx::{CtxTable, InsertRefused};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::client::{Client, Offer};
use crate::connection;
use crate::limits::Limits;
use crate::protocol::{Message, Outbound};
use crate::race::{First, race};
use crate::topics::Topics;
use crate::totals::Totals;

/// What connections share.
#[derive(Debug)]
pub(crate) struct Server {
    /// The clients. The id of a context is the public id of the client.
    pub(crate) clients: CtxTable<Client>,
    pub(crate) topics: Topics,
    pub(crate) limits: Limits,
    totals: Arc<Totals>,
}

/// For how many subscribers a message was queued and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) queued: u64,
    pub(crate) dropped: u64,
}

/// Serves clients until `end` is ready, and returns what was counted.
///
/// At the end, each subscriber is told which topics end, clients get the messages that are queued for
/// them, and the connections are closed. A client that does not read holds the server up for
/// `Limits::farewell` at most.
pub(crate) async fn serve(
    listener: TcpListener,
    limits: Limits,
    end: impl Future<Output = ()>,
) -> io::Result<Arc<Totals>> {
    let server = Arc::new(Server {
        clients: CtxTable::builder().max_contexts(limits.clients).build()?,
        topics: Topics::new()?,
        limits,
        totals: Arc::default(),
    });
    let mut end = pin!(end);
    loop {
        match race(end.as_mut(), listener.accept()).await {
            First::Left(()) => break,
            First::Right(Ok((stream, _))) => server.admit(stream),
            // A lack of descriptors or memory, in most cases, which passes when a client leaves.
            First::Right(Err(_)) => sleep(Duration::from_millis(50)).await,
        }
    }
    drop(listener);
    server.end().await?;
    Ok(Arc::clone(&server.totals))
}

impl Server {
    /// Makes a connection a client, and starts its task. Refuses it if there are too many.
    ///
    /// The context is inserted here and not in the task: when the accept loop has ended, no context is
    /// inserted any more, and `end` finds all of them.
    fn admit(self: &Arc<Self>, stream: TcpStream) {
        let admitted =
            Client::new(&self.limits).map_err(|error| error.to_string()).and_then(|client| {
                self.clients.insert_ref(client).map_err(|error| refusal(error.reason))
            });
        match admitted {
            Ok(client) => {
                self.totals.clients.add(1);
                tokio::spawn(connection::run(Arc::clone(self), client, stream));
            }
            Err(reason) => {
                tokio::spawn(refuse(stream, reason));
            }
        }
    }

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

    /// Ends the topics and all connections.
    async fn end(&self) -> io::Result<()> {
        self.topics.end(|topic, id| {
            // The lookup fails if the subscriber has left.
            let _ = self.clients.with(id, |client| client.end(topic));
        })?;
        // Each connection notices that its context is removed, and drops its reference at its end.
        self.clients.begin_remove_all().await?;
        Ok(())
    }
}

fn refusal(reason: InsertRefused) -> String {
    match reason {
        InsertRefused::Quota => "too many clients".to_string(),
        other => other.to_string(),
    }
}

/// Tells a connection why it is no client.
async fn refuse(mut stream: TcpStream, reason: String) {
    // The connection may be gone, which is as good.
    let _ = stream.write_all(format!("{}\n", Outbound::Error(reason)).as_bytes()).await;
}
