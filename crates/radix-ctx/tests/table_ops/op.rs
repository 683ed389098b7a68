//! Steps and limits, decoded from bytes, which a fuzzer can vary.

use radix_ctx::CtxTable;

use super::canary::Canary;

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
    /// Compares the neighbours of an index.
    CompareAt(u32),
}

impl Op {
    /// Decodes a step for a table with a given largest index.
    pub(crate) fn decode([kind, a, b, c]: [u8; 4], max_index: u32) -> Self {
        let index = |at: u8| match at % 8 {
            0..=3 => u32::from(b) % 80,
            4 => u32::from(b) * 16,
            5 => max_index.saturating_sub(u32::from(b) % 70),
            6 => u32::from(b) << (at / 8 % 24),
            _ => 64 * (u32::from(b) % 8) + 63,
        };
        match kind % 32 {
            0..=3 => Self::Insert { weight: 1 },
            4 => Self::Insert { weight: u64::from(a) << (b % 8) },
            5 => Self::InsertWith { panics: b % 2 == 1 },
            6..=7 => Self::InsertIn(index(a), index(a).saturating_add(c.into())),
            8 => Self::InsertIn(index(a), index(c)), // may be an empty range
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
            _ => Self::CompareAt(index(a)),
        }
    }
}

/// The limits of a table.
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

    pub(super) fn build(self) -> CtxTable<Canary> {
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
