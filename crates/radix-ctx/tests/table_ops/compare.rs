//! Comparisons of the table with its model.

use std::sync::atomic::Ordering::Relaxed;

use percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id, LookupError};

use super::both::{Both, Slot, State};
use super::canary::Canary;

impl Both<'_> {
    /// Compares the neighbours of an index and the iterations around it.
    pub(super) fn compare_at(&self, index: u32) {
        let guard = rcu::pin();
        let entry = |(id, context): (Id, &Canary)| (id, context.read());
        let of = |(_, slot): (&u32, &Slot)| match slot.state {
            State::Live { value, .. } => Some((slot.id, value)),
            _ => None,
        };
        let next = self.slots.range(index..).find_map(of);
        assert_eq!(self.table.at_or_after(index, &guard).map(entry), next);
        let prev = self.slots.range(..=index).rev().find_map(of);
        assert_eq!(self.table.at_or_before(index, &guard).map(entry), prev);
        // An iteration in two parts.
        let mut iteration = self.table.range(index / 2.., &guard);
        let mut seen: Vec<_> = iteration.by_ref().take(3).map(entry).collect();
        let position = iteration.next_index();
        if let Some(position) = position {
            seen.extend(self.table.range(position.., &guard).map(entry));
        }
        let all: Vec<_> = self.slots.range(index / 2..).filter_map(of).collect();
        assert_eq!(seen, all);
        let below: Vec<_> = self.table.range(..index, &guard).map(entry).collect();
        assert!(below.iter().eq(&self.slots.range(..index).filter_map(of).collect::<Vec<_>>()));
    }

    /// Compares everything, and checks the invariants.
    pub(super) fn compare(&self) {
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
        assert_eq!(stats.exhausted, self.number(|state| state == State::Exhausted));
        assert_eq!(stats.panics, 0);
        let usage = table.usage();
        assert_eq!(usage.contexts, self.counted());
        assert_eq!(usage.weight, self.limits.weight.map(|_| self.weight()));
        assert_eq!(table.next_free(), self.vacant(0, u32::MAX));
        assert_eq!(self.count.load(Relaxed), (self.live() + self.pending()) as i64);

        let guard = rcu::pin();
        let mut iteration = table.iter(&guard);
        for slot in self.slots.values() {
            let (id, result) = (slot.id, table.get(slot.id, &guard));
            match slot.state {
                State::Live { value, .. } => {
                    assert_eq!(result.map(Canary::read), Ok(value), "{id}");
                    let returned = iteration.next().map(|(id, context)| (id, context.read()));
                    assert_eq!(returned, Some((id, value)));
                    assert_eq!(lookup_next_generation(&guard, table, id), LookupError::NotFound);
                }
                State::Reserved => assert_eq!(result.err(), Some(LookupError::NotFound), "{id}"),
                _ => assert_eq!(result.err(), Some(LookupError::Stale), "{id}"),
            }
        }
        assert!(iteration.next().is_none());
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

/// Looks up the next generation of an id.
fn lookup_next_generation(guard: &rcu::Guard, table: &CtxTable<Canary>, id: Id) -> LookupError {
    let next = Id::from_bits(id.to_bits() + (1 << 32)).unwrap();
    table.get(next, guard).err().expect("no context has this generation yet")
}
