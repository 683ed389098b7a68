//! What a device's blocks must be: in the cache, and after a loss of power.

use super::disk::{BLOCKS, Disk, PARTS};

/// Of each sector.
#[derive(Clone, Debug)]
struct Sector {
    /// What a get must say.
    now: u32,
    /// All that was put there, oldest first; what was to be zeroed may have been.
    history: Vec<u32>,
    /// In that order: what the next good sync makes durable, at least.
    settled: usize,
    /// What must survive a loss of power, at least.
    promised: usize,
}

pub(super) struct Model {
    sectors: Vec<Sector>,
    last: u32,
}

impl Model {
    pub(super) fn new() -> Self {
        let sector = Sector { now: 1, history: vec![1], settled: 0, promised: 0 };
        Self { sectors: vec![sector; BLOCKS as usize * PARTS], last: 1 }
    }

    fn block_mut(&mut self, block: u64) -> &mut [Sector] {
        let first = block as usize * PARTS;
        &mut self.sectors[first..first + PARTS]
    }

    /// What the block must be.
    pub(super) fn now(&self, block: u64) -> Vec<u32> {
        let first = block as usize * PARTS;
        self.sectors[first..first + PARTS].iter().map(|sector| sector.now).collect()
    }

    /// A value that no sector had.
    pub(super) fn fresh(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    /// The block was written.
    pub(super) fn write(&mut self, block: u64, values: &[u32]) {
        for (sector, &value) in self.block_mut(block).iter_mut().zip(values) {
            if sector.history.last() != Some(&value) {
                sector.history.push(value);
            }
            (sector.now, sector.settled) = (value, sector.history.len() - 1);
        }
    }

    /// The device is about to put that there, and may do it in part.
    pub(super) fn may_become(&mut self, block: u64, values: &[u32]) {
        for (sector, &value) in self.block_mut(block).iter_mut().zip(values) {
            sector.history.push(value);
        }
    }

    /// It has done so.
    pub(super) fn became(&mut self, block: u64, values: &[u32]) {
        for (sector, &value) in self.block_mut(block).iter_mut().zip(values) {
            (sector.now, sector.settled) = (value, sector.history.len() - 1);
        }
    }

    /// It has or has not, sector by sector: this is what is there.
    ///
    /// # Panics
    ///
    /// Panics if it is anything else.
    pub(super) fn perhaps_became(&mut self, block: u64, values: &[u32], there: &[u32]) {
        let sectors = self.block_mut(block).iter_mut();
        for ((sector, &value), &there) in sectors.zip(values).zip(there) {
            let may_be = there == sector.now || there == value;
            assert!(may_be, "block {block}: {there}, and neither {value} nor {sector:?}");
            sector.now = there;
        }
    }

    /// The block was invalidated, so it has the bytes of the device. A sync may or may not make
    /// them durable.
    pub(super) fn forgotten(&mut self, block: u64, values: &[u32]) {
        for (sector, &value) in self.block_mut(block).iter_mut().zip(values) {
            assert!(sector.history.contains(&value), "block {block}: {value} of {sector:?}");
            (sector.now, sector.settled) = (value, sector.promised);
        }
    }

    /// What was written since the last good sync may be lost.
    pub(super) fn lost(&mut self, block: u64) {
        self.block_mut(block).iter_mut().for_each(|sector| sector.settled = sector.promised);
    }

    /// It is durable.
    pub(super) fn promise(&mut self, block: u64) {
        for sector in self.block_mut(block) {
            sector.promised = sector.settled.max(sector.promised);
        }
    }

    /// How far each sector is settled.
    pub(super) fn settled(&self) -> Vec<usize> {
        self.sectors.iter().map(|sector| sector.settled).collect()
    }

    /// What was [settled](Self::settled) at some time, and is not lost since, is durable.
    pub(super) fn promise_until(&mut self, settled: &[usize]) {
        for (sector, &before) in self.sectors.iter_mut().zip(settled) {
            sector.promised = sector.settled.min(before).max(sector.promised);
        }
    }

    /// Whether the device has what was promised, whatever survives: the least, the most, and
    /// another.
    pub(super) fn check_power_cut(&self, disk: &Disk, mut seed: u64) {
        for image in 0..3 {
            let left = disk.after_power_cut(|_, versions| match image {
                0 => 0,
                1 => versions,
                _ => {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) as usize % versions
                }
            });
            for (at, (sector, value)) in self.sectors.iter().zip(left).enumerate() {
                let may_be = &sector.history[sector.promised..];
                assert!(may_be.contains(&value), "sector {at}: {value} was promised {sector:?}");
            }
        }
    }
}
