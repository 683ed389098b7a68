//! Registries of live objects, with one list per CPU. A thread adds to the list of its CPU, removes
//! from any list, and can walk all of them.
//!
//! ```
//! use percpu_list::{PerCpuList, Refused};
//!
//! let sessions = PerCpuList::new();
//! let alice = sessions.insert("alice")?; // on this CPU's list, without a lock
//! let bob = sessions.insert("bob")?;
//!
//! for session in &sessions {
//!     println!("{}", *session); // no lock is held here, and `session` keeps the value alive
//! }
//! drop(alice); // removes it, on whichever CPU the thread runs now
//!
//! sessions.close()?; // later adds are refused, and get their value back
//! let refused = sessions.insert("carol").unwrap_err();
//! assert_eq!((refused.value, refused.reason), ("carol", Refused::Closed));
//! for session in sessions.drain() {
//!     assert_eq!(*session?, "bob"); // its entry is no longer linked
//! }
//! assert!(sessions.is_empty() && !bob.is_linked());
//! println!("{}", sessions.stats()); // how many removals came from another CPU or node
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The [`guide`] explains the lists with a picture.
//!
//! | to | call |
//! |---|---|
//! | create a list | [`new`](PerCpuList::new) |
//! | add | [`insert`](PerCpuList::insert) returns an [`Entry`], which can be stored anywhere and may outlive the list |
//! | remove | drop the [`Entry`], or call [`Entry::remove`]; [`remove`](PerCpuList::remove) takes a [`Ref`] from a walk |
//! | keep a value alive | [`Entry::share`] returns a [`Ref`] |
//! | walk, with no lock held while your code runs | [`iter`](PerCpuList::iter) |
//! | see the whole list at one instant | [`lock_all`](PerCpuList::lock_all) returns a [`Snapshot`] |
//! | remove every entry | [`close`](PerCpuList::close), then [`drain`](PerCpuList::drain), which returns a [`Drain`] |
//! | count | [`len`](PerCpuList::len), [`stats`](PerCpuList::stats) |
//! | give memory back after a burst | [`trim`](PerCpuList::trim) |
//!
//! # Choosing
//!
//! - Walk with `iter` to print or visit entries. Use `lock_all` for an answer that was true at one
//!   moment ("were both there?").
//!
//! # A map of lists
//!
//! The subscribers of a topic, the sessions of a user: a list for each key. Add under the shared lock
//! of the map, and remove an empty list under its exclusive lock. Otherwise an entry could be added to
//! a list that has just left the map.
//!
//! ```
//! use std::collections::HashMap;
//! use std::sync::{Arc, RwLock};
//!
//! use percpu_list::{Entry, PerCpuList, Refused};
//!
//! type Subscribers = PerCpuList<u32>;
//!
//! #[derive(Default)]
//! struct Topics {
//!     lists: RwLock<HashMap<String, Arc<Subscribers>>>,
//! }
//!
//! impl Topics {
//!     fn subscribe(&self, topic: &str, client: u32) -> Result<Entry<u32>, Refused> {
//!         if let Some(list) = self.lists.read().unwrap().get(topic) {
//!             return Ok(list.insert(client)?);
//!         }
//!         let mut lists = self.lists.write().unwrap();
//!         Ok(lists.entry(topic.into()).or_default().insert(client)?)
//!     }
//!
//!     fn unsubscribe(&self, topic: &str, subscription: Entry<u32>) {
//!         drop(subscription);
//!         let is_empty = |list: &Arc<Subscribers>| list.is_empty();
//!         if self.lists.read().unwrap().get(topic).is_some_and(is_empty) {
//!             let mut lists = self.lists.write().unwrap();
//!             if lists.get(topic).is_some_and(is_empty) {
//!                 lists.remove(topic); // no thread adds under this lock
//!             }
//!         }
//!     }
//! }
//!
//! let topics = Topics::default();
//! let subscription = topics.subscribe("news", 7)?;
//! assert_eq!(topics.lists.read().unwrap()["news"].len(), 1);
//! topics.unsubscribe("news", subscription);
//! assert!(topics.lists.read().unwrap().is_empty());
//! # Ok::<(), Refused>(())
//! ```
//!
//! # Waits
//!
//! An entry is a cell of a block of its CPU. An addition or a removal is one restartable sequence
//! (rseq), without a lock or a locked instruction if the CPU is that of the block. The list has
//! locks for what is rare.
//!
//! | call | waits |
//! |---|---|
//! | add | for a snapshot of another thread; if the CPU has no free cell, for a growth of the same slot |
//! | remove | for a snapshot of another thread; if a walk has seen the entry, for such a removal or a growth on this CPU |
//! | `iter`, `drain` | once for every 16 blocks, for another walk that pins its entries; `drain` also as a removal does |
//! | `lock_all`, `close`, `trim` | for a snapshot, and for the changes that have begun; one system call restarts the sequences of all threads |
//! | `len`, `is_empty`, `stats`, `is_closed`, clone and drop of a [`Ref`] | never; they are wait-free |
//!
//! If rseq or the `membarrier` command that restarts sequences is missing, additions lock the slot of the
//! CPU and removals are atomic operations under it: slower, with the same results.
//!
//! A walk marks the entries that it sees. The removal of such an entry takes about three times as long.
//!
//! Memory is allocated before a lock is acquired, and freed after it is released. Values are dropped with
//! no lock held. Other threads wait for code of the caller only while it has a snapshot.
//!
//! A walk sees every entry that is on the list during the whole walk exactly once. It sees an entry
//! that is added or removed during the walk once or not at all. An entry that a walk returns may
//! have been removed since.
//!
//! # Memory
//!
//! | | bytes |
//! |---|---|
//! | a list, for each slot | 128 |
//! | a block of 64 cells | 384 beside the values, which are rounded up to words of 8; the first block of a slot has 8 cells |
//! | a value of more than 256 bytes, or aligned to more than 64 | 8 in its cell, and an allocation of its own |
//! | an [`Entry`], a [`Ref`] | 16, 8 |
//!
//! Values do not move, so a block stays while one of its cells is used, until a [`trim`](PerCpuList::trim).
//! Slots are for possible CPUs. If a
//! CPU goes offline, its slot stays, and the entries there remain visible and removable.
//!
//! # Errors
//!
//! A refused call changes nothing; [`InsertError`] contains the value. An entry whose removal is refused is removed
//! at the end of its thread's snapshot. Every error has `errno()`, and converts into an
//! [`io::Error`](std::io::Error).
//!
//! | errno | error | returned by |
//! |---|---|---|
//! | `ESHUTDOWN` | [`Refused::Closed`] | add |
//! | `ENOMEM` | [`Refused::NoMemory`] | add |
//! | `EDEADLK` | [`Refused::Deadlock`], [`Deadlock`]: this thread has a snapshot of the list | add, remove, `drain`, `lock_all`, `close`, `trim` |
//!
//! # Special cases
//!
//! - *A forgotten [`Entry`]* (`mem::forget`): its value stays on the list until a drain, and is not dropped. The memory of
//!   the list stays.
//! - *Snapshots of two lists*: threads that take them in different orders wait for each other for ever.
//! - *A thread that has a snapshot and waits for another thread*, which adds to the list or removes from it: both wait for
//!   ever.
//! - *A loop over `iter`*: a [`Ref`] that ends may be the last of a removed entry. Its end drops the value, so a caller must
//!   not hold a lock that such a drop takes.
//! - *A value that owns an [`Entry`] of its own list*: the end of the list does not drop it.
//! - *A forgotten snapshot*: calls of other threads that wait for it wait for ever. A thread that starts
//!   when the forgetting one has ended may be taken for it. A forgotten walk or
//!   [`Ref`] keeps its values and their blocks.
//! - *Drop of the list*: entries and references keep their values and the memory of the list until the last of them
//!   ends.
//! - *A panic while a snapshot exists*: additions and removals go on, and nothing is poisoned. A panic in
//!   the drop of a value propagates to the caller whose call dropped it; other values that the call
//!   drops are still dropped. A second panic meanwhile aborts the process.
//! - *Drop of an [`Entry`] while its thread has a snapshot*: the entry is removed at the end of the
//!   snapshot. If the thread of an earlier snapshot is removing entries of the same block at that moment, it removes
//!   this one, too.
//! - *A signal handler* must not call functions of this crate.
//! - *fork*: the child may only exec or exit.
//!
//! # Not for
//!
//! - Finding an entry by a key: use a map, or `radix-ctx` for ids.
//! - Order: within a slot, the order changes with each removal.
//! - Lists that are walked as often as they change: use RCU for a list that is read all the time
//!   and changed rarely.
//! - One CPU, or lists that change a few hundred times a second: a mutex around a slab is enough.
//!
//! `cargo bench --bench percpu_list` measures the costs beside such lists, including the rows that
//! this crate loses.
//!
//! # Source
//!
//! The idea is that of "fs: scale files_lock" (Linux, 2010): a list of open files for each CPU and
//! super-block, a file that stores which list it is on, and a lock over all lists for the walks
//! that need the whole. The idea of a walk that releases the lock is that of dlock-list (posted for
//! Linux from 2016 to 2023). This crate changes the following:
//!
//! - There are both kinds of walk: one that makes no other thread wait, and one that shows an
//!   instant. If one entry was removed before another, no snapshot shows the first and misses the
//!   second.
//! - An addition or a removal takes no lock: it is one restartable sequence. A removal on another CPU than
//!   that of the entry is the same with one locked instruction.
//! - Entries are cells of blocks, and the bit of a cell in two words says whether it is occupied. So a
//!   walk reads adjacent memory, and no entry moves.

mod cells;
mod entry;
mod error;
#[cfg(doc)]
pub mod guide;
mod list;
#[cfg(offlock_model)]
mod model;
mod snapshot;
mod stats;
mod walk;

pub use offlock_percpu::CpuId;

pub use self::entry::{Entry, Ref};
pub use self::error::{Deadlock, InsertError, Refused};
pub use self::list::PerCpuList;
pub use self::snapshot::{Snapshot, SnapshotIter};
pub use self::stats::Stats;
pub use self::walk::{Drain, Iter};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
