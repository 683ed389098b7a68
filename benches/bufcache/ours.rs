//! bufcache itself.

use std::hint::{black_box, spin_loop};
use std::io;
use std::time::{Duration, Instant};

use bufcache::{BlockDevice, Cache, Device};
use harness::timed::{Row, on_one_cpu};
use harness::{Plan, percentile};

use crate::pages::{PAGE, Pages, fill, word};

/// A device of which each page says its number: nothing is stored.
pub(crate) struct Numbers;

impl BlockDevice for Numbers {
    fn len(&self) -> u64 {
        MANY
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        fill(offset / PAGE as u64, buf);
        Ok(buf.len())
    }

    fn write(&self, _: u64, buf: &[u8]) -> io::Result<()> {
        black_box(buf);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A device whose reads spin for this duration, and do nothing else.
pub(crate) struct Slow(pub(crate) Duration);

impl BlockDevice for Slow {
    fn len(&self) -> u64 {
        MANY
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        let start = Instant::now();
        while self.0 > Duration::ZERO && start.elapsed() < self.0 {
            spin_loop();
        }
        Ok(buf.len())
    }
}

/// More bytes than anything here asks for.
const MANY: u64 = 1 << 47;

/// Returns this percentile of the nanoseconds that a get of each of these blocks takes.
pub(crate) fn times(device: &Device, blocks: impl Iterator<Item = u64>, percent: f64) -> f64 {
    let time = |block| {
        let start = Instant::now();
        black_box(device.get(block).expect(OPEN)[0]);
        start.elapsed().as_nanos() as f64
    };
    percentile(&blocks.map(time).collect::<Vec<_>>(), percent).unwrap_or(f64::NAN)
}

/// The row `name/1`, of which an operation takes this percentile, in nanoseconds.
pub(crate) fn percentile_of<'a>(name: &str, mut ns: impl FnMut() -> f64 + 'a) -> Row<'a> {
    Row::of_windows(format!("{name}/1"), 1, move |_| Some([1e9 / on_one_cpu(&mut ns)]))
}

/// Rounds for windows that are measured without a limit of their time.
pub(crate) fn few(plan: &Plan) -> Plan {
    Plan { rounds: plan.rounds.min(15), limit: Duration::MAX, ..plan.clone() }
}

/// The message of `expect`: no get is refused.
pub(crate) const OPEN: &str = "memory, a device of numbers that does not fail, and no fork";

pub(crate) struct Ours {
    device: Device,
}

impl Ours {
    /// A full cache with room for so many, and a page in it whose hits are sampled.
    pub(crate) fn sampled(room: usize) -> (Self, u32) {
        let ours = Self::filled(4 * room, room);
        let hot = (0..4 * room as u32).rev().find(|&page| ours.device.is_sampled(u64::from(page)));
        (ours, hot.expect("one page in sixteen is sampled"))
    }
}

impl Pages for Ours {
    const NAME: &'static str = "bufcache";

    fn new(room: usize) -> Self {
        let cache = Cache::new(room * PAGE).expect(OPEN);
        let device = cache.attach(Numbers).expect(OPEN);
        Self { device }
    }

    #[inline(always)]
    fn read(&self, number: u64, at: usize) -> u64 {
        word(&self.device.get(number).expect(OPEN), at)
    }
}
