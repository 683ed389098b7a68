#![doc = include_str!("../README.md")]

mod table;
mod tree;

pub use percpu::{AllocError, rcu};

pub use self::table::{
    Builder, CtxRef, CtxTable, GetRefError, Id, InsertError, InsertRefused, Iter, LookupError,
    Removal, RemoveAll, RemovedFuture, TableStats, WaitError,
};
