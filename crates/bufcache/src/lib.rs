//! A block buffer cache: [`Device::get`] on a hit allocates nothing and writes nothing that other threads use.
//!
//! ```
//! use bufcache::{Cache, MemoryDevice};
//!
//! let cache = Cache::new(1 << 20)?; // a MiB, in blocks of 4,096 bytes
//! let disk = cache.attach(MemoryDevice::new(vec![7; 100_000]))?;
//!
//! let block = disk.get(3)?; // one read of the device, however many threads want the block
//! assert_eq!((block.len(), block[0]), (4096, 7));
//! drop(block); // a guard keeps its buffer in the cache, and unchanged
//!
//! disk.get(3)?; // a hit
//! assert_eq!(cache.stats().reads, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The chapters of the [`guide`] explain hazard slots and write-back with a picture each.
//!
//! # Choosing
//!
//! | the program | uses |
//! |---|---|
//! | reads in threads that may block | [`Device::get`]; [`ReadGuard::pin`] to move or keep what it returns |
//! | reads in tasks | [`Device::get_async`], which changes a count of the buffer, also on a hit |
//! | scans | [`Device::readahead`] |
//! | changes blocks | [`Device::get_mut`], or [`Device::create`] for a block of zeros; [`Device::sync`] |
//! | has a log of its own | [`AttachOptions::wal`] and [`WriteGuard::set_lsn`] |
//! | reads from files or block devices | [`FileDevice`]; with many operations in flight by a lent engine (feature `aio-reap`) |
//! | reads from something else | its own [`BlockDevice`] |
//!
//! Not for: values of variable size, or computed ones; blocks that are read once; several processes on one cache.
//!
//! # Writing
//!
//! ```
//! use bufcache::{Cache, MemoryDevice};
//!
//! let cache = Cache::new(1 << 20)?;
//! let disk = cache.attach(MemoryDevice::new(vec![0; 100_000]))?;
//! disk.get_mut(3)?[..5].copy_from_slice(b"hello"); // in the cache, and dirty
//! disk.sync()?; // on the device, and durable
//! disk.close()?; // a drop syncs too, but cannot return an error
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A block is **durable** when a [`Device::sync`], [`Device::write_through`] or [`Device::close`]
//! has returned `Ok` that began after the block's [`WriteGuard`] was dropped. Of a block written
//! later, each sector of 512 bytes has its old bytes or those of any version written since. There
//! is no order between blocks, except that of a [log](Wal) and that of two syncs one after the
//! other. A write that fails leaves its block dirty. A sync that fails
//! [poisons](WriteError::Poisoned) the device until a [`Device::reset`].
//!
//! # Threads
//!
//! A cache starts threads when it needs them: `bufcache` makes the blocking calls of devices for
//! tasks, and writes dirty blocks back; `bufcache-timer` ends waits of tasks whose time is over.
//!
//! # Waits without an end
//!
//! A wait for a guard of another thread ends after [`Builder::patience`], and a thread that would wait
//! for its own guard is refused. These waits end only with what they wait for:
//!
//! | the program | waits |
//! |---|---|
//! | uses a device that hangs | in each call that needs the device |
//! | forgets a [`Load`] or [`DeviceChange`] | for its end |
//! | forgets a [`Bypass`] | in gets and discards of its blocks, and in [`Device::close`] |
//! | calls [`Device::close`] or [`Device::reset`] in a callback or method of the device that a close or reset has called | for itself |
//! | blocks for [`Device::get_async`], in `verify` or in [`BlockDevice::read`], of a block of the same device | once four loads of the device do; [`Device::get`] is fine, as the thread then reads the block itself |
//! | blocks for [`Device::call_async`] or the like in a call by `call_async` of the same device | once sixteen calls do |
//!
//! After `fork` the child may only exec or exit.

// Which feature an item wants, on docs.rs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod cache;
mod device;
mod dirty;
mod engine;
mod error;
mod frames;
#[cfg(doc)]
pub mod guide;
mod handle;
mod hazard;
mod ids;
#[cfg(all(test, offlock_model))]
mod models;
mod policy;
mod source;
mod stats;
mod table;
mod wait;
mod word;

pub use self::cache::{Bypass, Change, DeviceChange, Load};
pub use self::device::{BlockDevice, FileDevice, IntoDevice, MemoryDevice};
pub use self::dirty::{AttachOptions, Wal, WriteError};
#[cfg(feature = "aio-reap")]
pub use self::engine::{LentEngine, lend_engine};
pub use self::error::{BuildError, GetError};
pub use self::handle::{
    Builder, Cache, Device, Exclusive, Lost, OwnedWriteGuard, Pin, ReadGuard, WriteGuard,
};
pub use self::policy::Eviction;
pub use self::stats::CacheStats;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
