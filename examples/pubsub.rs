//! A publish-subscribe server on TCP, under tokio.
//!
//! Run:     cargo run -p examples --example pubsub, then `nc 127.0.0.1 7070`, and Ctrl-C
//! Prints:  listening on 127.0.0.1:7070
//!          1 messages: 1 queued, 0 dropped
//!
//! | a client sends | the server answers |
//! |---|---|
//! | `SUB topic` | `OK SUB topic` |
//! | `UNSUB topic` | `OK UNSUB topic`; at most a message that is being published follows |
//! | `PUB priority topic text` | `OK PUB queued dropped`: for how many subscribers; priorities are 0 to 9 |
//! | `QUIT` | the lines that are queued, then `BYE` |
//! | another line | `ERR reason` |
//!
//! Without a command the server sends `HELLO id` first, `MSG topic priority id text` with the id of the
//! publisher, and `DROPPED count` for messages that this client read too slowly for. A publisher waits for no
//! subscriber. Urgent messages and answers have places that a flood of other messages cannot take.

use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use clap::Parser;
use mq_rbtree::{Queue, SendRefused};
use offlock_percpu::PerCpuCounter;
use parking_lot::RwLock;
use percpu_list::{Entry, PerCpuList, Refused};
use radix_ctx::{CtxRef, CtxTable, Id};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

/// The longest line in bytes, with its line end.
pub(crate) const MAX_LINE: usize = 4096;
/// The number of topics that one client may subscribe to.
pub(crate) const MAX_TOPICS: usize = 16;
/// The time that a client has to read its last lines.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);
/// The lowest priority of urgent messages.
pub(crate) const URGENT: u32 = 8;
const ANSWER: u32 = 10;
/// The number of places that each of the two has for itself.
pub(crate) const RESERVED: usize = 8;

/// Serves topics to publishers and subscribers over TCP.
#[derive(Clone, Debug, Parser)]
#[command(name = "pubsub", version)]
pub(crate) struct Options {
    /// Listen on this address; port 0 lets the system choose one.
    #[arg(default_value = "127.0.0.1:7070")]
    pub(crate) address: String,

    /// Clients at a time.
    #[arg(long, default_value_t = 1024)]
    pub(crate) clients: u64,

    /// Messages with priorities 0 to 7 that may wait for one client.
    #[arg(long, default_value_t = 64)]
    pub(crate) messages: usize,
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    Builder::new_multi_thread().enable_all().build()?.block_on(async {
        // Before the server listens: from then on Ctrl-C must not kill the process.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let listener = TcpListener::bind(&options.address).await?;
        println!("listening on {}", listener.local_addr()?);
        let broker = serve(listener, &options, interrupt.recv()).await?;
        let (queued, dropped) = (broker.queued.sum(), broker.dropped.sum());
        println!("{} messages: {queued} queued, {dropped} dropped", broker.published.sum());
        Ok(())
    })
}

/// Serves clients until `end` is ready. Then each client gets the lines that are queued for it.
pub(crate) async fn serve<T>(
    listener: TcpListener,
    options: &Options,
    end: impl Future<Output = T>,
) -> io::Result<Arc<Broker>> {
    let broker = Arc::new(Broker {
        clients: CtxTable::builder().max_contexts(options.clients).build(),
        topics: RwLock::default(),
        published: PerCpuCounter::new(),
        queued: PerCpuCounter::new(),
        dropped: PerCpuCounter::new(),
    });
    let mut end = pin!(end);
    loop {
        let accepted = tokio::select! {
            _ = &mut end => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((mut stream, _)) = accepted else {
            sleep(Duration::from_millis(50)).await; // descriptors or memory are out
            continue;
        };
        // The context is inserted here and not in the task, so that none is inserted after this loop.
        match broker.admit(options.messages) {
            Ok(client) => drop(tokio::spawn(connection(Arc::clone(&broker), client, stream))),
            // The write fails if the client has left. A new connection has room for the line.
            Err(reason) => drop(stream.write_all(format!("ERR {reason}\n").as_bytes()).await),
        }
    }
    drop(listener);
    // Each connection sees that its context is removed, and drops its references at its end.
    let mut removed = broker.clients.begin_remove_all();
    while !removed.is_done() {
        sleep(Duration::from_millis(1)).await;
    }
    Ok(broker)
}

/// The state that the connections share.
pub(crate) struct Broker {
    clients: CtxTable<Client>,
    pub(crate) topics: RwLock<HashMap<String, Arc<PerCpuList<Id>>>>,
    pub(crate) published: PerCpuCounter,
    pub(crate) queued: PerCpuCounter, // this and `dropped`: once for each subscriber
    pub(crate) dropped: PerCpuCounter,
}

/// A connected client: the lines that wait for it. The subscribers of a message share its text.
struct Client {
    outbound: Queue<Arc<str>>,
    /// Messages that were dropped and that no `DROPPED` line has told of.
    dropped: AtomicU64,
}

impl Broker {
    fn admit(&self, messages: usize) -> Result<CtxRef<Client>, String> {
        let outbound = Queue::builder(messages + 2 * RESERVED)
            .reserve(URGENT, RESERVED)
            .reserve(ANSWER, RESERVED)
            .build()
            .map_err(|error| error.to_string())?;
        let client = Client { outbound, dropped: AtomicU64::new(0) };
        self.clients.insert_ref(client).map_err(|error| error.reason.to_string())
    }

    fn subscribe(&self, topic: &str, id: Id) -> Result<Entry<Id>, Refused> {
        // Under the lock, because `unsubscribe` removes an empty list under the exclusive lock.
        if let Some(list) = self.topics.read().get(topic) {
            return list.insert(id).map_err(Refused::from);
        }
        let mut topics = self.topics.write();
        if let Some(list) = topics.get(topic) {
            return list.insert(id).map_err(Refused::from); // another client has made it meanwhile
        }
        let list = Arc::new(PerCpuList::new());
        // Before the topic exists: one without a subscriber would stay.
        let entry = list.insert(id).map_err(Refused::from)?;
        topics.insert(topic.to_string(), list);
        Ok(entry)
    }

    fn subscribers(&self, topic: &str) -> Option<Arc<PerCpuList<Id>>> {
        self.topics.read().get(topic).cloned()
    }

    /// Ends a subscription, and frees the topic if it was the last one.
    fn unsubscribe(&self, topic: &str, entry: Entry<Id>) {
        drop(entry);
        if self.subscribers(topic).is_some_and(|list| list.is_empty()) {
            let mut topics = self.topics.write();
            // Another client may have subscribed meanwhile; under this lock no client can.
            if topics.get(topic).is_some_and(|list| list.is_empty()) {
                topics.remove(topic);
            }
        }
    }

    /// Queues a message for the subscribers of a topic. Returns for how many it was queued and dropped.
    fn publish(&self, topic: &str, prio: u32, line: &Arc<str>) -> (i64, i64) {
        let (mut queued, mut dropped) = (0, 0);
        for id in self.subscribers(topic).iter().flat_map(|list| &**list) {
            // The id is stale if the subscriber has left since the walk found it.
            let _ = self.clients.with(*id, |client| {
                match client.outbound.try_send(Arc::clone(line), prio) {
                    Ok(()) => queued += 1,
                    Err(refused) if refused.reason == SendRefused::Closed => {}
                    Err(_) => {
                        client.dropped.fetch_add(1, Relaxed);
                        dropped += 1;
                    }
                }
            });
        }
        self.published.increment();
        self.queued.add(queued);
        self.dropped.add(dropped);
        (queued, dropped)
    }
}

type Subscriptions = HashMap<String, Entry<Id>>;

/// Serves a client until it leaves, its stream fails, or its context is removed.
async fn connection(broker: Arc<Broker>, client: CtxRef<Client>, stream: TcpStream) {
    let (id, mut subscriptions) = (CtxRef::id(&client), Subscriptions::new());
    let (input, output) = stream.into_split();
    {
        let mut writing = pin!(write_lines(&client, output));
        let written = tokio::select! {
            _ = read_commands((&broker, &client), &mut subscriptions, input) => false,
            () = CtxRef::removed(&client) => false,
            _ = &mut writing => true,
        };
        subscriptions.drain().for_each(|(topic, entry)| broker.unsubscribe(&topic, entry));
        client.outbound.close(); // the writer ends when the queue is empty
        if !written {
            // A client that does not read its last lines in time loses them.
            let _ = timeout(FAREWELL, writing).await;
        }
    }
    drop(client);
    // Fails if the server ends: then it has removed the context, and waits for its drop.
    if let Ok(removal) = broker.clients.remove(id) {
        // So that the queue is freed now, and not when another client comes.
        while !removal.is_done() {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Executes commands until the client leaves or is closed.
async fn read_commands(
    (broker, client): (&Broker, &CtxRef<Client>),
    subscriptions: &mut Subscriptions,
    input: OwnedReadHalf,
) -> io::Result<()> {
    let (mut input, mut line) = (BufReader::new(input), Vec::new());
    loop {
        line.clear();
        (&mut input).take(MAX_LINE as u64).read_until(b'\n', &mut line).await?;
        let (answer, last) = match line.strip_suffix(b"\n") {
            Some(b"QUIT" | b"QUIT\r") => return Ok(()),
            Some(line) => (execute((broker, client), subscriptions, line), false),
            None if line.len() < MAX_LINE => return Ok(()), // the end
            None => (Err(format!("the line is longer than {MAX_LINE} bytes")), true),
        };
        let answer = answer.unwrap_or_else(|reason| format!("ERR {reason}")).into();
        if client.outbound.send_async(answer, ANSWER).await.is_err() || last {
            return Ok(()); // the send waits while the client does not read its answers
        }
    }
}

fn execute(
    (broker, client): (&Broker, &CtxRef<Client>),
    subscriptions: &mut Subscriptions,
    line: &[u8],
) -> Result<String, String> {
    let line = str::from_utf8(line).map_err(|_| "the line is not UTF-8")?.trim_end_matches('\r');
    match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
        ["SUB", topic] if subscriptions.contains_key(topic) => Err("already subscribed".into()),
        ["SUB", topic] if subscriptions.len() < MAX_TOPICS => {
            let entry =
                broker.subscribe(topic, CtxRef::id(client)).map_err(|error| error.to_string())?;
            subscriptions.insert(topic.to_string(), entry);
            Ok(format!("OK SUB {topic}"))
        }
        ["SUB", _] => Err(format!("more than {MAX_TOPICS} topics")),
        ["UNSUB", topic] => {
            broker.unsubscribe(topic, subscriptions.remove(topic).ok_or("not subscribed")?);
            let start = format!("MSG {topic} ");
            client.outbound.drain_filter(|line, _| line.starts_with(&start));
            Ok(format!("OK UNSUB {topic}"))
        }
        ["PUB", priority, topic, text] if priority.len() == 1 => {
            let number = priority.parse().map_err(|_| "the priority is not a digit")?;
            let line = format!("MSG {topic} {number} {} {text}", CtxRef::id(client)).into();
            let sent = broker.publish(topic, number, &line);
            Ok(format!("OK PUB {} {}", sent.0, sent.1))
        }
        _ => Err("expected: SUB topic, UNSUB topic, PUB 0..9 topic text, or QUIT".into()),
    }
}

/// Writes the lines of a client in the order of their priority, and `BYE` when its queue is closed.
async fn write_lines(client: &CtxRef<Client>, stream: OwnedWriteHalf) -> io::Result<()> {
    let mut stream = BufWriter::new(stream);
    stream.write_all(format!("HELLO {}\n", CtxRef::id(client)).as_bytes()).await?;
    loop {
        let mut next = client.outbound.try_receive();
        if next.is_err() {
            stream.flush().await?;
            next = client.outbound.receive_async().await;
        }
        if let Ok((line, _)) = &next {
            stream.write_all(format!("{line}\n").as_bytes()).await?;
        }
        if let dropped @ 1.. = client.dropped.swap(0, Relaxed) {
            stream.write_all(format!("DROPPED {dropped}\n").as_bytes()).await?;
        }
        if next.is_err() {
            stream.write_all(b"BYE\n").await?;
            return stream.shutdown().await;
        }
    }
}
