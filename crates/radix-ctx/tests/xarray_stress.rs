//! Readers of an `XArray` on the real kernel, while its tree grows and shrinks.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` (5).
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use percpu::rcu::{self, Owned};
use radix_ctx::xarray::{Mark, Value, XArray};

use testkit::stress::{keep_running, stress_time};

/// Runs `readers` and `writer` at once for the stress time, and prints their numbers of rounds.
fn race(name: &str, writer: impl Fn(u64) + Sync, readers: &[&(dyn Fn(u64) + Sync)]) {
    let until = Instant::now() + stress_time(5);
    let stop = AtomicBool::new(false);
    let (written, read) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|s| {
        for reader in readers {
            let (stop, read) = (&stop, &read);
            s.spawn(move || {
                let mut rounds = 0;
                while !stop.load(Relaxed) {
                    reader(rounds);
                    if rounds == 0 {
                        read.fetch_add(1, Relaxed);
                    }
                    rounds += 1;
                }
                read.fetch_add(rounds.saturating_sub(1), Relaxed);
            });
        }
        let writing = s.spawn(|| {
            for round in 0.. {
                let on = || keep_running(until, || round > 0 && read.load(Relaxed) > 0);
                if round % 64 == 0 && !on() {
                    return written.store(round, Relaxed);
                }
                writer(round);
            }
        });
        let failed = writing.join().is_err();
        stop.store(true, Relaxed);
        assert!(!failed, "the writer panicked");
    });
    let (written, read) = (written.into_inner(), read.into_inner());
    println!("{name}: {written} changes, {read} rounds of readers");
    assert!(written > 0 && read > 0);
    rcu::barrier().unwrap();
}

fn value(index: u64) -> Value {
    Value::new(index >> 1).unwrap()
}

#[test]
#[ignore = "stress: five seconds of toggling"]
fn stress_inv10_lookup_of_zero_always_succeeds() {
    // Each neighbour moves the entry at 0 to another node.
    for neighbour in [1, 64, 4_096, u64::MAX] {
        let array = XArray::<Value>::new();
        array.store(0, value(0)).unwrap();
        let reader = |_| assert_eq!(array.with(0, |found| found), Some(value(0)));
        let writer = |_| {
            array.store(neighbour, value(neighbour)).unwrap();
            array.erase(neighbour);
        };
        race(&format!("toggling {neighbour}"), writer, &[&reader, &reader]);
        array.validate();
    }
}

/// Entries stay while others are stored and erased, with their nodes.
#[test]
#[ignore = "stress: five seconds of lookups"]
fn stress_inv10_gang_lookup_against_shrink() {
    let stays = [0, 5, 63, 64, 200, 4_095, 4_096, 70_000, 1 << 30];
    let array = XArray::<Value>::new();
    for index in stays {
        array.store(index, value(index)).unwrap();
        array.set_mark(index, Mark::Two);
    }
    let iterate = |_| {
        let guard = rcu::pin();
        let seen = array.iter(&guard).inspect(|&(index, found)| assert_eq!(found, value(index)));
        let seen: Vec<u64> = seen.map(|(index, _)| index).collect();
        assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
        let kept: Vec<u64> = seen.into_iter().filter(|index| stays.contains(index)).collect();
        assert_eq!(kept, stays);
    };
    let marked = |_| {
        let guard = rcu::pin();
        let seen = array.marked(Mark::Two, .., &guard).map(|(index, _)| index);
        assert_eq!(seen.collect::<Vec<_>>(), stays);
    };
    let back = |_| {
        let guard = rcu::pin();
        let mut from = array.at_or_before(u64::MAX, &guard);
        let mut kept = Vec::new();
        while let Some((index, found)) = from {
            assert_eq!(found, value(index));
            if stays.contains(&index) {
                kept.push(index);
            }
            from = array.prev(index, &guard);
        }
        kept.reverse();
        assert_eq!(kept, stays);
    };
    let writer = |round: u64| {
        let base = [6, 65, 4_097, 1 << 20, 1 << 40, u64::MAX - 300][(round % 6) as usize];
        for index in base..base + 50 {
            array.store(index, value(index)).unwrap();
        }
        array.erase_range(base..base + 50);
    };
    race("gang lookups", writer, &[&iterate, &marked, &back]);
    array.validate();
}

/// An iteration begins under a small root and ends under a large one, or the other way round.
#[test]
#[ignore = "stress: five seconds of growing"]
fn stress_inv10_iterators_go_on_across_growth() {
    let array = XArray::<Value>::new();
    let stays: Vec<u64> = (0..130).collect();
    for &index in &stays {
        array.store(index, value(index)).unwrap();
    }
    let reader = |_| {
        let guard = rcu::pin();
        let mut iteration = array.iter(&guard);
        for &index in &stays {
            assert_eq!(iteration.next(), Some((index, value(index))));
        }
        assert!(iteration.all(|(index, _)| index >= 130));
    };
    let writer = |round: u64| {
        let far = 1 << (8 + round % 56);
        array.store(far, value(far)).unwrap();
        array.erase(far);
    };
    race("growth", writer, &[&reader, &reader]);
    assert_eq!(array.stats().height, 2);
    array.validate();
}

/// Boxes with a drop flag are replaced and erased while readers read them.
#[test]
#[ignore = "stress: five seconds of replacing"]
fn stress_inv11_no_reader_sees_a_dropped_entry() {
    struct Alive(AtomicU64);
    impl Drop for Alive {
        fn drop(&mut self) {
            self.0.store(0, Relaxed);
            DROPPED.fetch_add(1, Relaxed);
        }
    }
    static DROPPED: AtomicU64 = AtomicU64::new(0);
    static MADE: AtomicU64 = AtomicU64::new(0);
    let new = || {
        MADE.fetch_add(1, Relaxed);
        Owned::new(Alive(AtomicU64::new(7)))
    };
    let array = XArray::<Owned<Alive>>::new();
    let reader = |round: u64| {
        let guard = rcu::pin();
        for index in round % 100..round % 100 + 10 {
            if let Some(alive) = array.load(index, &guard) {
                assert_eq!(alive.0.load(Relaxed), 7);
            }
        }
        assert!(array.iter(&guard).all(|(_, alive)| alive.0.load(Relaxed) == 7));
    };
    let writer = |round: u64| {
        drop(array.store(round % 70, new()).unwrap());
        drop(array.erase(round * 31 % 70));
        let _ = array.alloc(.., new());
        if round % 100 == 99 {
            array.clear();
        }
    };
    race("replacing", writer, &[&reader, &reader]);
    drop(array);
    rcu::barrier().unwrap();
    assert_eq!(MADE.load(Relaxed), DROPPED.load(Relaxed));
}

/// Each of several writers finds the entries at its own indexes.
#[test]
#[ignore = "stress: five seconds of writing"]
fn stress_inv01_writers_do_not_lose_each_others_entries() {
    let array = XArray::<Value>::new();
    let until = Instant::now() + stress_time(5);
    thread::scope(|s| {
        for me in 0..4_u64 {
            let array = &array;
            s.spawn(move || {
                let mut mine = Vec::new();
                let mut round = me;
                while Instant::now() < until {
                    for _ in 0..200 {
                        let index = array.alloc(.., Value::new(me).unwrap()).unwrap();
                        mine.push(index);
                        round = round.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        if mine.len() > (round >> 60) as usize * 20 {
                            let index = mine.swap_remove((round >> 32) as usize % mine.len());
                            assert_eq!(array.erase(index), Value::new(me));
                        }
                    }
                    for &index in &mine {
                        assert_eq!(array.with(index, Value::get), Some(me));
                    }
                }
                for index in mine {
                    assert_eq!(array.erase(index), Value::new(me));
                }
            });
        }
    });
    assert!(array.is_empty());
    array.validate();
}
