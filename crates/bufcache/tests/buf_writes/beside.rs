//! An operation of another thread that stands still in the device: what the first thread does meanwhile
//! comes between the begin and the end of it, wherever the device has it.

use std::thread::{Builder, JoinHandle};

use super::disk::BESIDE;
use super::steps::{Wipe, write_past};
use super::*;

/// The steps that an operation stands still for, at most.
const STEPS: usize = 8;

pub(super) struct Beside {
    which: usize,
    thread: JoinHandle<Result<(), WriteError>>,
    what: What,
    steps: usize,
}

enum What {
    Wipe(Wipe),
    /// What was settled when it began, and how many syncs had failed.
    Sync(Vec<usize>, u64),
}

impl Beside {
    /// Whether the device may change this block.
    pub(super) fn changes(&self, which: usize, block: u64) -> bool {
        let wiped = |wipe: &Wipe| wipe.blocks.contains(&block);
        which == self.which && matches!(&self.what, What::Wipe(wipe) if wiped(wipe))
    }

    /// The most blocks that are neither written nor evicted meanwhile.
    pub(super) fn most_marked(&self) -> usize {
        match &self.what {
            What::Wipe(wipe) => wipe.blocks.clone().count(),
            What::Sync(..) => 0,
        }
    }

    /// Whether a step would wait until this operation has ended.
    fn is_waited_for(&self, op: u8, which: usize, blocks: &Range<u64>) -> bool {
        match (op, &self.what) {
            (20..=22, _) => true,
            _ if which != self.which => false,
            (0..=2 | 5..=8 | 12..=16, What::Wipe(wipe)) => {
                blocks.start < wipe.blocks.end && wipe.blocks.start < blocks.end
            }
            (10..=13, What::Sync(..)) => true,
            _ => false,
        }
    }
}

impl Machine<'_> {
    /// Lets what stands still go on after some steps. Returns whether this step would wait for it.
    pub(super) fn must_not(&mut self, op: u8, which: usize, blocks: &Range<u64>) -> bool {
        let Some(beside) = &mut self.beside else { return false };
        beside.steps -= 1;
        let waits = beside.is_waited_for(op, which, blocks);
        if beside.steps == 0 || op == 21 {
            self.end_beside();
        }
        waits
    }

    /// Begins an operation of another thread, which stands still before the device does it or after that, and
    /// perhaps fails then.
    pub(super) fn begin_beside(&mut self, which: usize, blocks: Range<u64>, how: u8, fails: bool) {
        if self.states[which].closed || self.states[which].poisoned {
            return;
        }
        let (device, disk) = (self.device(which).clone(), Arc::clone(&self.places[which].disk));
        let zeros = vec![0; blocks.clone().count() * PARTS];
        let range = blocks.clone();
        type Call = Box<dyn FnOnce() -> Result<(), WriteError> + Send>;
        let (operation, what, call): (_, _, Call) = match how % 5 {
            0 => {
                let (values, bytes) = self.fresh(which, &blocks);
                let wipe = self.begin_wipe(which, blocks, values, Operation::Write);
                let call = move || write_past(&device, &disk, &range, &bytes);
                (Operation::Write, What::Wipe(wipe), Box::new(call))
            }
            1 => {
                let wipe = self.begin_wipe(which, blocks, zeros, Operation::Discard);
                let call = move || device.discard(range);
                (Operation::Discard, What::Wipe(wipe), Box::new(call))
            }
            2 => {
                let wipe = self.begin_wipe(which, blocks, zeros, Operation::Zero);
                let call = move || device.zero(range);
                (Operation::Zero, What::Wipe(wipe), Box::new(call))
            }
            _ => {
                let settled = self.states[which].model.settled();
                let failed = self.disk(which).failures(Operation::Sync);
                let call = move || device.sync();
                (Operation::Sync, What::Sync(settled, failed), Box::new(call))
            }
        };
        let disk = self.disk(which);
        disk.close(operation, how >= 5);
        if fails {
            disk.fail(operation, Fault::Error(libc::EIO));
        }
        let thread = Builder::new().name(BESIDE.into()).spawn(call).expect("a thread");
        disk.wait_for_gate(|| thread.is_finished());
        self.beside = Some(Beside { which, thread, what, steps: STEPS });
    }

    /// Lets the operation go on, if there is one, and looks at its result.
    pub(super) fn end_beside(&mut self) {
        let Some(Beside { which, thread, what, .. }) = self.beside.take() else { return };
        let disk = self.disk(which);
        disk.open();
        let result = thread.join().expect("no panic but in the device");
        self.see_failures();
        match what {
            // Another thread may have had a block marked for longer than the cache waits.
            What::Wipe(_) if matches!(result, Err(WriteError::Busy { .. })) => {}
            What::Wipe(wipe) => self.end_wipe(&wipe, result),
            What::Sync(settled, failed) => {
                let has_failed = disk.failures(Operation::Sync) > failed;
                match result {
                    Ok(()) | Err(WriteError::Earlier { .. }) => {
                        assert!(!has_failed, "the device has failed");
                        self.states[which].model.promise_until(&settled);
                    }
                    Err(WriteError::Poisoned { .. }) => assert!(has_failed, "poisoned by nothing"),
                    Err(
                        WriteError::Io { .. }
                        | WriteError::Panicked { .. }
                        | WriteError::Busy { .. },
                    ) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}
