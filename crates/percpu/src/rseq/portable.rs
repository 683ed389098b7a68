//! Builds without sections. The compiler removes the code behind these.

use offlock_sync::atomic::AtomicU64;

use super::Refused;
use super::cells::{Block, Cell, Head};
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

#[allow(
    missing_docs,
    clippy::missing_safety_doc,
    reason = "no function of this type can be called"
)]
impl Sections {
    pub fn find() -> Option<Self> {
        None
    }

    pub unsafe fn insert<T>(
        self,
        _: *const Head,
        _: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused> {
        match self {}
    }

    pub unsafe fn refill(self, _: *const Block) -> Result<(), Refused> {
        match self {}
    }

    pub unsafe fn remove<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }

    pub unsafe fn remove_remote<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }
}
