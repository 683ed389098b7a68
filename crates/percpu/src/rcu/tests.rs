use std::cell::{Cell, UnsafeCell};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::MutexGuard;

use super::*;

/// Does not compile if the type implements the trait: `_` is ambiguous with two impls.
macro_rules! assert_not {
    ($type:ty: $thing:path) => {{
        trait Not<A> {
            fn check() {}
        }
        impl<T: ?Sized> Not<()> for T {}
        struct Implements;
        impl<T: ?Sized + $thing> Not<Implements> for T {}
        let _ = Implements;
        <$type as Not<_>>::check();
    }};
}

/// The public types are `Send` and `Sync` exactly as documented.
#[test]
fn send_and_sync_are_as_documented() {
    fn both<T: Send + Sync>() {}
    both::<GracePeriod>();
    both::<Atomic<u64>>();
    both::<Owned<u64>>();
    both::<Unlinked<u64>>();
    both::<Batch>();
    both::<RetireHead>();
    both::<Stats>();
    both::<SynchronizeError>();

    assert_not!(Guard: Send);
    assert_not!(Guard: Sync);
    assert_not!(Owned<Cell<u8>>: Sync);
    assert_not!(Owned<MutexGuard<'static, u8>>: Send);
}

/// A caught panic leaves no public type in a broken state: guards are counts, and a pointer changes
/// with one exchange.
#[test]
fn unwinding_leaves_nothing_half_done() {
    fn safe<T: UnwindSafe + RefUnwindSafe>() {}
    safe::<Guard>();
    safe::<GracePeriod>();
    safe::<Atomic<u64>>();
    safe::<Owned<u64>>();
    safe::<Unlinked<u64>>();

    // No lock is poisoned here, so a value with interior mutability may be seen half changed.
    type Interior = AssertSync<UnsafeCell<u8>>;
    assert_not!(Atomic<Interior>: UnwindSafe);
    assert_not!(Atomic<Interior>: RefUnwindSafe);
    assert_not!(Unlinked<Interior>: UnwindSafe);
    assert_not!(Owned<&'static Interior>: UnwindSafe);
    assert_not!(Owned<Interior>: RefUnwindSafe);
}

struct AssertSync<T>(T);
// SAFETY: no value of this type is ever created.
unsafe impl<T> Sync for AssertSync<T> {}

/// `Owned` is covariant, like `Box`.
#[test]
fn owned_is_covariant() {
    fn shorter<'a>(long: Owned<&'static str>) -> Owned<&'a str> {
        long
    }
    assert_eq!(*shorter(Owned::new("value")), "value");
}
