//! Replace a routing table under readers that take no lock and never wait.
//!
//! Run:     cargo run -p examples --example rcu
//! Prints:  4 readers, 4000 lookups, 100 tables dropped

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use offlock_percpu::rcu::{self, Atomic, Owned};

const READERS: u64 = 4;
const LOOKUPS: u64 = 1_000; // per reader
const UPDATES: u64 = 100;

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A route to each port, and the same number at both ends to show that it stays whole.
struct Table(Vec<u64>);

impl Drop for Table {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

fn main() {
    let routes = Atomic::new(Table(vec![0; 64]));
    thread::scope(|s| {
        for _ in 0..READERS {
            s.spawn(|| {
                for _ in 0..LOOKUPS {
                    let guard = rcu::pin(); // the table found stays until this goes
                    let table = routes.load(&guard);
                    assert_eq!(table.0.first(), table.0.last());
                }
            });
        }
        for version in 1..=UPDATES {
            routes.store(Owned::new(Table(vec![version; 64]))); // retires the one before
        }
    });

    rcu::poll(); // no reader is left: drops every table but the last
    let dropped = DROPPED.load(Ordering::Relaxed);
    println!("{READERS} readers, {} lookups, {dropped} tables dropped", READERS * LOOKUPS);
    assert_eq!(dropped, UPDATES);
}
