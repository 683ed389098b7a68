//! Two owning lists in one domain.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use percpu_list::{
    CpuId, Domain, Entry, InsertError, Iter, LockError, PerCpuList, Ref, Refused, SlotPolicy,
};

use super::{Canary, Counted, Expected, Slots, Step};

type List = PerCpuList<Canary>;

/// A value that is alive: its entry exists, its removal is deferred, or there is a reference.
struct Value<'l> {
    list: usize,
    slot: u32,
    entry: Option<Entry<&'l List>>,
    refs: Vec<Ref<Canary>>,
    linked: bool,
    /// The removal is deferred.
    deferred: bool,
}

struct Walk<'l> {
    list: usize,
    iter: Iter<'l, Canary>,
    expected: Expected,
}

/// Two lists and their model, until the lists are dropped.
struct Epoch<'l> {
    lists: &'l [List; 2],
    slots: &'l Slots,
    count: &'l Arc<AtomicI64>,
    values: BTreeMap<u64, Value<'l>>,
    walks: Vec<Walk<'l>>,
    counted: [Counted; 2],
    closed: [bool; 2],
    next: u64,
}

pub(super) fn run(policy: SlotPolicy, steps: impl Iterator<Item = Step>) -> usize {
    let domain = Domain::with_policy(policy);
    let slots = Slots::new(&domain);
    let count = Arc::new(AtomicI64::new(0));
    let (mut steps, mut made) = (steps.peekable(), 0);
    while steps.peek().is_some() {
        let lists = [List::new_in(&domain), List::new_in(&domain)];
        let mut epoch = Epoch {
            lists: &lists,
            slots: &slots,
            count: &count,
            values: BTreeMap::new(),
            walks: Vec::new(),
            counted: [Counted::default(); 2],
            closed: [false; 2],
            next: 0,
        };
        let mut last = [0; 4];
        for step in steps.by_ref() {
            (last, made) = (step, made + 1);
            if step[0] % 32 == 31 {
                break;
            }
            epoch.step(step);
            epoch.compare();
        }
        let outlive = epoch.end(last[1]);
        let held = outlive.len() as i64;
        drop(lists);
        assert_eq!(count.load(Relaxed), held, "a list drops what is forgotten on it");
        assert!(outlive.iter().all(|found| !found.is_linked() && found.id() < u64::MAX));
        drop(outlive);
        assert_eq!(count.load(Relaxed), 0);
    }
    made
}

impl<'l> Epoch<'l> {
    fn linked(&self, list: usize) -> BTreeSet<u64> {
        let on = |value: &Value| value.list == list && value.linked && !value.deferred;
        self.values.iter().filter(|(_, value)| on(value)).map(|(id, _)| *id).collect()
    }

    /// Returns the value at an index among those that `what` accepts.
    fn pick(&self, at: u8, what: impl Fn(&Value) -> bool) -> Option<u64> {
        let ids: Vec<u64> =
            self.values.iter().filter(|(_, value)| what(value)).map(|(id, _)| *id).collect();
        ids.get(usize::from(at) % ids.len().max(1)).copied()
    }

    fn entry(&mut self, at: u8) -> Option<(u64, Entry<&'l List>)> {
        let id = self.pick(at, |value| value.entry.is_some())?;
        Some((id, self.values.get_mut(&id)?.entry.take()?))
    }

    /// Counts that a value has left its list.
    fn left(&mut self, id: u64, from: u32) {
        let value = self.values.get_mut(&id).expect("a value that lives");
        assert!(mem::take(&mut value.linked), "{id} left twice");
        value.deferred = false;
        self.counted[value.list].removed(value.slot, from);
        for walk in &mut self.walks {
            walk.expected.must.remove(&id);
        }
    }

    /// A slot of a list, or every slot, was locked, so its deferred removals are done.
    fn flushed(&mut self, list: usize, slot: Option<u32>) {
        let here = |value: &Value| value.list == list && slot.is_none_or(|slot| slot == value.slot);
        let gone = self.values.iter().filter(|(_, value)| value.deferred && here(value));
        let gone: Vec<u64> = gone.map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.left(id, self.slots.here));
    }

    /// Forgets values that nothing keeps alive.
    fn bury(&mut self) {
        self.values
            .retain(|_, value| value.entry.is_some() || value.linked || !value.refs.is_empty());
    }

    fn added(&mut self, list: usize, entry: Entry<&'l List>) {
        let slot = entry.slot().get();
        let id = entry.id();
        self.counted[list].adds += 1;
        for walk in self.walks.iter_mut().filter(|walk| walk.list == list) {
            walk.expected.may.insert(id);
        }
        let value =
            Value { list, slot, entry: Some(entry), refs: vec![], linked: true, deferred: false };
        assert!(self.values.insert(id, value).is_none());
    }

    fn insert(&mut self, list: usize, cpu: Option<CpuId>) {
        let id = self.next;
        self.next += 1;
        let value = Canary::new(id, self.count);
        let slot = cpu.map_or(self.slots.here, |cpu| self.slots.of(cpu));
        let lists = self.lists;
        let inserted = match cpu {
            Some(cpu) => lists[list].insert_on(cpu, value),
            None => lists[list].insert(value),
        };
        self.flushed(list, Some(slot));
        match inserted {
            Ok(entry) => {
                assert!(!self.closed[list] && entry.slot().get() == slot && entry.id() == id);
                self.added(list, entry);
            }
            Err(InsertError { value, reason }) => {
                assert!(self.closed[list] && reason == Refused::Closed && value.id() == id);
            }
        }
    }

    /// Removes an entry, in one of several ways.
    fn remove(&mut self, at: u8, way: u8, cpu: CpuId) {
        let Some((id, entry)) = self.entry(at) else { return };
        let value = &self.values[&id];
        let (list, slot, linked) = (value.list, value.slot, value.linked);
        assert_eq!(entry.is_linked(), linked);
        let mut from = self.slots.here;
        match way {
            0 => drop(entry),
            1 => assert_eq!(entry.remove().map_err(|error| error.reason), Ok(linked)),
            2 => {
                from = self.slots.of(cpu);
                assert_eq!(entry.remove_on(cpu).map_err(|error| error.reason), Ok(linked));
            }
            3 => assert_eq!(entry.try_remove().map_err(|error| error.reason), Ok(linked)),
            4 => {
                let found = entry.into_ref().expect("nothing is locked");
                assert!(found.id() == id && !found.is_linked());
                self.values.get_mut(&id).unwrap().refs.push(found);
            }
            _ => {
                entry.defer_remove();
                // The deferred removal of an entry that had left its list waits too.
                let value = self.values.get_mut(&id).unwrap();
                value.deferred = linked;
                if !linked {
                    self.lists[list].flush().unwrap();
                    self.flushed(list, None);
                }
                for walk in &mut self.walks {
                    walk.expected.must.remove(&id);
                }
                return;
            }
        }
        self.flushed(list, Some(slot));
        if linked {
            self.left(id, from);
        }
    }

    fn step(&mut self, [what, a, b, c]: Step) {
        let list = usize::from(a & 1);
        let cpu = self.slots.cpu(b);
        match what % 32 {
            0..=5 => self.insert(list, Some(cpu)),
            6 => self.insert(list, None),
            7 => (0..c % 80).for_each(|_| self.insert(list, Some(cpu))),
            8..=10 => self.remove(a, 0, cpu),
            way @ 11..=14 => self.remove(a, way - 10, cpu),
            15 => self.remove(a, 5, cpu),
            16 => {
                if let Some(id) = self.pick(a, |value| value.entry.is_some()) {
                    let value = self.values.get_mut(&id).unwrap();
                    value.refs.extend(value.entry.as_ref().map(Entry::share));
                    value.refs.extend(value.refs.last().cloned());
                }
            }
            17 => self.put(a, b),
            18 => self.remove_found(a, b),
            19 => {
                self.lists[list].flush().unwrap();
                self.flushed(list, None);
            }
            20 => self.drain(list, usize::from(b) % 70),
            21 => self.for_each(list, a, b),
            22 => self.snapshot(list, a, b),
            23..=24 => self.walk(list, a / 2),
            25..=27 => self.go_on(a, b),
            28 if !self.walks.is_empty() => {
                self.walks.remove(usize::from(a) % self.walks.len());
            }
            29 => (0..c % 60).for_each(|at| self.remove(at.wrapping_mul(b), c % 6, cpu)),
            30 if b < 64 => {
                self.lists[list].close().unwrap();
                self.closed[list] = true;
            }
            _ => {}
        }
        self.bury();
    }

    /// Drops a reference, or takes the value if it is the last.
    fn put(&mut self, a: u8, b: u8) {
        let Some(id) = self.pick(a, |value| !value.refs.is_empty()) else { return };
        let walks = self.walks.len();
        let value = self.values.get_mut(&id).unwrap();
        let found = value.refs.pop().unwrap();
        if b.is_multiple_of(2) {
            return;
        }
        assert!(value.refs.last().is_none_or(|other| found.ptr_eq(other)));
        let alone = value.refs.is_empty() && value.entry.is_none() && !value.linked;
        match found.try_unwrap() {
            Ok(canary) => assert!(alone && canary.id() == id),
            Err(found) => {
                assert!(!alone || walks != 0); // an open walk may have a reference
                value.refs.push(found);
            }
        }
    }

    fn remove_found(&mut self, a: u8, b: u8) {
        let Some(id) = self.pick(a, |value| !value.refs.is_empty()) else { return };
        let (list, slot, linked) = {
            let value = &self.values[&id];
            (value.list, value.slot, value.linked && !value.deferred)
        };
        let found = self.values[&id].refs[0].clone();
        if b.is_multiple_of(4) {
            assert_eq!(self.lists[1 - list].remove(&found), Ok(false), "not its list");
            return;
        }
        assert_eq!(self.lists[list].remove(&found), Ok(linked));
        self.flushed(list, Some(slot));
        if linked {
            self.left(id, self.slots.here);
        }
        assert_eq!(self.lists[list].remove(&found), Ok(false));
    }

    fn drain(&mut self, list: usize, many: usize) {
        let before = self.linked(list);
        let mut drained = BTreeSet::new();
        for found in self.lists[list].drain().take(many) {
            let found = found.expect("nothing is locked");
            assert!(!found.is_linked() && drained.insert(found.id()));
        }
        assert!(drained.is_subset(&before));
        self.lists[list].flush().unwrap();
        self.flushed(list, None);
        let rest: BTreeSet<u64> =
            self.lists[list].lock_all().unwrap().iter().map(Canary::id).collect();
        assert!(rest.is_subset(&before) && rest.is_disjoint(&drained));
        assert!(
            before.len() - rest.len() - drained.len() < 32,
            "of a chunk that was not given out"
        );
        if many > before.len() {
            assert!(rest.is_empty());
        }
        before.difference(&rest).for_each(|id| self.left(*id, self.slots.here));
    }

    /// A locked walk, which may drop an entry, add or panic.
    fn for_each(&mut self, list: usize, a: u8, way: u8) {
        let mut expected = self.linked(list);
        let mut victim = if way % 4 == 1 { self.entry(a) } else { None };
        let gone = victim.as_ref().map(|(id, _)| *id);
        let (seen, refused) = (Cell::new(BTreeSet::new()), Cell::new(0));
        let (lists, slots, count) = (self.lists, self.slots, self.count);
        let slot_of: BTreeMap<u64, u32> =
            self.values.iter().map(|(id, value)| (*id, value.slot)).collect();
        let mut first = None;
        let walked = catch_unwind(AssertUnwindSafe(|| {
            lists[list].for_each(|canary| {
                let id = canary.id();
                let mut ids = seen.take();
                assert!(ids.insert(id));
                seen.set(ids);
                if first.is_some() {
                    return;
                }
                first = Some(slot_of[&id]);
                victim = None;
                if way % 4 == 2 {
                    // The first CPU of this slot.
                    let cpu = (0..slots.cpus as u32).map(CpuId::new);
                    let cpu = cpu.into_iter().find(|cpu| Some(slots.of(*cpu)) == first).unwrap();
                    for list in lists {
                        let error = list.insert_on(cpu, Canary::new(7, count)).unwrap_err();
                        assert_eq!(error.value.id(), 7);
                        assert_eq!(error.reason, Refused::Lock(LockError::Deadlock));
                        refused.set(refused.get() + 1);
                    }
                }
                if way % 4 == 3 {
                    resume_unwind(Box::new("the callback's own"));
                }
            })
        }));
        drop(victim); // if there was no value to walk
        let seen = seen.take();
        assert_eq!(walked.is_err(), way % 4 == 3 && !expected.is_empty());
        if walked.is_err() {
            lists[list].flush().unwrap();
        } else {
            assert_eq!(refused.get(), if way % 4 == 2 && first.is_some() { 2 } else { 0 });
        }
        self.flushed(list, None);
        if let Some(id) = gone {
            let value = self.values.get_mut(&id).unwrap();
            if first == Some(value.slot) {
                // This thread had locked its slot.
                value.deferred = value.linked;
                let (other, was_linked) = (value.list, value.linked);
                for walk in &mut self.walks {
                    walk.expected.must.remove(&id);
                }
                if !was_linked {
                    lists[other].flush().unwrap();
                    self.flushed(other, None);
                }
                self.flushed(list, None); // the walk's end, or the flush, removed the entry if it is of this list
            } else {
                let (other, slot, linked) = (value.list, value.slot, value.linked);
                self.flushed(other, Some(slot));
                if linked {
                    self.left(id, slots.here);
                }
                if first.is_some_and(|first| first < slot) {
                    expected.remove(&id); // its removal was done before the walk reached it
                }
            }
        }
        if walked.is_ok() {
            assert_eq!(seen, expected);
        } else {
            assert!(seen.len() == 1 && seen.is_subset(&expected));
        }
    }

    /// All slots are locked: dropped entries are deferred, and adds are refused.
    fn snapshot(&mut self, list: usize, a: u8, way: u8) {
        let expected = self.linked(list);
        let lists = self.lists;
        let snapshot = lists[list].lock_all().unwrap();
        self.flushed(list, None);
        let seen: BTreeSet<u64> = snapshot.iter().map(Canary::id).collect();
        assert_eq!(
            (&seen, snapshot.len(), snapshot.iter().len()),
            (&expected, seen.len(), seen.len())
        );
        let mut again = BTreeSet::new();
        snapshot.for_each(|canary| assert!(again.insert(canary.id())));
        assert_eq!((&again, snapshot.is_empty()), (&expected, seen.is_empty()));
        let error = lists[1 - list].insert(Canary::new(7, self.count)).unwrap_err();
        assert_eq!((error.value.id(), error.reason), (7, Refused::Lock(LockError::Deadlock)));
        if way % 2 == 1 {
            if let Some((id, entry)) = self.entry(a) {
                drop(entry);
                let value = self.values.get_mut(&id).unwrap();
                value.deferred = value.linked;
                assert_eq!(snapshot.iter().count(), expected.len(), "a snapshot does not change");
                for walk in &mut self.walks {
                    walk.expected.must.remove(&id);
                }
            }
        }
        drop(snapshot);
        // A flush also drops a deferred value that had left its list before.
        lists.iter().for_each(|list| list.flush().unwrap());
        (0..2).for_each(|list| self.flushed(list, None));
    }

    fn walk(&mut self, list: usize, how: u8) {
        if how.is_multiple_of(4) {
            let expected = self.linked(list);
            let found: Vec<Ref<Canary>> = self.lists[list].iter().map(Result::unwrap).collect();
            self.flushed(list, None);
            let ids: BTreeSet<u64> = found.iter().map(|found| found.id()).collect();
            assert_eq!((found.len(), ids), (expected.len(), expected));
        } else if self.walks.len() < 4 {
            let expected = Expected::new(self.linked(list));
            self.walks.push(Walk { list, iter: self.lists[list].iter(), expected });
        }
    }

    fn go_on(&mut self, a: u8, many: u8) {
        if self.walks.is_empty() {
            return;
        }
        let at = usize::from(a) % self.walks.len();
        let walk = &mut self.walks[at];
        let mut ended = false;
        for _ in 0..many % 50 {
            match walk.iter.next() {
                Some(found) => walk.expected.sees(found.expect("nothing is locked").id()),
                None => {
                    ended = true;
                    break;
                }
            }
        }
        let list = walk.list;
        // The walk has done the deferred removals of the slots that it reached. This does the
        // others.
        self.lists[list].flush().unwrap();
        self.flushed(list, None);
        if ended {
            self.walks.remove(at).expected.ends();
        }
    }

    fn compare(&self) {
        for (index, list) in self.lists.iter().enumerate() {
            list.validate();
            let here = |value: &&Value| value.list == index && value.linked;
            let linked = self.values.values().filter(here).count();
            assert_eq!((list.len(), list.is_empty()), (linked, linked == 0));
            assert_eq!(list.is_closed(), self.closed[index]);
            self.counted[index].compare(&list.stats(), self.slots);
        }
        for (id, value) in &self.values {
            let handles = value.entry.iter().map(|entry| (entry.id(), entry.is_linked()));
            let found = value.refs.iter().map(|found| (found.id(), found.is_linked()));
            handles.chain(found).for_each(|seen| assert_eq!(seen, (*id, value.linked)));
        }
        let alive = self.count.load(Relaxed) - self.values.len() as i64;
        assert!(alive == 0 || alive > 0 && !self.walks.is_empty(), "{alive} too many live");
    }

    /// Drops the lists. Some entries are forgotten, and some references outlive the lists.
    fn end(mut self, way: u8) -> Vec<Ref<Canary>> {
        self.walks.clear();
        let mut outlive = Vec::new();
        for (id, value) in mem::take(&mut self.values) {
            match value.entry {
                Some(entry) if value.linked && (id + u64::from(way)) % 3 == 0 => mem::forget(entry),
                Some(entry) if id % 2 == 0 => entry.defer_remove(),
                other => drop(other),
            }
            outlive.extend(value.refs.into_iter().next());
        }
        outlive
    }
}
