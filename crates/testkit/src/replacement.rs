//! Replacement policies of the literature, simulated on a trace: what a cache is compared with.
//!
//! The keys are small numbers, as in [`Trace`](crate::traces::Trace). Each function returns the hits of a
//! cache with `room` blocks, of which it must have at least one.

use std::collections::BinaryHeap;

const NIL: u32 = u32::MAX;
/// The list of a key that is on none.
const NONE: u8 = u8::MAX;

/// Lists of keys: each key is on one list at most.
struct Lists<const N: usize> {
    links: Vec<[u32; 2]>,
    on: Vec<u8>,
    /// The newest and the oldest key of each.
    ends: [[u32; 2]; N],
    len: [usize; N],
}

impl<const N: usize> Lists<N> {
    fn new(keys: &[u32]) -> Self {
        let most = keys.iter().max().map_or(0, |key| *key as usize + 1);
        Self { links: vec![[NIL; 2]; most], on: vec![NONE; most], ends: [[NIL; 2]; N], len: [0; N] }
    }

    fn on(&self, key: u32) -> u8 {
        self.on[key as usize]
    }

    fn remove(&mut self, key: u32) {
        let list = std::mem::replace(&mut self.on[key as usize], NONE);
        if list == NONE {
            return;
        }
        let [newer, older] = self.links[key as usize];
        let ends = &mut self.ends[list as usize];
        if newer == NIL {
            ends[0] = older
        } else {
            self.links[newer as usize][1] = older
        }
        if older == NIL {
            ends[1] = newer
        } else {
            self.links[older as usize][0] = newer
        }
        self.len[list as usize] -= 1;
    }

    /// Makes a key the newest of a list; takes it off the one it was on.
    fn push(&mut self, list: usize, key: u32) {
        self.remove(key);
        let newest = self.ends[list][0];
        self.links[key as usize] = [NIL, newest];
        if newest == NIL {
            self.ends[list][1] = key
        } else {
            self.links[newest as usize][0] = key
        }
        self.ends[list][0] = key;
        self.on[key as usize] = list as u8;
        self.len[list] += 1;
    }

    /// Takes the oldest key off a list.
    fn pop(&mut self, list: usize) -> Option<u32> {
        let oldest = self.ends[list][1];
        (oldest != NIL).then(|| {
            self.remove(oldest);
            oldest
        })
    }
}

/// Least recently used.
#[must_use]
pub fn lru(keys: &[u32], room: usize) -> u64 {
    let mut lists = Lists::<1>::new(keys);
    let mut hits = 0;
    for &key in keys {
        hits += u64::from(lists.on(key) == 0);
        lists.push(0, key);
        if lists.len[0] > room {
            lists.pop(0);
        }
    }
    hits
}

/// The optimum, which knows the future: the block goes whose next request is the last (Belady, 1966).
#[must_use]
pub fn opt(keys: &[u32], room: usize) -> u64 {
    let most = keys.iter().max().map_or(0, |key| *key as usize + 1);
    let mut next = vec![usize::MAX; keys.len()];
    let mut last = vec![usize::MAX; most];
    for (at, &key) in keys.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut last[key as usize], at);
    }
    // The next request of each cached block. The heap also has requests that are past.
    let mut cached = vec![None; most];
    let (mut heap, mut len, mut hits) = (BinaryHeap::new(), 0, 0);
    for (at, &key) in keys.iter().enumerate() {
        if cached[key as usize].is_some() {
            hits += 1;
        } else {
            len += 1;
        }
        while len > room {
            let Some((when, key)) = heap.pop() else { break };
            if cached[key as usize] == Some(when) {
                cached[key as usize] = None;
                len -= 1;
            }
        }
        cached[key as usize] = Some(next[at]);
        heap.push((next[at], key));
    }
    hits
}

/// ARC as its authors have it (Megiddo and Modha, FAST 2003).
#[must_use]
pub fn arc(keys: &[u32], room: usize) -> u64 {
    const RECENT: usize = 0;
    const FREQUENT: usize = 1;
    const RECENT_GHOSTS: usize = 2;
    const FREQUENT_GHOSTS: usize = 3;
    let mut lists = Lists::<4>::new(keys);
    let (mut target, mut hits) = (0_usize, 0);
    for &key in keys {
        let on = usize::from(lists.on(key));
        if on <= FREQUENT {
            lists.push(FREQUENT, key);
            hits += 1;
            continue;
        }
        let [recent, frequent, recent_ghosts, frequent_ghosts] = lists.len;
        let mut full = true;
        if on == RECENT_GHOSTS {
            target = (target + (frequent_ghosts / recent_ghosts).max(1)).min(room);
        } else if on == FREQUENT_GHOSTS {
            target = target.saturating_sub((recent_ghosts / frequent_ghosts).max(1));
        } else {
            let all = recent + frequent + recent_ghosts + frequent_ghosts;
            full = all >= room;
            if recent + recent_ghosts == room {
                if recent < room {
                    lists.pop(RECENT_GHOSTS);
                } else {
                    lists.pop(RECENT);
                    full = false;
                }
            } else if all >= 2 * room {
                lists.pop(FREQUENT_GHOSTS);
            }
        }
        let [recent, frequent, ..] = lists.len;
        if full && recent + frequent >= room {
            let over = recent > target || (on == FREQUENT_GHOSTS && recent == target);
            let from = if recent > 0 && over { RECENT } else { FREQUENT };
            if let Some(oldest) = lists.pop(from) {
                lists.push(from + RECENT_GHOSTS, oldest);
            }
        }
        let known = on == RECENT_GHOSTS || on == FREQUENT_GHOSTS;
        lists.push(if known { FREQUENT } else { RECENT }, key);
    }
    hits
}

/// S3-FIFO as its authors have it (SOSP 2023): a tenth on probation, a ghost for each block in main.
#[must_use]
pub fn s3_fifo(keys: &[u32], room: usize) -> u64 {
    let rule = A2 {
        ghosts: |room, probation| room - probation,
        fills_main: false,
        counts_new: true,
        uses: 2,
        ..A2::default()
    };
    rule.hits(keys, room)
}

/// The rules A2 and A2Small of bufcache, each part of which can be left out.
///
/// The default is A2: S3-FIFO with four changes. See `policy/mod.rs` of bufcache.
#[derive(Clone, Copy, Debug)]
pub struct A2 {
    /// The blocks of the cache for each block on probation.
    pub per_probation: usize,
    /// The number of ghosts, by the room and the blocks on probation.
    pub ghosts: fn(usize, usize) -> usize,
    /// Main is filled before the cache is full.
    pub fills_main: bool,
    /// Hits in the newer half of probation count.
    pub counts_new: bool,
    /// The hits with which a block leaves probation for main.
    pub uses: u8,
    /// A ghost enters main only if main's oldest block has no use left, and otherwise takes one.
    pub gate: bool,
}

impl Default for A2 {
    fn default() -> Self {
        Self {
            per_probation: 10,
            ghosts: |room, _| 2 * room,
            fills_main: true,
            counts_new: false,
            uses: 1,
            gate: false,
        }
    }
}

impl A2 {
    /// A2Small.
    #[must_use]
    pub fn small() -> Self {
        Self { per_probation: 100, gate: true, ..Self::default() }
    }

    /// The hits of a cache with `room` blocks.
    #[must_use]
    pub fn hits(self, keys: &[u32], room: usize) -> u64 {
        const NEWER: usize = 0;
        const OLDER: usize = 1;
        const MAIN: usize = 2;
        const GHOSTS: usize = 3;
        let probation = (room / self.per_probation).max(1);
        let mut lists = Lists::<4>::new(keys);
        let mut used = vec![0_u8; lists.on.len()];
        let (mut hits, mut is_filling) = (0, self.fills_main);
        for &key in keys {
            let on = usize::from(lists.on(key));
            if on <= MAIN {
                if on != NEWER || self.counts_new {
                    used[key as usize] = (used[key as usize] + 1).min(3);
                }
                hits += 1;
                continue;
            }
            while lists.len[NEWER] + lists.len[OLDER] + lists.len[MAIN] >= room {
                is_filling = false;
                let is_short = lists.len[NEWER] + lists.len[OLDER] < probation;
                let from = if is_short && lists.len[MAIN] > 0 {
                    MAIN
                } else {
                    [OLDER, NEWER, MAIN].into_iter().find(|&of| lists.len[of] > 0).unwrap_or(MAIN)
                };
                let Some(oldest) = lists.pop(from) else { break };
                let uses = &mut used[oldest as usize];
                if from == MAIN && *uses > 0 {
                    *uses -= 1;
                    lists.push(MAIN, oldest);
                } else if from != MAIN && *uses >= self.uses {
                    *uses = 0;
                    lists.push(MAIN, oldest);
                } else if from != MAIN {
                    lists.push(GHOSTS, oldest);
                    if lists.len[GHOSTS] > (self.ghosts)(room, probation) {
                        lists.pop(GHOSTS);
                    }
                }
            }
            used[key as usize] = 0;
            let mut enters_main = is_filling && lists.len[MAIN] + 1 + probation <= room;
            if !enters_main && usize::from(lists.on(key)) == GHOSTS {
                let oldest = lists.ends[MAIN][1];
                enters_main = !self.gate || oldest == NIL || used[oldest as usize] == 0;
                if !enters_main {
                    used[oldest as usize] -= 1;
                    lists.push(MAIN, oldest);
                }
            }
            lists.push(if enters_main { MAIN } else { NEWER }, key);
            if !enters_main && lists.len[NEWER] > probation / 2 {
                if let Some(aged) = lists.pop(NEWER) {
                    lists.push(OLDER, aged);
                }
            }
        }
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_hits_of_short_traces() {
        // From the Wikipedia page on page replacement: 3 frames.
        let keys = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        assert_eq!((lru(&keys, 3), opt(&keys, 3)), (8, 11));
        // A loop of four with room for three.
        let keys: Vec<u32> = (0..400).map(|at| at % 4).collect();
        assert_eq!((lru(&keys, 3), arc(&keys, 3)), (0, 0));
        assert!(s3_fifo(&keys, 3) < opt(&keys, 3) && opt(&keys, 3) > 260);
        assert_eq!([lru, arc, s3_fifo, opt].map(|hits| hits(&keys, 4)), [396; 4]);
        // Main has two blocks of the loop; the other two pass through probation.
        assert_eq!(A2::default().hits(&keys, 3), 198);
    }

    #[test]
    fn no_policy_is_better_than_the_optimum() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut key = || 1 + random.u32(..99);
        let keys: Vec<u32> = (0..5000).map(|_| key() * key() / 99).collect();
        for room in [1, 2, 10, 50] {
            let best = opt(&keys, room);
            assert!([lru, arc, s3_fifo].iter().all(|hits| hits(&keys, room) <= best));
            assert!([A2::default(), A2::small()].iter().all(|rule| rule.hits(&keys, room) <= best));
        }
    }
}
