//! The sections of `offlock_percpu::cells` for the model checkers: the same steps by plain loads and
//! stores, under the mutex of the virtual CPU. `heavy_rseq` takes that mutex, so it waits for a section
//! where the kernel restarts it.

use std::ptr;

use offlock_percpu::cells::{Block, Cell, CellSections, FREE, Head, Refused};
use offlock_sync::atomic::Ordering;
use offlock_sync::{check, load_own, order, virtual_cpu};

/// The sections of the virtual CPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sections(());

impl Sections {
    /// Returns the sections, if they run in this model.
    pub(crate) fn find() -> Option<Self> {
        virtual_cpu::sections().then_some(Self(()))
    }

    fn alone_on(block: &Block) -> Result<impl Drop + use<>, Refused> {
        let cpu = virtual_cpu::current();
        if !virtual_cpu::has_id() || cpu.get() != block.cpu {
            return Err(Refused::WrongCpu);
        }
        Ok(virtual_cpu::alone_on(cpu))
    }

    fn may_remove(head: &Head, special: u64, index: u32) -> Result<(), Refused> {
        // Ordering: Acquire, as in the assembly. `heavy_rseq` follows the store.
        let open = head.gate.load(Ordering::Acquire) == 0;
        let open = check!("cell remove: there is no snapshot", open);
        let unmarked = special & 1 << index == 0;
        if open && check!("cell remove: no walk has marked the entry", unmarked) {
            return Ok(());
        }
        Err(Refused::Closed)
    }
}

impl CellSections for Sections {
    unsafe fn insert<T>(
        self,
        head: *const Head,
        source: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused> {
        let cpu = virtual_cpu::current();
        if !virtual_cpu::has_id() {
            return Err(Refused::WrongCpu);
        }
        let _alone = virtual_cpu::alone_on(cpu);
        // SAFETY: by the contract of this function the list lives during the call.
        let head = unsafe { &*head };
        // Ordering: Acquire, as in the assembly.
        let open = head.add_gate.load(Ordering::Acquire) == 0;
        if !check!("cell insert: the list is open", open) {
            return Err(Refused::Closed);
        }
        // SAFETY: by the contract of this function there is a shard for each CPU, which begins with
        // its current block.
        let current = unsafe { &*head.shards.byte_add(cpu.index() * head.stride) };
        let at = current.load(Ordering::Relaxed).cast_const();
        // SAFETY: by the contract of this function a current block lives as long as the list.
        let Some(block) = (unsafe { at.as_ref() }) else { return Err(Refused::NoRoom) };
        let (home, seen) = (load_own(&block.home), load_own(&block.seen));
        let free = !(home ^ seen);
        if free == 0 {
            return Err(Refused::NoRoom);
        }
        let index = free.trailing_zeros();
        block.lives();
        block.moves(index);
        // SAFETY: the cell is free (invariant 2), and only sections of this CPU take free cells.
        unsafe { ptr::copy_nonoverlapping(source, Block::cell::<T>(at, index), 1) };
        block.adds.store(load_own(&block.adds) + 1, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire of a walk's load of `home`; it carries the value.
        let order = order!(Release, "cell insert: the value is in its cell");
        block.home.store(home ^ 1 << index, order);
        Ok((at, index))
    }

    unsafe fn refill(self, at: *const Block) -> Result<(), Refused> {
        // SAFETY: by the contract of this function the block is alive.
        let block = unsafe { &*at };
        let _alone = Self::alone_on(block)?;
        // Ordering: Acquire, both. They pair with the Release of a removal; the first carries its
        // use of the value and its store of `held`, the second the last use by a walk.
        let remote = block.remote.load(order!(Acquire, "cell refill: `remote` before `held`"));
        let held = block.held.load(order!(Acquire, "cell refill: after the last unpin"));
        let home = load_own(&block.home);
        let held = if check!("cell refill: held cells are not free", held == 0) { 0 } else { held };
        let taken = home ^ remote | held | !block.mask;
        let mut new = !taken & (home ^ load_own(&block.seen));
        let misses = load_own(&block.misses) + u64::from(new.count_ones());
        while new != 0 {
            let state = &block.states[new.trailing_zeros() as usize];
            new &= new - 1;
            // Only FREE is replaced: another state has the pins of a walk with a stale word.
            if check!("cell refill: the state is free", state.load(Ordering::Acquire) == FREE) {
                state.store(0, Ordering::Release);
            }
        }
        // SAFETY: by the contract of this function the shard lives as long as the block.
        unsafe { &*block.current }.store(at.cast_mut(), Ordering::Relaxed);
        block.misses.store(misses, Ordering::Relaxed);
        block.seen.store(home ^ taken, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn remove<T>(
        self,
        head: *const Head,
        at: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused> {
        // SAFETY: by the contract of this function the block is alive.
        let block = unsafe { &*at };
        let _alone = Self::alone_on(block)?;
        // SAFETY: by the contract of this function the list lives during the call.
        let head = unsafe { &*head };
        Self::may_remove(head, block.special.load(Ordering::Acquire), index)?;
        block.moves(index);
        // SAFETY: the entry is the caller's, and no walk pins it: its mark is not set.
        unsafe { ptr::copy_nonoverlapping(Block::cell::<T>(at, index), target, 1) };
        // SAFETY: by the contract of this function the shard lives as long as the block.
        unsafe { &*block.current }.store(at.cast_mut(), Ordering::Relaxed);
        // Ordering: Release, as in the assembly.
        block.home.store(load_own(&block.home) ^ 1 << index, Ordering::Release);
        Ok(())
    }

    unsafe fn remove_remote<T>(
        self,
        head: *const Head,
        at: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused> {
        if !virtual_cpu::has_id() {
            return Err(Refused::WrongCpu);
        }
        let _alone = virtual_cpu::alone_on(virtual_cpu::current());
        // SAFETY: by the contract of this function the block is alive.
        let block = unsafe { &*at };
        // SAFETY: by the contract of this function the list lives during the call.
        let head = unsafe { &*head };
        Self::may_remove(head, block.special_remote.load(Ordering::Acquire), index)?;
        block.moves(index);
        // SAFETY: the entry is the caller's, and no walk pins it: its mark is not set.
        unsafe { ptr::copy_nonoverlapping(Block::cell::<T>(at, index), target, 1) };
        // Ordering: AcqRel. Release pairs with the Acquire in `refill`; it carries the copy above.
        // Acquire, as in the assembly.
        let order = order!(AcqRel, "cell remove: the value is out of its cell");
        block.remote.fetch_xor(1 << index, order);
        Ok(())
    }
}
