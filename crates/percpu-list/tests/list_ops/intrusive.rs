//! Two intrusive lists in one domain, and items that move between them.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use percpu_list::{
    CpuId, Domain, IntrusiveList, Link, LockError, PinnedIter, Refused, SlotPolicy, linked,
};

use super::{Canary, Counted, Expected, Slots, Step};

struct Item {
    this: Weak<Item>,
    canary: Canary,
    link: Link,
}

linked!(Item => link);

impl Item {
    fn make(id: u64, domain: &Domain, count: &Arc<AtomicI64>) -> Pin<Arc<Self>> {
        let item = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            canary: Canary::new(id, count),
            link: Link::new(domain),
        });
        // SAFETY: an `Arc` does not move its value, and the tests do not move it out.
        unsafe { Pin::new_unchecked(item) }
    }

    fn id(&self) -> u64 {
        self.canary.id()
    }
}

type List = IntrusiveList<Item>;
type Pinning = fn(Pin<&Item>) -> Option<u64>;

/// An item, and where it is in the model.
struct Known {
    item: Pin<Arc<Item>>,
    /// The list, and the slot that it was last added to.
    on: Option<usize>,
    slot: u32,
}

struct Walk<'l> {
    list: usize,
    iter: PinnedIter<'l, Item, u64, Pinning>,
    expected: Expected,
}

struct Items {
    known: Vec<Known>,
    next: u64,
    domain: Domain,
    count: Arc<AtomicI64>,
}

struct Epoch<'l> {
    lists: &'l [List; 2],
    slots: &'l Slots,
    items: &'l mut Items,
    walks: Vec<Walk<'l>>,
    counted: [Counted; 2],
    closed: [bool; 2],
}

pub(super) fn run(policy: SlotPolicy, steps: impl Iterator<Item = Step>) -> usize {
    let domain = Domain::with_policy(policy);
    let slots = Slots::new(&domain);
    let count = Arc::new(AtomicI64::new(0));
    let mut items = Items { known: Vec::new(), next: 0, domain, count };
    let (mut steps, mut made) = (steps.peekable(), 0);
    while steps.peek().is_some() {
        let lists = [List::new_in(&items.domain), List::new_in(&items.domain)];
        let mut epoch = Epoch {
            lists: &lists,
            slots: &slots,
            items: &mut items,
            walks: Vec::new(),
            counted: [Counted::default(); 2],
            closed: [false; 2],
        };
        for step in steps.by_ref() {
            made += 1;
            if step[0] % 32 == 31 {
                break;
            }
            epoch.step(step);
            epoch.compare();
        }
        drop(epoch);
        drop(lists);
        // The items can be added to the next two lists.
        for known in &mut items.known {
            assert!(!known.item.link.is_linked(), "a list takes its items off when it is dropped");
            known.on = None;
        }
    }
    items.known.clear();
    assert_eq!(items.count.load(Relaxed), 0);
    made
}

impl Items {
    fn place(&self, at: u8) -> Option<usize> {
        (!self.known.is_empty()).then(|| usize::from(at) % self.known.len())
    }
}

impl Epoch<'_> {
    fn linked(&self, list: usize) -> BTreeSet<u64> {
        let on = self.items.known.iter().filter(|known| known.on == Some(list));
        on.map(|known| known.item.id()).collect()
    }

    fn make(&mut self) {
        if self.items.known.len() < 400 {
            let item = Item::make(self.items.next, &self.items.domain, &self.items.count);
            assert_eq!((item.link.is_linked(), item.link.slot().get()), (false, self.slots.here));
            self.items.next += 1;
            self.items.known.push(Known { item, on: None, slot: self.slots.here });
        }
    }

    fn insert(&mut self, list: usize, at: usize, cpu: Option<CpuId>) {
        let known = &mut self.items.known[at];
        let slot = cpu.map_or(self.slots.here, |cpu| self.slots.of(cpu));
        let inserted = match cpu {
            Some(cpu) => self.lists[list].insert_on(cpu, known.item.as_ref()),
            None => self.lists[list].insert(known.item.as_ref()),
        };
        let expected = match (known.on, self.closed[list]) {
            (Some(_), _) => Err(Refused::Linked),
            (None, true) => Err(Refused::Closed),
            (None, false) => Ok(()),
        };
        assert_eq!(inserted, expected);
        if inserted.is_ok() {
            known.on = Some(list);
            known.slot = slot;
            self.counted[list].adds += 1;
            for walk in self.walks.iter_mut().filter(|walk| walk.list == list) {
                walk.expected.may.insert(known.item.id());
            }
        }
    }

    /// Counts that an item has left its list.
    fn left(&mut self, at: usize, from: u32) {
        let known = &mut self.items.known[at];
        let list = known.on.take().expect("it was on a list");
        self.counted[list].removed(known.slot, from);
        for walk in &mut self.walks {
            walk.expected.must.remove(&known.item.id());
        }
    }

    fn remove(&mut self, list: usize, at: usize, way: u8, cpu: CpuId) {
        let known = &self.items.known[at];
        let mut from = self.slots.here;
        let (removed, expected) = match way {
            0 => (self.lists[list].remove(&known.item), known.on == Some(list)),
            1 => {
                from = self.slots.of(cpu);
                (self.lists[list].remove_on(cpu, &known.item), known.on == Some(list))
            }
            2 => (self.lists[list].try_remove(&known.item), known.on == Some(list)),
            3 => (known.item.link.remove(), known.on.is_some()),
            _ => (known.item.link.try_remove(), known.on.is_some()),
        };
        assert_eq!(removed, Ok(expected));
        if expected {
            self.left(at, from);
        }
    }

    fn step(&mut self, [what, a, b, c]: Step) {
        let list = usize::from(a & 1);
        let cpu = self.slots.cpu(b);
        if what % 32 < 2 {
            self.make();
        }
        let Some(at) = self.items.place((a / 2).wrapping_add(c)) else { return };
        match what % 32 {
            0..=4 => self.insert(list, at, Some(cpu)),
            5 => self.insert(list, at, None),
            6 => {
                for _ in 0..c % 90 {
                    self.make();
                    self.insert(list, self.items.known.len() - 1, Some(cpu));
                }
            }
            way @ 7..=11 => self.remove(list, at, way - 7, cpu),
            12..=14 => self.kill(at),
            15 => (0..c % 60).for_each(|_| {
                if let Some(at) = self.items.place(a) {
                    self.kill(at);
                }
            }),
            16 => {
                for at in 0..self.items.known.len() {
                    if self.items.known[at].item.id().is_multiple_of(2 + u64::from(c % 4)) {
                        self.remove(list, at, b % 5, cpu);
                    }
                }
            }
            17..=18 => self.retain(list, u64::from(b % 5), c),
            19 if b < 128 => {
                let expected = self.linked(list);
                assert_eq!(self.lists[list].drain(), Ok(expected.len()));
                self.all_left(list, &expected);
            }
            20..=21 => self.for_each(list, a, b),
            22 => self.snapshot(list, at),
            23..=24 => self.walk(list, b),
            25..=27 => self.go_on(a, b),
            28 if !self.walks.is_empty() => {
                self.walks.remove(usize::from(a) % self.walks.len());
            }
            29 => {
                let elsewhere = Domain::new();
                let foreign = Item::make(7, &elsewhere, &self.items.count);
                assert_eq!(self.lists[list].insert(foreign.as_ref()), Err(Refused::OtherDomain));
                assert_eq!(self.lists[list].remove(&foreign), Ok(false));
                assert_eq!(self.lists[list].try_remove(&foreign), Ok(false));
            }
            30 if b < 64 => {
                self.lists[list].close().unwrap();
                self.closed[list] = true;
            }
            _ => {}
        }
    }

    /// Drops an item, which may be on a list.
    fn kill(&mut self, at: usize) {
        if self.items.known[at].on.is_some() {
            self.left(at, self.slots.here);
        }
        let known = self.items.known.swap_remove(at);
        let before = self.items.count.load(Relaxed);
        drop(known);
        assert_eq!(self.items.count.load(Relaxed), before - 1, "no other reference exists");
    }

    fn all_left(&mut self, list: usize, ids: &BTreeSet<u64>) {
        for at in 0..self.items.known.len() {
            let known = &self.items.known[at];
            if known.on == Some(list) && ids.contains(&known.item.id()) {
                self.left(at, self.slots.here);
            }
        }
    }

    /// `retain` calls `keep` with each item once, with or without holes.
    fn retain(&mut self, list: usize, rest: u64, c: u8) {
        let before = self.linked(list);
        let modulus = 2 + u64::from(c % 5);
        let panics_at = (c >= 200).then_some(usize::from(c % 16));
        let mut asked = BTreeSet::new();
        let mut off = BTreeSet::new();
        let retained = catch_unwind(AssertUnwindSafe(|| {
            self.lists[list].retain(|item| {
                let id = item.id();
                assert!(asked.insert(id), "{id} was asked about twice");
                if panics_at == Some(asked.len()) {
                    resume_unwind(Box::new("the callback's own"));
                }
                let keep = id % modulus != rest;
                if !keep {
                    off.insert(id);
                }
                keep
            })
        }));
        match retained {
            Ok(removed) => assert_eq!((removed, asked), (Ok(off.len()), before)),
            Err(panic) if panics_at.is_some() => drop(panic),
            Err(panic) => resume_unwind(panic),
        }
        self.all_left(list, &off);
    }

    fn for_each(&mut self, list: usize, a: u8, way: u8) {
        let expected = self.linked(list);
        let seen = Cell::new(BTreeSet::new());
        let (lists, slots, items) = (self.lists, self.slots, &*self.items);
        let other = items.place(a).map(|at| &items.known[at]);
        let walked = catch_unwind(AssertUnwindSafe(|| {
            lists[list].for_each(|item| {
                let mut ids = seen.take();
                assert!(ids.insert(item.id()));
                seen.set(ids);
                // This thread holds the slot, for all lists of the domain.
                let cpu = (0..slots.cpus as u32).map(CpuId::new);
                let cpu = cpu.into_iter().find(|cpu| slots.of(*cpu) == item.link.slot().get());
                let again = lists[1 - list].insert_on(cpu.unwrap(), item);
                assert_eq!(again, Err(Refused::Lock(LockError::Deadlock)));
                assert_eq!(item.link.remove(), Err(LockError::Deadlock));
                assert_eq!(item.link.try_remove(), Err(LockError::Deadlock));
                if let Some(other) = other.filter(|other| other.on.is_none()) {
                    let expected = if other.slot == item.link.slot().get() {
                        Err(LockError::Deadlock)
                    } else {
                        Ok(false)
                    };
                    assert_eq!(other.item.link.remove(), expected);
                }
                if way % 4 == 3 {
                    resume_unwind(Box::new("the callback's own"));
                }
            })
        }));
        let seen = seen.take();
        match walked {
            Ok(walked) => assert_eq!((walked, seen), (Ok(()), expected)),
            Err(panic) if way % 4 == 3 && seen.len() == 1 => drop(panic),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn snapshot(&mut self, list: usize, at: usize) {
        let expected = self.linked(list);
        let snapshot = self.lists[list].lock_all().unwrap();
        let seen: BTreeSet<u64> = snapshot.iter().map(|item| item.id()).collect();
        assert_eq!(
            (&seen, snapshot.len(), snapshot.iter().len()),
            (&expected, seen.len(), seen.len())
        );
        let mut again = BTreeSet::new();
        snapshot.for_each(|item| assert!(again.insert(item.id())));
        assert_eq!((&again, snapshot.is_empty()), (&expected, seen.is_empty()));
        let item = &self.items.known[at].item;
        let refused = Err(Refused::Lock(LockError::Deadlock));
        assert_eq!(self.lists[1 - list].insert(item.as_ref()), refused);
        assert_eq!(item.link.remove(), Err(LockError::Deadlock));
    }

    fn walk(&mut self, list: usize, how: u8) {
        let expected = self.linked(list);
        match how % 4 {
            0 => {
                let walk = self.lists[list].iter_pinned(|item| item.this.upgrade());
                let found: Vec<Arc<Item>> = walk.map(Result::unwrap).collect();
                let ids: BTreeSet<u64> = found.iter().map(|item| item.id()).collect();
                assert_eq!((found.len(), ids), (expected.len(), expected));
            }
            1 => {
                // Leaves some items out, and panics once.
                let mut asked = 0;
                let mut walk = self.lists[list].iter_pinned(|item| {
                    asked += 1;
                    if asked == 3 {
                        resume_unwind(Box::new("the pin's own"));
                    }
                    (item.id() % 2 == 0).then(|| item.id())
                });
                let mut found = BTreeSet::new();
                let mut panics = 0;
                loop {
                    match catch_unwind(AssertUnwindSafe(|| walk.next())) {
                        Ok(Some(id)) => assert!(found.insert(id.unwrap())),
                        Ok(None) => break,
                        Err(_) => panics += 1,
                    }
                }
                drop(walk);
                let even: BTreeSet<u64> =
                    expected.iter().copied().filter(|id| id % 2 == 0).collect();
                assert!(found.is_subset(&even) && even.len() - found.len() <= panics);
                assert_eq!((asked, panics), (expected.len(), usize::from(asked >= 3)));
            }
            _ if self.walks.len() < 4 => {
                let pin: Pinning = |item| Some(item.id());
                let iter = self.lists[list].iter_pinned(pin);
                self.walks.push(Walk { list, iter, expected: Expected::new(expected) });
            }
            _ => {}
        }
    }

    fn go_on(&mut self, a: u8, many: u8) {
        if self.walks.is_empty() {
            return;
        }
        let at = usize::from(a) % self.walks.len();
        let walk = &mut self.walks[at];
        for _ in 0..many % 50 {
            match walk.iter.next() {
                Some(id) => walk.expected.sees(id.expect("nothing is locked")),
                None => return self.walks.remove(at).expected.ends(),
            }
        }
    }

    fn compare(&self) {
        for (index, list) in self.lists.iter().enumerate() {
            list.validate();
            let linked = self.items.known.iter().filter(|known| known.on == Some(index)).count();
            assert_eq!((list.len(), list.is_empty()), (linked, linked == 0));
            assert_eq!(list.is_closed(), self.closed[index]);
            self.counted[index].compare(&list.stats(), self.slots);
        }
        for known in &self.items.known {
            let link = &known.item.link;
            assert_eq!((link.is_linked(), link.slot().get()), (known.on.is_some(), known.slot));
        }
        assert_eq!(self.items.count.load(Relaxed), self.items.known.len() as i64);
    }
}
