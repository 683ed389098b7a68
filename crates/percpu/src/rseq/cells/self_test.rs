//! The start-up test of the sections: percpu-list runs none if an emulator gets them wrong. Like
//! `rseq::self_test`, it checks sections that are not interrupted.

use std::mem::MaybeUninit;
use std::ptr;

use super::{Block, Cell, FREE, Head, Refused, SHARD, Sections};
use crate::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// The value of the test: three words, of which one is not in a pair, and a drop.
pub(super) struct Value(pub(super) [u64; 3]);

impl Drop for Value {
    fn drop(&mut self) {}
}

/// A block with its cells.
#[repr(C)]
struct Whole {
    block: Block,
    cells: [Cell<Value>; 64],
}

/// A shard whose current block is its only one.
#[repr(C, align(128))]
struct Shard {
    current: AtomicPtr<Block>,
}

const _: () = assert!(size_of::<Shard>() == SHARD);

/// A list with one block for each CPU.
pub(super) struct TestList {
    pub(super) head: Head,
    shards: Box<[Shard]>,
}

// SAFETY: the blocks change by sections and atomic operations only, and are freed by the drop.
unsafe impl Send for TestList {}
// SAFETY: as above.
unsafe impl Sync for TestList {}

impl TestList {
    pub(super) fn new(cpus: u32) -> Self {
        let shards: Box<[Shard]> =
            (0..cpus).map(|_| Shard { current: AtomicPtr::default() }).collect();
        for (cpu, shard) in shards.iter().enumerate() {
            let word = || AtomicU64::new(0);
            let block = Block {
                home: word(),
                adds: word(),
                seen: word(),
                misses: word(),
                special: word(),
                mask: u64::MAX,
                current: ptr::from_ref(&shard.current),
                cpu: cpu as u32,
                slot: cpu as u32,
                states: [const { AtomicU32::new(0) }; 64],
                remote: word(),
                held: word(),
                special_remote: word(),
                next: AtomicPtr::default(),
                list: ptr::null(),
                deferred: word(),
                link: AtomicPtr::default(),
                serial: 0,
            };
            let cells = [const { Cell(MaybeUninit::uninit()) }; 64];
            let whole = Box::into_raw(Box::new(Whole { block, cells }));
            shard.current.store(whole.cast(), Ordering::Relaxed);
        }
        let first = ptr::from_ref(&shards[0]).cast();
        let gate = || AtomicU64::new(0);
        let head = Head { gate: gate(), add_gate: gate(), shards: first, stride: SHARD };
        Self { head, shards }
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        // SAFETY: the blocks live until the drop of the list.
        self.shards.iter().map(|shard| unsafe { &*shard.current.load(Ordering::Relaxed) })
    }

    pub(super) fn insert(
        &self,
        sections: Sections,
        value: [u64; 3],
    ) -> Result<(*const Block, u32), Refused> {
        let cell = Cell(MaybeUninit::new(Value(value)));
        // SAFETY: there is a shard for each CPU, whose current block has cells of `Value`.
        unsafe { sections.insert::<_, 0>(&raw const self.head, &raw const cell) }
    }

    /// Removes by a section on any CPU.
    pub(super) fn remove(
        &self,
        sections: Sections,
        (block, index): (*const Block, u32),
    ) -> Result<[u64; 3], Refused> {
        let mut out = Cell(MaybeUninit::<Value>::uninit());
        // SAFETY: the caller has the entry of the cell, in a block of this list.
        let mut done = unsafe { sections.remove(&raw const self.head, block, index, &raw mut out) };
        if done == Err(Refused::OtherCpu) {
            // SAFETY: as above.
            done = unsafe { sections.remove_remote(&raw const self.head, block, index, &raw mut out) };
        }
        // SAFETY: the section has moved the value, whose drop is empty.
        done.map(|()| unsafe { out.0.assume_init_ref() }.0)
    }
}

impl Drop for TestList {
    fn drop(&mut self) {
        for shard in &self.shards {
            // SAFETY: the pointer is that of a box of `Whole`, and the cells need no drop.
            drop(unsafe { Box::from_raw(shard.current.load(Ordering::Relaxed).cast::<Whole>()) });
        }
    }
}

/// Returns whether the sections do what they should.
pub(super) fn self_test(sections: Sections, cpus: u32) -> bool {
    let list = TestList::new(cpus);
    let total = |word: fn(&Block) -> &AtomicU64| -> u64 {
        list.blocks().map(|block| word(block).load(Ordering::Relaxed)).sum()
    };
    let live = || -> u32 {
        let bits = |block: &Block| {
            let word = block.home.load(Ordering::Relaxed) ^ block.remote.load(Ordering::Relaxed);
            word.count_ones()
        };
        list.blocks().map(bits).sum()
    };
    let value = [0x0123_4567_89ab_cdef, u64::MAX, 7];
    let (Ok(first), Ok(second)) = (list.insert(sections, value), list.insert(sections, [1; 3]))
    else {
        return false;
    };
    let mut right = live() == 2 && total(|block| &block.adds) == 2 && first != second;
    for (gate, closed) in [(&list.head.add_gate, true), (&list.head.gate, false)] {
        gate.store(1, Ordering::Relaxed);
        let refused = list.insert(sections, value).err() == Some(Refused::Closed);
        right &= refused == closed || { live() == 3 && !closed };
        right &= closed || list.remove(sections, first) == Err(Refused::Closed);
        gate.store(0, Ordering::Relaxed);
    }
    // SAFETY: the blocks of the list are alive.
    let block = unsafe { &*first.0 };
    for word in [&block.special, &block.special_remote] {
        word.store(1 << first.1, Ordering::Relaxed);
    }
    right &= list.remove(sections, first) == Err(Refused::Closed);
    for word in [&block.special, &block.special_remote] {
        word.store(0, Ordering::Relaxed);
    }
    right &=
        list.remove(sections, first) == Ok(value) && list.remove(sections, second) == Ok([1; 3]);

    // A removal by `remote` is a miss that a refill finds, and its state becomes 0.
    let Ok((at, index)) = list.insert(sections, value) else { return false };
    // SAFETY: the blocks of the list are alive.
    let block = unsafe { &*at };
    block.states[index as usize].store(FREE, Ordering::Relaxed);
    block.remote.fetch_xor(1 << index, Ordering::Relaxed);
    let before = block.misses.load(Ordering::Relaxed);
    // SAFETY: the block and its shard are alive.
    match unsafe { sections.refill(block) } {
        Ok(()) => {
            right &= block.misses.load(Ordering::Relaxed) > before
                && block.states[index as usize].load(Ordering::Relaxed) == 0;
        }
        // The thread has migrated, which a busy machine may do; the stress test covers the rest.
        Err(refused) => right &= refused == Refused::OtherCpu,
    }
    right
}
