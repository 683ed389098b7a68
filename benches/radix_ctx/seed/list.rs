//! "Before": a singly linked list of contexts, walked under an RCU guard. And what both sides share:
//! the context, and the two questions of a request.

use std::sync::atomic::{AtomicPtr, Ordering};

use offlock_percpu::rcu;

use super::aio::Handle;

/// One thread's context: 1 KiB with what the list needs of it, somewhere on the heap.
#[repr(C, align(64))]
pub(crate) struct Context {
    next: AtomicPtr<Context>,
    id: u64,
    pub(crate) aio: Handle,
    _rest: [u64; 125],
}

const _: () = assert!(size_of::<Context>() == 1024);

impl Context {
    pub(crate) fn new(id: u64, aio: Handle) -> Box<Self> {
        Box::new(Self { next: AtomicPtr::default(), id, aio, _rest: [0; 125] })
    }
}

/// A registry in which contexts are looked up.
pub(crate) trait Registry: Sync {
    /// The handle of the context called `id`, looked up under a guard of its own.
    fn find(&self, id: u64) -> Option<Handle>;
}

/// The list. No context is ever removed; a walk takes a guard as if removals were possible.
pub(crate) struct List {
    head: AtomicPtr<Context>,
}

impl List {
    pub(crate) fn new() -> Self {
        Self { head: AtomicPtr::default() }
    }

    /// Adds the context in front of all others, as the seed's list did.
    pub(crate) fn push(&mut self, mut context: Box<Context>) {
        *context.next.get_mut() = *self.head.get_mut();
        *self.head.get_mut() = Box::leak(context);
    }
}

impl Registry for List {
    #[inline(never)]
    fn find(&self, id: u64) -> Option<Handle> {
        let _guard = rcu::pin();
        // Ordering: Acquire, here and below, is what a walk needs beside writers; it costs a plain
        // load. The contexts were published by the start of the threads.
        let mut at = self.head.load(Ordering::Acquire);
        // SAFETY: null, or from `Box::leak` in `push`.
        while let Some(context) = unsafe { at.as_ref() } {
            if context.id == id {
                return Some(context.aio);
            }
            at = context.next.load(Ordering::Acquire);
        }
        None
    }
}
