//! Shadows: simulations of each rule on the requests for a sample of the blocks.
//!
//! A shadow is a cache without memory for blocks: it has the table, the nodes and the lists of a
//! cache, and so behaves like one. It has as many blocks as the cache has sampled ones, about
//! [`MOST_BLOCKS`] at most, and takes under 200 bytes for each. With the rings of [`Samples`] that is
//! at most 180 KiB, and nothing in a cache of fewer than `PART * FEWEST_BLOCKS` blocks.
//!
//! Three rules are enough. On 45 pairs of a capacity and a trace or pattern, among them those of B8
//! and B11, the mean gap to the best of LRU, ARC, S3-FIFO and the variants tried is 4.7 points with
//! A2 alone, 7.2 with clock alone and 0.5 with the three. A fourth rule, with probation in 30 %,
//! changes that by less than 0.1. The gate of `A2Small` gains 0.5 of these points, and twice as
//! many ghosts 0.4. Ageing main while nothing enters it gains nothing beside clock.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arrayvec::ArrayVec;
use offlock_percpu::AllocError;
use offlock_sync::WordLock;

use super::{Eviction, Looks, Policy};
use crate::frames::{Frame, Place, boxed};
use crate::table::Table;
use crate::word::{EntryWord, Key};

/// The planned number of blocks of a shadow, at most. 512 are no better; with 128, a loop of 1.01
/// times the capacity is not distinguished from one that fits.
const MOST_BLOCKS: usize = 256;
/// The least number of blocks of the cache for each block of a shadow.
const PART: usize = 8;
/// The least number of blocks of a shadow, because fewer say nothing about the rules.
const FEWEST_BLOCKS: usize = 16;
/// The weight of a hit after as many requests as a shadow has blocks.
const DECAY: f32 = 0.97;
/// The factor by which the hits of another rule must exceed those of the rule in force.
const HYSTERESIS: f32 = 1.03;
/// A cache may refuse blocks if a smaller share of the requests hits than this. To fill
/// buffers costs more than the hits save if fewer than one in eight is used again.
const FEW: f32 = 1.0 / 8.0;
/// The share of the requests that may miss because the cache refused their blocks. Two standard
/// deviations of the hits are added, because the hits are those of a sample. With as many requests
/// as [`DECAY`] leaves, the sum is at most 1/55 of the requests in a cache of 2,048 buffers or more,
/// and 1/24 in one of 128.
const COST: f32 = 1.0 / 96.0;
/// The number of comparisons in which the cache refuses nothing after refusals have cost more than
/// [`COST`]: the start of the range the first time, twice as many each further time, and at most
/// the end. Refusals that cost more are noticed after about 5 comparisons.
const PAUSE: Range<u32> = 32..1024;

/// Returns the planned blocks of a shadow of a cache with `count` buffers; 0 for a cache without
/// shadows.
pub(crate) fn sampled_blocks(count: usize) -> usize {
    let blocks = (count / PART).min(MOST_BLOCKS);
    if blocks < FEWEST_BLOCKS { 0 } else { blocks }
}

/// The simulation of one rule.
#[derive(Debug)]
struct Shadow {
    policy: Policy,
    table: Table,
    /// The number of the entry of each frame.
    places: Box<[Place]>,
    /// The number of hits, weighted by [`DECAY`].
    hits: f32,
}

impl Shadow {
    fn new(rule: Eviction, blocks: usize) -> Result<Self, AllocError> {
        Ok(Self {
            policy: Policy::new(rule, blocks)?,
            table: Table::new(blocks)?,
            places: boxed(0, blocks)?,
            hits: 0.0,
        })
    }

    /// Sets the largest number of blocks.
    fn set_room(&mut self, blocks: usize) {
        self.policy.set_limit(blocks.max(1));
        while self.policy.exceeds_limit() && self.evict().is_some() {}
    }

    fn evict(&mut self) -> Option<()> {
        self.policy.note_full();
        let mut looks = Looks::new(None);
        looks.left = u32::MAX; // no buffer is pinned here, so the search ends
        let Self { table, places, .. } = self;
        let entry_of = |frame: Frame| table.entry(places[frame.0 as usize]);
        let frame = self.policy.pick(entry_of, &mut looks)?;
        let place = places[frame.0 as usize];
        table.lock(table.entry(place).key()).hide(place);
        table.free(place);
        self.policy.give(frame);
        Some(())
    }

    fn request(&mut self, key: Key) {
        if let Some(entry) = self.table.find(key) {
            entry.count_hit(entry.word());
            self.hits += 1.0;
            return;
        }
        let frame = loop {
            match self.policy.take() {
                Some(frame) => break frame,
                None if self.evict().is_none() => return,
                None => {}
            }
        };
        let place = self.table.lock(key).insert(EntryWord::loading(frame));
        let Some(place) = place else {
            self.policy.give(frame);
            return;
        };
        self.places[frame.0 as usize] = place;
        self.table.entry(place).publish();
        let Self { table, places, .. } = self;
        self.policy.insert(|frame| table.entry(places[frame.0 as usize]), frame, key);
    }
}

/// The simulations of all rules.
#[derive(Debug)]
pub(crate) struct Shadows {
    /// One for each rule. The rule of the first is in force at the beginning.
    of: Vec<Shadow>,
    /// The index of the rule in force.
    in_force: usize,
    /// The planned blocks of a shadow, and the requests between two comparisons.
    planned: usize,
    /// The requests until the hits are compared.
    left: usize,
    /// The number of sampled blocks in the cache at the last sampled miss; 0 until the cache is full.
    cached: usize,
    /// The sum of `cached` over the requests since the last comparison.
    sum: usize,
    /// The number of requests, and of those that hit in the cache, weighted by [`DECAY`].
    requests: f32,
    found: f32,
    /// Set while the cache [refuses](Self::is_selective) blocks.
    is_selective: bool,
    /// The comparisons until the cache may refuse blocks again, and those of the next
    /// [pause](PAUSE).
    pause: (u32, u32),
}

impl Shadows {
    /// Returns shadows with about `blocks` blocks each.
    #[inline(never)] // the stacks of a model are small
    pub(crate) fn new(blocks: usize) -> Result<Self, AllocError> {
        let most = blocks + blocks / 4; // a sample may be larger than planned
        let rules = [Eviction::A2, Eviction::A2Small, Eviction::Clock];
        Ok(Self {
            of: rules.into_iter().map(|rule| Shadow::new(rule, most)).collect::<Result<_, _>>()?,
            in_force: 0,
            planned: blocks,
            left: blocks,
            cached: 0,
            sum: 0,
            requests: 0.0,
            found: 0.0,
            is_selective: false,
            pause: (0, PAUSE.start),
        })
    }

    /// Returns the rule in force.
    pub(crate) fn rule(&self) -> Eviction {
        self.of[self.in_force].policy.rule()
    }

    /// Returns whether the cache refuses blocks that were neither evicted from probation nor
    /// refused lately.
    ///
    /// It refuses blocks while few of the sampled requests hit in the shadow of the rule in force,
    /// and while the cache has about as many hits as that shadow, which refuses no block. So
    /// refusals turn few requests into misses; see [`COST`]. If they turn more, the cache tries
    /// them again only after a pause, which doubles each time.
    pub(crate) fn is_selective(&self) -> bool {
        self.is_selective
    }

    /// Notes the number of sampled blocks in the full cache.
    ///
    /// The capacity of each shadow follows this number. An expected number would be off by some
    /// percent, which decide whether a loop fits, and each working set has another number.
    pub(crate) fn follow(&mut self, cached: usize) {
        if self.cached == 0 {
            (self.left, self.sum) = (self.planned, 0);
            self.of.iter_mut().for_each(|shadow| shadow.set_room(cached));
        }
        self.cached = cached;
    }

    /// Passes a request for the block with that tag, which `hit` in the cache or missed, to each
    /// shadow. Returns whether the hits were compared: the rule in force and the selection may
    /// change then.
    pub(crate) fn request(&mut self, tag: u32, hit: bool) -> bool {
        let key = Key::new(1, u64::from(tag));
        self.of.iter_mut().for_each(|shadow| shadow.request(key));
        self.requests += 1.0;
        self.found += f32::from(u8::from(hit));
        self.sum += self.cached;
        self.left -= 1;
        if self.left > 0 {
            return false;
        }
        self.left = self.planned;
        // Until the cache is full, the shadows get no hits, and there is nothing to compare.
        if self.cached > 0 {
            self.compare();
        }
        true
    }

    /// Chooses the rule with the most hits, and whether the cache refuses blocks.
    fn compare(&mut self) {
        let mut most = HYSTERESIS * self.of[self.in_force].hits + 1.0;
        for (at, shadow) in self.of.iter().enumerate() {
            if shadow.hits > most {
                (most, self.in_force) = (shadow.hits, at);
            }
        }
        self.choose_selection();
        let room = (self.sum + self.planned / 2) / self.planned;
        self.sum = 0;
        for shadow in &mut self.of {
            shadow.set_room(room);
            shadow.hits *= DECAY;
        }
        self.requests *= DECAY;
        self.found *= DECAY;
    }

    /// Decides whether the cache [refuses](Self::is_selective) blocks.
    fn choose_selection(&mut self) {
        let hits = self.of[self.in_force].hits;
        let is_short = self.found + COST * self.requests + 2.0 * hits.sqrt() < hits;
        let (left, next) = &mut self.pause;
        if self.is_selective && is_short {
            (*left, *next) = (*next, PAUSE.end.min(2 * *next));
        }
        self.is_selective = *left == 0 && !is_short && hits < FEW * self.requests;
        *left = left.saturating_sub(1);
    }
}

/// The number of rings.
const RINGS: usize = if cfg!(offlock_model) { 1 } else { 64 };
/// The most hits that one miss takes from the rings. They delay the miss by 4 us.
const MOST: usize = 32;

/// The sample of the blocks, and the hits of sampled blocks on their way from the threads to the
/// shadows.
///
/// Each of the first 64 hazard records, which one thread owns at a time, has a ring of its own; so
/// with up to 64 threads a hit writes to memory of its thread. Later records share these rings. A
/// hit that finds its ring full or locked is dropped. A ring has as many places as a shadow has
/// blocks: a shorter one loses most of a long run of hits, and shadows that miss the hits of the
/// rule in force favour the other rules.
#[derive(Debug)]
pub(crate) struct Samples {
    /// A block is sampled if 32 bits of its hash are below this.
    share: u32,
    /// Set once the cache has been full: one that never evicts has nothing to learn of hits.
    is_open: AtomicBool,
    /// The number of rings used so far.
    used: AtomicUsize,
    /// The ring from which the next miss takes hits first.
    next: AtomicUsize,
    rings: Box<[Ring]>,
}

/// Hits of one thread: the tags of their blocks.
#[derive(Debug)]
#[repr(align(128))]
struct Ring(WordLock<Vec<u32>>);

impl Samples {
    /// Samples `blocks` of the blocks of `buffers` buffers; with 0, nothing is sampled.
    pub(crate) fn new(blocks: usize, buffers: usize) -> Result<Self, AllocError> {
        let mut rings = Vec::new();
        for _ in 0..if blocks == 0 { 0 } else { RINGS } {
            let mut tags = Vec::new();
            tags.try_reserve_exact(blocks).map_err(|_| AllocError::new())?;
            rings.push(Ring(WordLock::new(tags)));
        }
        Ok(Self {
            share: (blocks as f64 / buffers as f64 * f64::from(u32::MAX)) as u32,
            is_open: AtomicBool::new(false),
            used: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            rings: rings.into(),
        })
    }

    /// Begins to take hits.
    pub(crate) fn open(&self) {
        if !self.is_open() {
            self.is_open.store(true, Ordering::Relaxed); // a hint
        }
    }

    /// Returns whether hits are taken.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed) // a hint
    }

    /// Returns whether requests for a block are passed to the shadows.
    pub(crate) fn takes(&self, key: Key) -> bool {
        // The half that chooses neither the bucket of the table nor the tag.
        (key.hash() as u32) < self.share
    }

    /// Returns the tag of a block: the other half of its hash.
    pub(crate) fn tag(key: Key) -> u32 {
        (key.hash() >> 32) as u32
    }

    /// Adds a hit of the thread with that hazard record to its ring.
    pub(crate) fn add(&self, record: u32, key: Key) {
        if self.rings.is_empty() {
            return;
        }
        let ring = record as usize % self.rings.len();
        let Some(mut tags) = self.rings[ring].0.try_lock() else { return };
        if tags.len() < tags.capacity() {
            tags.push(Self::tag(key));
        }
        if self.used.load(Ordering::Relaxed) <= ring {
            self.used.fetch_max(ring + 1, Ordering::Relaxed); // a hint; once per thread
        }
    }

    /// Takes some of the hits, the oldest of each ring first, and from another ring first each time.
    pub(crate) fn drain(&self) -> ArrayVec<u32, MOST> {
        let mut hits = ArrayVec::new();
        let used = self.used.load(Ordering::Relaxed); // a hint
        let first = self.next.fetch_add(1, Ordering::Relaxed) % used.max(1); // a hint
        let (before, after) = self.rings[..used].split_at(first);
        for ring in after.iter().chain(before) {
            if hits.is_full() {
                break;
            }
            let Some(mut tags) = ring.0.try_lock() else { continue };
            let taken = tags.len().min(hits.remaining_capacity());
            hits.extend(tags.drain(..taken));
        }
        hits
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    /// The rule after `requests` of a cache that is full after the first `room` of them, and has the
    /// hits of the shadow of its rule.
    fn rule(room: usize, requests: impl Iterator<Item = u32>) -> Eviction {
        let mut shadows = Shadows::new(room).unwrap();
        for (at, tag) in requests.enumerate() {
            if at >= room {
                shadows.follow(room);
            }
            let hit = shadows.of[shadows.in_force].table.find(Key::new(1, tag.into())).is_some();
            shadows.request(tag, hit);
        }
        shadows.rule()
    }

    #[test]
    fn each_rule_wins_where_it_is_the_best() {
        let zigzag = (0..400).chain((0..400).rev()).cycle().take(40_000);
        assert_eq!(rule(200, zigzag), Eviction::Clock);
        assert_eq!(rule(200, (0..210).cycle().take(40_000)), Eviction::A2Small);
        // Each block again after 30 others, and nothing lasts: A2Small is the worst, A2 no better
        // than clock.
        let again = (0..20_000).flat_map(|at| [at + 15, at]);
        assert_ne!(rule(200, again), Eviction::A2Small);
    }

    #[test]
    fn shadows_have_the_room_of_the_sampled_blocks_in_the_cache() {
        let mut shadows = Shadows::new(64).unwrap();
        let lens = |shadows: &Shadows| {
            shadows.of.iter().map(|shadow| shadow.policy.in_use()).collect::<Vec<_>>()
        };
        (0..200).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(lens(&shadows), [80; 3]);
        for cached in [70, 60] {
            shadows.follow(cached);
            (0..128).for_each(|tag| _ = shadows.request(tag, false));
            assert_eq!(lens(&shadows), [cached; 3]);
        }
    }

    #[test]
    fn inv27_a_miss_takes_few_hits_and_those_of_each_thread_in_order() {
        let samples = Samples::new(32, 320).unwrap();
        let key = |block| Key::new(1, block);
        let records = [0, 5, RINGS as u32 - 1];
        for &record in &records {
            (0..40).for_each(|at| samples.add(record, key(u64::from(100 * record + at))));
        }
        for _ in records {
            let hits = samples.drain();
            let is_of = |record: &&u32| Samples::tag(key(u64::from(100 * **record))) == hits[0];
            let record = *records.iter().find(is_of).expect("the first of a thread");
            let all = (0..32).map(|at| Samples::tag(key(u64::from(100 * record + at))));
            assert!(hits.into_iter().eq(all), "in order, and no more than there is room for");
        }
        assert!(samples.drain().is_empty(), "each once");
    }
}
