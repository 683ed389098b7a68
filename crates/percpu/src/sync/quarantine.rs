//! Freed memory that a model checker can catch a late reader in.
//!
//! A node that other threads reach through a raw pointer lives in a [`Watched`] and dies in
//! [`free`]. In a model-checking build every dereference checks a canary, and [`free`] kills the
//! canary, drops the value, overwrites its bytes and keeps the memory until the run is over:
//!
//! - a reader that comes after the free finds the canary dead;
//! - under loom the canary is a checked cell, so a read and a free that no ordering separates
//!   fail the model in whichever order they ran;
//! - under shuttle every check is a point at which the schedule may change.
//!
//! In every other build a `Watched<T>` is a `T` and `free` is `drop`.
//!
//! Check late: what is caught is the dereference of a `Watched`, not a later use of a `&T` that
//! was taken out of one.

pub use self::imp::{Watched, free};

#[cfg(any(offlock_loom, offlock_shuttle))]
pub(super) use self::imp::begin_run;

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::ops::{Deref, DerefMut};

    /// A `T` that other threads reach through a raw pointer.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct Watched<T>(T);

    const _: () = assert!(size_of::<Watched<u64>>() == size_of::<u64>());

    impl<T> Watched<T> {
        /// Bytes from the start of a `Watched<T>` to its `T`.
        pub const OFFSET: usize = 0;

        /// Wraps `value`.
        #[inline(always)]
        pub const fn new(value: T) -> Self {
            Self(value)
        }
    }

    impl<T> Deref for Watched<T> {
        type Target = T;

        #[inline(always)]
        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<T> DerefMut for Watched<T> {
        #[inline(always)]
        fn deref_mut(&mut self) -> &mut T {
            &mut self.0
        }
    }

    /// Drops the value and returns its memory.
    #[inline(always)]
    pub fn free<T>(node: Box<Watched<T>>) {
        drop(node);
    }
}

#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    use std::alloc::{Layout, dealloc};
    use std::cell::RefCell;
    use std::ops::{Deref, DerefMut};
    use std::ptr;

    use super::super::mutant;

    const ALIVE: u64 = 0x0a11_fe00_0ff1_0c4d;
    const DEAD: u64 = 0xdead_dead_dead_dead;

    /// What freed values are overwritten with: as a pointer it is not canonical, so that a
    /// dereference faults.
    const POISON: u8 = 0xdb;

    #[cfg(offlock_loom)]
    #[derive(Debug)]
    struct Canary(loom::cell::UnsafeCell<u64>);

    #[cfg(offlock_loom)]
    impl Canary {
        fn new() -> Self {
            Self(loom::cell::UnsafeCell::new(ALIVE))
        }

        #[track_caller]
        fn read(&self) -> u64 {
            // SAFETY: loom has just checked that no write of this cell races with us, or panicked;
            // the memory is there, because `free` keeps it until the run is over.
            self.0.with(|canary| unsafe { canary.read() })
        }

        #[track_caller]
        fn kill(&self) {
            // SAFETY: as in `read`, and loom has also checked that no read races with us.
            self.0.with_mut(|canary| unsafe { canary.write(DEAD) });
        }
    }

    // SAFETY: the cell is reached only through `with` and `with_mut` above, in which loom fails
    // the model before it lets two threads race; and loom runs one thread at a time.
    #[cfg(offlock_loom)]
    unsafe impl Sync for Canary {}

    #[cfg(offlock_shuttle)]
    #[derive(Debug)]
    struct Canary(shuttle::sync::atomic::AtomicU64);

    #[cfg(offlock_shuttle)]
    impl Canary {
        fn new() -> Self {
            Self(shuttle::sync::atomic::AtomicU64::new(ALIVE))
        }

        fn read(&self) -> u64 {
            // Ordering: shuttle is sequentially consistent whatever is asked for.
            self.0.load(shuttle::sync::atomic::Ordering::SeqCst)
        }

        fn kill(&self) {
            // Ordering: as in `read`.
            self.0.store(DEAD, shuttle::sync::atomic::Ordering::SeqCst);
        }
    }

    /// A `T` that other threads reach through a raw pointer; every dereference checks a canary.
    #[derive(Debug)]
    pub struct Watched<T> {
        canary: Canary,
        value: T,
    }

    impl<T> Watched<T> {
        /// Bytes from the start of a `Watched<T>` to its `T`.
        pub const OFFSET: usize = std::mem::offset_of!(Self, value);

        /// Wraps `value`.
        pub fn new(value: T) -> Self {
            Self { canary: Canary::new(), value }
        }

        #[track_caller]
        fn check(&self, what: &str) {
            match self.canary.read() {
                ALIVE => {}
                DEAD => panic!("{what} after free: the canary is dead"),
                other => panic!("{what} of wild memory: the canary reads {other:#x}"),
            }
        }
    }

    impl<T> Deref for Watched<T> {
        type Target = T;

        #[track_caller]
        fn deref(&self) -> &T {
            self.check("use");
            &self.value
        }
    }

    impl<T> DerefMut for Watched<T> {
        #[track_caller]
        fn deref_mut(&mut self) -> &mut T {
            self.check("use");
            &mut self.value
        }
    }

    /// Memory that [`free`] was given, returned when this is dropped.
    struct Kept {
        memory: *mut u8,
        layout: Layout,
    }

    impl Drop for Kept {
        fn drop(&mut self) {
            // SAFETY: `free` took both from a `Box` it owned, of a type that is not zero-sized
            // (it has a canary), and nothing else returns that memory.
            unsafe { dealloc(self.memory, self.layout) };
        }
    }

    thread_local! {
        // Both checkers run every thread of a model on one OS thread, so this is one list per run,
        // and tests that run side by side do not share it.
        static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
    }

    /// Returns what the previous run of a model on this OS thread freed.
    pub(in super::super) fn begin_run() {
        KEPT.with_borrow_mut(Vec::clear);
    }

    /// Drops the value and keeps its memory until the run is over.
    ///
    /// # Panics
    ///
    /// Panics if the node was freed before, and under loom if a read of it may race with this.
    #[track_caller]
    pub fn free<T>(node: Box<Watched<T>>) {
        // Raw before the checks: one that panics must not return the memory while it unwinds.
        let node = Box::into_raw(node);
        if !mutant("quarantine-canary-lives") {
            // SAFETY: it came from a `Box`; freed before, it is still in `KEPT`.
            let watched = unsafe { &*node };
            watched.check("free");
            watched.canary.kill();
        }
        // SAFETY: `node` came from a `Box`, so the field is in bounds.
        let value = unsafe { &raw mut (*node).value };
        // SAFETY: we own the value, which the canary says was not dropped before, and nothing
        // below reads it.
        unsafe { ptr::drop_in_place(value) };
        // SAFETY: `value` has room for one `T`, which is dropped: its bytes are free to change.
        unsafe { ptr::write_bytes(value.cast::<u8>(), POISON, size_of::<T>()) };
        let kept = Kept { memory: node.cast(), layout: Layout::new::<Watched<T>>() };
        KEPT.with_borrow_mut(|list| list.push(kept));
    }
}
