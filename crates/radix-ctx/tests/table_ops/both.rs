//! The table and its model, and what each step changes in the model.

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
    /// Removed and not dropped. `folded` if a flush has folded the count: only references keep the context.
    Pending {
        folded: bool,
    },
    Exhausted,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) id: Id,
    pub(super) state: State,
}

/// The table and its model.
pub(super) struct Both<'t> {
    pub(super) table: &'t CtxTable<Canary>,
    pub(super) limits: Limits,
    /// The last context of each index.
    pub(super) slots: BTreeMap<u32, Slot>,
    /// Some of the stale ids.
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

    /// Drops the guard and the reservations, and returns the references.
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

    /// Returns the lowest vacant index of a range.
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

    /// Returns the result of an insert. The checks have this order: the weight, the limits, the index.
    pub(super) fn expected(
        &self,
        first: u32,
        last: u32,
        weight: u64,
    ) -> Result<u32, InsertRefused> {
        if let Some(limit) = self.limits.weight.filter(|&limit| weight > limit) {
            return Err(InsertRefused::TooHeavy { weight, limit });
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

    /// Records the id of a new context.
    pub(super) fn record_new(&mut self, id: Id, state: State) {
        let old = self.slots.insert(id.index(), Slot { id, state });
        let before = old.map_or(0, |slot| slot.id.generation());
        assert!(id.generation() > before, "{id} after generation {before}");
        let limit = self.limits.generations;
        assert!(limit.is_none_or(|limit| id.generation() <= limit), "{id}");
    }

    /// Records that the context of a slot is dropped.
    pub(super) fn record_vacant(slot: &mut Slot, limits: &Limits) {
        let last = limits.generations.is_some_and(|limit| slot.id.generation() >= limit);
        slot.state = if last { State::Exhausted } else { State::Vacant };
    }

    pub(super) fn record_stale(&mut self, id: Id) {
        if self.stale.len() == 64 {
            self.stale.remove(id.index() as usize % 64);
        }
        self.stale.push(id);
    }

    pub(super) fn record_insert(
        &mut self,
        expected: Result<u32, InsertRefused>,
        result: Result<Id, InsertError<Canary>>,
        value: u64,
        weight: u64,
    ) {
        match result {
            Ok(id) => {
                assert_eq!(Ok(id.index()), expected);
                self.record_new(id, State::Live { value, weight });
            }
            Err(error) => {
                assert_eq!(Err(error.reason), expected);
                assert_eq!(error.value.read(), value, "the error returns the value");
            }
        }
    }

    /// Returns the id of a live context.
    pub(super) fn pick(&self, which: u8) -> Option<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        let number = self.live() as usize;
        live.map(|slot| slot.id).nth(usize::from(which) % number.max(1))
    }

    pub(super) fn has_ref(&self, id: Id) -> bool {
        self.refs.iter().any(|context| CtxRef::id(context) == id)
    }

    pub(super) fn record_removal(&mut self, id: Id) {
        self.slots.get_mut(&id.index()).unwrap().state = State::Pending { folded: false };
        self.record_stale(id);
    }

    /// Flushes the table. If there is no guard, only references keep removed contexts after this.
    pub(super) fn flush(&mut self) {
        if self.guard.is_some() {
            return assert_eq!(self.table.flush(), Err(WaitError::Pinned));
        }
        self.table.flush().unwrap();
        let referenced: Vec<Id> = self.refs.iter().map(CtxRef::id).collect();
        for slot in self.slots.values_mut() {
            if matches!(slot.state, State::Pending { .. }) {
                if referenced.contains(&slot.id) {
                    slot.state = State::Pending { folded: true };
                } else {
                    Self::record_vacant(slot, &self.limits);
                }
            }
        }
    }

    pub(super) fn live_ids(&self) -> Vec<Id> {
        let live = self.slots.values().filter(|slot| matches!(slot.state, State::Live { .. }));
        live.map(|slot| slot.id).collect()
    }

    /// Records that a reservation was dropped: its id is stale, and its index is vacant.
    pub(super) fn record_release(&mut self, id: Id) {
        Self::record_vacant(self.slots.get_mut(&id.index()).unwrap(), &self.limits);
        self.record_stale(id);
    }
}
