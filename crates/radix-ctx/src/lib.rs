//! From an id to a live context, without a lock on the way.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("radix-ctx supports 64-bit Linux only");

mod alloc;
mod table;
mod tree;
pub mod xarray;

pub use percpu::{AllocError, Forked};

pub use self::xarray::XArray;

pub use self::table::{
    Builder, Closing, ClosingFuture, CtxRef, CtxTable, GetRefError, Id, InsertError, InsertRefused,
    Iter, Killed, LookupError, Removal, RemovalFuture, RemoveError, Reservation, TableStats, Usage,
    WaitError,
};
