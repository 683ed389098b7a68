//! A registry of connections that come and go on many threads, while a monitor walks all of them
//! without delaying the threads.
//!
//! Run:     cargo run -p examples --example percpu_list_registry
//! Prints:  4 threads, 40000 connections; every walk saw the 4 that stayed

use std::thread;

use percpu_list::{PerCpuList, Refused};

const THREADS: usize = 4;
const CONNECTIONS: usize = 10_000; // per thread

/// Adds connections, named by what they do, and drops each before the next.
fn work(open: &PerCpuList<&'static str>) -> Result<(), Refused> {
    for _ in 0..CONNECTIONS {
        let connection = open.insert("goes")?;
        assert_eq!(*connection, "goes");
    } // dropped: off the list
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let open = PerCpuList::new();
    let stay: Result<Vec<_>, _> = (0..THREADS).map(|_| open.insert("stays")).collect();
    let stay = stay?; // each walk from here on sees each of them exactly once
    thread::scope(|s| {
        let threads = [(); THREADS].map(|()| s.spawn(|| work(&open)));
        while !threads.iter().all(|thread| thread.is_finished()) {
            let mut stayed = 0;
            for found in &open {
                stayed += usize::from(*found == "stays"); // no lock is held here
            }
            assert_eq!(stayed, THREADS);
        }
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    let gone = open.stats().removals as usize;
    println!(
        "{THREADS} threads, {gone} connections; every walk saw the {} that stayed",
        open.len()
    );
    assert_eq!((gone, open.len()), (CONNECTIONS * THREADS, stay.len()));
    Ok(())
}
