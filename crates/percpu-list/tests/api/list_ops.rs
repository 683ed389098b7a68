//! Two lists driven by bytes. Each step is compared with a model of sets.
//!
//! The property tests, the corpus and the fuzz target share it. It runs on one thread,
//! which is pinned to a CPU and moves to others, so that the hits are known.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use percpu_list::{Deadlock, Entry, InsertError, Iter, PerCpuList, Ref, Refused};
use testkit::canary::{Canary, Census};
use testkit::pin::{allowed_cpus, current_cpu, pin_to};

/// One step: the operation and its arguments.
pub(crate) type Step = [u8; 4];

type List = PerCpuList<Canary>;

/// The expected counters of a list.
#[derive(Clone, Copy, Default)]
struct Counted {
    adds: u64,
    removals: u64,
    cpu_hits: u64,
    node_hits: u64,
}

/// Returns the name of a CPU's node. A node has the list of its CPUs, such as "0-3,8".
fn node(cpu: usize) -> Option<std::ffi::OsString> {
    let mut nodes = std::fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    nodes.find_map(|node| {
        let list = std::fs::read_to_string(node.path().join("cpulist")).ok()?;
        let is_in = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some((first.parse().ok()?..=last.parse::<usize>().ok()?).contains(&cpu))
        };
        list.trim().split(',').any(|part| is_in(part) == Some(true)).then(|| node.file_name())
    })
}

/// A value that is alive: its entry exists, or there is a reference.
struct Value {
    list: usize,
    cpu: usize,
    entry: Option<Entry<Canary>>,
    refs: Vec<Ref<Canary>>,
    linked: bool,
}

/// An open walk: the values that it must return, and those that it may return.
struct Walk<'l> {
    list: usize,
    iter: Iter<'l, Canary>,
    /// On the list since the walk began.
    must: BTreeSet<u64>,
    /// On the list at some time since the walk began.
    may: BTreeSet<u64>,
    seen: BTreeSet<u64>,
}

/// Two lists and their model, until the lists are dropped.
struct Epoch<'l> {
    lists: &'l [List; 2],
    /// The CPUs, each with its node.
    cpus: &'l BTreeMap<usize, Option<std::ffi::OsString>>,
    here: usize,
    census: &'l Census,
    values: BTreeMap<u64, Value>,
    walks: Vec<Walk<'l>>,
    counted: [Counted; 2],
    closed: [bool; 2],
    next: u64,
}

/// Runs one input, and returns the number of its steps.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run(input: &[u8]) -> usize {
    run_steps(input.chunks(4).map(|chunk| {
        let mut step = [0; 4];
        step[..chunk.len()].copy_from_slice(chunk);
        step
    }))
}

/// Runs steps, and returns their number. Panics like [`run`].
pub(crate) fn run_steps(steps: impl Iterator<Item = Step>) -> usize {
    let cpus = allowed_cpus().into_iter().map(|cpu| (cpu, node(cpu))).collect();
    let census = Census::new();
    let (mut steps, mut made) = (steps.peekable(), 0);
    pin_to(&[current_cpu()]);
    while steps.peek().is_some() {
        let lists = [List::new(), List::new()];
        let mut epoch = Epoch {
            lists: &lists,
            cpus: &cpus,
            here: current_cpu(),
            census: &census,
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
        assert_eq!(census.alive(), held);
        for Value { entry, refs, .. } in &outlive {
            assert!(entry.iter().all(|entry| entry.is_linked() && entry.read() < u64::MAX));
            assert!(refs.iter().all(|found| found.is_linked() == entry.is_some()));
        }
        drop(outlive);
        assert_eq!(census.alive(), 0);
    }
    made
}

impl<'l> Epoch<'l> {
    fn linked(&self, list: usize) -> BTreeSet<u64> {
        let on = |value: &Value| value.list == list && value.linked;
        self.values.iter().filter(|(_, value)| on(value)).map(|(id, _)| *id).collect()
    }

    /// Returns the value at an index among those that `what` accepts.
    fn pick(&self, at: u8, what: impl Fn(&Value) -> bool) -> Option<u64> {
        let ids: Vec<u64> =
            self.values.iter().filter(|(_, value)| what(value)).map(|(id, _)| *id).collect();
        ids.get(usize::from(at) % ids.len().max(1)).copied()
    }

    fn entry(&mut self, at: u8) -> Option<(u64, Entry<Canary>)> {
        let id = self.pick(at, |value| value.entry.is_some())?;
        Some((id, self.values.get_mut(&id)?.entry.take()?))
    }

    /// Counts that a value has left its list.
    fn left(&mut self, id: u64) {
        let value = self.values.get_mut(&id).expect("a value that lives");
        assert!(mem::take(&mut value.linked), "{id} left twice");
        let counted = &mut self.counted[value.list];
        counted.removals += 1;
        counted.cpu_hits += u64::from(value.cpu == self.here);
        counted.node_hits += u64::from(self.cpus[&value.cpu] == self.cpus[&self.here]);
        for walk in &mut self.walks {
            walk.must.remove(&id);
        }
    }

    /// Forgets values that nothing keeps alive.
    fn bury(&mut self) {
        self.values
            .retain(|_, value| value.entry.is_some() || value.linked || !value.refs.is_empty());
    }

    fn insert(&mut self, list: usize) {
        let id = self.next;
        self.next += 1;
        match self.lists[list].insert(Canary::new(id, self.census)) {
            Ok(entry) => {
                assert!(
                    !self.closed[list] && entry.slot().index() == self.here && entry.read() == id
                );
                self.counted[list].adds += 1;
                for walk in self.walks.iter_mut().filter(|walk| walk.list == list) {
                    walk.may.insert(id);
                }
                let (cpu, entry) = (self.here, Some(entry));
                let value = Value { list, cpu, entry, refs: vec![], linked: true };
                assert!(self.values.insert(id, value).is_none());
            }
            Err(InsertError { value, reason }) => {
                assert!(self.closed[list] && reason == Refused::Closed && value.read() == id);
            }
        }
    }

    /// Removes an entry, in one of several ways.
    fn remove(&mut self, at: u8, way: u8) {
        let Some((id, entry)) = self.entry(at) else { return };
        let linked = self.values[&id].linked;
        assert_eq!(entry.is_linked(), linked);
        match way {
            0 => drop(entry),
            1 => assert_eq!(entry.remove(), Ok(linked)),
            _ => {
                let found = entry.share();
                drop(entry);
                assert!(found.read() == id && !found.is_linked());
                self.values.get_mut(&id).unwrap().refs.push(found);
            }
        }
        if linked {
            self.left(id);
        }
    }

    fn step(&mut self, [what, a, b, c]: Step) {
        let list = usize::from(a & 1);
        match what % 32 {
            0..=5 => self.insert(list),
            6 => {
                let mut cpus = self.cpus.keys().cycle();
                self.here = *cpus.nth(usize::from(b)).expect("a CPU");
                pin_to(&[self.here]);
            }
            7 => (0..c % 80).for_each(|_| self.insert(list)),
            8..=11 => self.remove(a, 0),
            12..=13 => self.remove(a, 1),
            14..=15 => self.remove(a, 2),
            16 => {
                if let Some(id) = self.pick(a, |value| value.entry.is_some()) {
                    let value = self.values.get_mut(&id).unwrap();
                    value.refs.extend(value.entry.as_ref().map(Entry::share));
                    value.refs.extend(value.refs.last().cloned());
                }
            }
            17 => {
                if let Some(id) = self.pick(a, |value| !value.refs.is_empty()) {
                    self.values.get_mut(&id).unwrap().refs.pop();
                }
            }
            18 | 19 => self.remove_found(a, b),
            20 => self.drain(list, usize::from(b) % 70),
            21 | 22 => self.snapshot(list, a, b),
            23 | 24 => self.walk(list, a / 2),
            25..=27 => self.go_on(a, b),
            28 if !self.walks.is_empty() => {
                self.walks.remove(usize::from(a) % self.walks.len());
            }
            29 => (0..c % 60).for_each(|at| self.remove(at.wrapping_mul(b), c % 3)),
            30 if b < 64 => {
                self.lists[list].close().unwrap();
                self.closed[list] = true;
            }
            30 => self.lists[list].trim().unwrap(),
            _ => {}
        }
        self.bury();
    }

    fn remove_found(&mut self, a: u8, b: u8) {
        let Some(id) = self.pick(a, |value| !value.refs.is_empty()) else { return };
        let (list, linked) = (self.values[&id].list, self.values[&id].linked);
        let found = self.values[&id].refs[0].clone();
        if b.is_multiple_of(4) {
            assert_eq!(self.lists[1 - list].remove(&found), Ok(false), "not its list");
            return;
        }
        assert_eq!(self.lists[list].remove(&found), Ok(linked));
        if linked {
            self.left(id);
        }
        assert_eq!(self.lists[list].remove(&found), Ok(false));
    }

    fn drain(&mut self, list: usize, many: usize) {
        let before = self.linked(list);
        let mut drained = BTreeSet::new();
        for found in self.lists[list].drain().take(many) {
            let found = found.expect("there is no snapshot");
            assert!(!found.is_linked() && drained.insert(found.read()));
        }
        assert!(drained.is_subset(&before));
        let rest: BTreeSet<u64> =
            self.lists[list].lock_all().unwrap().iter().map(Canary::read).collect();
        assert!(rest.is_subset(&before) && rest.is_disjoint(&drained));
        assert_eq!(before.len(), rest.len() + drained.len());
        if many > before.len() {
            assert!(rest.is_empty());
        }
        before.difference(&rest).for_each(|id| self.left(*id));
    }

    /// Nothing changes: dropped entries wait for the end, and additions are refused.
    fn snapshot(&mut self, list: usize, a: u8, way: u8) {
        let expected = self.linked(list);
        let lists = self.lists;
        let snapshot = lists[list].lock_all().unwrap();
        let seen: BTreeSet<u64> = snapshot.iter().map(Canary::read).collect();
        assert_eq!(
            (&seen, snapshot.len(), snapshot.iter().len()),
            (&expected, seen.len(), seen.len())
        );
        let mut again = BTreeSet::new();
        snapshot.for_each(|canary| assert!(again.insert(canary.read())));
        assert_eq!((&again, snapshot.is_empty()), (&expected, seen.is_empty()));
        let error = lists[list].insert(Canary::new(7, self.census)).err().unwrap();
        assert_eq!((error.value.read(), error.reason), (7, Refused::Deadlock));
        assert_eq!(lists[list].lock_all().map(drop), Err(Deadlock));
        assert_eq!((lists[list].close(), lists[list].trim()), (Err(Deadlock), Err(Deadlock)));
        let drained = lists[list].drain().next().map(|found| found.map(drop));
        assert_eq!(drained, expected.first().map(|_| Err(Deadlock)));
        if let Some(id) = self.pick(a, |value| value.list == list && !value.refs.is_empty()) {
            assert_eq!(lists[list].remove(&self.values[&id].refs[0]), Err(Deadlock));
        }
        let mut removed = Vec::new();
        for at in 0..way % 4 {
            let Some((id, entry)) = self.entry(a.wrapping_add(at)) else { break };
            let result = entry.remove(); // at once, if it is of the other list
            let here = self.values[&id].list == list;
            assert_eq!(result, if here { Err(Deadlock) } else { Ok(self.values[&id].linked) });
            removed.extend(self.values[&id].linked.then_some(id));
            assert_eq!(snapshot.iter().count(), expected.len(), "a snapshot does not change");
        }
        drop(snapshot);
        removed.into_iter().for_each(|id| self.left(id));
    }

    fn walk(&mut self, list: usize, how: u8) {
        let linked = self.linked(list);
        if how.is_multiple_of(4) {
            let found: Vec<Ref<Canary>> = self.lists[list].iter().collect();
            let ids: BTreeSet<u64> = found.iter().map(|found| found.read()).collect();
            assert_eq!((found.len(), ids), (linked.len(), linked));
        } else if self.walks.len() < 4 {
            let (iter, seen) = (self.lists[list].iter(), BTreeSet::new());
            self.walks.push(Walk { list, iter, must: linked.clone(), may: linked, seen });
        }
    }

    fn go_on(&mut self, a: u8, many: u8) {
        if self.walks.is_empty() {
            return;
        }
        let at = usize::from(a) % self.walks.len();
        for _ in 0..many % 50 {
            let walk = &mut self.walks[at];
            let Some(found) = walk.iter.next() else {
                let skipped = &walk.must - &walk.seen;
                assert!(skipped.is_empty(), "skipped: {skipped:?}");
                self.walks.remove(at);
                return;
            };
            let id = found.read();
            let (may, first) = (walk.may.contains(&id), walk.seen.insert(id));
            assert!(may, "{id} was never on the list during the walk");
            assert!(first, "{id} was met twice");
            if a >= 192 {
                // The current entry and the next are removed; the reference keeps the value.
                for id in [id, id + 1] {
                    let entry = self.values.get_mut(&id).and_then(|value| value.entry.take());
                    let Some(entry) = entry else { continue };
                    drop(entry);
                    if self.values[&id].linked {
                        self.left(id);
                    }
                }
                assert_eq!(found.read(), id);
            }
        }
    }

    fn compare(&self) {
        for (index, list) in self.lists.iter().enumerate() {
            list.validate();
            let linked = self.linked(index).len();
            assert_eq!((list.len(), list.is_empty()), (linked, linked == 0));
            assert_eq!(list.is_closed(), self.closed[index]);
            let (stats, counted) = (list.stats(), self.counted[index]);
            assert_eq!((stats.adds, stats.removals), (counted.adds, counted.removals));
            assert_eq!((stats.cpu_hits, stats.node_hits), (counted.cpu_hits, counted.node_hits));
        }
        for (id, value) in &self.values {
            let entry = value.entry.iter().map(|entry| (entry.read(), entry.is_linked()));
            let found = value.refs.iter().map(|found| (found.read(), found.is_linked()));
            entry.chain(found).for_each(|seen| assert_eq!(seen, (*id, value.linked)));
        }
        let alive = self.census.alive() - self.values.len() as i64;
        assert!(alive == 0 || alive > 0 && !self.walks.is_empty(), "{alive} too many live");
    }

    /// Returns the values that outlive the lists, by an entry or a reference.
    fn end(mut self, way: u8) -> Vec<Value> {
        self.walks.clear();
        let mut outlive = Vec::new();
        for (id, mut value) in mem::take(&mut self.values) {
            value.refs.truncate(1);
            value.entry.take_if(|_| !value.linked || (id + u64::from(way)) % 3 != 0);
            if value.entry.is_some() || !value.refs.is_empty() {
                outlive.push(value);
            }
        }
        outlive
    }
}
