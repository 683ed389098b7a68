//! Registries of live objects, one list per CPU.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("percpu-list supports 64-bit Linux only, as percpu does");

mod alloc;
mod anchor;
mod array;
mod core;
mod domain;
mod error;
mod intrusive;
mod owning;
mod shard;
mod stats;

pub use percpu::lglock::LockError;
pub use percpu::{AllocError, CpuId};

pub use self::domain::{Domain, SlotPolicy};
pub use self::error::{InsertError, Refused, RemoveError};
pub use self::intrusive::{
    IntrusiveIter, IntrusiveList, IntrusiveSnapshot, Link, Linked, PinnedIter,
};
pub use self::owning::{Drain, Entry, Holder, Iter, PerCpuList, Ref, Snapshot, SnapshotIter};
pub use self::stats::Stats;

/// For the macro.
#[doc(hidden)]
pub mod __private {
    pub use crate::intrusive::Pinned;
}

/// Ends the process as `Box::new` does when there is no memory.
#[cold]
fn out_of_memory<T>() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<T>())
}
