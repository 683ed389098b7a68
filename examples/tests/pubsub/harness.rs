//! A server in this process, and clients that expect lines from it.

use std::io;
use std::net::SocketAddr;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::pubsub::{self, Broker, Options};

/// The time that a line, or the end of the server, may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn options() -> Options {
    Options { address: String::new(), clients: 64, messages: 64 }
}

/// The time that a test may take, its repeated attempts included.
const WHOLE_TEST: Duration = Duration::from_secs(300);

/// Runs a test and its server on one thread: while the test waits, each task that can run does so, also
/// on a busy machine.
pub(crate) fn on_runtime(test: impl Future<Output = io::Result<()>>) {
    on(&mut Builder::new_current_thread(), test);
}

pub(crate) fn on(builder: &mut Builder, test: impl Future<Output = io::Result<()>>) {
    let runtime = builder.enable_all().build().unwrap();
    runtime.block_on(async { timeout(WHOLE_TEST, test).await }).expect("the test ends").unwrap();
}

/// A server on a free port.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    task: JoinHandle<io::Result<Arc<Broker>>>,
}

impl Running {
    /// Starts a server that ends when `end` is ready.
    pub(crate) async fn start(
        options: Options,
        end: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Running> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let serve = async move { pubsub::serve(listener, &options, end).await };
        Ok(Running { address, task: tokio::spawn(serve) })
    }

    pub(crate) async fn connect(&self) -> io::Result<Peer> {
        Peer::greeted(TcpStream::connect(self.address).await?).await
    }

    /// Connects, and leaves the first line to the caller.
    pub(crate) async fn connect_raw(&self) -> io::Result<Peer> {
        Ok(Peer::on(TcpStream::connect(self.address).await?))
    }

    /// Connects with a small receive buffer, for a client that reads too slowly.
    pub(crate) async fn connect_slow(&self) -> io::Result<Peer> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4096)?;
        Peer::greeted(socket.connect(self.address).await?).await
    }

    /// Waits until the server has ended. Returns its state.
    pub(crate) async fn ended(self) -> io::Result<Arc<Broker>> {
        timeout(PATIENCE, self.task).await.expect("the server ends")?
    }
}

/// A client of the server.
pub(crate) struct Peer {
    pub(crate) stream: BufReader<TcpStream>,
    /// The public id of this client.
    pub(crate) id: String,
}

impl Peer {
    fn on(stream: TcpStream) -> Peer {
        Peer { stream: BufReader::new(stream), id: String::new() }
    }

    async fn greeted(stream: TcpStream) -> io::Result<Peer> {
        let mut peer = Peer::on(stream);
        let hello = peer.line().await?;
        peer.id = hello.strip_prefix("HELLO ").expect("the first line").to_string();
        Ok(peer)
    }

    pub(crate) async fn send(&mut self, line: &str) -> io::Result<()> {
        self.stream.write_all(format!("{line}\n").as_bytes()).await
    }

    /// The next line, or an empty string at the end of the stream.
    pub(crate) async fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        timeout(PATIENCE, self.stream.read_line(&mut line)).await.expect("a line comes")?;
        Ok(line.trim_end().to_string())
    }

    /// Sends a command, and checks the next line.
    #[track_caller]
    pub(crate) fn expect(
        &mut self,
        command: &str,
        answer: &str,
    ) -> impl Future<Output = io::Result<()>> {
        let caller = Location::caller();
        async move {
            self.send(command).await?;
            assert_eq!(self.line().await?, answer, "{command} at {caller}");
            Ok(())
        }
    }

    /// All lines until the end of the stream.
    pub(crate) async fn rest(&mut self) -> io::Result<Vec<String>> {
        let mut text = String::new();
        timeout(PATIENCE, self.stream.read_to_string(&mut text)).await.expect("the end comes")?;
        Ok(text.lines().map(String::from).collect())
    }

    /// Publishes to a topic until it has no subscriber.
    pub(crate) async fn until_no_subscriber(&mut self, topic: &str) -> io::Result<()> {
        loop {
            self.send(&format!("PUB 9 {topic} late")).await?;
            if self.line().await? == "OK PUB 0 0" {
                return Ok(());
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends numbered messages of priorities 0 to 3 to a topic of one subscriber, until its queue stays
    /// full. Returns how many were queued and dropped.
    pub(crate) async fn flood(&mut self, topic: &str) -> io::Result<(u64, u64)> {
        let (mut queued, mut dropped, mut in_a_row) = (0, 0, 0);
        let padding = "x".repeat(1000);
        while in_a_row < 25 {
            let number = queued + dropped;
            self.send(&format!("PUB {} {topic} {number} {padding}", number % 4)).await?;
            match &*self.line().await? {
                "OK PUB 1 0" => (queued, in_a_row) = (queued + 1, 0),
                "OK PUB 0 1" => {
                    (dropped, in_a_row) = (dropped + 1, in_a_row + 1);
                    sleep(Duration::from_millis(10)).await; // the kernel may still make room
                }
                other => panic!("one subscriber, but {other}"),
            }
        }
        Ok((queued, dropped))
    }
}

/// The priority and the number of a message of `Peer::flood`, or `None` for another line.
pub(crate) fn numbered(line: &str) -> Option<(u32, u64)> {
    let words: Vec<_> = line.split(' ').collect();
    let ["MSG", _, priority, _, number, ..] = words[..] else { return None };
    Some((priority.parse().unwrap(), number.parse().unwrap()))
}

/// The messages that the `DROPPED` lines tell of.
pub(crate) fn told_dropped(lines: &[String]) -> u64 {
    let counts = lines.iter().filter_map(|line| line.strip_prefix("DROPPED "));
    counts.map(|count| count.parse::<u64>().unwrap()).sum()
}
