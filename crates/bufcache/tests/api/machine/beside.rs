//! An operation of another thread that stands still in the device: what the first thread does meanwhile
//! comes between the begin and the end of it, wherever the device has it.

use std::thread::{Builder, JoinHandle};

use bufcache_test::Fault;

use super::*;

/// The steps that an operation stands still for, at most.
const STEPS: usize = 8;

pub(super) struct Beside {
    which: usize,
    /// The blocks that the operation changes; none if it is a sync.
    wiped: Range<u64>,
    thread: JoinHandle<()>,
    steps: usize,
}

impl Beside {
    /// Whether a step would wait until this operation has ended.
    fn is_waited_for(&self, op: u8, which: usize, blocks: &Range<u64>) -> bool {
        match op {
            20..=22 => true,
            _ if which != self.which => false,
            10..=13 if self.wiped.is_empty() => true,
            0..=2 | 5..=8 | 12..=16 => {
                blocks.start < self.wiped.end && self.wiped.start < blocks.end
            }
            _ => false,
        }
    }
}

impl World {
    /// Whether the operation beside may change this block.
    pub(super) fn changes_beside(&self, which: usize, block: u64) -> bool {
        let changes = |beside: &Beside| which == beside.which && beside.wiped.contains(&block);
        self.beside.lock().as_ref().is_some_and(changes)
    }

    /// The most blocks that are neither written nor evicted meanwhile; `None` if there is no such operation.
    pub(super) fn marked_beside(&self) -> Option<usize> {
        self.beside.lock().as_ref().map(|beside| beside.wiped.clone().count())
    }

    /// Lets what stands still go on after some steps. Returns whether this step would wait for it.
    pub(super) fn must_not(&self, op: u8, which: usize, blocks: &Range<u64>) -> bool {
        let mut beside = self.beside.lock();
        let Some(Beside { steps, .. }) = &mut *beside else { return false };
        *steps -= 1;
        let is_over = *steps == 0 || op == 21;
        let waits = beside.as_ref().is_some_and(|it| it.is_waited_for(op, which, blocks));
        drop(beside);
        if is_over {
            self.end_beside();
        }
        waits
    }

    /// Begins an operation of another thread, which stands still before the device does it or after that, and
    /// perhaps fails then.
    pub(super) fn begin_beside(
        self: &Arc<Self>,
        which: usize,
        device: &Device,
        blocks: Range<u64>,
        how: u8,
        fails: bool,
    ) {
        let disk = &self.disks[which];
        if disk.told().closed || disk.told().poisoned {
            return;
        }
        let wipes = [Operation::Write, Operation::Discard, Operation::Zero];
        let wipe = wipes.get(usize::from(how % 5)).copied();
        let operation = wipe.unwrap_or(Operation::Sync);
        let wiped = if wipe.is_some() { blocks } else { 0..0 };
        disk.close_gate(operation, how >= 5);
        if fails {
            disk.fail(operation, Fault::Error(libc::EIO));
        }
        let (world, device, range) = (Arc::clone(self), device.clone(), wiped.clone());
        let call = move || match wipe {
            Some(wipe) => world.wipe(&world.disks[which], &device, range, wipe),
            None => world.sync(&world.disks[which], &device),
        };
        let thread = Builder::new().name(BESIDE.into()).spawn(call).expect("a thread");
        disk.wait_for_gate(|| thread.is_finished());
        *self.beside.lock() = Some(Beside { which, wiped, thread, steps: STEPS });
    }

    /// Lets the operation go on, if there is one, to its end.
    pub(super) fn end_beside(&self) {
        let Some(Beside { which, thread, .. }) = self.beside.lock().take() else { return };
        self.disks[which].open_gate();
        thread.join().expect("no panic but in the device");
        self.disks.iter().for_each(Disk::see_failures);
    }
}
