//! RCU on one thread: a value lives as long as the guards that loaded it, and no longer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use offlock_percpu::rcu::{self, Atomic, Guard, Owned};
use testkit::wait_until;

/// The most guards held at a time.
const MOST: usize = 8;

/// Counts its drop.
struct Value {
    number: u64,
    /// 1 while the value lives. The test reads it without an access of the value.
    alive: Arc<AtomicUsize>,
}

impl Value {
    fn new(number: u64) -> Self {
        Self { number, alive: Arc::new(AtomicUsize::new(1)) }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.alive.fetch_sub(1, Relaxed), 1, "dropped twice");
    }
}

/// One pointer, and guards of different ages.
#[derive(Default)]
pub(super) struct Readers {
    pointer: Atomic<Option<Value>>,
    now: Option<u64>,
    next: u64,
    /// Each guard, with the value that it loaded.
    guards: Vec<(Guard, Option<Arc<AtomicUsize>>)>,
    /// Every value that was created.
    made: Vec<Arc<AtomicUsize>>,
}

impl Readers {
    pub(super) fn step(&mut self, what: u8, a: u8) {
        match what {
            0 if a.is_multiple_of(4) => {
                self.pointer.store(Owned::new(None)); // retires the old value
                self.now = None;
            }
            0 => {
                self.next += 1;
                let value = Value::new(self.next);
                self.made.push(Arc::clone(&value.alive));
                let old = self.pointer.swap(Owned::new(Some(value)));
                assert_eq!(old.as_ref().map(|old| old.number), self.now);
                self.now = Some(self.next);
                old.retire();
            }
            _ if a.is_multiple_of(4) => _ = rcu::poll(),
            _ if a % 4 == 1 && self.guards.len() < MOST => {
                let guard = rcu::pin();
                let seen = self.pointer.load(&guard).as_ref().map(|value| {
                    assert_eq!(Some(value.number), self.now);
                    Arc::clone(&value.alive)
                });
                assert_eq!(seen.is_some(), self.now.is_some());
                self.guards.push((guard, seen));
            }
            _ if self.guards.is_empty() => {}
            _ => drop(self.guards.swap_remove(usize::from(a) % self.guards.len())),
        }
        let mut seen = self.guards.iter().flat_map(|(_, seen)| seen);
        assert!(seen.all(|alive| alive.load(Relaxed) == 1), "dropped while a reader has it");
    }

    /// Drops all guards and the pointer, and checks that every value is dropped.
    pub(super) fn end(mut self) {
        self.guards.clear();
        self.pointer.store(Owned::new(None));
        wait_until(|| {
            rcu::poll(); // another thread may drop them
            self.made.iter().all(|alive| alive.load(Relaxed) == 0)
        });
    }
}
