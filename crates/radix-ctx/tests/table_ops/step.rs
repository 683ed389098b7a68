//! The steps.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use percpu::rcu;
use radix_ctx::{CtxRef, GetRefError, Id, InsertError, InsertRefused, LookupError, WaitError};

use super::both::{Both, State};
use super::canary::Canary;
use super::op::Op;

impl Both<'_> {
    /// Does a step on both, and compares the results and everything else.
    pub(super) fn step(&mut self, op: Op) {
        self.serial += 1;
        let (table, value) = (self.table, self.serial);
        let new = || Canary::new(value, self.count);
        match op {
            Op::Insert { weight: 1 } => {
                let expected = self.expected(0, u32::MAX, 1);
                let result = table.insert(new());
                self.record_insert(expected, result, value, 1);
            }
            Op::Insert { weight } => {
                let expected = self.expected(0, u32::MAX, weight);
                let result = table.insert_weighted(new(), weight);
                self.record_insert(expected, result, value, weight);
            }
            Op::InsertWith { panics: false } => {
                let expected = self.expected(0, u32::MAX, 1);
                let result = table.insert_with(|id| {
                    assert_eq!(table.with(id, |_| ()), Err(LookupError::NotFound));
                    new()
                });
                let result = result.map_err(|error| {
                    let InsertError { value: _make, reason, .. } = error;
                    reason
                });
                assert_eq!(result.map(Id::index), expected);
                if let Ok(id) = result {
                    self.record_new(id, State::Live { value, weight: 1 });
                }
            }
            Op::InsertWith { panics: true } => {
                let expected = self.expected(0, u32::MAX, 1);
                let mut seen = None;
                let result = catch_unwind(AssertUnwindSafe(|| {
                    let make = |id| -> Canary {
                        seen = Some(id);
                        resume_unwind(Box::new("make panics"))
                    };
                    table.insert_with(make).map_err(|error| error.reason)
                }));
                match result {
                    Ok(result) => assert_eq!(result.map(Id::index), expected),
                    Err(_) => {
                        let id: Id = seen.expect("`make` panicked");
                        assert_eq!(Ok(id.index()), expected);
                        self.record_new(id, State::Reserved);
                        self.record_release(id);
                    }
                }
            }
            Op::InsertIn(first, last) => {
                let expected = if first > last {
                    Err(InsertRefused::NoRange)
                } else {
                    self.expected(first, last, 1)
                };
                let result = table.insert_in(first..=last, new());
                self.record_insert(expected, result, value, 1);
            }
            Op::InsertCyclic => {
                let mut expected = self.expected(0, u32::MAX, 1);
                if let Ok(lowest) = expected {
                    expected = Ok(self.vacant(self.cursor, u32::MAX).unwrap_or(lowest));
                }
                let result = table.insert_cyclic(new());
                if let Ok(index) = expected {
                    self.cursor = index + 1;
                }
                self.record_insert(expected, result, value, 1);
            }
            Op::InsertMany(number) => {
                for _ in 0..number {
                    let expected = self.expected(0, u32::MAX, 1);
                    let result = table.insert(Canary::new(value, self.count));
                    let is_full = result.is_err();
                    self.record_insert(expected, result, value, 1);
                    if is_full {
                        break;
                    }
                }
            }
            Op::Reserve if self.reservations.len() < 6 => {
                let expected = self.expected(0, u32::MAX, 1);
                let result = table.reserve().map_err(|error| error.reason);
                assert_eq!(
                    result.as_ref().map(|made| made.id().index()),
                    expected.as_ref().copied()
                );
                if let Ok(reservation) = result {
                    self.record_new(reservation.id(), State::Reserved);
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
                    self.record_release(id);
                }
            }
            Op::Remove(which) => {
                if let Some(id) = self.pick(which) {
                    let removal = table.remove(id).unwrap();
                    assert_eq!(removal.id(), id);
                    let kept = self.guard.is_some() || self.has_ref(id);
                    assert!(!(kept && removal.is_done()));
                    self.record_removal(id);
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
                        self.record_removal(id);
                    }
                }
            }
            Op::GetRef(which) if self.refs.len() < 12 => {
                if let Some(id) = self.pick(which) {
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
            Op::PutRef(which) => {
                if let Some(context) = take(&mut self.refs, which) {
                    let id = CtxRef::id(&context);
                    context.read();
                    drop(context);
                    let is_last = !self.has_ref(id);
                    let slot = self.slots.get_mut(&id.index()).unwrap();
                    if slot.state == (State::Pending { folded: true }) && slot.id == id && is_last {
                        Self::record_vacant(slot, &self.limits);
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
                let mut closing = table.begin_remove_all();
                assert_eq!(closing.len(), live.len());
                let is_done = closing.is_done();
                assert!(!is_done || self.refs.is_empty() || live.is_empty());
                live.into_iter().for_each(|id| self.record_removal(id));
            }
            Op::CloseAll => {
                if self.guard.is_some() {
                    assert_eq!(table.remove_all(), Err(WaitError::Pinned));
                } else if self.refs.is_empty() {
                    let live: Vec<Id> = self.live_ids();
                    assert_eq!(table.remove_all(), Ok(live.len()));
                    live.into_iter().for_each(|id| self.record_removal(id));
                }
            }
            Op::TryReserve(number) => {
                let room = u64::from(self.limits.max_index) + 1
                    - self.number(|state| state != State::Vacant);
                let result = table.try_reserve(number);
                if u64::from(number) <= room {
                    assert_eq!(result, Ok(()));
                } else {
                    let pending = self.pending();
                    assert_eq!(result, Err(InsertRefused::Exhausted { pending }));
                }
            }
            Op::Shrink => table.shrink_to_fit(),
            Op::Poll => _ = table.poll(),
            Op::CompareAt(index) => self.compare_at(index),
            Op::Reserve | Op::GetRef(_) | Op::CloneRef(_) | Op::Pin => {}
        }
        self.flush();
        self.compare();
    }
}

/// Takes an element out of a list.
fn take<T>(list: &mut Vec<T>, which: u8) -> Option<T> {
    let at = usize::from(which).checked_rem(list.len())?;
    Some(list.swap_remove(at))
}
