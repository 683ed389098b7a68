//! `Send`, `Sync` and the variance of the public types. A compile-time test.
//!
//! A type that loses `Send` or `Sync` breaks its callers, and one that gains it may be unsound.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::MutexGuard;

use offlock_percpu::lglock::{GlobalGuard, LgLock, LocalGuard};
use offlock_percpu::rcu::{
    Atomic, Batch, GracePeriod, Guard, Owned, RetireHead, Stats, SynchronizeError, Unlinked,
};
use offlock_percpu::{
    AllocError, Capabilities, CpuId, PerCpu, PerCpuCounter, PercpuRef, RefBlock, Reference,
};
use offlock_sync::{WordGuard, WordLock};

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

/// Checks the traits of plain data: copied, compared and printed.
fn plain<T: Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static>() {}

#[test]
fn facts_are_plain_values_on_every_thread() {
    plain::<CpuId>();
    plain::<Capabilities>();
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

#[test]
fn locks_and_references_go_where_they_may() {
    everywhere::<Reference<'_>>();
    send::<PercpuRef>();
    sync::<PercpuRef>();
    send::<RefBlock>();
    sync::<RefBlock>();
    send::<LgLock<Cell<u8>>>();
    sync::<LgLock<Cell<u8>>>();
    <LgLock<MutexGuard<'static, u8>> as NotSend<_>>::none();
    <LgLock<MutexGuard<'static, u8>> as NotSync<_>>::none();
    sync::<LocalGuard<'_, u8>>();
    sync::<GlobalGuard<'_, u8>>();
    <LocalGuard<'static, u8> as NotSend<_>>::none();
    <GlobalGuard<'static, u8> as NotSend<_>>::none();
    <LocalGuard<'static, Cell<u8>> as NotSync<_>>::none();
    <GlobalGuard<'static, Cell<u8>> as NotSync<_>>::none();
    // Two threads with an iterator each would share the values.
    fn is_not_send<X: NotSend<A>, A>(_: &X) {}
    is_not_send(&LgLock::new(|_| Cell::new(0_u8)).global().unwrap().iter());
    send::<WordLock<Cell<u8>>>();
    sync::<WordLock<Cell<u8>>>();
    sync::<WordGuard<'_, u8>>();
    <WordGuard<'_, Cell<u8>> as NotSync<_>>::none();
}

#[test]
fn rcu_types_go_where_they_may() {
    everywhere::<Atomic<u64>>();
    everywhere::<Owned<u64>>();
    everywhere::<Unlinked<u64>>();
    everywhere::<Batch>();
    everywhere::<RetireHead>();
    plain::<GracePeriod>();
    plain::<Stats>();
    plain::<SynchronizeError>();
    <Guard as NotSend<_>>::none();
    <Guard as NotSync<_>>::none();
    <Owned<Cell<u8>> as NotSync<_>>::none();
    <Owned<MutexGuard<'static, u8>> as NotSend<_>>::none();
}

/// A longer lifetime may stand for a shorter one, inside and outside.
#[expect(dead_code, reason = "compiled for the variance they need")]
mod covariant {
    use super::*;

    fn reference<'a>(reference: Reference<'static>) -> Reference<'a> {
        reference
    }

    fn owned<'a>(owned: Owned<&'static u8>) -> Owned<&'a u8> {
        owned
    }

    fn guard<'a>(guard: LocalGuard<'static, u8>) -> LocalGuard<'a, u8> {
        guard
    }

    fn slots<'a>(slots: PerCpu<&'static u8>) -> PerCpu<&'a u8> {
        slots
    }
}
