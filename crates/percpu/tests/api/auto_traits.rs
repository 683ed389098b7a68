//! What the public types may do on threads, and what may be shortened. Compiling is the test.
//!
//! A type that lost `Send` or `Sync`, or won one that it must not have, breaks callers elsewhere.
//! The locks, references and caches have the same beside their code.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::MutexGuard;

use offlock_percpu::fence::Strategy;
use offlock_percpu::slots::{IntoIter, Iter, IterMut};
use offlock_percpu::{
    AllocError, Backend, Capabilities, CpuId, CpuList, CpuListError, CpuListIter, NodeId, PerCpu,
    PerCpuCounter, RseqState, RseqUnavailable, Sections, Source, Topology,
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
fn sync<T: Sync>() {}

/// A value that is copied, compared and printed: nothing else is behind it.
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
    everywhere::<CpuListIter<'_>>();
    everywhere::<CpuListError>();
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
    // Sync and not Send: a slot is used by whichever thread comes to its CPU.
    <PerCpu<MutexGuard<'static, u8>> as NotSend<_>>::none();
    <PerCpu<MutexGuard<'static, u8>> as NotSync<_>>::none();

    everywhere::<Iter<'_, u8>>();
    everywhere::<IterMut<'_, u8>>();
    everywhere::<IntoIter<u8>>();
    // `&T` on another thread, `&mut T` or `T` there.
    <Iter<'_, Cell<u8>> as NotSend<_>>::none();
    <Iter<'_, Cell<u8>> as NotSync<_>>::none();
    send::<IterMut<'_, Cell<u8>>>();
    <IterMut<'_, Cell<u8>> as NotSync<_>>::none();
    <IterMut<'_, MutexGuard<'static, u8>> as NotSend<_>>::none();
    send::<IntoIter<Cell<u8>>>();
    sync::<IntoIter<MutexGuard<'static, u8>>>();
    <IntoIter<Rc<u8>> as NotSend<_>>::none();
}

/// A longer lifetime may stand for a shorter one, inside and outside.
#[expect(dead_code, reason = "compiled for the variance they need")]
mod covariant {
    use super::*;

    fn slots<'a>(slots: PerCpu<&'static u8>) -> PerCpu<&'a u8> {
        slots
    }

    fn iter<'a>(iter: Iter<'static, &'static u8>) -> Iter<'a, &'a u8> {
        iter
    }

    fn iter_mut<'a>(iter: IterMut<'static, u8>) -> IterMut<'a, u8> {
        iter
    }

    fn into_iter<'a>(iter: IntoIter<&'static u8>) -> IntoIter<&'a u8> {
        iter
    }

    fn cpus<'a>(iter: CpuListIter<'static>) -> CpuListIter<'a> {
        iter
    }
}
