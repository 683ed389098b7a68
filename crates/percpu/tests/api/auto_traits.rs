//! `Send`, `Sync` and the variance of the public types. A compile-time test.
//!
//! A type that loses `Send` or `Sync` breaks its callers, and one that gains it may be unsound. The
//! tests of locks and references have the same checks.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::MutexGuard;

use offlock_percpu::fence::Strategy;
use offlock_percpu::{
    AllocError, Backend, Capabilities, CpuId, CpuList, NodeId, PerCpu, PerCpuCounter, RseqState,
    RseqUnavailable, Sections, Source, Topology,
};

/// `none::<T>` names one function only if `T` has none of the traits.
trait NotSend<A> {
    fn none() {}
}
struct IsSend;
impl<T: ?Sized> NotSend<()> for T {}
impl<T: ?Sized + Send> NotSend<IsSend> for T {}

trait NotSync<A> {
    fn none() {}
}
struct IsSync;
impl<T: ?Sized> NotSync<()> for T {}
impl<T: ?Sized + Sync> NotSync<IsSync> for T {}

fn everywhere<T: Send + Sync + Unpin>() {}
fn send<T: Send>() {}

/// Checks the traits of plain data: copied, compared and printed.
fn plain<T: Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static>() {}

#[test]
fn facts_are_plain_values_on_every_thread() {
    plain::<CpuId>();
    plain::<NodeId>();
    plain::<Backend>();
    plain::<Capabilities>();
    plain::<Source>();
    plain::<RseqState>();
    plain::<Sections>();
    plain::<Strategy>();
    plain::<RseqUnavailable>();
    everywhere::<Topology>();
    everywhere::<&'static Topology>();
    everywhere::<CpuList>();
    everywhere::<AllocError>();
}

#[test]
fn counters_are_shared() {
    everywhere::<PerCpuCounter>();
}

#[test]
fn slots_go_where_their_values_go() {
    everywhere::<PerCpu<u64>>();
    send::<PerCpu<Cell<u8>>>();
    <PerCpu<Cell<u8>> as NotSync<_>>::none();
    <PerCpu<Rc<u8>> as NotSend<_>>::none();
    <PerCpu<Rc<u8>> as NotSync<_>>::none();
    // `T: Sync` is not enough, because any thread that runs on a CPU uses its slot.
    <PerCpu<MutexGuard<'static, u8>> as NotSend<_>>::none();
    <PerCpu<MutexGuard<'static, u8>> as NotSync<_>>::none();
}

/// A longer lifetime may stand for a shorter one, inside and outside.
#[expect(dead_code, reason = "compiled for the variance they need")]
mod covariant {
    use super::*;

    fn slots<'a>(slots: PerCpu<&'static u8>) -> PerCpu<&'a u8> {
        slots
    }
}
