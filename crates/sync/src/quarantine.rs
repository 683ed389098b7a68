//! Detects use after free in a model, for nodes that threads reach through raw pointers.
//!
//! Such a node is a [`Watched`], and [`free`] frees it. In a build for a model checker each
//! dereference checks a canary. [`free`] marks the canary as dead, drops the value, overwrites its
//! bytes and keeps the memory until the next run of the model:
//!
//! - A reader that dereferences the node after the free finds the canary dead.
//! - Under loom the canary is a checked cell. A read and a free that are not ordered fail the
//!   model, whichever of the two ran first.
//! - Under shuttle each check is a point at which the schedule may change.
//!
//! In every other build a `Watched<T>` is a `T` and `free` is `drop`.
//!
//! The check is made by the dereference of a `Watched`, not by later uses of the `&T` that the
//! dereference returned. So dereference again for each use.

pub use self::imp::{Watched, free};

#[cfg(offlock_model)]
pub use self::payload::{Drops, Late, Payload};

#[cfg(offlock_model)]
pub(crate) use self::imp::begin_run;

/// The values of the structures that models check.
#[cfg(offlock_model)]
mod payload {
    use std::sync::Arc as Unchecked;
    use std::sync::atomic::AtomicUsize as UncheckedUsize;

    use super::{Watched, free};
    use crate::Arc;
    use crate::atomic::{AtomicUsize, Ordering};

    /// The numbers of payloads that were made and dropped in a run.
    #[derive(Clone, Debug, Default)]
    pub struct Drops {
        made: Unchecked<UncheckedUsize>,
        dropped: Arc<AtomicUsize>,
    }

    impl Drops {
        /// Makes a payload.
        pub fn payload(&self, value: u64) -> Payload {
            self.made.fetch_add(1, Ordering::Relaxed);
            Payload(Late(Box::into_raw(Box::new(Watched::new(value)))), self.clone())
        }

        /// Returns the number of payloads that were made.
        pub fn made(&self) -> usize {
            self.made.load(Ordering::Relaxed)
        }

        /// Returns the number of payloads that were dropped, as far as the calling thread knows.
        pub fn dropped(&self) -> usize {
            // Ordering: Relaxed; the model checks what orders the drops before this load.
            self.dropped.load(Ordering::Relaxed)
        }
    }

    /// A value. A read after its drop, a read that is not ordered with the drop, and a second drop fail the model.
    #[derive(Debug)]
    pub struct Payload(Late, Drops);

    impl Payload {
        /// Returns the value.
        pub fn read(&self) -> u64 {
            self.0.read()
        }

        /// Returns a copy for a read after the last use of the reference.
        pub fn late(&self) -> Late {
            self.0
        }
    }

    impl Drop for Payload {
        fn drop(&mut self) {
            // SAFETY: the pointer is from `into_raw`, and `free` fails the model at a second drop.
            free(unsafe { Box::from_raw(self.0.0) });
            // Ordering: Relaxed; see `dropped`.
            self.1.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The place of a value that may be dropped meanwhile.
    #[derive(Clone, Copy, Debug)]
    pub struct Late(*mut Watched<u64>);

    // SAFETY: only the drop of the payload frees the value, and a model checks that no thread reads it then.
    unsafe impl Send for Late {}
    // SAFETY: `&Late` only reads the value.
    unsafe impl Sync for Late {}

    impl Late {
        /// Returns the value.
        pub fn read(self) -> u64 {
            // SAFETY: the memory stays allocated until the end of the run: a dropped payload is in
            // quarantine, and a read of it fails the model.
            **unsafe { &*self.0 }
        }
    }
}

#[cfg(not(offlock_model))]
mod imp {
    use std::ops::{Deref, DerefMut};

    /// A `T` that other threads reach through a raw pointer.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct Watched<T>(T);

    const _: () = assert!(size_of::<Watched<u64>>() == size_of::<u64>());

    impl<T> Watched<T> {
        /// The offset in bytes of the `T` in a `Watched<T>`.
        pub const OFFSET: usize = 0;

        /// Creates a node that contains `value`.
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

    /// Drops the value and frees its memory.
    #[inline(always)]
    pub fn free<T>(node: Box<Watched<T>>) {
        drop(node);
    }
}

#[cfg(offlock_model)]
mod imp {
    use std::alloc::{Layout, dealloc};
    use std::cell::RefCell;
    use std::ops::{Deref, DerefMut};
    use std::ptr;

    use crate::is_planted;

    const ALIVE: u64 = 0x0a11_fe00_0ff1_0c4d;
    const DEAD: u64 = 0xdead_dead_dead_dead;

    /// The byte that overwrites a freed value. A pointer of such bytes is not canonical, so its
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
            // SAFETY: loom checks that no write of this cell races with this read, and panics if
            // one does. The memory is valid, because `free` keeps it until the next run.
            self.0.with(|canary| unsafe { canary.read() })
        }

        #[track_caller]
        fn kill(&self) {
            // SAFETY: loom checks that no access of this cell races with this write, and panics if
            // one does. The memory is valid, because `free` keeps it until the next run.
            self.0.with_mut(|canary| unsafe { canary.write(DEAD) });
        }
    }

    // SAFETY: only `with` and `with_mut` above access the cell. loom fails the model there before
    // two accesses race, and runs one thread at a time.
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
            // Ordering: SeqCst, because shuttle treats every ordering as SeqCst.
            self.0.load(shuttle::sync::atomic::Ordering::SeqCst)
        }

        fn kill(&self) {
            // Ordering: SeqCst, because shuttle treats every ordering as SeqCst.
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
        /// The offset in bytes of the `T` in a `Watched<T>`.
        pub const OFFSET: usize = std::mem::offset_of!(Self, value);

        /// Creates a node that contains `value`.
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

    /// The memory of a freed node, which is deallocated on drop.
    struct Kept {
        memory: *mut u8,
        layout: Layout,
    }

    impl Drop for Kept {
        fn drop(&mut self) {
            // SAFETY: `free` took both from a `Box` that it owned. The type has a canary, so it is
            // not zero-sized. Only this drop deallocates the memory.
            unsafe { dealloc(self.memory, self.layout) };
        }
    }

    thread_local! {
        // Both checkers run all threads of a model on one OS thread. So the threads of a run share
        // this list, and tests that run in parallel do not.
        static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
    }

    /// Deallocates the nodes that the previous run of a model on this OS thread freed.
    pub(crate) fn begin_run() {
        KEPT.with_borrow_mut(Vec::clear);
    }

    /// Drops the value and keeps its memory until the next run of a model on this OS thread.
    ///
    /// # Panics
    ///
    /// Panics if the node was freed before, and under loom if an access of it races with this call.
    #[track_caller]
    pub fn free<T>(node: Box<Watched<T>>) {
        // Raw before the checks, so that the memory is not freed if a check panics.
        let node = Box::into_raw(node);
        // SAFETY: `node` is from a `Box`. If it was freed before, `KEPT` still has its memory.
        let watched = unsafe { &*node };
        watched.check("free");
        if !is_planted("free: mark the node as dead") {
            watched.canary.kill();
        }
        // SAFETY: `node` is from a `Box`, so the field is in bounds.
        let value = unsafe { &raw mut (*node).value };
        // SAFETY: this function owns the value. The canary was alive, so the value was not dropped
        // before, and the code below does not read it.
        unsafe { ptr::drop_in_place(value) };
        // SAFETY: `value` points to the bytes of one `T`, which is dropped, so they may be
        // overwritten.
        unsafe { ptr::write_bytes(value.cast::<u8>(), POISON, size_of::<T>()) };
        let kept = Kept { memory: node.cast(), layout: Layout::new::<Watched<T>>() };
        KEPT.with_borrow_mut(|list| list.push(kept));
    }
}
