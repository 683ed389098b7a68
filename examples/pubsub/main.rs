//! A publish-subscribe server on TCP: tokio tasks, clients as contexts, topics as per-CPU lists, and a
//! bounded priority queue of outbound lines for each client.
//!
//! Run:     cargo run -p examples --example pubsub, then `nc 127.0.0.1 7070`, and Ctrl-C
//! Prints:  listening on 127.0.0.1:7070
//!          1 clients, 1 messages published: 1 queued for a subscriber, 0 dropped
//!
//! ```text
//!  main ─► server: accept ─► connection: read ─► session: commands ─► topics: subscribers (percpu-list)
//!                                │                                          │ ids
//!                                └──── write ◄── client: queue (mq-rbtree) ◄┘ looked up by broker (radix-ctx)
//! ```
//!
//! `protocol.rs` lists the lines of both directions, `client.rs` states what happens to a message for a
//! slow client, `server.rs` how the server ends.

mod broker;
mod client;
mod connection;
mod interrupt;
mod limits;
mod lines;
mod protocol;
mod race;
mod server;
mod session;
mod topics;
mod totals;

use std::io;

use clap::Parser;
use tokio::net::TcpListener;
use tokio::runtime::Builder;

use crate::limits::Limits;

/// Serves topics to publishers and subscribers over TCP.
#[derive(Parser)]
#[command(name = "pubsub")]
struct Args {
    /// Listen on this address; port 0 lets the system choose one.
    #[arg(default_value = "127.0.0.1:7070")]
    address: String,

    #[command(flatten)]
    limits: Limits,
}

fn main() -> io::Result<()> {
    let args = Args::parse();
    Builder::new_multi_thread().enable_all().build()?.block_on(async {
        // Before the server listens: from then on Ctrl-C must not kill the process.
        let interrupted = interrupt::interrupted()?;
        let listener = TcpListener::bind(&args.address).await?;
        println!("listening on {}", listener.local_addr()?);
        let totals = server::serve(listener, args.limits, interrupted).await?;
        println!("{totals}");
        Ok(())
    })
}
