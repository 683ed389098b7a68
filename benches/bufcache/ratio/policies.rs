//! Policies: ours and those of other caches, and of the literature where none is at hand.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::num::NonZeroUsize;

use bufcache::{BlockDevice, Cache, Eviction};
use lru::LruCache;
use rustc_hash::FxBuildHasher;

use crate::ours::OPEN;

/// Hits among the keys, with room for so many.
type Hits = fn(&[u32], usize) -> u64;

/// What the target is about, and what it is compared with.
pub(crate) const OURS: &str = "bufcache";
pub(crate) const PEERS: [&str; 4] = ["lru", "quick_cache", "S3-FIFO", "ARC"];

pub(crate) const POLICIES: &[(&str, Hits)] = &[
    (OURS, |keys, room| bufcache(keys, room, Eviction::A2)),
    ("clock", |keys, room| bufcache(keys, room, Eviction::Clock)),
    ("lru", lru),
    ("quick_cache", quick_cache),
    ("S3-FIFO", s3_fifo),
    ("ARC", arc),
];

/// Reads cost nothing, and bring nothing.
struct Nothing;

impl BlockDevice for Nothing {
    fn len(&self) -> u64 {
        1 << 42
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        Ok(buf.len())
    }
}

/// The cache itself, with its smallest blocks.
fn bufcache(keys: &[u32], room: usize, eviction: Eviction) -> u64 {
    const BLOCK: usize = 512;
    let builder = Cache::builder(room * BLOCK).block_sizes(BLOCK, BLOCK).eviction(eviction);
    let cache = builder.build().expect(OPEN);
    let device = cache.attach(Nothing, BLOCK).expect(OPEN);
    for &key in keys {
        drop(device.get(u64::from(key)).expect(OPEN));
    }
    let stats = cache.stats();
    stats.get - stats.misses
}

type Keys = LruCache<u32, (), FxBuildHasher>;

fn lru(keys: &[u32], room: usize) -> u64 {
    let mut cache = Keys::with_hasher(NonZeroUsize::new(room).expect("room"), FxBuildHasher);
    let hit = |key: &&u32| cache.put(**key, ()).is_some();
    keys.iter().filter(hit).count() as u64
}

/// In one part, which is the best for its hits.
fn quick_cache(keys: &[u32], room: usize) -> u64 {
    let mut cache = quick_cache::unsync::Cache::<u32, ()>::new(room);
    let mut hits = 0;
    for key in keys {
        if cache.get(key).is_some() {
            hits += 1;
        } else {
            cache.insert(*key, ());
        }
    }
    hits
}

/// S3-FIFO as its authors have it (SOSP 2023): a tenth on probation, a ghost for each in main.
fn s3_fifo(keys: &[u32], room: usize) -> u64 {
    let probation = (room / 10).max(1);
    let mut used: HashMap<u32, u8, FxBuildHasher> = HashMap::default();
    let (mut small, mut main) = (VecDeque::new(), VecDeque::new());
    let mut ghosts = Keys::unbounded_with_hasher(FxBuildHasher);
    let mut hits = 0;
    for &key in keys {
        if let Some(used) = used.get_mut(&key) {
            *used = (*used + 1).min(3);
            hits += 1;
            continue;
        }
        while small.len() + main.len() >= room {
            if small.len() >= probation || main.is_empty() {
                let oldest = small.pop_front().expect("the cache is full");
                if used[&oldest] > 1 {
                    used.insert(oldest, 0);
                    main.push_back(oldest);
                    continue;
                }
                used.remove(&oldest);
                ghosts.put(oldest, ());
                if ghosts.len() > room - probation {
                    ghosts.pop_lru();
                }
            } else if let Some(oldest) = main.pop_front() {
                match used[&oldest] {
                    0 => _ = used.remove(&oldest),
                    times => {
                        used.insert(oldest, times - 1);
                        main.push_back(oldest);
                    }
                }
            }
        }
        used.insert(key, 0);
        if ghosts.pop(&key).is_some() { main.push_back(key) } else { small.push_back(key) }
    }
    hits
}

/// ARC as its authors have it (FAST 2003).
fn arc(keys: &[u32], room: usize) -> u64 {
    let [mut recent, mut frequent, mut recent_ghosts, mut frequent_ghosts] =
        [(); 4].map(|()| Keys::unbounded_with_hasher(FxBuildHasher));
    let (mut target, mut hits) = (0_usize, 0);
    for &key in keys {
        if recent.pop(&key).is_some() || frequent.contains(&key) {
            frequent.put(key, ());
            hits += 1;
            continue;
        }
        let from_recent = recent_ghosts.contains(&key);
        let from_frequent = !from_recent && frequent_ghosts.contains(&key);
        let mut full = true;
        if from_recent {
            let step = (frequent_ghosts.len() / recent_ghosts.len()).max(1);
            target = (target + step).min(room);
        } else if from_frequent {
            let step = (recent_ghosts.len() / frequent_ghosts.len()).max(1);
            target = target.saturating_sub(step);
        } else {
            let first = recent.len() + recent_ghosts.len();
            let all = first + frequent.len() + frequent_ghosts.len();
            full = all >= room;
            if first == room {
                if recent.len() < room {
                    recent_ghosts.pop_lru();
                } else {
                    recent.pop_lru();
                    full = false;
                }
            } else if all >= 2 * room {
                frequent_ghosts.pop_lru();
            }
        }
        if full && recent.len() + frequent.len() >= room {
            let over = recent.len() > target || (from_frequent && recent.len() == target);
            let (from, to) = if !recent.is_empty() && over {
                (&mut recent, &mut recent_ghosts)
            } else {
                (&mut frequent, &mut frequent_ghosts)
            };
            if let Some((oldest, ())) = from.pop_lru() {
                to.put(oldest, ());
            }
        }
        if from_recent || from_frequent {
            recent_ghosts.pop(&key);
            frequent_ghosts.pop(&key);
            frequent.put(key, ());
        } else {
            recent.put(key, ());
        }
    }
    hits
}
