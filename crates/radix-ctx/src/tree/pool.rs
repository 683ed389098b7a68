//! Memory for nodes, allocated before it is needed.

use std::ptr::NonNull;

use percpu::AllocError;
use percpu::sync::quarantine::Watched;

use super::node::{Memory, Node};

/// A list of memory for nodes, linked through the memory itself.
#[derive(Debug)]
pub(super) struct Pool {
    first: Option<NonNull<Watched<Node>>>,
    len: usize,
}

impl Pool {
    pub(super) const fn new() -> Self {
        Self { first: None, len: 0 }
    }

    fn push(&mut self, memory: Memory) {
        let at = memory.into_raw();
        // SAFETY: `push` owns the memory, which is aligned for a link and larger than one.
        unsafe { at.cast().write(self.first) };
        self.first = Some(at);
        self.len += 1;
    }

    pub(super) fn pop(&mut self) -> Option<Memory> {
        let at = self.first?;
        // SAFETY: `push` wrote the link.
        self.first = unsafe { at.cast().read() };
        self.len -= 1;
        // SAFETY: `push` took it from a `Memory`, and it has left the list.
        Some(unsafe { Memory::from_raw(at) })
    }

    /// Takes memory for `count` nodes out of the pool, after a `fill`. On failure the pool has as much as
    /// before.
    pub(super) fn take(&mut self, count: usize) -> Result<Self, AllocError> {
        self.fill(count)?;
        let mut taken = Self::new();
        for _ in 0..count {
            let Some(memory) = self.pop() else { unreachable!("`fill` saw to it") };
            taken.push(memory);
        }
        Ok(taken)
    }

    /// Allocates until the pool has memory for `count` nodes. On failure it has as much as before.
    pub(super) fn fill(&mut self, count: usize) -> Result<(), AllocError> {
        let before = self.len;
        if count > isize::MAX as usize / Memory::BYTES {
            return Err(AllocError::new()); // before the attempt uses up the memory of the system
        }
        while self.len < count {
            match Memory::new() {
                Ok(memory) => self.push(memory),
                Err(error) => {
                    self.shrink_to(before);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Frees all memory but that for `count` nodes.
    pub(super) fn shrink_to(&mut self, count: usize) {
        while self.len > count {
            drop(self.pop());
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}
