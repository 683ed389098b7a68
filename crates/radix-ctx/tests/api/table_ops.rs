//! A `CtxTable` and its model, a `BTreeMap`: each step changes both and compares them.
//!
//! The property tests and the fuzz target share this module. One thread runs the steps. Each step without a
//! guard flushes the table. While there is a guard, no context that was removed under it is reclaimed. So it
//! is always known which indexes are vacant.

use std::collections::{BTreeMap, BTreeSet};

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, GetRefError, Id, InsertRefused, LookupError, WaitError};
use testkit::canary::{Canary, Census};

/// One step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Insert,
    InsertRef,
    InsertMany(u32),
    Remove(u8),
    Retain(u8),
    GetRef(u8),
    CloneRef(u8),
    PutRef(u8),
    Pin,
    Unpin,
    BeginRemoveAll,
    RemoveAll,
    Poll,
}

impl Op {
    pub(crate) fn decode([kind, a, ..]: [u8; 4]) -> Self {
        match kind % 32 {
            0..=4 => Self::Insert,
            5 => Self::InsertRef,
            6..=11 => Self::InsertMany(u32::from(a)),
            12..=18 => Self::Remove(a),
            19 => Self::Retain(a),
            20..=21 => Self::GetRef(a),
            22 => Self::CloneRef(a),
            23..=24 => Self::PutRef(a),
            25 => Self::Pin,
            26 => Self::Unpin,
            27 if a % 2 == 0 => Self::BeginRemoveAll,
            27 => Self::RemoveAll,
            _ => Self::Poll,
        }
    }
}

/// The limits of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) contexts: Option<u64>,
    pub(crate) max_index: u32,
}

impl Limits {
    pub(crate) fn decode([contexts, _, index, _]: [u8; 4]) -> Self {
        Self {
            contexts: (contexts % 3 == 0).then_some(u64::from(contexts / 3)),
            max_index: match index % 4 {
                0 => u32::MAX - 2,
                1 => u32::from(index / 4) % 8,
                2 => 60 + u32::from(index / 4) % 10,
                _ => u32::from(index) * 3,
            },
        }
    }

    fn build(self) -> CtxTable<Canary> {
        let builder = CtxTable::builder().max_index(self.max_index);
        match self.contexts {
            Some(contexts) => builder.max_contexts(contexts).build(),
            None => builder.build(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Vacant,
    Live(u64),
    /// Removed and not dropped. `folded` if a flush has folded the count: only references keep the context.
    Pending {
        folded: bool,
    },
}

/// The last context of an index.
#[derive(Clone, Copy, Debug)]
struct Slot {
    id: Id,
    state: State,
}

/// The table and its model.
struct Both<'t> {
    table: &'t CtxTable<Canary>,
    limits: Limits,
    slots: BTreeMap<u32, Slot>,
    /// Some of the stale ids.
    stale: Vec<Id>,
    refs: Vec<CtxRef<Canary>>,
    guard: Option<rcu::Guard>,
    census: &'t Census,
    serial: u64,
}

/// Runs the steps of an input, and returns their number. The first four bytes select the limits of the table.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run(input: &[u8]) -> usize {
    let mut groups = input.chunks(4).map(|chunk| {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        four
    });
    let limits = Limits::decode(groups.next().unwrap_or([1; 4]));
    run_ops(limits, groups.map(Op::decode))
}

/// Runs steps on a table, and returns their number. Panics like [`run`].
pub(crate) fn run_ops(limits: Limits, ops: impl Iterator<Item = Op>) -> usize {
    let census = Census::new();
    let table = limits.build();
    let (slots, stale, refs) = (BTreeMap::new(), Vec::new(), Vec::new());
    let mut both =
        Both { table: &table, limits, slots, stale, refs, guard: None, census: &census, serial: 0 };
    let steps = ops.map(|op| both.step(op)).count();
    drop(both.guard);
    let refs = both.refs;
    drop(table);
    let referenced: BTreeSet<Id> = refs.iter().map(CtxRef::id).collect();
    assert_eq!(census.alive(), referenced.len() as i64, "only references keep contexts");
    drop(refs);
    assert_eq!(census.alive(), 0, "a context was not dropped");
    steps
}

impl Both<'_> {
    fn number(&self, is: impl Fn(State) -> bool) -> u64 {
        self.slots.values().filter(|slot| is(slot.state)).count() as u64
    }

    fn live_ids(&self) -> Vec<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live(_)));
        live.map(|slot| slot.id).collect()
    }

    /// Returns the id of a live context.
    fn pick(&self, which: u8) -> Option<Id> {
        let live = self.live_ids();
        live.get(usize::from(which).checked_rem(live.len())?).copied()
    }

    fn has_ref(&self, id: Id) -> bool {
        self.refs.iter().any(|context| CtxRef::id(context) == id)
    }

    fn pending(&self) -> u64 {
        self.number(|state| matches!(state, State::Pending { .. }))
    }

    /// Returns the result of an insert: the lowest vacant index. The limit is checked before the indexes.
    fn expected(&self) -> Result<u32, InsertRefused> {
        if let Some(limit) = self.limits.contexts {
            if self.live_ids().len() as u64 >= limit {
                return Err(InsertRefused::Quota { limit });
            }
        }
        let last = self.slots.last_key_value().map_or(0, |(index, _)| index + 1);
        let is_vacant =
            |index: &u32| self.slots.get(index).is_none_or(|slot| slot.state == State::Vacant);
        let lowest = (0..=last.min(self.limits.max_index)).find(is_vacant);
        lowest.ok_or(InsertRefused::Exhausted { pending: self.pending() })
    }

    /// Inserts a context into both. Returns whether it was inserted.
    fn insert(&mut self, by_ref: bool) -> bool {
        let expected = self.expected();
        let canary = Canary::new(self.serial, self.census);
        let result = if by_ref {
            self.table.insert_ref(canary).map(|context| {
                let id = CtxRef::id(&context);
                self.refs.push(context);
                id
            })
        } else {
            self.table.insert(canary)
        };
        match result {
            Ok(id) => {
                assert_eq!(Ok(id.index()), expected);
                let slot = Slot { id, state: State::Live(self.serial) };
                let before = self.slots.insert(id.index(), slot);
                let before = before.map_or(0, |slot| slot.id.generation());
                assert!(id.generation() > before, "{id} after generation {before}");
                true
            }
            Err(error) => {
                assert_eq!(Err(error.reason), expected);
                assert_eq!(error.value.read(), self.serial, "the error returns the value");
                false
            }
        }
    }

    fn record_removal(&mut self, id: Id) {
        self.slots.get_mut(&id.index()).unwrap().state = State::Pending { folded: false };
        if self.stale.len() == 64 {
            self.stale.remove(id.index() as usize % 64);
        }
        self.stale.push(id);
    }

    /// Does a step on both, and compares the results and everything else.
    fn step(&mut self, op: Op) {
        self.serial += 1;
        let table = self.table;
        match op {
            Op::Insert => _ = self.insert(false),
            Op::InsertRef => _ = self.insert(self.refs.len() < 12),
            Op::InsertMany(number) => _ = (0..number).find(|_| !self.insert(false)),
            Op::Remove(which) => {
                if let Some(id) = self.pick(which) {
                    let removal = table.remove(id).unwrap();
                    let kept = self.guard.is_some() || self.has_ref(id);
                    assert!(!(kept && removal.is_done()));
                    self.record_removal(id);
                }
                if let Some(id) = self.stale.get(usize::from(which) % 64) {
                    assert_eq!(table.remove(*id).map(|_| ()), Err(LookupError::Stale));
                }
            }
            Op::Retain(keep) => {
                let stays = |id: Id| u64::from(id.index()) % (1 + u64::from(keep)) != 0;
                let goes: Vec<Id> = self.live_ids().into_iter().filter(|&id| !stays(id)).collect();
                assert_eq!(
                    table.retain(|id, context| context.read() != 0 && stays(id)),
                    goes.len()
                );
                goes.into_iter().for_each(|id| self.record_removal(id));
            }
            Op::GetRef(which) => {
                if let Some(id) = self.pick(which).filter(|_| self.refs.len() < 12) {
                    self.refs.push(table.get_ref(id).unwrap());
                }
                if let Some(id) = self.stale.get(usize::from(which) % 64) {
                    let result = table.get_ref(*id).map(|_| ());
                    assert_eq!(result, Err(GetRefError::Lookup(LookupError::Stale)));
                }
            }
            Op::CloneRef(which) if (1..12).contains(&self.refs.len()) => {
                let of = &self.refs[usize::from(which) % self.refs.len()];
                self.refs.push(of.clone());
            }
            Op::PutRef(which) if !self.refs.is_empty() => {
                let context = self.refs.swap_remove(usize::from(which) % self.refs.len());
                let id = CtxRef::id(&context);
                context.read();
                drop(context);
                let is_last = !self.has_ref(id);
                let slot = self.slots.get_mut(&id.index()).unwrap();
                if slot.state == (State::Pending { folded: true }) && slot.id == id && is_last {
                    slot.state = State::Vacant;
                }
            }
            Op::Pin if self.guard.is_none() => {
                self.flush();
                self.guard = Some(rcu::pin());
            }
            Op::Unpin => self.guard = None,
            Op::BeginRemoveAll => {
                let live = self.live_ids();
                let mut closing = table.begin_remove_all();
                assert_eq!(closing.count(), live.len());
                if self.guard.is_none() && self.refs.is_empty() {
                    assert_eq!((closing.wait(), closing.is_done()), (Ok(()), true));
                } else {
                    assert!(!closing.is_done() || live.is_empty());
                }
                live.into_iter().for_each(|id| self.record_removal(id));
            }
            Op::RemoveAll if self.guard.is_some() => {
                assert_eq!(table.remove_all(), Err(WaitError::Pinned));
            }
            Op::RemoveAll if self.refs.is_empty() => {
                let live = self.live_ids();
                assert_eq!(table.remove_all(), Ok(live.len()));
                live.into_iter().for_each(|id| self.record_removal(id));
            }
            Op::Poll => _ = rcu::poll(),
            Op::CloneRef(_) | Op::PutRef(_) | Op::Pin | Op::RemoveAll => {}
        }
        self.flush();
        self.compare();
    }

    /// Flushes the table. If there is no guard, only references keep removed contexts after this.
    fn flush(&mut self) {
        if self.guard.is_some() {
            return assert_eq!(self.table.flush(), Err(WaitError::Pinned));
        }
        self.table.flush().unwrap();
        let referenced: Vec<Id> = self.refs.iter().map(CtxRef::id).collect();
        for slot in self.slots.values_mut() {
            if matches!(slot.state, State::Pending { .. }) {
                let kept = referenced.contains(&slot.id);
                slot.state = if kept { State::Pending { folded: true } } else { State::Vacant };
            }
        }
    }

    /// Compares everything, and checks the invariants.
    fn compare(&self) {
        let table = self.table;
        table.validate();
        let live = self.live_ids().len();
        assert_eq!((table.len(), table.is_empty()), (live, live == 0));
        let stats = table.stats();
        assert_eq!((stats.live, stats.pending), (live as u64, self.pending()));
        let folded = State::Pending { folded: true };
        assert_eq!(stats.referenced, self.number(|state| state == folded));
        assert_eq!(self.census.alive(), (live as u64 + self.pending()) as i64);

        let guard = rcu::pin();
        let mut iteration = table.iter(&guard);
        for slot in self.slots.values() {
            let (id, result) = (slot.id, table.get(slot.id, &guard));
            if let State::Live(value) = slot.state {
                assert_eq!(result.map(Canary::read), Ok(value), "{id}");
                let returned = iteration.next().map(|(id, context)| (id, context.read()));
                assert_eq!(returned, Some((id, value)));
                let next = Id::from_bits(id.to_bits() + (1 << 32)).unwrap();
                assert_eq!(table.get(next, &guard).err(), Some(LookupError::NotFound));
            } else {
                assert_eq!(result.err(), Some(LookupError::Stale), "{id}");
            }
        }
        assert!(iteration.next().is_none());
        for id in &self.stale {
            assert_eq!(table.get(*id, &guard).err(), Some(LookupError::Stale), "{id}");
            assert!(!table.contains(*id));
        }
        for context in &self.refs {
            let slot = self.slots[&CtxRef::id(context).index()];
            let is_live = slot.id == CtxRef::id(context) && matches!(slot.state, State::Live(_));
            assert_eq!(CtxRef::is_removed(context), !is_live);
            context.read();
        }
    }
}
