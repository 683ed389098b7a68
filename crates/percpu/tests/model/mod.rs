//! Runs steps on every structure of the crate, and compares each result with a model.
//!
//! The property tests and the fuzz target share it. It uses one thread, and searches for a sequence
//! of steps on several types after which a count is wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use offlock_percpu::lglock::{GlobalGuard, LocalGuard};
use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_percpu::{CpuId, KillError, LgLock, LockError, PerCpuCounter, PercpuRef, Reference};
use testkit::pin::{allowed_cpus, pin_to};
use testkit::wait_until;

/// The most guards of the lock, and of RCU, at a time.
const MOST: usize = 8;

/// Returns a small or middling number, or one so large that sums wrap: `shift` decides.
fn amount(base: u8, shift: u8) -> u64 {
    match shift % 4 {
        0 => u64::from(base % 8),
        1 => u64::from(base),
        2 => u64::from(base) << (shift / 4),
        _ => (u64::from(base) << (shift / 4)).wrapping_sub(1),
    }
}

/// Runs one input: a header of the corpus, and steps of four bytes. Returns the number of steps.
///
/// # Panics
///
/// Panics if the result of a step differs from the model's.
pub(crate) fn run(input: &[u8]) -> usize {
    let steps = input.get(4..).unwrap_or_default().chunks(4);
    run_steps(steps.map(|chunk| {
        let mut step = [0; 4];
        step[..chunk.len()].copy_from_slice(chunk);
        step
    }))
}

/// Runs steps, and returns their number. Panics like [`run`].
pub(crate) fn run_steps(steps: impl IntoIterator<Item = [u8; 4]>) -> usize {
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    let refs = PercpuRef::new(move || _ = count.fetch_add(1, Relaxed));
    let lock = LgLock::default();
    let mut world = World::new(&refs, released, &lock);
    let count = steps.into_iter().map(|step| world.checked_step(step)).count();
    world.end();
    count
}

/// The guard of a locked slot, or of all.
enum Locked<'a> {
    One(LocalGuard<'a, u64>),
    All(GlobalGuard<'a, u64>),
}

/// A value that RCU protects. Counts its drop.
struct Value {
    number: u64,
    /// 1 while the value lives. The test reads it without an access of the value.
    alive: Arc<AtomicUsize>,
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.alive.fetch_sub(1, Relaxed), 1, "dropped twice");
    }
}

/// One object of each type, with its model.
struct World<'a> {
    cpus: Vec<usize>,
    /// The CPU that the thread runs on, once it is pinned.
    pinned: Option<usize>,

    counter: PerCpuCounter,
    sum: i64,

    refs: &'a PercpuRef,
    released: Arc<AtomicUsize>,
    held: Vec<Reference<'a>>,
    killed: bool,

    lock: &'a LgLock<u64>,
    /// The value of each slot.
    values: Vec<u64>,
    locked: Vec<Locked<'a>>,

    pointer: Atomic<Option<Value>>,
    /// The number of the value that is published, and the last number used.
    published: Option<u64>,
    last: u64,
    /// Each guard, with the value that it loaded.
    readers: Vec<(rcu::Guard, Option<Arc<AtomicUsize>>)>,
    /// Every value that was created.
    made: Vec<Arc<AtomicUsize>>,
}

impl<'a> World<'a> {
    fn new(refs: &'a PercpuRef, released: Arc<AtomicUsize>, lock: &'a LgLock<u64>) -> Self {
        Self {
            cpus: allowed_cpus(),
            pinned: None,
            counter: PerCpuCounter::new(),
            sum: 0,
            refs,
            released,
            held: Vec::new(),
            killed: false,
            lock,
            values: vec![0; lock.capacity()],
            locked: Vec::new(),
            pointer: Atomic::default(),
            published: None,
            last: 0,
            readers: Vec::new(),
            made: Vec::new(),
        }
    }

    /// Makes the step that the first byte names, and checks everything. Numbers that select something
    /// are taken modulo the number of choices.
    fn checked_step(&mut self, [what, a, b, c]: [u8; 4]) {
        match what % 32 {
            what @ 0..=13 if what % 5 < 2 => {
                let amount = amount(b, c) as i64;
                let delta = if a % 2 == 0 { amount } else { amount.wrapping_neg() };
                self.counter.add(delta);
                self.sum = self.sum.wrapping_add(delta);
            }
            0..=13 => {
                (0..a).for_each(|_| self.counter.increment());
                self.sum = self.sum.wrapping_add(i64::from(a));
            }
            14 | 15 => {
                let cpu = self.cpus[usize::from(a) % self.cpus.len()];
                pin_to(&[cpu]);
                self.pinned = Some(cpu); // also for a guard that is held: it unlocks its own slot
            }
            16 => {
                let got = self.refs.try_get();
                assert_eq!(got.is_some(), !self.killed, "a get succeeds exactly while live");
                self.held.extend(got);
            }
            17 if a.is_multiple_of(8) => self.held.extend(self.held.last().cloned()),
            17 => drop(remove(&mut self.held, a)),
            18 | 19 => self.kill(),
            20..=29 => match a / 2 % 5 {
                0 => self.lock_here(),
                1 => self.lock_on(b),
                2 | 3 => self.lock_all(),
                _ => drop(remove(&mut self.locked, b)),
            },
            30 if a.is_multiple_of(4) => self.unpublish(),
            30 => self.publish(),
            _ if a.is_multiple_of(4) => _ = rcu::poll(),
            _ if a % 4 == 1 => self.pin(),
            _ => drop(remove(&mut self.readers, a)),
        }
        self.check();
    }

    fn kill(&mut self) {
        let want = if self.killed { Err(KillError::AlreadyDying) } else { Ok(()) };
        assert_eq!(self.refs.kill(), want);
        self.killed = true;
    }

    fn lock_here(&mut self) {
        self.unlock_some();
        let got = self.lock.local();
        // The slot of the current CPU is known only after the call.
        let may = match &got {
            Ok(guard) => {
                let slot = guard.cpu().index();
                assert!(self.pinned.is_none_or(|cpu| slot == cpu % self.values.len()));
                self.is_free(slot)
            }
            Err(_) => self.locked.is_empty(),
        };
        self.took(got.map(Locked::One), may);
    }

    fn lock_on(&mut self, cpu: u8) {
        self.unlock_some();
        let slot = usize::from(cpu) % self.values.len();
        let got = self.lock.local_on(CpuId::new(slot as u32)).map(Locked::One);
        self.took(got, self.is_free(slot));
    }

    fn lock_all(&mut self) {
        self.unlock_some();
        self.took(self.lock.global().map(Locked::All), self.locked.is_empty());
    }

    /// Publishes a new value, and retires the old one.
    fn publish(&mut self) {
        self.last += 1;
        let value = Value { number: self.last, alive: Arc::new(AtomicUsize::new(1)) };
        self.made.push(Arc::clone(&value.alive));
        let old = self.pointer.swap(Owned::new(Some(value)));
        assert_eq!(old.as_ref().map(|old| old.number), self.published);
        self.published = Some(self.last);
        old.retire();
    }

    fn unpublish(&mut self) {
        self.pointer.store(Owned::new(None)); // retires the old value
        self.published = None;
    }

    fn pin(&mut self) {
        if self.readers.len() < MOST {
            let guard = rcu::pin();
            let value = self.pointer.load(&guard).as_ref();
            assert_eq!(value.map(|value| value.number), self.published);
            let alive = value.map(|value| Arc::clone(&value.alive));
            self.readers.push((guard, alive));
        }
    }

    fn unlock_some(&mut self) {
        if self.locked.len() == MOST {
            self.locked.clear();
        }
    }

    /// Returns whether no guard has the slot.
    fn is_free(&self, slot: usize) -> bool {
        self.locked.iter().all(|locked| match locked {
            Locked::One(guard) => guard.cpu().index() != slot,
            Locked::All(_) => false,
        })
    }

    /// Checks whether the lock was granted, and adds 1 to each locked slot.
    fn took(&mut self, got: Result<Locked<'a>, LockError>, may: bool) {
        assert_eq!(got.as_ref().err(), (!may).then_some(&LockError::Deadlock));
        let Ok(mut locked) = got else { return };
        match &mut locked {
            Locked::One(guard) => {
                **guard += 1;
                self.values[guard.cpu().index()] += 1;
            }
            Locked::All(guard) => {
                guard.iter_mut().for_each(|(_, value)| *value += 1);
                self.values.iter_mut().for_each(|value| *value += 1);
            }
        }
        self.locked.push(locked);
    }

    /// Compares every object with its model.
    fn check(&self) {
        assert_eq!(self.counter.sum(), self.sum);
        let zero = self.killed && self.held.is_empty();
        assert_eq!(self.refs.is_zero(), zero);
        assert_eq!(self.released.load(Relaxed), usize::from(zero), "one release");
        assert!(self.locked.iter().all(|locked| match locked {
            Locked::One(guard) => **guard == self.values[guard.cpu().index()],
            Locked::All(guard) => guard.iter().map(|(_, value)| value).eq(&self.values),
        }));
        let mut seen = self.readers.iter().flat_map(|(_, seen)| seen);
        assert!(seen.all(|alive| alive.load(Relaxed) == 1), "dropped while a reader has it");
    }

    /// Drops all guards and references. Checks that the count is released, that every slot has its
    /// value, and that every published value is dropped.
    fn end(mut self) {
        pin_to(&self.cpus);
        self.kill();
        while self.held.pop().is_some() {
            self.check();
        }
        self.check();
        self.locked.clear();
        self.lock_all();
        self.check();
        self.readers.clear();
        self.unpublish();
        wait_until(|| {
            rcu::poll(); // another thread may drop them
            self.made.iter().all(|alive| alive.load(Relaxed) == 0)
        });
    }
}

/// Removes one of `all`, if there is one.
fn remove<T>(all: &mut Vec<T>, which: u8) -> Option<T> {
    let which = usize::from(which).checked_rem(all.len())?;
    Some(all.swap_remove(which))
}
