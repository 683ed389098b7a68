use std::cell::{Cell, UnsafeCell};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::MutexGuard;

use super::*;

/// Does not compile for a type that is the thing: two impls make `_` ambiguous then.
macro_rules! assert_not {
    ($type:ty: $thing:path) => {{
        trait Not<A> {
            fn check() {}
        }
        impl<T: ?Sized> Not<()> for T {}
        struct Is;
        impl<T: ?Sized + $thing> Not<Is> for T {}
        let _ = Is;
        <$type as Not<_>>::check();
    }};
}

/// What a public type is, to threads.
#[test]
fn send_and_sync_are_as_documented() {
    fn both<T: Send + Sync>() {}
    both::<SendGuard>();
    both::<GracePeriod>();
    both::<Atomic<u64>>();
    both::<Owned<u64>>();
    both::<Unlinked<u64>>();
    both::<Batch>();
    both::<RetireHead>();
    both::<Stats>();
    both::<Bounds>();
    both::<SynchronizeError>();
    both::<ReclaimError<u64>>();
    both::<CompareExchangeError<'_, u64>>();

    assert_not!(Guard: Send);
    assert_not!(Guard: Sync);
    assert_not!(Owned<Cell<u8>>: Sync);
    assert_not!(Owned<MutexGuard<'static, u8>>: Send);
    assert_not!(ReclaimError<u64>: Copy);
}

/// After a caught panic all is as it was: guards are counts, the pointers are changed at once.
#[test]
fn unwinding_leaves_nothing_half_done() {
    fn safe<T: UnwindSafe + RefUnwindSafe>() {}
    safe::<Guard>();
    safe::<SendGuard>();
    safe::<GracePeriod>();
    safe::<Atomic<u64>>();
    safe::<Owned<u64>>();
    safe::<Unlinked<u64>>();

    // Other than in a mutex, what is inside such a value may be seen half changed.
    type Open = AssertSync<UnsafeCell<u8>>;
    assert_not!(Atomic<Open>: UnwindSafe);
    assert_not!(Atomic<Open>: RefUnwindSafe);
    assert_not!(Unlinked<Open>: UnwindSafe);
    assert_not!(Owned<&'static Open>: UnwindSafe);
    assert_not!(Owned<Open>: RefUnwindSafe);
}

struct AssertSync<T>(T);
// SAFETY: no value of it is ever made.
unsafe impl<T> Sync for AssertSync<T> {}

/// An owned value is covariant, like a box.
#[test]
fn owned_is_covariant() {
    fn shorter<'a>(long: Owned<&'static str>) -> Owned<&'a str> {
        long
    }
    assert_eq!(*shorter(Owned::new("value")), "value");
}
