//! What a program writes with a lock: a heap or a map of queues, and two condition variables.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::PoisonError;

use crate::queue::Queue;

/// What is under the lock.
pub(crate) trait Store: Default + Send {
    fn put(&mut self, message: u64, priority: u32);
    fn take(&mut self) -> Option<u64>;
    fn len(&self) -> usize;
}

/// A heap: the sequence number keeps messages of one priority in order.
#[derive(Default)]
pub(crate) struct Heap {
    heap: BinaryHeap<Entry>,
    sequence: u64,
}

struct Entry {
    order: (u32, Reverse<u64>),
    message: u64,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order.cmp(&other.order)
    }
}

impl Store for Heap {
    #[inline(always)]
    fn put(&mut self, message: u64, priority: u32) {
        self.sequence += 1;
        self.heap.push(Entry { order: (priority, Reverse(self.sequence)), message });
    }

    #[inline(always)]
    fn take(&mut self) -> Option<u64> {
        self.heap.pop().map(|entry| entry.message)
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.heap.len()
    }
}

/// A map from priorities to their messages.
#[derive(Default)]
pub(crate) struct Map {
    map: BTreeMap<u32, VecDeque<u64>>,
    len: usize,
}

impl Store for Map {
    #[inline(always)]
    fn put(&mut self, message: u64, priority: u32) {
        self.map.entry(priority).or_default().push_back(message);
        self.len += 1;
    }

    #[inline(always)]
    fn take(&mut self) -> Option<u64> {
        let mut highest = self.map.last_entry()?;
        let message = highest.get_mut().pop_front();
        if highest.get().is_empty() {
            highest.remove();
        }
        self.len -= 1;
        message
    }

    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }
}

/// parking_lot's lock: its notify is a load if nobody waits.
pub(crate) struct ParkingLot<S> {
    store: parking_lot::Mutex<S>,
    came: parking_lot::Condvar,
    left: parking_lot::Condvar,
    most: usize,
}

impl<S: Store + Named> Queue for ParkingLot<S> {
    const NAME: &'static str = S::PARKING_LOT;

    fn new(most: usize) -> Self {
        let store = parking_lot::Mutex::new(S::default());
        Self { store, came: parking_lot::Condvar::new(), left: parking_lot::Condvar::new(), most }
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let mut store = self.store.lock();
        while store.len() >= self.most {
            self.left.wait(&mut store);
        }
        store.put(message, priority);
        drop(store);
        self.came.notify_one();
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut store = self.store.lock();
        loop {
            if let Some(message) = store.take() {
                drop(store);
                self.left.notify_one();
                return message;
            }
            self.came.wait(&mut store);
        }
    }
}

/// The standard library's lock: its notify is a system call each time.
pub(crate) struct Std<S> {
    store: std::sync::Mutex<S>,
    came: std::sync::Condvar,
    left: std::sync::Condvar,
    most: usize,
}

impl<S: Store + Named> Queue for Std<S> {
    const NAME: &'static str = S::STD;

    fn new(most: usize) -> Self {
        let store = std::sync::Mutex::new(S::default());
        Self { store, came: std::sync::Condvar::new(), left: std::sync::Condvar::new(), most }
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        while store.len() >= self.most {
            store = self.left.wait(store).unwrap_or_else(PoisonError::into_inner);
        }
        store.put(message, priority);
        drop(store);
        self.came.notify_one();
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(message) = store.take() {
                drop(store);
                self.left.notify_one();
                return message;
            }
            store = self.came.wait(store).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// As the tables have them.
pub(crate) trait Named {
    const PARKING_LOT: &'static str;
    const STD: &'static str;
}

impl Named for Heap {
    const PARKING_LOT: &'static str = "parking_lot BinaryHeap";
    const STD: &'static str = "std BinaryHeap";
}

impl Named for Map {
    const PARKING_LOT: &'static str = "parking_lot BTreeMap";
    const STD: &'static str = "std BTreeMap";
}

pub(crate) type PlHeap = ParkingLot<Heap>;
pub(crate) type PlMap = ParkingLot<Map>;
pub(crate) type StdHeap = Std<Heap>;
