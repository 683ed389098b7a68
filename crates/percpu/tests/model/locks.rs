//! The lock on one thread: which guards are granted, and the errors of the others.

use offlock_percpu::lglock::{GlobalGuard, LocalGuard};
use offlock_percpu::{CpuId, LgLock, LockError};

/// The most guards held at a time.
const MOST: usize = 8;

/// The guard that one call returned.
struct Held<'a> {
    guard: Guard<'a>,
    slots: Vec<usize>,
}

enum Guard<'a> {
    Local(LocalGuard<'a, u64>),
    Global(GlobalGuard<'a, u64>),
}

impl Guard<'_> {
    /// Adds 1 to each locked slot.
    fn add(&mut self) {
        match self {
            Self::Local(guard) => **guard += 1,
            Self::Global(guard) => guard.iter_mut().for_each(|(_, value)| *value += 1),
        }
    }

    /// Returns whether the locked slots have the values of the model.
    fn sees(&self, values: &[u64]) -> bool {
        match self {
            Self::Local(guard) => **guard == values[guard.cpu().index()],
            Self::Global(guard) => guard.iter().all(|(cpu, &value)| value == values[cpu.index()]),
        }
    }
}

/// The model of a lock.
pub(super) struct Locks<'a> {
    lock: &'a LgLock<u64>,
    values: Vec<u64>,
    held: Vec<Held<'a>>,
    /// The CPU that the thread runs on, once it is pinned.
    pub(super) pinned: Option<usize>,
}

impl<'a> Locks<'a> {
    pub(super) fn new(lock: &'a LgLock<u64>) -> Self {
        let values = vec![0; lock.capacity()];
        Self { lock, values, held: Vec::new(), pinned: None }
    }

    pub(super) fn step(&mut self, what: u8, a: CpuId) {
        if self.held.len() == MOST {
            self.held.clear();
        }
        match what / 2 % 5 {
            0 => self.local(),
            1 => {
                let refused = self.busy(&[a]);
                self.took(self.lock.local_on(a).map(Guard::Local), refused, &[a.index()]);
            }
            2 | 3 => {
                let slots: Vec<usize> = (0..self.values.len()).collect();
                let cpus: Vec<CpuId> = slots.iter().map(|&slot| CpuId::new(slot as u32)).collect();
                let refused = self.busy(&cpus);
                self.took(self.lock.global().map(Guard::Global), refused, &slots);
            }
            _ if self.held.is_empty() => {}
            _ => drop(self.held.swap_remove(a.index() % self.held.len())),
        }
        assert!(self.held.iter().all(|held| held.guard.sees(&self.values)));
    }

    /// Locks the slot of the current CPU, which is known only after the call.
    fn local(&mut self) {
        match self.lock.local() {
            Ok(mut guard) => {
                let slot = guard.cpu().index();
                assert!(self.pinned.is_none_or(|cpu| slot == cpu % self.values.len()));
                assert_eq!(self.busy(&[guard.cpu()]), None);
                *guard += 1;
                self.values[slot] += 1;
                let guard = Guard::Local(guard);
                self.held.push(Held { guard, slots: vec![slot] });
            }
            Err(error) => {
                assert_eq!((error, self.held.is_empty()), (LockError::Deadlock, false));
            }
        }
    }

    fn busy(&self, cpus: &[CpuId]) -> Option<LockError> {
        let ours = |held: &Held<'_>| cpus.iter().any(|cpu| held.slots.contains(&cpu.index()));
        self.held.iter().any(ours).then_some(LockError::Deadlock)
    }

    fn took(
        &mut self,
        got: Result<Guard<'a>, LockError>,
        refused: Option<LockError>,
        slots: &[usize],
    ) {
        assert_eq!(got.as_ref().err().copied(), refused, "{slots:?}");
        if let Ok(mut guard) = got {
            guard.add();
            slots.iter().for_each(|&slot| self.values[slot] += 1);
            self.held.push(Held { guard, slots: slots.to_vec() });
        }
    }

    /// Drops all guards, and checks the value of every slot.
    pub(super) fn end(mut self) {
        self.held.clear();
        let all = self.lock.global().expect("nothing is held");
        assert!(all.iter().map(|(_, value)| value).eq(&self.values));
    }
}
