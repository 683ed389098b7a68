//! B5: what XFS asked its buffer cache for, asked again: the two recordings, one thread, in the order
//! in which it happened. A replay begins with an empty cache that has its memory already.

use std::hint::black_box;
use std::sync::Arc;

use bufcache::{BlockDevice, Cache, Device};
use harness::timed::{Row, measure};
use harness::{Plan, Report};
use recordings::{BufferEvent, CREATE8, Recording, UNLINK8};

use crate::ours::OPEN;
use crate::pages::{fill, word};
use crate::peers::Quick;

/// The unit of the recordings, in bytes.
const SECTOR: usize = 512;
/// The lengths that are in them, in sectors, and one between.
const LENGTHS: [u16; 6] = [1, 2, 4, 8, 16, 32];
/// Buffers that there is room for: more than twice what is asked for.
const ROOM: usize = 4096;

/// The gets of a recording; addresses and lengths are in sectors.
pub(crate) fn gets(recording: &Recording) -> Vec<BufferEvent> {
    let mut events = recording.buffers().unwrap_or_else(|error| panic!("{error}"));
    events.retain(|event| !event.is_made);
    events
}

/// Something that has buffers of several lengths.
trait Buffers {
    const NAME: &'static str;
    fn new() -> Self;
    /// Lets go of all of them.
    fn empty(&self);
    fn read(&self, get: BufferEvent) -> u64;
}

/// A disk whose sectors say their numbers.
struct Disk;

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        (1 << 32) * SECTOR as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        fill(offset / SECTOR as u64, buf);
        Ok(buf.len())
    }
}

/// The disk, attached to a cache for each length: a block is asked for with one of them only.
struct Ours {
    caches: [Cache; LENGTHS.len()],
    disks: [Device; LENGTHS.len()],
}

impl Buffers for Ours {
    const NAME: &'static str = "bufcache";

    fn new() -> Self {
        let sizes = LENGTHS.map(|length| usize::from(length) * SECTOR);
        let caches =
            sizes.map(|size| Cache::builder(ROOM * size).block_size(size).build().expect(OPEN));
        let disks = caches.each_ref().map(|cache: &Cache| cache.attach(Disk).expect(OPEN));
        Self { caches, disks }
    }

    fn empty(&self) {
        for _ in 0..8 {
            // What was used often survives a pass.
            self.caches.iter().for_each(|cache| _ = cache.shrink(usize::MAX));
        }
    }

    #[inline(always)]
    fn read(&self, get: BufferEvent) -> u64 {
        let shift = get.length.ilog2();
        let block = u64::from(get.address >> shift);
        word(&self.disks[shift as usize].get(block).expect(OPEN), 0)
    }
}

impl Buffers for Quick<u32, [u8]> {
    const NAME: &'static str = "quick_cache";

    fn new() -> Self {
        Self::with_room(ROOM)
    }

    fn empty(&self) {
        self.0.clear();
    }

    #[inline(always)]
    fn read(&self, get: BufferEvent) -> u64 {
        self.word(get.address, 0, || {
            let mut bytes: Arc<[u8]> = vec![0; usize::from(get.length) * SECTOR].into();
            fill(u64::from(get.address), Arc::get_mut(&mut bytes).expect("just made"));
            bytes
        })
    }
}

fn row<'a, B: Buffers>(buffers: &'a B, gets: &'a [BufferEvent]) -> Row<'a> {
    Row::after(
        B::NAME,
        || buffers.empty(),
        move || {
            for &get in gets {
                assert_eq!(black_box(buffers.read(get)), u64::from(get.address));
            }
            gets.len() as u64
        },
    )
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    for recording in [UNLINK8, CREATE8] {
        let gets = gets(&recording);
        let (ours, quick) = (Ours::new(), Quick::<u32, [u8]>::new());
        let name = format!("{}, {} gets", recording.name, gets.len());
        let [rounds] = measure([&name], plan, vec![row(&ours, &gets), row(&quick, &gets)]);
        report.compare(&rounds, &[Ours::NAME]);
        let ratio = rounds.time_ratio(Ours::NAME, <Quick<u32, [u8]>>::NAME);
        report.record(&format!("B5.{}.quick_cache", recording.name), ratio);
        ours.caches.iter().for_each(|cache| println!("- bufcache: {}", cache.stats()));
    }
}
