//! A configuration that is replaced while an async server reads it: see `config_swap.md`.
//!
//! Run:     cargo run -p examples --example config_swap
//! Prints:  400 requests saw whole configurations; 100 old ones were dropped

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use offlock_percpu::rcu::{self, Atomic, Owned};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

const CLIENTS: u64 = 4;
const REQUESTS: u64 = 100; // per client
const RELOADS: u64 = 100;

static DROPPED: AtomicU64 = AtomicU64::new(0);

struct Config {
    version: u64,
    banner: String,
    backends: Arc<[String]>,
}

impl Config {
    fn of(version: u64) -> Self {
        let backends = (0..3).map(|n| format!("backend {n} of {version}")).collect();
        Self { version, banner: format!("version {version}"), backends }
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

struct Server {
    config: Atomic<Config>,
}

impl Server {
    /// Answers a request, with one configuration from its begin to its end.
    async fn answer(&self) -> (String, String) {
        // One load for the whole request. The guard must end before the first `.await`, so this takes the values
        // that the request needs later: a copy of a small one, an `Arc` of a large one.
        let (version, banner, backends) = {
            let guard = rcu::pin();
            let config = self.config.load(&guard);
            (config.version, config.banner.clone(), Arc::clone(&config.backends))
        };
        tokio::task::yield_now().await; // asks a backend; meanwhile the configuration is replaced
        (banner, backends[version as usize % backends.len()].clone())
    }

    /// Publishes a new configuration. Requests that have begun keep the old one.
    fn reload(&self, config: Config) {
        self.config.store(Owned::new(config)); // retires the one before
    }
}

async fn serve(server: Arc<Server>) -> u64 {
    // Drops the retired ones: a store does so only once many have gathered.
    let poll = tokio::spawn(async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            rcu::poll();
        }
    });
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let server = Arc::clone(&server);
        clients.spawn(async move {
            for _ in 0..REQUESTS {
                let (banner, backend) = server.answer().await;
                let version = banner.strip_prefix("version ").unwrap();
                assert!(backend.ends_with(&format!(" of {version}")), "{banner}, {backend}");
            }
            REQUESTS
        });
    }
    let reloads = async {
        for version in 1..=RELOADS {
            server.reload(Config::of(version));
            tokio::task::yield_now().await;
        }
    };
    let (answers, ()) = tokio::join!(clients.join_all(), reloads);
    poll.abort();
    answers.into_iter().sum()
}

fn main() -> Result<(), Box<dyn Error>> {
    let server = Arc::new(Server { config: Atomic::new(Config::of(0)) });
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_time().build()?;
    let answers = runtime.block_on(serve(Arc::clone(&server)));
    drop(runtime); // and with it the task that polls
    rcu::poll();
    let dropped = DROPPED.load(Ordering::Relaxed);
    println!("{answers} requests saw whole configurations; {dropped} old ones were dropped");
    assert_eq!((answers, dropped), (CLIENTS * REQUESTS, RELOADS));
    Ok(())
}
