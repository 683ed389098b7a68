//! Shadows: simulations of each rule on the requests for a sample of the blocks.
//!
//! A shadow is a cache without memory for blocks: it has the table, the nodes and the lists of a
//! cache, and so behaves like one. It has as many blocks as the full cache has sampled ones, at
//! most about [`MOST_BLOCKS`], and takes under 200 bytes for each. With the rings of
//! [`Samples`](super::Samples) that is at most 180 KiB, and nothing in a cache of fewer than `PART
//! * FEWEST_BLOCKS` blocks.
//!
//! Three rules are enough. On 45 pairs of a capacity and a trace or pattern, among them those of B8
//! and B11, the mean gap to the best of LRU, ARC, S3-FIFO and the variants tried is 4.7 points with
//! A2 alone, 7.2 with clock alone and 0.5 with the three. A fourth rule, with probation in 30 %,
//! changes that by less than 0.1. The gate of `A2Small` gains 0.5 of these points, and twice as
//! many ghosts 0.4. Ageing main while nothing enters it gains nothing beside clock.

use std::ops::Range;

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{WordLock, load_own, order};

use super::{Buffers, Eviction, Looks, Policy};
use crate::frames::{Frame, Nodes, Place, Victim, boxed};
use crate::table::Table;
use crate::word::{Entry, EntryWord, Key};

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
/// The cache is short of hits if it has a smaller part of those of the shadow of its rule. With 3/4,
/// the trace P3 with room for 5 % has 0.8 points fewer hits.
const SHORT: f32 = 0.5;
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

/// The table of a shadow.
#[derive(Debug)]
struct Blocks {
    table: Table,
    /// The entry of each frame.
    places: Box<[Place]>,
}

impl Buffers for Blocks {
    fn entry(&self, frame: Frame) -> &Entry {
        self.table.entry(self.places[frame.0 as usize])
    }

    fn victim(&self, frame: Frame) -> Victim {
        Victim { frame, place: self.places[frame.0 as usize] }
    }
}

/// The simulation of one rule.
#[derive(Debug)]
struct Shadow {
    nodes: Nodes,
    policy: Policy,
    blocks: Blocks,
    /// Frames without a block.
    free: Vec<Frame>,
    /// The largest number of blocks.
    room: usize,
    /// The number of hits, weighted by [`DECAY`].
    hits: f32,
}

impl Shadow {
    fn new(rule: Eviction, blocks: usize) -> Result<Self, AllocError> {
        let mut free = Vec::new();
        free.try_reserve_exact(blocks).map_err(|_| AllocError::new())?;
        free.extend((0..blocks as u32).map(Frame));
        Ok(Self {
            nodes: Nodes::new(blocks)?,
            policy: Policy::new(rule, blocks)?,
            blocks: Blocks { table: Table::new(blocks)?, places: boxed(0, blocks)? },
            free,
            room: blocks,
            hits: 0.0,
        })
    }

    fn len(&self) -> usize {
        self.blocks.places.len() - self.free.len()
    }

    fn set_room(&mut self, blocks: usize) {
        self.room = blocks.clamp(1, self.blocks.places.len());
        self.policy.resize(self.room);
        self.evict_to(self.room);
    }

    fn evict_to(&mut self, blocks: usize) {
        while self.len() > blocks {
            self.policy.note_full();
            let mut looks = Looks::new(None);
            looks.left = u32::MAX; // no buffer is pinned here, so the search ends
            let Some(victim) = self.policy.pick(&mut self.nodes, &self.blocks, &mut looks) else {
                return;
            };
            let entry = self.blocks.table.entry(victim.place);
            self.blocks.table.lock(entry.key()).hide(victim.place);
            self.blocks.table.free(victim.place);
            self.free.push(victim.frame); // within the capacity reserved in `new`
        }
    }

    fn request(&mut self, key: Key) {
        if let Some(entry) = self.blocks.table.find(key) {
            entry.count_hit(entry.word());
            self.hits += 1.0;
            return;
        }
        self.evict_to(self.room - 1);
        let Some(frame) = self.free.pop() else { return };
        let place = self.blocks.table.lock(key).insert(EntryWord::loading(frame));
        let Some(place) = place else { return self.free.push(frame) };
        self.blocks.places[frame.0 as usize] = place;
        self.blocks.entry(frame).publish();
        self.policy.insert(&mut self.nodes, &self.blocks, frame, key);
    }
}

/// The simulations of all rules.
#[derive(Debug)]
pub(crate) struct Shadows {
    /// One for each rule. The rule of the first is in force at the beginning.
    of: Vec<Shadow>,
    /// The index of the rule in force.
    rules: usize,
    /// The planned blocks of a shadow.
    planned: usize,
    /// The blocks that a shadow was expected to have when the share of the sample was chosen; 0
    /// before the cache was full.
    expected: usize,
    /// The number of sampled blocks in the cache at its last sampled miss, and the sum of these
    /// numbers over the requests since the last comparison.
    cached: usize,
    sum: usize,
    /// The hits of the rule in force and of the cache after the last comparison.
    last: (f32, f32),
    /// The number of comparisons in a row at which the cache was [`SHORT`] of hits.
    short: u32,
    /// Whether the share of the sample is to be chosen once the cache is full.
    pub(crate) is_due: bool,
    /// Requests until the hits are compared.
    left: usize,
    /// The number of requests, and of those that hit in the cache, weighted by [`DECAY`].
    requests: f32,
    found: f32,
    /// Set while the cache [refuses](Self::is_selective) blocks.
    is_selective: bool,
    /// The comparisons until the cache may refuse blocks again, and those of the next
    /// [pause](PAUSE).
    pause: (u32, u32),
    /// The entries of the cache's table whose sampled blocks are not marked `SAMPLED` yet.
    pub(crate) unmarked: Range<Place>,
}

impl Shadows {
    /// Returns shadows with about `blocks` blocks each.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for them.
    #[inline(never)] // the stacks of a model are small
    pub(crate) fn new(blocks: usize) -> Result<Self, AllocError> {
        let most = blocks + blocks / 4; // a sample may be larger than planned
        let rules = [Eviction::A2, Eviction::A2Small, Eviction::Clock];
        let mut of = Vec::new();
        of.try_reserve_exact(rules.len()).map_err(|_| AllocError::new())?;
        for rule in rules {
            of.push(Shadow::new(rule, most)?);
        }
        Ok(Self {
            of,
            rules: 0,
            planned: blocks,
            expected: 0,
            cached: 0,
            sum: 0,
            last: (0.0, 0.0),
            short: 0,
            is_due: true,
            left: blocks,
            requests: 0.0,
            found: 0.0,
            is_selective: false,
            pause: (0, PAUSE.start),
            unmarked: 0..0,
        })
    }

    /// Returns the rule in force.
    pub(crate) fn rule(&self) -> Eviction {
        self.of[self.rules].policy.rule()
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

    /// Decides after a comparison whether the cache [refuses](Self::is_selective) blocks.
    fn choose_selection(&mut self) {
        let hits = self.of[self.rules].hits;
        let is_short = self.found + COST * self.requests + 2.0 * hits.sqrt() < hits;
        let (left, next) = &mut self.pause;
        if self.is_selective && is_short {
            (*left, *next) = (*next, PAUSE.end.min(2 * *next));
        }
        self.is_selective = *left == 0 && !is_short && hits < FEW * self.requests;
        *left = left.saturating_sub(1);
    }

    /// Returns whether the cache has been full.
    pub(crate) fn is_settled(&self) -> bool {
        self.expected > 0
    }

    /// Notes that the cache is full, with `blocks` blocks. Returns the share of the blocks to
    /// sample, or `None` if the cache has too few blocks.
    pub(crate) fn settle(&mut self, blocks: usize) -> Option<f64> {
        let expected = self.planned.min(blocks / PART);
        // Half of the least number, because a cache may have a few more or less than planned.
        if expected < FEWEST_BLOCKS / 2 {
            return None;
        }
        // Until the sampled blocks are counted. The shadows have all of them if the share is about
        // as planned.
        let seen = self.of[0].len();
        let is_seen = !self.is_settled() && seen.abs_diff(expected) < expected / 4;
        self.cached = if is_seen { seen } else { expected };
        (self.expected, self.is_due) = (expected, false);
        (self.left, self.sum) = (self.planned, 0);
        self.of.iter_mut().for_each(|shadow| shadow.set_room(self.cached));
        Some(expected as f64 / blocks as f64)
    }

    /// Notes the number of sampled blocks in the full cache.
    ///
    /// The capacity of each shadow follows it: an expected number is off by some percent, which
    /// decides whether a loop fits, and each working set has another number.
    pub(crate) fn follow(&mut self, cached: usize) {
        self.cached = cached;
    }

    /// Notes that the cache has another capacity.
    pub(crate) fn resize(&mut self) {
        self.is_due = true;
    }

    /// Forgets the hits of the shadow of the rule in force if the cache was [`SHORT`] of them at three
    /// comparisons in a row, so that another rule gets its turn: the shadow has hits that the cache
    /// does not have, for example because a loop fits in the shadow only. Few hits say nothing.
    fn check_promise(&mut self) {
        let is_settled = self.is_settled();
        let rule = &mut self.of[self.rules];
        let (promised, real) = (rule.hits - self.last.0, self.found - self.last.1);
        let is_short = promised > FEW * self.planned as f32 && real < SHORT * promised;
        self.short = if is_short && is_settled { self.short + 1 } else { 0 };
        if self.short == 3 {
            (rule.hits, self.short) = (0.0, 0);
        }
    }

    /// Passes a request for the block with that tag, which `hit` in the cache or missed, to each
    /// shadow. Returns whether the rule in force or the selection changes.
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
        let before = (self.rules, self.is_selective);
        self.check_promise();
        let mut most = HYSTERESIS * self.of[self.rules].hits + 1.0;
        for (at, shadow) in self.of.iter().enumerate() {
            if shadow.hits > most {
                (most, self.rules) = (shadow.hits, at);
            }
        }
        if self.is_settled() {
            self.choose_selection();
            let room = (self.sum + self.planned / 2) / self.planned;
            self.of.iter_mut().for_each(|shadow| shadow.set_room(room));
        }
        self.sum = 0;
        self.of.iter_mut().for_each(|shadow| shadow.hits *= DECAY);
        self.requests *= DECAY;
        self.found *= DECAY;
        if self.rules != before.0 {
            self.short = 0;
        }
        self.last = (self.of[self.rules].hits, self.found);
        (self.rules, self.is_selective) != before
    }
}

// Hits of sampled blocks, on their way from the threads to the shadows.
//
// There is a ring for each of the first hazard records, which one thread owns at a time. A hit adds
// the block's tag by two plain loads and two plain stores to memory of its thread, and drops it if
// the ring is full. Threads with other records share a few more rings: the one that gets the lock
// of its ring adds its tag, another one drops it. A ring has at least as many places as a shadow has
// blocks: a shorter one loses most of a long run of hits, and shadows that miss the hits of the rule
// in force favour the other rules.
//
// # Invariants
//
// 1. The tags from `tail` to `head` belong to the thread that drains, the others to the owner of
//    the ring, or to the thread that has the ring's lock.
// 2. One thread at a time drains, because draining needs the lock of the shadows.

/// The number of rings with an owner.
const RINGS: usize = if cfg!(offlock_model) { 1 } else { 64 };
/// The number of rings that other threads share.
const SHARED: usize = if cfg!(offlock_model) { 0 } else { 8 };
/// The most hits that one miss takes from the rings. They delay the miss by 4 us.
const MOST: u32 = 32;

/// The rings of a cache, and the share of the blocks that is sampled.
#[derive(Debug)]
pub(crate) struct Samples {
    /// A block is sampled if 32 bits of its hash are below this. 0 for hits until the cache is
    /// full, because a cache that never evicts has nothing to learn. An atomic of `std`, which no
    /// model explores: any value is correct.
    share: std::sync::atomic::AtomicU32,
    /// The share of misses until the cache is full.
    planned: u32,
    /// The number of rings used so far. An atomic of `std`, like `share`.
    used: std::sync::atomic::AtomicU32,
    /// The ring from which the next miss takes hits first. An atomic of `std`, like `share`.
    next: std::sync::atomic::AtomicU32,
    rings: Box<[Ring]>,
    /// The locks of the last rings, which are shared.
    locks: Box<[WordLock<()>]>,
}

#[derive(Debug)]
#[repr(align(128))]
struct Ring {
    head: AtomicU32,
    tail: AtomicU32,
    tags: Box<[UnsafeCell<u32>]>,
}

// SAFETY: invariant 1 gives each tag to one thread at a time; the other fields are atomics.
unsafe impl Sync for Ring {}

impl Samples {
    /// Samples `blocks` of the blocks of `buffers` buffers; with 0, nothing is sampled.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the rings.
    pub(crate) fn new(blocks: usize, buffers: usize) -> Result<Self, AllocError> {
        let mut rings = Vec::new();
        let shared = if blocks == 0 { 0 } else { SHARED };
        let count = if blocks == 0 { 0 } else { RINGS + SHARED };
        // A power of two, because `head` and `tail` wrap at 2^32 and `head % places` must not jump
        // there.
        let places = blocks.next_power_of_two();
        rings.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        for _ in 0..count {
            let mut tags = Vec::new();
            tags.try_reserve_exact(places).map_err(|_| AllocError::new())?;
            tags.extend((0..places).map(|_| UnsafeCell::new(0)));
            let [head, tail] = [0; 2].map(AtomicU32::new);
            rings.push(Ring { head, tail, tags: tags.into() });
        }
        let planned = (blocks as f64 / buffers as f64 * f64::from(u32::MAX)) as u32;
        // A model does not explore `used`, so all rings count as used there.
        let used = if cfg!(offlock_model) { count as u32 } else { 0 };
        let [share, used, next] = [0, used, 0].map(std::sync::atomic::AtomicU32::new);
        let locks = (0..shared).map(|_| WordLock::new(())).collect();
        Ok(Self { share, planned, used, next, rings: rings.into(), locks })
    }

    /// Samples the hits and misses of a share of the blocks, which is at least the planned one.
    pub(crate) fn open(&self, share: f64) {
        self.share.store((share * f64::from(u32::MAX)) as u32, Ordering::Relaxed); // a hint
    }

    /// Returns whether hits of a block are passed to the shadows.
    pub(crate) fn takes_hit(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed) // a hint
    }

    /// Returns whether misses of a block are passed to the shadows.
    pub(crate) fn takes_miss(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed).max(self.planned) // a hint
    }

    /// Returns bits of the hash that choose neither the bucket of the table nor the tag.
    fn bits(key: Key) -> u32 {
        (key.hash() >> 8) as u32
    }

    /// Returns the tag of a block: the half of its hash that does not decide whether it is sampled.
    pub(crate) fn tag(key: Key) -> u32 {
        (key.hash() >> 32) as u32
    }

    /// Adds a hit of the thread with that hazard record to its ring. Drops the hit if there is no
    /// room, or if another thread adds to a shared ring. Wait-free.
    pub(crate) fn add(&self, record: u32, tag: u32) {
        let owned = (self.rings.len() - self.locks.len()) as u32;
        if record < owned {
            return self.push(record, tag);
        }
        let Some(at) = record.checked_rem(self.locks.len() as u32) else { return };
        if let Some(_lock) = self.locks[at as usize].try_lock() {
            self.push(owned + at, tag);
        }
    }

    /// Adds a hit to a ring that is the calling thread's, or that it has locked.
    fn push(&self, ring: u32, tag: u32) {
        let Ring { head, tail, tags } = &self.rings[ring as usize];
        let at = load_own(head);
        // Ordering: Acquire pairs with the Release in `drain`; the write below comes after the read
        // of the tag that was at this place.
        let acquire = order!(Acquire, "add: the tag there was read");
        if at.wrapping_sub(tail.load(acquire)) as usize == tags.len() {
            return;
        }
        if self.used.load(Ordering::Relaxed) <= ring {
            // Ordering: Relaxed; a hint. Once per thread.
            self.used.fetch_max(ring + 1, Ordering::Relaxed);
        }
        // SAFETY: the place is not between `tail` and `head`, so it is this thread's (invariant 1).
        tags[at as usize % tags.len()].with_mut(|place| unsafe { place.write(tag) });
        // Ordering: Release pairs with the Acquire in `drain`; it carries the tag.
        head.store(at.wrapping_add(1), order!(Release, "add: the tag is written"));
    }

    /// Takes some of the hits, from another ring first each time. The caller has the lock of the
    /// shadows (invariant 2).
    pub(crate) fn drain(&self, mut take: impl FnMut(u32)) {
        let used = self.used.load(Ordering::Relaxed) as usize; // a hint
        // Ordering: Relaxed; a hint.
        let first = self.next.fetch_add(1, Ordering::Relaxed) as usize % used.max(1);
        let (before, after) = self.rings[..used].split_at(first);
        let mut left = MOST;
        for Ring { head, tail, tags } in after.iter().chain(before) {
            if left == 0 {
                break;
            }
            let from = load_own(tail);
            // Ordering: Acquire pairs with the Release in `push`; it carries the tags.
            let there = head.load(order!(Acquire, "drain: the tag is written")).wrapping_sub(from);
            let taken = there.min(left);
            left -= taken;
            let to = from.wrapping_add(taken);
            let mut at = from;
            while at != to {
                // SAFETY: the place is between `tail` and `head`, so it is this thread's (invariant
                // 1).
                take(tags[at as usize % tags.len()].with(|place| unsafe { place.read() }));
                at = at.wrapping_add(1);
            }
            // Ordering: Release pairs with the Acquire in `push`; the reads of the tags come before
            // it.
            tail.store(to, order!(Release, "drain: the tag was read"));
        }
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
            if at == room {
                assert_eq!(shadows.settle(8 * room), Some(1.0 / 8.0));
                shadows.follow(room);
            }
            let is_there = shadows.of[shadows.rules].blocks.table.find(Key::new(1, tag.into()));
            let hit = is_there.is_some();
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
        let lens = |shadows: &Shadows| shadows.of.iter().map(Shadow::len).collect::<Vec<_>>();
        (0..70).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(shadows.settle(512), Some(1.0 / 8.0));
        assert!(!shadows.is_due);
        (0..200).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(lens(&shadows), [70; 3]);
        shadows.follow(60);
        (0..128).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(lens(&shadows), [60; 3]);
        // Another capacity needs another share.
        shadows.resize();
        assert!(shadows.is_due && shadows.is_settled());
        assert_eq!(shadows.settle(256), Some(1.0 / 8.0));
        assert_eq!(lens(&shadows), [32; 3]);
    }

    #[test]
    fn large_blocks_are_sampled_more_often_and_few_tell_nothing() {
        let mut shadows = Shadows::new(256).unwrap();
        (0..4).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(shadows.settle(50), None, "6 in a shadow");
        assert!(!shadows.is_settled());
        // An eighth of 512 blocks; planned was one in 256.
        assert_eq!(shadows.settle(512), Some(1.0 / 8.0));
        (0..100).for_each(|tag| _ = shadows.request(tag, false));
        assert_eq!(shadows.of[0].len(), 64);
    }

    #[test]
    fn a_rule_whose_promise_the_cache_does_not_keep_is_replaced() {
        let mut shadows = Shadows::new(64).unwrap();
        (0..64).for_each(|tag| _ = shadows.request(tag, false));
        shadows.settle(512);
        for round in 0..4 {
            (0..64).for_each(|tag| _ = shadows.request(tag, round < 2));
        }
        assert_eq!(shadows.rule(), Eviction::A2, "two rounds ended short of hits");
        (0..64).for_each(|tag| _ = shadows.request(tag, false));
        assert_ne!(shadows.rule(), Eviction::A2);
    }
}

#[cfg(all(test, not(offlock_model)))]
mod samples_tests {
    use super::*;

    #[test]
    fn inv27_tags_stay_in_order_where_the_counts_wrap() {
        let samples = Samples::new(20, 200).unwrap();
        let Ring { head, tail, .. } = &samples.rings[0];
        let first = u32::MAX - 4;
        [head, tail].into_iter().for_each(|count| count.store(first, Ordering::Relaxed));
        (1..=20).for_each(|tag| samples.add(0, tag));
        let mut tags = Vec::new();
        samples.drain(|tag| tags.push(tag));
        assert!(tags.into_iter().eq(1..=20));
    }

    #[test]
    fn threads_beyond_the_rings_share_some_and_one_miss_takes_few_hits() {
        let samples = Samples::new(32, 320).unwrap();
        let records = [0, 5, RINGS as u32 - 1, RINGS as u32, 1001];
        for record in records {
            (0..32).for_each(|tag| samples.add(record, 100 * record + tag));
        }
        let drained = || {
            let mut tags = Vec::new();
            samples.drain(|tag| tags.push(tag));
            tags
        };
        let mut all = Vec::new();
        for _ in records {
            let tags = drained();
            assert_eq!(tags.len(), MOST as usize);
            all.extend(tags);
        }
        assert!(drained().is_empty());
        all.sort_unstable();
        assert!(
            all.into_iter()
                .eq(records.iter().flat_map(|at| (0..32).map(move |tag| 100 * at + tag)))
        );
    }
}
