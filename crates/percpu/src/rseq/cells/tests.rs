//! The sections on this kernel, alone and interrupted by signals, migrations and barriers.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng;
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::stress_time;

use super::self_test::{TestList, self_test};
use super::{Block, Refused, Sections};
use crate::fence::heavy_rseq;

impl TestList {
    /// Calls `refill` for the blocks, of which that of this CPU is refilled.
    fn refill(&self, sections: Sections) {
        for block in self.blocks() {
            // SAFETY: the block and its shard are alive.
            let _ = unsafe { sections.refill(block) };
        }
    }
}

/// Returns the sections and the number of CPUs; `None` where none run.
fn sections() -> Option<(Sections, u32)> {
    let found = Sections::find();
    if found.is_none() {
        println!("sections are off: nothing to test");
    }
    Some((found?, crate::sync::cpu::possible() as u32))
}

#[test]
fn the_self_test_passes() {
    let Some((sections, cpus)) = sections() else { return };
    (0..1_000).for_each(|_| assert!(self_test(sections, cpus)));
}

/// On one CPU a block fills up, is empty again, and another CPU frees its cells.
#[test]
fn a_block_is_filled_and_refilled() {
    let Some((sections, cpus)) = sections() else { return };
    let list = TestList::new(cpus);
    let allowed = allowed_cpus();
    pin_to(&allowed[..1]);
    for round in 0..3 {
        let mut entries: Vec<_> =
            (0..64).map(|n| list.insert(sections, [n, round, n]).unwrap()).collect();
        let places: HashSet<u32> = entries.iter().map(|entry| entry.1).collect();
        assert_eq!(places.len(), 64);
        assert_eq!(list.insert(sections, [0; 3]).err(), Some(Refused::NoRoom));
        pin_to(&allowed[allowed.len() - 1..]);
        let half = entries.split_off(32);
        for (n, entry) in half.into_iter().enumerate() {
            assert_eq!(list.remove(sections, entry), Ok([n as u64 + 32, round, n as u64 + 32]));
        }
        pin_to(&allowed[..1]);
        if allowed.len() > 1 {
            assert_eq!(list.insert(sections, [0; 3]).err(), Some(Refused::NoRoom), "not seen");
        }
        list.refill(sections);
        for (n, entry) in entries.into_iter().enumerate() {
            assert_eq!(list.remove(sections, entry), Ok([n as u64, round, n as u64]));
        }
    }
    let misses: u64 = list.blocks().map(|block| block.misses.load(Ordering::Relaxed)).sum();
    assert_eq!(misses, if allowed.len() > 1 { 96 } else { 0 });
}

extern "C" fn nothing(_: libc::c_int) {}

/// An entry on its way between threads.
struct Entry((*const Block, u32), u64);

// SAFETY: the block lives as long as the list, which outlives the threads.
unsafe impl Send for Entry {}

#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_no_cell_is_lost_or_given_twice() {
    let Some((sections, cpus)) = sections() else { return };
    let (list, exchange) = (TestList::new(cpus), Mutex::new(Vec::<Entry>::new()));
    let (stop, next, allowed) = (AtomicBool::new(false), AtomicU64::new(0), allowed_cpus());
    let removed = AtomicU64::new(0);
    handle(nothing);
    thread::scope(|scope| {
        for worker in 0..6 {
            let (list, exchange, stop, next, removed, allowed) =
                (&list, &exchange, &stop, &next, &removed, &allowed);
            scope.spawn(move || {
                let _signals = ThreadTimer::start(Duration::from_micros(50));
                let (mut rng, mut own) = (rng::seeded(worker), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    match rng.usize(..1000) {
                        0 => pin_to(&[allowed[rng.usize(..allowed.len())]]),
                        1..100 => exchange.lock().unwrap().extend(own.pop()),
                        100..200 => own.extend(exchange.lock().unwrap().pop()),
                        200..600 => {
                            let id = next.fetch_add(1, Ordering::Relaxed);
                            match list.insert(sections, [id, !id, id]) {
                                Ok(at) => own.push(Entry(at, id)),
                                Err(refused) => {
                                    assert_eq!(refused, Refused::NoRoom);
                                    next.fetch_sub(1, Ordering::Relaxed);
                                    list.refill(sections);
                                }
                            }
                        }
                        _ => {
                            let Some(Entry(at, id)) = own.pop() else { continue };
                            assert_eq!(list.remove(sections, at), Ok([id, !id, id]));
                            removed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                exchange.lock().unwrap().extend(own);
            });
        }
        let until = Instant::now() + stress_time(2);
        while Instant::now() < until {
            heavy_rseq();
            thread::sleep(Duration::from_micros(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let left = exchange.into_inner().unwrap();
    let adds: u64 = list.blocks().map(|block| block.adds.load(Ordering::Relaxed)).sum();
    let removed = removed.into_inner();
    println!("{adds} additions, {removed} removals");
    assert_eq!(adds, removed + left.len() as u64);
    let places: HashSet<_> = left.iter().map(|entry| entry.0).collect();
    assert_eq!(places.len(), left.len());
    for Entry(at, id) in left {
        assert_eq!(list.remove(sections, at).map(|value| value[1]), Ok(!id));
    }
    let bits =
        |block: &Block| block.home.load(Ordering::Relaxed) ^ block.remote.load(Ordering::Relaxed);
    assert!(list.blocks().all(|block| bits(block) == 0) && removed > 1_000);
}
