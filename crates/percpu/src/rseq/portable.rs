//! Builds without sections. The compiler removes the code behind these.

use offlock_sync::atomic::AtomicU64;

use super::Refused;
use super::cells::{Block, Cell, CellSections, Head};
use crate::words::Words;

#[inline(always)]
pub(crate) fn state() -> Result<(), &'static str> {
    Err(if cfg!(offlock_virtual_cpu) { "the CPUs are virtual" } else { "not in this build" })
}

#[inline(always)]
pub(crate) fn add(_: Option<(&AtomicU64, u64)>, _: &Words, _: u64) -> Result<(), Refused> {
    Err(Refused::WrongCpu)
}

/// The sections of this build, a type without values.
#[derive(Clone, Copy, Debug)]
pub enum Sections {}

impl Sections {
    /// Returns the sections, if they run in this process: never.
    pub fn find() -> Option<Self> {
        None
    }
}

impl CellSections for Sections {
    unsafe fn insert<T>(
        self,
        _: *const Head,
        _: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused> {
        match self {}
    }

    unsafe fn refill(self, _: *const Block) -> Result<(), Refused> {
        match self {}
    }

    unsafe fn remove<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }

    unsafe fn remove_remote<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }
}
