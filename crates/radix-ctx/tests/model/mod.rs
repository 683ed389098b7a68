//! An `XArray` and its model, a `BTreeMap`: each step changes both and compares them.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use percpu::rcu;
use proptest::prelude::*;
use radix_ctx::xarray::{
    AllocateError, CommitError, CompareExchangeReason, Cycle, InsertError, Mark, ReserveError,
    StoreError, Value, XArray,
};

/// An index in use. `value` is `None` for a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Used {
    pub(crate) value: Option<u64>,
    pub(crate) marks: [bool; 3],
}

impl Used {
    fn of(value: u64) -> Self {
        Self { value: Some(value), ..Self::default() }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Store(u64, u64),
    /// Stores at all 64 indexes that share a node with this one.
    Fill(u64),
    Insert(u64, u64),
    InsertWith(u64, u64),
    Erase(u64),
    EraseRange(u64, u64),
    Clear,
    /// The index, the expected entry, the new entry. An expected entry of `None` is the current one.
    CompareExchange(u64, Option<Option<u64>>, Option<u64>),
    Reserve(u64),
    ReserveAndCommit(u64, u64),
    ReserveAndDrop(u64),
    Release(u64),
    Commit(u64, u64),
    Alloc(u64, u64),
    AllocWith(u64, u64),
    AllocCyclic(u64, u64),
    AllocCyclicBy(u64, u64),
    ReserveLowest(u64, u64),
    SetMark(u64, usize),
    ClearMark(u64, usize),
    TryReserve(u64, u64),
    ShrinkToFit,
    /// Iterates in both directions.
    Iterate(u64, u64),
}

/// Indexes at the limits of levels, dense ones, and any.
pub(crate) fn keys() -> impl Strategy<Value = u64> {
    // Indexes that often meet, so that an array becomes empty or has a single entry again.
    let few = [0, 0, 1, 63, 64, 130, 4_096, u64::MAX];
    prop_oneof![
        8 => prop::sample::select(few.to_vec()),
        3 => 0..70_u64,
        3 => (0..64_u32, -2..3_i64).prop_map(|(bit, by)| (1_u64 << bit).wrapping_add_signed(by)),
        2 => (0..3_u64).prop_map(|by| u64::MAX - by),
        1 => 4090..4102_u64,
        1 => any::<u64>(),
    ]
}

/// Pairs of indexes, the lower one first. Half of them are close together.
pub(crate) fn spans() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        (keys(), 0..20_u64).prop_map(|(from, by)| (from, from.saturating_add(by))),
        (keys(), keys()).prop_map(|(a, b)| (a.min(b), a.max(b))),
    ]
}

/// Values, with those whose words look like that of an absent or a reserved index.
fn small() -> impl Strategy<Value = u64> {
    prop_oneof![0..4_u64, 0..1_000_u64]
}

pub(crate) fn stores() -> BoxedStrategy<Op> {
    prop_oneof![
        6 => (keys(), small()).prop_map(|(key, value)| Op::Store(key, value)),
        1 => keys().prop_map(Op::Fill),
        4 => keys().prop_map(Op::Erase),
        2 => spans().prop_map(|(from, to)| Op::EraseRange(from, to)),
    ]
    .boxed()
}

pub(crate) fn inserts() -> BoxedStrategy<Op> {
    prop_oneof![
        (keys(), small()).prop_map(|(key, value)| Op::Insert(key, value)),
        (keys(), small()).prop_map(|(key, value)| Op::InsertWith(key, value)),
        keys().prop_map(Op::Reserve),
        (keys(), small()).prop_map(|(key, value)| Op::ReserveAndCommit(key, value)),
        keys().prop_map(Op::ReserveAndDrop),
        keys().prop_map(Op::Release),
        (keys(), small()).prop_map(|(key, value)| Op::Commit(key, value)),
        (keys(), small()).prop_map(|(key, value)| Op::Store(key, value)),
        keys().prop_map(Op::Erase),
        spans().prop_map(|(from, to)| Op::EraseRange(from, to)),
        spans().prop_map(|(from, to)| Op::ReserveLowest(from, to)),
    ]
    .boxed()
}

pub(crate) fn exchanges() -> BoxedStrategy<Op> {
    let value = || prop::option::of(small());
    let op = (keys(), prop::option::of(value()), value());
    op.prop_map(|(key, expected, new)| Op::CompareExchange(key, expected, new)).boxed()
}

pub(crate) fn allocations() -> BoxedStrategy<Op> {
    prop_oneof![
        spans().prop_map(|(from, to)| Op::Alloc(from, to)),
        spans().prop_map(|(from, to)| Op::AllocWith(from, to)),
        spans().prop_map(|(from, to)| Op::AllocCyclic(from, to)),
        spans().prop_map(|(from, to)| Op::AllocCyclicBy(from, to)),
    ]
    .boxed()
}

pub(crate) fn marks() -> BoxedStrategy<Op> {
    prop_oneof![
        2 => (keys(), 0..3_usize).prop_map(|(key, mark)| Op::SetMark(key, mark)),
        1 => (keys(), 0..3_usize).prop_map(|(key, mark)| Op::ClearMark(key, mark)),
    ]
    .boxed()
}

pub(crate) fn iterations() -> BoxedStrategy<Op> {
    spans().prop_map(|(from, to)| Op::Iterate(from, to)).boxed()
}

pub(crate) fn memory() -> BoxedStrategy<Op> {
    prop_oneof![
        (keys(), 0..200_u64).prop_map(|(from, by)| Op::TryReserve(from, from.saturating_add(by))),
        Just(Op::ShrinkToFit),
        Just(Op::Clear),
    ]
    .boxed()
}

/// Returns a configuration of `PROPTEST_CASES` cases, or of 40.
pub(crate) fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(40, |cases| cases.parse().expect("a number")))
}

/// The result of a step.
pub(crate) type Step = Result<(), TestCaseError>;

fn value(value: u64) -> Value {
    Value::new(value).expect("small")
}

fn store(array: &XArray<Value>, model: &mut BTreeMap<u64, Used>, key: u64, new: u64) -> Step {
    let expected = match model.get_mut(&key) {
        Some(Used { value: None, .. }) => Err(StoreError::Reserved(value(new))),
        Some(had) => Ok(had.value.replace(new).map(value)),
        None => Ok(None),
    };
    if expected == Ok(None) {
        model.insert(key, Used::of(new));
    }
    prop_assert_eq!(array.store(key, value(new)), expected);
    Ok(())
}

/// The array and its model.
#[derive(Debug, Default)]
pub(crate) struct Both {
    pub(crate) array: Arc<XArray<Value>>,
    pub(crate) model: BTreeMap<u64, Used>,
    /// The array's position of cyclic allocations. `None` after the largest index.
    inner: Option<u64>,
    cycle: Cycle,
    serial: u64,
}

impl Both {
    pub(crate) fn new() -> Self {
        Self { inner: Some(0), ..Self::default() }
    }

    pub(crate) fn run(ops: &[Op]) -> Step {
        let mut both = Self::new();
        for op in ops {
            both.step(op)?;
        }
        both.compare()
    }

    /// Returns the first entry at `from` or above, with the mark if one is given.
    pub(crate) fn first(&self, from: u64, mark: Option<Mark>) -> Option<(u64, Value)> {
        let has = |key: &u64| mark.is_none_or(|mark| self.model[key].marks[mark as usize]);
        self.entries(from..=u64::MAX).find(|(key, _)| has(key))
    }

    /// Returns the lowest index of the range that is not in use.
    fn free(&self, from: u64, to: u64) -> Option<u64> {
        let mut free = from;
        for &used in self.model.range(from..=to).map(|(used, _)| used) {
            if used != free {
                break;
            }
            if used == to {
                return None;
            }
            free += 1;
        }
        (from <= to).then_some(free)
    }

    fn free_cyclic(&self, next: Option<u64>, from: u64, to: u64) -> Option<(u64, bool)> {
        let ahead = next.filter(|&next| next <= to);
        if let Some(found) = ahead.and_then(|next| self.free(next.max(from), to)) {
            return Some((found, false));
        }
        self.free(from, to).map(|found| (found, true))
    }

    /// Does a step on both, compares the results, and checks the invariants.
    pub(crate) fn step(&mut self, op: &Op) -> Step {
        self.serial += 1;
        let serial = self.serial;
        let (array, model) = (&self.array, &mut self.model);
        match *op {
            Op::Store(key, new) => store(array, model, key, new)?,
            Op::Fill(key) => {
                for key in key & !63..=key | 63 {
                    store(array, model, key, serial)?;
                }
            }
            Op::Insert(key, new) => {
                let result = array.insert(key, value(new));
                let expected = match model.get(&key) {
                    None => Ok(()),
                    Some(Used { value: None, .. }) => Err(InsertError::Reserved(value(new))),
                    Some(_) => Err(InsertError::Present(value(new))),
                };
                prop_assert_eq!(result, expected);
                model.entry(key).or_insert(Used::of(new));
            }
            Op::InsertWith(key, new) => {
                let result = array.insert_with(key, |index| {
                    assert_eq!(index, key);
                    assert!(!array.contains(key) && !array.is_empty(), "{key} is reserved");
                    value(new)
                });
                let result = result.map_err(|error| {
                    assert!(error.into_inner().is_some(), "the error returns the closure");
                });
                prop_assert_eq!(result.is_ok(), !model.contains_key(&key));
                model.entry(key).or_insert(Used::of(new));
            }
            Op::Erase(key) => {
                let old = model.get(&key).and_then(|had| had.value).map(value);
                if old.is_some() {
                    model.remove(&key);
                }
                prop_assert_eq!(array.erase(key), old);
            }
            Op::EraseRange(from, to) => {
                let erased = model.range(from..=to).filter(|(_, had)| had.value.is_some()).count();
                model.retain(|key, had| had.value.is_none() || !(from..=to).contains(key));
                prop_assert_eq!(array.erase_range(from..=to), erased as u64);
            }
            Op::Clear => {
                let entries = model.values().filter(|had| had.value.is_some()).count();
                model.retain(|_, had| had.value.is_none());
                prop_assert_eq!(array.clear(), entries as u64);
            }
            Op::CompareExchange(key, expected, new) => {
                let had = model.get(&key).copied();
                let there = had.and_then(|had| had.value);
                let expected = expected.unwrap_or(there);
                let guard = rcu::pin();
                let result =
                    array.compare_exchange(key, expected.map(value), new.map(value), &guard);
                let is_reserved = had.is_some() && there.is_none();
                let is_match = expected == there && !is_reserved;
                match result {
                    Ok(old) => {
                        prop_assert!(is_match);
                        prop_assert_eq!(old, there.map(value));
                        match new {
                            Some(new) => model.entry(key).or_default().value = Some(new),
                            None => drop(model.remove(&key)),
                        }
                    }
                    Err(error) => {
                        prop_assert!(!is_match);
                        prop_assert_eq!(error.new, new.map(value));
                        match error.reason {
                            CompareExchangeReason::Mismatch(current) => {
                                prop_assert_eq!(current, there.map(value));
                                prop_assert!(expected.is_some() || !is_reserved);
                            }
                            CompareExchangeReason::Reserved => {
                                prop_assert!(is_reserved && expected.is_none());
                            }
                            other => prop_assert!(false, "{other:?}"),
                        }
                    }
                }
            }
            Op::Reserve(key) => {
                let result = array.reserve(key).map(|reservation| reservation.keep());
                let expected = match model.get(&key) {
                    None => Ok(key),
                    Some(Used { value: None, .. }) => Err(ReserveError::Reserved),
                    Some(_) => Err(ReserveError::Present),
                };
                prop_assert_eq!(result, expected);
                model.entry(key).or_default();
            }
            Op::ReserveAndCommit(key, new) => {
                if let Ok(reservation) = array.reserve(key) {
                    prop_assert!(!model.contains_key(&key));
                    prop_assert_eq!(reservation.index(), key);
                    prop_assert_eq!(reservation.commit(value(new)), Ok(()));
                    model.insert(key, Used::of(new));
                }
            }
            Op::ReserveAndDrop(key) => {
                let reservation = array.reserve(key);
                prop_assert_eq!(reservation.is_ok(), !model.contains_key(&key));
                prop_assert!(!array.is_empty());
                if let Ok(reservation) = reservation {
                    if serial.is_multiple_of(2) {
                        // A commit by the index ends the reservation. Its own commit fails, and its
                        // drop does nothing.
                        array.commit(key, value(serial)).unwrap();
                        model.insert(key, Used::of(serial));
                        let lost = reservation.commit(value(serial + 1));
                        prop_assert_eq!(lost, Err(CommitError::Lost(value(serial + 1))));
                    }
                }
            }
            Op::Release(key) => {
                let is_reserved = model.get(&key).is_some_and(|had| had.value.is_none());
                if is_reserved {
                    model.remove(&key);
                }
                prop_assert_eq!(array.release(key), is_reserved);
            }
            Op::Commit(key, new) => {
                let reserved = model.get_mut(&key).filter(|had| had.value.is_none());
                let expected = match reserved {
                    Some(had) => {
                        had.value = Some(new);
                        Ok(())
                    }
                    None => Err(CommitError::Lost(value(new))),
                };
                prop_assert_eq!(array.commit(key, value(new)), expected);
            }
            Op::ReserveLowest(from, to) => {
                let result = array.reserve_lowest(from..=to).map(|reservation| reservation.keep());
                let free = self.free(from, to);
                prop_assert_eq!(result, free.ok_or(ReserveError::Exhausted));
                if let Some(free) = free {
                    self.model.insert(free, Used::default());
                }
            }
            Op::Alloc(from, to) => {
                let free = self.free(from, to);
                prop_assert_eq!(array.next_free(from..=to), free);
                let result = array.alloc(from..=to, value(serial));
                prop_assert_eq!(result, free.ok_or(AllocateError::Exhausted(value(serial))));
                self.allocated(free);
            }
            Op::AllocWith(from, to) => {
                let free = self.free(from, to);
                let result = array.alloc_with(from..=to, |index| {
                    assert_eq!(Some(index), free);
                    value(serial)
                });
                prop_assert_eq!(result.ok(), free);
                self.allocated(free);
            }
            Op::AllocCyclic(from, to) => {
                let free = self.free_cyclic(self.inner, from, to);
                let result = array.alloc_cyclic(from..=to, value(serial));
                let result = result.map(|allocation| (allocation.index, allocation.wrapped));
                prop_assert_eq!(result, free.ok_or(AllocateError::Exhausted(value(serial))));
                if let Some((free, _)) = free {
                    self.inner = free.checked_add(1);
                    self.allocated(Some(free));
                }
            }
            Op::AllocCyclicBy(from, to) => {
                let free = self.free_cyclic(self.cycle.next_index(), from, to);
                let before = self.cycle;
                let result = array.alloc_cyclic_by(from..=to, &mut self.cycle, value(serial));
                let result = result.map(|allocation| (allocation.index, allocation.wrapped));
                prop_assert_eq!(result, free.ok_or(AllocateError::Exhausted(value(serial))));
                match free {
                    Some((free, _)) => {
                        prop_assert_eq!(self.cycle.next_index(), free.checked_add(1));
                        self.allocated(Some(free));
                    }
                    None => prop_assert_eq!(self.cycle, before),
                }
            }
            Op::SetMark(key, mark) => {
                let had = model.get_mut(&key).filter(|had| had.value.is_some());
                prop_assert_eq!(array.set_mark(key, Mark::ALL[mark]), had.is_some());
                if let Some(had) = had {
                    had.marks[mark] = true;
                }
            }
            Op::ClearMark(key, mark) => {
                let had = model.get_mut(&key);
                let was = had.is_some_and(|had| std::mem::take(&mut had.marks[mark]));
                prop_assert_eq!(array.clear_mark(key, Mark::ALL[mark]), was);
            }
            Op::TryReserve(from, to) => prop_assert_eq!(array.try_reserve(from..=to), Ok(())),
            Op::ShrinkToFit => array.shrink_to_fit(),
            Op::Iterate(from, to) => self.iterate(from..=to)?,
        }
        self.array.validate();
        self.compare_at(op)
    }

    fn allocated(&mut self, index: Option<u64>) {
        if let Some(index) = index {
            self.model.insert(index, Used::of(self.serial));
        }
    }

    /// Compares the index of the step, its neighbours, and the first and the last index.
    fn compare_at(&self, op: &Op) -> Step {
        let key = match *op {
            Op::Store(key, _) | Op::Insert(key, _) | Op::InsertWith(key, _) => key,
            Op::Erase(key) | Op::Fill(key) => key,
            Op::CompareExchange(key, ..) | Op::ReserveAndCommit(key, _) | Op::Commit(key, _) => key,
            Op::Reserve(key) | Op::ReserveAndDrop(key) | Op::Release(key) => key,
            Op::SetMark(key, _) | Op::ClearMark(key, _) => key,
            Op::EraseRange(_, to) | Op::Alloc(_, to) | Op::Iterate(_, to) => to,
            _ => 0,
        };
        let guard = rcu::pin();
        for key in [key, key.wrapping_add(1), key.wrapping_sub(1), 0, u64::MAX] {
            let had = self.model.get(&key).copied().unwrap_or_default();
            let array = &self.array;
            prop_assert_eq!(array.load(key, &guard), had.value.map(value), "at {}", key);
            prop_assert_eq!(array.contains(key), had.value.is_some());
            prop_assert_eq!(array.with(key, Value::get), had.value);
            for mark in Mark::ALL {
                prop_assert_eq!(array.is_marked(key, mark), had.marks[mark as usize]);
            }
        }
        prop_assert_eq!(self.array.is_empty(), self.model.is_empty());
        Ok(())
    }

    fn entries(&self, range: RangeInclusive<u64>) -> impl DoubleEndedIterator<Item = (u64, Value)> {
        self.model.range(range).filter_map(|(&key, had)| Some((key, value(had.value?))))
    }

    /// Iterates at once, with a pause at each entry, and backwards.
    fn iterate(&self, range: RangeInclusive<u64>) -> Step {
        let (array, guard) = (&self.array, rcu::pin());
        let expected: Vec<_> = self.entries(range.clone()).collect();
        prop_assert_eq!(&array.range(range.clone(), &guard).collect::<Vec<_>>(), &expected);

        let (mut paused, mut from) = (Vec::new(), Some(*range.start()));
        while let Some(position) = from {
            let mut rest = array.range(position..=*range.end(), &guard);
            paused.extend(rest.next());
            from = rest.next_index();
            prop_assert!(from.is_none_or(|from| from > position), "{position} to {from:?}");
        }
        prop_assert_eq!(&paused, &expected);

        let mut from = array.at_or_before(*range.end(), &guard);
        for &(key, value) in expected.iter().rev() {
            prop_assert_eq!(from, Some((key, value)));
            from = array.prev(key, &guard);
        }
        let before = range.start().checked_sub(1);
        prop_assert_eq!(from, before.and_then(|before| self.entries(0..=before).next_back()));

        let at_or_after = array.at_or_after(*range.start(), &guard);
        prop_assert_eq!(at_or_after, self.entries(*range.start()..=u64::MAX).next());
        let after = range.end().checked_add(1);
        let expected = after.and_then(|after| self.entries(after..=u64::MAX).next());
        prop_assert_eq!(array.next(*range.end(), &guard), expected);

        for mark in Mark::ALL {
            let marked = array.marked(mark, range.clone(), &guard).collect::<Vec<_>>();
            let has = |key: &u64| self.model[key].marks[mark as usize];
            let expected = self.entries(range.clone()).filter(|(key, _)| has(key));
            prop_assert_eq!(marked, expected.collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Compares everything.
    pub(crate) fn compare(&self) -> Step {
        self.iterate(0..=u64::MAX)?;
        let stats = self.array.stats();
        let entries = self.model.values().filter(|had| had.value.is_some()).count() as u64;
        prop_assert_eq!(stats.entries, entries);
        prop_assert_eq!(stats.reserved, self.model.len() as u64 - entries);
        for mark in Mark::ALL {
            let any = self.model.values().any(|had| had.marks[mark as usize]);
            prop_assert_eq!(self.array.any_marked(mark), any);
        }
        Ok(())
    }
}
