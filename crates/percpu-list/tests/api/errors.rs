//! The texts and numbers of the errors, and which types are `Send`, `Sync` and covariant.
#![cfg(not(offlock_model))]

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use percpu_list::{
    Deadlock, Drain, Entry, InsertError, Iter, PerCpuList, Ref, Refused, Snapshot, SnapshotIter,
    Stats,
};

#[test]
fn every_error_has_a_text_and_an_errno() {
    let cases = [
        (Refused::Closed, libc::ESHUTDOWN, "the list is closed"),
        (Refused::NoMemory, libc::ENOMEM, "out of memory"),
        (Deadlock.into(), libc::EDEADLK, "this thread has a snapshot of the list"),
    ];
    for (refused, errno, text) in cases {
        let error = InsertError { value: 1, reason: refused };
        assert_eq!((refused.to_string(), error.to_string()), (text.into(), text.into()));
        assert_eq!((refused.errno(), error.errno()), (errno, errno));
        assert!(format!("{error:?}").contains("InsertError") && Refused::from(error) == refused);
        let error = InsertError { value: 1, reason: refused };
        let errors = [io::Error::from(refused), io::Error::from(error)];
        assert_eq!(errors.map(|error| error.raw_os_error()), [Some(errno); 2]);
    }
    assert_eq!(
        (Deadlock.errno(), Refused::Deadlock.to_string()),
        (libc::EDEADLK, Deadlock.to_string())
    );
}

/// `<T as NotSend<_>>::none` is ambiguous, and does not compile, if `T` is `Send`.
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

fn send_and_sync<T: Send + Sync>() {}
fn send<T: Send>() {}

type List<T> = PerCpuList<T>;

#[test]
fn send_and_sync_follow_the_values() {
    send_and_sync::<List<u8>>();
    send_and_sync::<Entry<u8>>();
    send_and_sync::<Ref<u8>>();
    send_and_sync::<(Stats, Refused, InsertError<u8>)>();
    send::<(Iter<'_, u8>, Drain<'_, u8>)>();
    // A snapshot holds locks, which the thread that acquired them must release.
    <Snapshot<'_, u8> as NotSend<_>>::none();
}

#[test]
fn values_that_are_not_send_and_sync_make_lists_neither() {
    <List<Rc<u8>> as NotSend<_>>::none();
    <List<Rc<u8>> as NotSync<_>>::none();
    // Walks share values, and any thread may drop the last reference.
    <List<Cell<u8>> as NotSend<_>>::none();
    <List<Cell<u8>> as NotSync<_>>::none();
    <Ref<Cell<u8>> as NotSend<_>>::none();
    <Ref<Rc<u8>> as NotSync<_>>::none();
    <Entry<Cell<u8>> as NotSend<_>>::none();
    <Entry<Cell<u8>> as NotSync<_>>::none();
    <Entry<Rc<u8>> as NotSend<_>>::none();
    <Iter<'_, Cell<u8>> as NotSend<_>>::none();
    <Drain<'_, Rc<u8>> as NotSend<_>>::none();
    <SnapshotIter<'_, Rc<u8>> as NotSend<_>>::none();
}

/// A list is invariant: see the doctest of `PerCpuList`.
#[test]
fn references_are_covariant() {
    fn _ref<'a>(found: Ref<&'static str>) -> Ref<&'a str> {
        found
    }
}
