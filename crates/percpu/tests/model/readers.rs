//! RCU from one thread: what a guard has seen lives as long as the guard, and nothing for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use percpu::rcu::{self, Atomic, Guard, Owned};

/// Guards held at a time, at most.
const MOST: usize = 8;

/// Says when it is dropped.
struct Value {
    number: u64,
    /// 1 while it lives; its readers' way to look without touching it.
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

/// One pointer, and guards that came at different times.
#[derive(Default)]
pub(super) struct Readers {
    pointer: Atomic<Option<Value>>,
    now: Option<u64>,
    next: u64,
    /// Each with what it saw.
    guards: Vec<(Guard, Option<Arc<AtomicUsize>>)>,
    /// All that was ever made.
    made: Vec<Arc<AtomicUsize>>,
}

impl Readers {
    pub(super) fn step(&mut self, what: u8, a: u8) {
        match what {
            0 if a.is_multiple_of(4) => {
                self.pointer.store(Owned::new(None)); // the old one is retired
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
        assert!(seen.all(|alive| alive.load(Relaxed) == 1), "dropped under its reader");
    }

    /// Lets go of everything: then nothing that was made lives on.
    pub(super) fn end(mut self) {
        self.guards.clear();
        self.pointer.store(Owned::new(None));
        rcu::barrier().expect("this thread holds no guard");
        assert!(self.made.iter().all(|alive| alive.load(Relaxed) == 0), "kept for ever");
    }
}
