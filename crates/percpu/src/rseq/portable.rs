//! Builds without sections: every operation is refused, and the compiler removes the code behind
//! it.

use crate::cpu::CpuId;
use crate::rseq::operations::Refused;
use crate::rseq::state::Sections;
use crate::sync::atomic::AtomicU64;
use crate::words::Words;

pub(super) fn state() -> &'static Sections {
    if cfg!(offlock_virtual_cpu) { &Sections::VirtualCpus } else { &Sections::NotBuilt }
}

#[inline(always)]
pub(super) fn available() -> bool {
    false
}

#[inline(always)]
pub(super) fn add(_: &AtomicU64, _: &Words, _: u64) -> Result<CpuId, Refused> {
    Err(Refused::NoCpu)
}

#[inline(always)]
pub(super) fn add_while(_: &AtomicU64, _: u64, _: &Words, _: u64) -> Result<CpuId, Refused> {
    Err(Refused::NoCpu)
}

#[inline(always)]
pub(super) fn add_within(_: &AtomicU64, _: &Words, _: i64, _: i64) -> Result<CpuId, Refused> {
    Err(Refused::NoCpu)
}

pub(super) fn swap(_: &AtomicU64, _: &Words, _: u64) -> Result<(CpuId, u64), Refused> {
    Err(Refused::NoCpu)
}
