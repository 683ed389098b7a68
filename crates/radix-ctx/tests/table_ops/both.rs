//! The table, and what it must be: what each step changes in the model.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, InsertError, InsertRefused, Reservation, WaitError};

use super::canary::Canary;
use super::op::Limits;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
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
pub(super) struct Slot {
    pub(super) id: Id,
    pub(super) state: State,
}

/// The table, and what it must be.
pub(super) struct Both<'t> {
    pub(super) table: &'t CtxTable<Canary>,
    pub(super) limits: Limits,
    /// The last context of each index.
    pub(super) slots: BTreeMap<u32, Slot>,
    /// Ids that name nothing any more; some of them.
    pub(super) stale: Vec<Id>,
    pub(super) reservations: Vec<Reservation<'t, Canary>>,
    pub(super) refs: Vec<CtxRef<Canary>>,
    pub(super) guard: Option<rcu::Guard>,
    pub(super) cursor: u32,
    pub(super) count: &'t Arc<AtomicI64>,
    pub(super) serial: u64,
}

impl<'t> Both<'t> {
    pub(super) fn new(
        table: &'t CtxTable<Canary>,
        limits: Limits,
        count: &'t Arc<AtomicI64>,
    ) -> Self {
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
    pub(super) fn end(self) -> Vec<CtxRef<Canary>> {
        drop(self.guard);
        drop(self.reservations);
        self.refs
    }

    pub(super) fn number(&self, is: impl Fn(State) -> bool) -> u64 {
        self.slots.values().filter(|slot| is(slot.state)).count() as u64
    }

    pub(super) fn live(&self) -> u64 {
        self.number(|state| matches!(state, State::Live { .. }))
    }

    pub(super) fn counted(&self) -> u64 {
        self.live() + self.number(|state| state == State::Reserved)
    }

    pub(super) fn pending(&self) -> u64 {
        self.number(|state| matches!(state, State::Pending { .. }))
    }

    pub(super) fn weight(&self) -> u64 {
        let weight = |slot: &Slot| match slot.state {
            State::Live { weight, .. } => weight,
            State::Reserved => 1,
            _ => 0,
        };
        self.slots.values().map(weight).sum()
    }

    /// The lowest vacant index of a range.
    pub(super) fn vacant(&self, first: u32, last: u32) -> Option<u32> {
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
    pub(super) fn expected(
        &self,
        first: u32,
        last: u32,
        weight: u64,
    ) -> Result<u32, InsertRefused> {
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
    pub(super) fn came(&mut self, id: Id, state: State) {
        let old = self.slots.insert(id.index(), Slot { id, state });
        let before = old.map_or(0, |slot| slot.id.generation());
        assert!(id.generation() > before, "{id} after generation {before}");
        let limit = self.limits.generations;
        assert!(limit.is_none_or(|limit| id.generation() <= limit), "{id}");
    }

    /// The last user of the index is gone.
    pub(super) fn went(slot: &mut Slot, limits: &Limits) {
        let last = limits.generations.is_some_and(|limit| slot.id.generation() >= limit);
        slot.state = if last { State::Retired } else { State::Vacant };
    }

    pub(super) fn forget(&mut self, id: Id) {
        if self.stale.len() == 64 {
            self.stale.remove(id.index() as usize % 64);
        }
        self.stale.push(id);
    }

    pub(super) fn inserted(
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
    pub(super) fn pick(&self, which: u8) -> Option<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        let number = self.live() as usize;
        live.map(|slot| slot.id).nth(usize::from(which) % number.max(1))
    }

    pub(super) fn has_ref(&self, id: Id) -> bool {
        self.refs.iter().any(|context| CtxRef::id(context) == id)
    }

    pub(super) fn removed(&mut self, id: Id) {
        self.slots.get_mut(&id.index()).unwrap().state = State::Pending { folded: false };
        self.forget(id);
    }

    /// Everything that waits for readers only is vacant after this.
    pub(super) fn flush(&mut self) {
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

    pub(super) fn live_ids(&self) -> Vec<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        live.map(|slot| slot.id).collect()
    }

    /// A reservation was given up: its id is stale, its index vacant at once.
    pub(super) fn gave_back(&mut self, id: Id) {
        Self::went(self.slots.get_mut(&id.index()).unwrap(), &self.limits);
        self.forget(id);
    }
}
