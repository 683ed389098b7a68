//! What a `CtxTable` must do, by a `BTreeMap`: each step is done to both, and compared.
//!
//! One thread. After each step without a guard the table is flushed, and while there is a guard
//! nothing is reclaimed that was removed under it: so which indexes are vacant is always known.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use percpu::rcu;
use radix_ctx::{
    CtxRef, CtxTable, GetRefError, Id, InsertError, InsertRefused, LookupError, Reservation,
    WaitError,
};

const ALIVE: u64 = 0x0a11_fe0f_0c0f_fee5;

/// A context that is counted, and screams when it is read or dropped after its drop.
pub(crate) struct Canary {
    alive: u64,
    value: u64,
    count: Arc<AtomicI64>,
}

impl Canary {
    pub(crate) fn new(value: u64, count: &Arc<AtomicI64>) -> Self {
        count.fetch_add(1, Relaxed);
        Self { alive: ALIVE, value, count: Arc::clone(count) }
    }

    pub(crate) fn read(&self) -> u64 {
        assert_eq!(self.alive, ALIVE, "read after its drop");
        self.value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        assert_eq!(self.alive, ALIVE, "dropped twice");
        // SAFETY: ours; volatile, as nobody is to read it.
        unsafe { (&raw mut self.alive).write_volatile(0xdead) };
        self.count.fetch_sub(1, Relaxed);
    }
}

/// One step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Insert {
        weight: u64,
    },
    InsertWith {
        panics: bool,
    },
    InsertIn(u32, u32),
    InsertCyclic,
    InsertMany(u32),
    Reserve,
    Commit(u8),
    Release(u8),
    Remove(u8),
    RemoveMany(u8),
    GetRef(u8),
    CloneRef(u8),
    PutRef(u8),
    Pin,
    Unpin,
    KillAll,
    CloseAll,
    TryReserve(u32),
    Shrink,
    Poll,
    /// The neighbours of an index.
    Look(u32),
}

impl Op {
    /// The step that four bytes say; of table with a given largest index.
    pub(crate) fn decode([what, a, b, c]: [u8; 4], max_index: u32) -> Self {
        let index = |at: u8| match at % 8 {
            0..=3 => u32::from(b) % 80,
            4 => u32::from(b) * 16,
            5 => max_index.saturating_sub(u32::from(b) % 70),
            6 => u32::from(b) << (at / 8 % 24),
            _ => 64 * (u32::from(b) % 8) + 63,
        };
        match what % 32 {
            0..=3 => Self::Insert { weight: 1 },
            4 => Self::Insert { weight: u64::from(a) << (b % 8) },
            5 => Self::InsertWith { panics: b % 2 == 1 },
            6..=7 => Self::InsertIn(index(a), index(a).saturating_add(c.into())),
            8 => Self::InsertIn(index(a), index(c)), // the empty range too
            9..=10 => Self::InsertCyclic,
            11 => Self::InsertMany(u32::from(a)),
            12 => Self::Reserve,
            13 => Self::Commit(a),
            14 => Self::Release(a),
            15..=18 => Self::Remove(a),
            19 => Self::RemoveMany(a),
            20..=21 => Self::GetRef(a),
            22 => Self::CloneRef(a),
            23..=24 => Self::PutRef(a),
            25 => Self::Pin,
            26 => Self::Unpin,
            27 if a % 2 == 0 => Self::KillAll,
            27 => Self::CloseAll,
            28 => Self::TryReserve(u32::from(a) * (1 + u32::from(b % 4))),
            29 => Self::Shrink,
            30 => Self::Poll,
            _ => Self::Look(index(a)),
        }
    }
}

/// What a table is to allow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) contexts: Option<u64>,
    pub(crate) weight: Option<u64>,
    pub(crate) max_index: u32,
    pub(crate) generations: Option<u32>,
}

impl Limits {
    pub(crate) fn decode([contexts, weight, index, generations]: [u8; 4]) -> Self {
        Self {
            contexts: (contexts % 3 == 0).then_some(u64::from(contexts / 3)),
            weight: (weight % 3 == 0).then_some(u64::from(weight)),
            max_index: match index % 4 {
                0 => u32::MAX - 2,
                1 => u32::from(index / 4) % 8,
                2 => 60 + u32::from(index / 4) % 10,
                _ => u32::from(index) * 3,
            },
            generations: (generations % 2 == 0).then_some(u32::from(generations / 2) % 3 + 1),
        }
    }

    pub(crate) fn build(self) -> CtxTable<Canary> {
        let mut builder = CtxTable::builder().max_index(self.max_index);
        if let Some(contexts) = self.contexts {
            builder = builder.max_contexts(contexts);
        }
        if let Some(weight) = self.weight {
            builder = builder.max_weight(weight);
        }
        if let Some(generations) = self.generations {
            builder = builder.generation_limit(generations);
        }
        builder.build().unwrap()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Vacant,
    Live {
        value: u64,
        weight: u64,
    },
    Reserved,
    /// Removed; `folded` before a guard came, so that the last reference alone makes it vacant.
    Pending {
        folded: bool,
    },
    Retired,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    id: Id,
    state: State,
}

/// The table, and what it must be.
pub(crate) struct Both<'t> {
    table: &'t CtxTable<Canary>,
    limits: Limits,
    /// The last context of each index.
    slots: BTreeMap<u32, Slot>,
    /// Ids that name nothing any more; some of them.
    stale: Vec<Id>,
    reservations: Vec<Reservation<'t, Canary>>,
    refs: Vec<CtxRef<Canary>>,
    guard: Option<rcu::Guard>,
    cursor: u32,
    count: &'t Arc<AtomicI64>,
    serial: u64,
}

/// Runs steps on a table; returns their number.
///
/// # Panics
///
/// Panics if an operation's answer is not the model's.
pub(crate) fn run_ops(limits: Limits, ops: impl Iterator<Item = Op>) -> usize {
    let count = Arc::new(AtomicI64::new(0));
    let table = limits.build();
    let mut both = Both::new(&table, limits, &count);
    let steps = ops.map(|op| both.step(op)).count();
    let refs = both.end();
    drop(table);
    assert_eq!(count.load(Relaxed), referred(&refs), "only references keep contexts");
    drop(refs);
    assert_eq!(count.load(Relaxed), 0, "a context was lost");
    steps
}

fn referred(refs: &[CtxRef<Canary>]) -> i64 {
    let ids: std::collections::BTreeSet<Id> = refs.iter().map(CtxRef::id).collect();
    ids.len() as i64
}

impl<'t> Both<'t> {
    fn new(table: &'t CtxTable<Canary>, limits: Limits, count: &'t Arc<AtomicI64>) -> Self {
        Self {
            table,
            limits,
            slots: BTreeMap::new(),
            stale: Vec::new(),
            reservations: Vec::new(),
            refs: Vec::new(),
            guard: None,
            cursor: 0,
            count,
            serial: 0,
        }
    }

    /// Releases the reservations, and gives back the references.
    fn end(self) -> Vec<CtxRef<Canary>> {
        drop(self.guard);
        drop(self.reservations);
        self.refs
    }

    fn number(&self, is: impl Fn(State) -> bool) -> u64 {
        self.slots.values().filter(|slot| is(slot.state)).count() as u64
    }

    fn live(&self) -> u64 {
        self.number(|state| matches!(state, State::Live { .. }))
    }

    fn counted(&self) -> u64 {
        self.live() + self.number(|state| state == State::Reserved)
    }

    fn pending(&self) -> u64 {
        self.number(|state| matches!(state, State::Pending { .. }))
    }

    fn weight(&self) -> u64 {
        let weight = |slot: &Slot| match slot.state {
            State::Live { weight, .. } => weight,
            State::Reserved => 1,
            _ => 0,
        };
        self.slots.values().map(weight).sum()
    }

    /// The lowest vacant index of a range.
    fn vacant(&self, first: u32, last: u32) -> Option<u32> {
        let last = last.min(self.limits.max_index);
        if first > last {
            return None;
        }
        let mut at = first;
        for (&index, slot) in self.slots.range(first..=last) {
            if index != at || slot.state == State::Vacant {
                return Some(at);
            }
            if at == last {
                return None;
            }
            at += 1;
        }
        Some(at)
    }

    /// What an insert must say: size, quota, index.
    fn expected(&self, first: u32, last: u32, weight: u64) -> Result<u32, InsertRefused> {
        if self.limits.weight.is_some_and(|limit| weight > limit) {
            return Err(InsertRefused::TooHeavy);
        }
        if self.limits.contexts.is_some_and(|limit| self.counted() >= limit)
            || self.limits.weight.is_some_and(|limit| self.weight() + weight > limit)
        {
            return Err(InsertRefused::Quota);
        }
        if first > last.min(self.limits.max_index) {
            return Err(InsertRefused::NoRange);
        }
        let exhausted = InsertRefused::Exhausted { pending: self.pending() };
        self.vacant(first, last).ok_or(exhausted)
    }

    /// A new context has this id.
    fn came(&mut self, id: Id, state: State) {
        let old = self.slots.insert(id.index(), Slot { id, state });
        let before = old.map_or(0, |slot| slot.id.generation());
        assert!(id.generation() > before, "{id} after generation {before}");
        let limit = self.limits.generations;
        assert!(limit.is_none_or(|limit| id.generation() <= limit), "{id}");
    }

    /// The last user of the index is gone.
    fn went(slot: &mut Slot, limits: &Limits) {
        let last = limits.generations.is_some_and(|limit| slot.id.generation() >= limit);
        slot.state = if last { State::Retired } else { State::Vacant };
    }

    fn forget(&mut self, id: Id) {
        if self.stale.len() == 64 {
            self.stale.remove(id.index() as usize % 64);
        }
        self.stale.push(id);
    }

    fn inserted(
        &mut self,
        expected: Result<u32, InsertRefused>,
        said: Result<Id, InsertError<Canary>>,
        value: u64,
        weight: u64,
    ) {
        match said {
            Ok(id) => {
                assert_eq!(Ok(id.index()), expected);
                self.came(id, State::Live { value, weight });
            }
            Err(error) => {
                assert_eq!(Err(error.reason), expected);
                assert_eq!(error.value.read(), value, "the value comes back");
            }
        }
    }

    /// One of the live contexts.
    fn pick(&self, which: u8) -> Option<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        let number = self.live() as usize;
        live.map(|slot| slot.id).nth(usize::from(which) % number.max(1))
    }

    fn has_ref(&self, id: Id) -> bool {
        self.refs.iter().any(|context| CtxRef::id(context) == id)
    }

    fn removed(&mut self, id: Id) {
        self.slots.get_mut(&id.index()).unwrap().state = State::Pending { folded: false };
        self.forget(id);
    }

    /// Everything that waits for readers only is vacant after this.
    fn flush(&mut self) {
        if self.guard.is_some() {
            return assert_eq!(self.table.flush(), Err(WaitError::Pinned));
        }
        self.table.flush().unwrap();
        let referred: Vec<Id> = self.refs.iter().map(CtxRef::id).collect();
        for slot in self.slots.values_mut() {
            if matches!(slot.state, State::Pending { .. }) {
                if referred.contains(&slot.id) {
                    slot.state = State::Pending { folded: true };
                } else {
                    Self::went(slot, &self.limits);
                }
            }
        }
    }

    /// Does it to both, and compares what they say, and all that can be seen.
    pub(crate) fn step(&mut self, op: Op) {
        self.serial += 1;
        let (table, value) = (self.table, self.serial);
        let new = || Canary::new(value, self.count);
        match op {
            Op::Insert { weight: 1 } => {
                let expected = self.expected(0, u32::MAX, 1);
                let said = table.insert(new());
                self.inserted(expected, said, value, 1);
            }
            Op::Insert { weight } => {
                let expected = self.expected(0, u32::MAX, weight);
                let said = table.insert_weighted(new(), weight);
                self.inserted(expected, said, value, weight);
            }
            Op::InsertWith { panics: false } => {
                let expected = self.expected(0, u32::MAX, 1);
                let said = table.insert_with(|id| {
                    assert_eq!(table.with(id, |_| ()), Err(LookupError::NotFound));
                    new()
                });
                let said = said.map_err(|error| {
                    let InsertError { value: _make, reason, .. } = error;
                    reason
                });
                assert_eq!(said.map(Id::index), expected);
                if let Ok(id) = said {
                    self.came(id, State::Live { value, weight: 1 });
                }
            }
            Op::InsertWith { panics: true } => {
                let expected = self.expected(0, u32::MAX, 1);
                let mut seen = None;
                let said = catch_unwind(AssertUnwindSafe(|| {
                    let make = |id| -> Canary {
                        seen = Some(id);
                        resume_unwind(Box::new("no context"))
                    };
                    table.insert_with(make).map_err(|error| error.reason)
                }));
                match said {
                    Ok(said) => assert_eq!(said.map(Id::index), expected),
                    Err(_) => {
                        let id: Id = seen.expect("`make` panicked");
                        assert_eq!(Ok(id.index()), expected);
                        self.came(id, State::Reserved);
                        self.gave_back(id);
                    }
                }
            }
            Op::InsertIn(first, last) => {
                let expected = if first > last {
                    Err(InsertRefused::NoRange)
                } else {
                    self.expected(first, last, 1)
                };
                let said = table.insert_in(first..=last, new());
                self.inserted(expected, said, value, 1);
            }
            Op::InsertCyclic => {
                let mut expected = self.expected(0, u32::MAX, 1);
                if let Ok(lowest) = expected {
                    expected = Ok(self.vacant(self.cursor, u32::MAX).unwrap_or(lowest));
                }
                let said = table.insert_cyclic(new());
                if let Ok(index) = expected {
                    self.cursor = index + 1;
                }
                self.inserted(expected, said, value, 1);
            }
            Op::InsertMany(number) => {
                for _ in 0..number {
                    let expected = self.expected(0, u32::MAX, 1);
                    let said = table.insert(Canary::new(value, self.count));
                    let is_full = said.is_err();
                    self.inserted(expected, said, value, 1);
                    if is_full {
                        break;
                    }
                }
            }
            Op::Reserve if self.reservations.len() < 6 => {
                let expected = self.expected(0, u32::MAX, 1);
                let said = table.reserve().map_err(|error| error.reason);
                assert_eq!(said.as_ref().map(|made| made.id().index()), expected.as_ref().copied());
                if let Ok(reservation) = said {
                    self.came(reservation.id(), State::Reserved);
                    self.reservations.push(reservation);
                }
            }
            Op::Commit(which) => {
                if let Some(reservation) = take(&mut self.reservations, which) {
                    let id = reservation.id();
                    assert_eq!(reservation.commit(new()), id);
                    let slot = self.slots.get_mut(&id.index()).unwrap();
                    slot.state = State::Live { value, weight: 1 };
                }
            }
            Op::Release(which) => {
                if let Some(reservation) = take(&mut self.reservations, which) {
                    let id = reservation.id();
                    drop(reservation);
                    self.gave_back(id);
                }
            }
            Op::Remove(which) => {
                if let Some(id) = self.pick(which) {
                    let removal = table.remove(id).unwrap();
                    assert_eq!(removal.id(), id);
                    let kept = self.guard.is_some() || self.has_ref(id);
                    assert!(!(kept && removal.is_done()));
                    self.removed(id);
                }
                if let Some(id) = self.stale.get(usize::from(which) % 64) {
                    assert_eq!(table.remove(*id).map(|_| ()), Err(LookupError::Stale));
                }
            }
            Op::RemoveMany(keep) => {
                let live =
                    self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
                let live: Vec<Id> = live.map(|slot| slot.id).collect();
                for (number, id) in live.into_iter().enumerate() {
                    if keep % 4 == 0 || number % (1 + usize::from(keep)) != 0 {
                        table.remove(id).unwrap();
                        self.removed(id);
                    }
                }
            }
            Op::GetRef(which) if self.refs.len() < 12 => {
                if let Some(id) = self.pick(which) {
                    self.refs.push(table.get_ref(id).unwrap());
                }
                if let Some(id) = self.stale.get(usize::from(which) % 64) {
                    let said = table.get_ref(*id).map(|_| ());
                    assert_eq!(said, Err(GetRefError::Lookup(LookupError::Stale)));
                }
            }
            Op::CloneRef(which) if (1..12).contains(&self.refs.len()) => {
                let of = &self.refs[usize::from(which) % self.refs.len()];
                self.refs.push(of.clone());
            }
            Op::PutRef(which) => {
                if let Some(context) = take(&mut self.refs, which) {
                    let id = CtxRef::id(&context);
                    context.read();
                    drop(context);
                    let is_last = !self.has_ref(id);
                    let slot = self.slots.get_mut(&id.index()).unwrap();
                    if slot.state == (State::Pending { folded: true }) && slot.id == id && is_last {
                        Self::went(slot, &self.limits);
                    }
                }
            }
            Op::Pin if self.guard.is_none() => {
                self.flush();
                self.guard = Some(rcu::pin());
            }
            Op::Unpin => self.guard = None,
            Op::KillAll => {
                let live: Vec<Id> = self.live_ids();
                let mut closing = table.kill_all();
                assert_eq!(closing.len(), live.len());
                let is_done = closing.is_done();
                assert!(!is_done || self.refs.is_empty() || live.is_empty());
                live.into_iter().for_each(|id| self.removed(id));
            }
            Op::CloseAll => {
                if self.guard.is_some() {
                    assert_eq!(table.close_all(), Err(WaitError::Pinned));
                } else if self.refs.is_empty() {
                    let live: Vec<Id> = self.live_ids();
                    assert_eq!(table.close_all(), Ok(live.len()));
                    live.into_iter().for_each(|id| self.removed(id));
                }
            }
            Op::TryReserve(number) => {
                let room = u64::from(self.limits.max_index) + 1
                    - self.number(|state| state != State::Vacant);
                let said = table.try_reserve(number);
                if u64::from(number) <= room {
                    assert_eq!(said, Ok(()));
                } else {
                    let pending = self.pending();
                    assert_eq!(said, Err(InsertRefused::Exhausted { pending }));
                }
            }
            Op::Shrink => table.shrink_to_fit().unwrap(),
            Op::Poll => _ = table.poll(),
            Op::Look(index) => self.look(index),
            Op::Reserve | Op::GetRef(_) | Op::CloneRef(_) | Op::Pin => {}
        }
        self.flush();
        self.compare();
    }

    fn live_ids(&self) -> Vec<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        live.map(|slot| slot.id).collect()
    }

    /// A reservation was given up: its id is stale, its index vacant at once.
    fn gave_back(&mut self, id: Id) {
        Self::went(self.slots.get_mut(&id.index()).unwrap(), &self.limits);
        self.forget(id);
    }

    /// What is around an index.
    fn look(&self, index: u32) {
        let guard = rcu::pin();
        let entry = |(id, context): (Id, &Canary)| (id, context.read());
        let of = |(_, slot): (&u32, &Slot)| match slot.state {
            State::Live { value, .. } => Some((slot.id, value)),
            _ => None,
        };
        let next = self.slots.range(index..).find_map(of);
        assert_eq!(self.table.next(index, &guard).map(entry), next);
        let prev = self.slots.range(..=index).rev().find_map(of);
        assert_eq!(self.table.prev(index, &guard).map(entry), prev);
        // A walk in two parts.
        let mut walk = self.table.range(index / 2.., &guard);
        let mut seen: Vec<_> = walk.by_ref().take(3).map(entry).collect();
        let position = walk.next_index();
        if let Some(position) = position {
            seen.extend(self.table.range(position.., &guard).map(entry));
        }
        let all: Vec<_> = self.slots.range(index / 2..).filter_map(of).collect();
        assert_eq!(seen, all);
        let below: Vec<_> = self.table.range(..index, &guard).map(entry).collect();
        assert!(below.iter().eq(&self.slots.range(..index).filter_map(of).collect::<Vec<_>>()));
    }

    /// All that can be seen, and the invariants.
    fn compare(&self) {
        let table = self.table;
        table.validate();
        assert_eq!(table.len() as u64, self.live());
        assert_eq!(table.is_empty(), self.live() == 0);
        let stats = table.stats();
        assert_eq!(stats.live, self.live());
        assert_eq!(stats.reserved, self.number(|state| state == State::Reserved));
        assert_eq!(stats.pending, self.pending());
        let folded = State::Pending { folded: true };
        assert_eq!(stats.referenced, self.number(|state| state == folded));
        assert_eq!(stats.retired, self.number(|state| state == State::Retired));
        assert_eq!(stats.panics, 0);
        let usage = table.usage().unwrap();
        assert_eq!(usage.contexts, self.counted());
        assert_eq!(usage.weight, self.limits.weight.map(|_| self.weight()));
        assert_eq!(table.next_free(), Ok(self.vacant(0, u32::MAX)));
        assert_eq!(self.count.load(Relaxed), (self.live() + self.pending()) as i64);

        let guard = rcu::pin();
        let mut walk = table.iter(&guard);
        for slot in self.slots.values() {
            let (id, said) = (slot.id, table.get(slot.id, &guard));
            match slot.state {
                State::Live { value, .. } => {
                    assert_eq!(said.map(Canary::read), Ok(value), "{id}");
                    let walked = walk.next().map(|(id, context)| (id, context.read()));
                    assert_eq!(walked, Some((id, value)));
                    assert_eq!(forged(&guard, table, id), LookupError::NotFound);
                }
                State::Reserved => assert_eq!(said.err(), Some(LookupError::NotFound), "{id}"),
                _ => assert_eq!(said.err(), Some(LookupError::Stale), "{id}"),
            }
        }
        assert!(walk.next().is_none());
        for id in &self.stale {
            assert_eq!(table.get(*id, &guard).err(), Some(LookupError::Stale), "{id}");
            assert!(!table.contains(*id));
        }
        for context in &self.refs {
            let slot = self.slots[&CtxRef::id(context).index()];
            let is_live =
                slot.id == CtxRef::id(context) && matches!(slot.state, State::Live { .. });
            assert_eq!(CtxRef::is_removed(context), !is_live);
            context.read();
        }
    }
}

/// What is said of a generation that is yet to come.
fn forged(guard: &rcu::Guard, table: &CtxTable<Canary>, id: Id) -> LookupError {
    let next = Id::from_bits(id.to_bits() + (1 << 32)).unwrap();
    table.get(next, guard).err().expect("it never was")
}

/// One of a list, out of it.
fn take<T>(list: &mut Vec<T>, which: u8) -> Option<T> {
    let at = usize::from(which).checked_rem(list.len())?;
    Some(list.swap_remove(at))
}
