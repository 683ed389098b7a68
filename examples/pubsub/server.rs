//! The server: the accept loop, and the end.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use radix_ctx::{CtxTable, InsertRefused};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::broker::Broker;
use crate::client::Client;
use crate::connection;
use crate::limits::Limits;
use crate::protocol::Outbound;
use crate::race::{First, race};
use crate::topics::Topics;
use crate::totals::Totals;

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
    let broker = Arc::new(Broker {
        clients: CtxTable::builder().max_contexts(limits.clients).build()?,
        topics: Topics::new()?,
        limits,
        totals: Arc::default(),
    });
    let mut end = pin!(end);
    loop {
        match race(end.as_mut(), listener.accept()).await {
            First::Left(()) => break,
            First::Right(Ok((stream, _))) => admit(&broker, stream),
            // A lack of descriptors or memory, in most cases, which passes when a client leaves.
            First::Right(Err(_)) => sleep(Duration::from_millis(50)).await,
        }
    }
    drop(listener);
    end_all(&broker).await?;
    Ok(Arc::clone(&broker.totals))
}

/// Makes a connection a client, and starts its task. Refuses it if there are too many.
///
/// The context is inserted here and not in the task: when the accept loop has ended, no context is
/// inserted any more, and `end_all` finds all of them.
fn admit(broker: &Arc<Broker>, stream: TcpStream) {
    let admitted =
        Client::new(&broker.limits).map_err(|error| error.to_string()).and_then(|client| {
            broker.clients.insert_ref(client).map_err(|error| refusal(error.reason))
        });
    match admitted {
        Ok(client) => {
            broker.totals.clients.add(1);
            tokio::spawn(connection::run(Arc::clone(broker), client, stream));
        }
        Err(reason) => {
            tokio::spawn(refuse(stream, reason));
        }
    }
}

/// Ends the topics and all connections.
async fn end_all(broker: &Broker) -> io::Result<()> {
    broker.topics.end(|topic, id| {
        // The lookup fails if the subscriber has left.
        let _ = broker.clients.with(id, |client| client.end(topic));
    })?;
    // Each connection notices that its context is removed, and drops its reference at its end.
    broker.clients.begin_remove_all().await?;
    Ok(())
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
