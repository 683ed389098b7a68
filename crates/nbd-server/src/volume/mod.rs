//! A disk whose bytes live in an object store.
//!
//! ```text
//!  bufcache ─► Volume (BlockDevice) ─► SlateDB: one ordered, atomic batch per write ─► object store
//!                 sync ─► flush of its log: one request, answered when the store has confirmed it
//! ```
//!
//! | key | value |
//! |---|---|
//! | `00` | format and size |
//! | `01 region` | of each 16 MiB of a region of 1 GiB: the generation, and whether a block was written in it ([`regions`]) |
//! | `02 region generation block 00` | the written parts of a block of 64 KiB ([`patch`]) |
//!
//! A TRIM begins the next generation of each 16 MiB within it: one key for a region instead of 16,384 deletions,
//! and at most 255 deletions at each end. So a TRIM of 2 TiB is 2,048 keys and at most 510 deletions.
//! The blocks of older generations are dropped by compactions, once the store has confirmed the new
//! generation. What has no data is read without a request.
//!
//! # What a crash leaves
//!
//! The database's log is a sequence of batches, and recovery replays a prefix of it that has at
//! least all batches before the last confirmed flush. Each write is one batch. So the volume holds
//! a prefix of the writes, never less than the last FLUSH.
//!
//! # One writer
//!
//! A server that opens the volume fences the one before it: the store refuses every later write of
//! that one's log, also of a server that was paused and wakes up. The fenced server fails what is not confirmed, and
//! ends. [`lease`] is only a courtesy before that: it keeps a second server from taking over a volume
//! by mistake.

mod device;
mod lease;
mod open;
mod patch;
mod regions;
pub(crate) mod snapshot;
mod store;
mod url;

pub(crate) use self::device::Volume;
pub(crate) use self::open::{OpenOptions, VolumeError};
pub(crate) use self::patch::BLOCK;
pub(crate) use self::store::{Requests, without_credentials};
pub(crate) use self::url::{CREDENTIALS, VolumeUrl};
