//! What travels with a request: its buffer and whoever waits for it, stored without an allocation.
//!
//! ```text
//!  Cargo | 96 bytes: (buffer, callback) or (buffer, queue, token) or buffer | vtable |
//! ```
//!
//! # Invariants
//!
//! 1. `bytes` holds a valid, owned value of the type `vtable` was made for, until the `Cargo` is
//!    consumed or dropped.

use std::io;
use std::mem::{ManuallyDrop, MaybeUninit, align_of, size_of};
use std::ptr;

/// Room for the buffer and the front end of one request; a guess that fits three `Vec`s.
const CARGO_BYTES: usize = 96;

/// Something that takes a request's result.
pub(crate) trait Deliver: 'static {
    fn deliver(self, result: io::Result<usize>);
}

pub(crate) struct Cargo {
    bytes: Bytes,
    vtable: &'static VTable,
}

#[repr(align(16))]
struct Bytes {
    /// Only reached through pointers to the whole.
    _room: MaybeUninit<[u8; CARGO_BYTES]>,
}

struct VTable {
    /// Moves the value out and delivers to it. Call at most once, instead of `drop`.
    deliver: unsafe fn(*mut u8, io::Result<usize>),
    /// Drops the value in place. Call at most once, instead of `deliver`.
    drop: unsafe fn(*mut u8),
}

trait HasVTable: Deliver + Sized {
    const VTABLE: VTable = VTable {
        deliver: |value, result| {
            // SAFETY: the contract of `VTable::deliver`: a valid value that nobody uses again.
            let value = unsafe { value.cast::<Self>().read() };
            value.deliver(result);
        },
        drop: |value| {
            // SAFETY: the contract of `VTable::drop`, as above.
            unsafe { value.cast::<Self>().drop_in_place() }
        },
    };
}

impl<T: Deliver> HasVTable for T {}

impl Cargo {
    pub(crate) fn new<T: Deliver>(value: T) -> Self {
        const {
            assert!(
                size_of::<T>() <= CARGO_BYTES && align_of::<T>() <= align_of::<Bytes>(),
                "buffer and callback together exceed 96 bytes: box what the callback captures",
            );
        }
        let mut bytes = Bytes { _room: MaybeUninit::uninit() };
        // SAFETY: size and alignment were checked above.
        unsafe { ptr::from_mut(&mut bytes).cast::<T>().write(value) };
        Self { bytes, vtable: &T::VTABLE }
    }

    /// Hands `result` to the front end.
    pub(crate) fn deliver(self, result: io::Result<usize>) {
        let mut this = ManuallyDrop::new(self);
        let value = ptr::from_mut(&mut this.bytes).cast();
        // SAFETY: invariant 1; `ManuallyDrop` keeps `drop` from seeing the value again.
        unsafe { (this.vtable.deliver)(value, result) }
    }

    /// Takes the value back.
    ///
    /// # Safety
    ///
    /// This cargo was made by `Cargo::new::<T>`.
    pub(crate) unsafe fn take<T: Deliver>(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: invariant 1, and the caller vouches for the type; it is not used again.
        unsafe { ptr::from_ref(&this.bytes).cast::<T>().read() }
    }
}

impl Drop for Cargo {
    fn drop(&mut self) {
        let value = ptr::from_mut(&mut self.bytes).cast();
        // SAFETY: invariant 1; `deliver` and `take` forget the cargo, so the value is still here.
        unsafe { (self.vtable.drop)(value) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    struct Probe(Rc<Cell<u32>>, Rc<Cell<usize>>);

    impl Drop for Probe {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    impl Deliver for Probe {
        fn deliver(self, result: io::Result<usize>) {
            self.1.set(result.unwrap_or(0));
        }
    }

    #[test]
    fn value_is_dropped_once_whichever_way_it_leaves() {
        let (drops, got) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let cargo = || Cargo::new(Probe(Rc::clone(&drops), Rc::clone(&got)));
        cargo().deliver(Ok(9));
        assert_eq!((drops.get(), got.get()), (1, 9));
        drop(cargo());
        assert_eq!(drops.get(), 2);
        // SAFETY: made from a `Probe` just above.
        drop(unsafe { cargo().take::<Probe>() });
        assert_eq!(drops.get(), 3);
    }
}
