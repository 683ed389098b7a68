//! One connection: a task that reads commands and writes lines until the client or the server ends it.

use std::fmt::Write;
use std::io;
use std::pin::pin;
use std::sync::Arc;

use radix_ctx::{CtxRef, Id};
use tokio::io::{AsyncWriteExt, BufWriter};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::time::timeout;

use crate::broker::Broker;
use crate::client::Client;
use crate::protocol::Outbound;
use crate::race::{First, race};
use crate::session::Session;

/// Serves a client until it leaves, its stream fails, or its context is removed.
pub(crate) async fn run(broker: Arc<Broker>, client: CtxRef<Client>, stream: TcpStream) {
    let id = CtxRef::id(&client);
    let (input, output) = stream.into_split();
    {
        let mut writing = pin!(write_lines(id, &client, output));
        let mut session = Session::new(&broker, &client);
        let reading = race(session.run(input), CtxRef::removed(&client));
        let ended = race(reading, writing.as_mut()).await;

        // From here on publishers do not reach this client, and the writer ends when the queue is empty.
        drop(session);
        client.close();
        if let First::Left(_) = ended {
            // A client that does not read its last lines in time loses them.
            let _ = timeout(broker.limits.farewell, writing).await;
        }
    }
    drop(client);
    // The lookup fails if the server ends: then it has removed the context, and waits for its drop.
    if let Ok(removal) = broker.clients.remove(id) {
        let _ = removal.await; // the queue is freed now, and not when another client comes
    }
}

/// Writes the lines of a client in the order of their priority, and `BYE` when its queue is closed.
async fn write_lines(id: Id, client: &Client, stream: OwnedWriteHalf) -> io::Result<()> {
    let mut lines = LineWriter { stream: BufWriter::new(stream), text: String::new() };
    lines.write(&Outbound::Hello(id)).await?;
    loop {
        let line = match client.try_next() {
            Some(line) => Some(line),
            None => {
                lines.stream.flush().await?;
                client.next().await
            }
        };
        if let Some(line) = &line {
            lines.write(line).await?;
        }
        let dropped = client.take_dropped();
        if dropped > 0 {
            lines.write(&Outbound::Dropped(dropped)).await?;
        }
        if line.is_none() {
            lines.write(&Outbound::Bye).await?;
            return lines.stream.shutdown().await;
        }
    }
}

/// Writes lines to a stream through a buffer.
struct LineWriter {
    stream: BufWriter<OwnedWriteHalf>,
    text: String,
}

impl LineWriter {
    async fn write(&mut self, line: &Outbound) -> io::Result<()> {
        self.text.clear();
        writeln!(self.text, "{line}").expect("a String takes any text");
        self.stream.write_all(self.text.as_bytes()).await
    }
}
