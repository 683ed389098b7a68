//! R7: reads and writes at once, by two threads on 64 k entries.
//!
//! Reads pick from all entries, and may meet a removed one. Half of the writes remove an entry, half
//! insert one that was removed 64 removals before; each thread does so in its own half. The stream
//! of operations is the same for every row. An insert tells both threads the entry's key, through
//! one array that is also the same for all: a table hands out a new key, a hash map gets its old.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use harness::{Case, Group, Plan, Random, Report, two};

use crate::map::{Change, Pack, Value, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded};

const ENTRIES: usize = 1 << 16;
const HALF: usize = ENTRIES / 2;
/// Entries of a thread that are out at a time.
const OUT: usize = 64;
/// Operations before the stream repeats.
const STREAM: usize = 1 << 16;
/// The number in a stream that stands for a write.
const WRITE: u32 = u32::MAX;

/// A map and the keys of its entries, as of the last insert of each.
struct Shared<M> {
    map: M,
    keys: Vec<AtomicU64>,
}

impl<M: Change<Value>> Shared<M> {
    fn new() -> Self {
        let (map, keys) = M::filled(ENTRIES, value);
        Self { map, keys: keys.into_iter().map(|key| AtomicU64::new(key.pack())).collect() }
    }

    fn key(&self, entry: u32) -> M::Key {
        // Ordering: Relaxed; a key is a number, and what it names is found by the map's own means.
        M::Key::unpack(self.keys[entry as usize].load(Ordering::Relaxed))
    }

    /// The row `NAME/2`: `reads` in 100 operations are reads.
    fn case(reads: u64) -> Case<'static> {
        let this = Arc::new(Self::new());
        Case::batched(M::NAME, 2, move |thread| {
            let this = Arc::clone(&this);
            let stream = stream(thread, reads);
            let mut writer = Writer::new(thread);
            let mut at = 0;
            move |ops| {
                let mut sum = 0_u64;
                for i in 0..ops as usize {
                    let entry = stream[(at + i) & (STREAM - 1)];
                    if entry == WRITE {
                        writer.write(&this);
                    } else {
                        let found = this.map.read(&this.map.enter(), this.key(entry), |v| v[0]);
                        sum = sum.wrapping_add(found.unwrap_or(0));
                    }
                }
                at += ops as usize;
                black_box(sum);
            }
        })
    }
}

/// Returns the operations of thread `thread`: an entry to read, or [`WRITE`].
fn stream(thread: usize, reads: u64) -> Vec<u32> {
    let mut random = Random::new(70 + thread as u64);
    let mut next = || {
        let entry = random.below(ENTRIES) as u32;
        if random.below(100) < reads as usize { entry } else { WRITE }
    };
    (0..STREAM).map(|_| next()).collect()
}

/// A thread's writes: it removes its half in random order, round and round, and inserts in the same
/// order, [`OUT`] entries behind.
struct Writer {
    order: Vec<u32>,
    removed: usize,
    inserted: usize,
}

impl Writer {
    fn new(thread: usize) -> Self {
        let order = Random::new(700 + thread as u64).permutation(HALF);
        let order = order.into_iter().map(|n| n + (thread * HALF) as u32).collect();
        Self { order, removed: 0, inserted: 0 }
    }

    fn write<M: Change<Value>>(&mut self, shared: &Shared<M>) {
        if self.removed - self.inserted < OUT {
            let entry = self.order[self.removed & (HALF - 1)];
            assert!(shared.map.remove(shared.key(entry)), "entry {entry} is there");
            self.removed += 1;
        } else {
            let entry = self.order[self.inserted & (HALF - 1)];
            let key = shared.map.insert(u64::from(entry), value(u64::from(entry)));
            // Ordering: as in `key`.
            shared.keys[entry as usize].store(key.pack(), Ordering::Relaxed);
            self.inserted += 1;
        }
    }
}

/// So many reads in 100 operations.
pub(crate) fn run(plan: &Plan, report: &mut Report, reads: u64) {
    let mix = format!("{reads}_{}", 100 - reads);
    let rounds = Group::new(&format!("{reads}/{} reads/writes, 64k", 100 - reads))
        .case(Shared::<Ctx<Value>>::case(reads))
        .case(Shared::<Papaya<Value>>::case(reads))
        .case(Shared::<Index<Value>>::case(reads))
        .case(Shared::<Dash<Value>>::case(reads))
        .case(Shared::<Sharded<Value>>::case(reads))
        .run(plan);
    report.compare(&rounds, &["radix-ctx"]);
    let ratio = |peer| rounds.tput_ratio("radix-ctx/2", &two(peer));
    if reads == 95 {
        report.record(&format!("R7.{mix}.papaya.tput"), ratio("papaya"));
    }
    report.record(&format!("R7.{mix}.hashindex.tput"), ratio("HashIndex"));
}
