//! `Send`, `Sync` and the variance of the public types.
//!
//! A type that loses `Send` or `Sync` breaks its callers, and one that gains it may be unsound.

use std::cell::Cell;
use std::fmt::Debug;
use std::marker::PhantomData;
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

struct Of<T: ?Sized>(PhantomData<T>);

/// What holds for every type that has no constant of its own.
trait Neither {
    const SEND: bool = false;
    const SYNC: bool = false;
}

impl<T: ?Sized> Neither for Of<T> {}

impl<T: ?Sized + Send> Of<T> {
    const SEND: bool = true;
}

impl<T: ?Sized + Sync> Of<T> {
    const SYNC: bool = true;
}

/// A type that is `Sync` and not `Send`.
type Pinned = MutexGuard<'static, u8>;

#[test]
fn types_go_where_their_values_may() {
    let send_and_sync = [
        (Of::<PerCpu<Cell<u8>>>::SEND, Of::<PerCpu<Cell<u8>>>::SYNC, (true, false)),
        (Of::<PerCpu<Rc<u8>>>::SEND, Of::<PerCpu<Rc<u8>>>::SYNC, (false, false)),
        // `T: Sync` is not enough, because any thread that runs on a CPU uses its slot.
        (Of::<PerCpu<Pinned>>::SEND, Of::<PerCpu<Pinned>>::SYNC, (false, false)),
        (Of::<PercpuRef>::SEND, Of::<PercpuRef>::SYNC, (true, true)),
        (Of::<RefBlock>::SEND, Of::<RefBlock>::SYNC, (true, true)),
        (Of::<LgLock<Cell<u8>>>::SEND, Of::<LgLock<Cell<u8>>>::SYNC, (true, true)),
        (Of::<LgLock<Pinned>>::SEND, Of::<LgLock<Pinned>>::SYNC, (false, false)),
        (Of::<LocalGuard<u8>>::SEND, Of::<LocalGuard<u8>>::SYNC, (false, true)),
        (Of::<LocalGuard<Cell<u8>>>::SEND, Of::<LocalGuard<Cell<u8>>>::SYNC, (false, false)),
        (Of::<GlobalGuard<u8>>::SEND, Of::<GlobalGuard<u8>>::SYNC, (false, true)),
        (Of::<GlobalGuard<Cell<u8>>>::SEND, Of::<GlobalGuard<Cell<u8>>>::SYNC, (false, false)),
        (Of::<WordLock<Cell<u8>>>::SEND, Of::<WordLock<Cell<u8>>>::SYNC, (true, true)),
        (Of::<WordGuard<u8>>::SEND, Of::<WordGuard<u8>>::SYNC, (false, true)),
        (Of::<WordGuard<Cell<u8>>>::SEND, Of::<WordGuard<Cell<u8>>>::SYNC, (false, false)),
        (Of::<Guard>::SEND, Of::<Guard>::SYNC, (false, false)),
        (Of::<Owned<Cell<u8>>>::SEND, Of::<Owned<Cell<u8>>>::SYNC, (true, false)),
        (Of::<Owned<Pinned>>::SEND, Of::<Owned<Pinned>>::SYNC, (false, true)),
    ];
    for (at, (send, sync, wanted)) in send_and_sync.into_iter().enumerate() {
        assert_eq!((send, sync), wanted, "row {at}");
    }
    // Two threads with an iterator each would share the values.
    trait NotSend<A> {}
    struct IsSend;
    impl<T> NotSend<()> for T {}
    impl<T: Send> NotSend<IsSend> for T {}
    fn is_not_send<T: NotSend<A>, A>(_: &T) {} // two choices of `A`, and no build, if `T` is `Send`
    is_not_send(&LgLock::new(|_| Cell::new(0_u8)).global().unwrap().iter());
}

fn everywhere<T: Send + Sync + Unpin>() {}

/// Checks the traits of plain data: copied, compared and printed.
fn plain<T: Copy + PartialEq + Debug + Send + Sync + 'static>() {}

/// A longer lifetime may stand for a shorter one, inside and outside.
type Covariant<'a> = (Reference<'a>, Owned<&'a u8>, LocalGuard<'a, u8>, PerCpu<&'a u8>);

#[expect(dead_code, reason = "compiled for the variance and the traits that they need")]
fn compiled<'a>(long: Covariant<'static>) -> Covariant<'a> {
    plain::<(CpuId, Capabilities, GracePeriod, Stats, SynchronizeError)>();
    everywhere::<(AllocError, PerCpuCounter, PerCpu<u64>, Reference<'_>)>();
    everywhere::<(Atomic<u64>, Owned<u64>, Unlinked<u64>, Batch, RetireHead)>();
    long
}
