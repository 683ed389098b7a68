//! Registries of live objects, with one list per CPU. A thread adds to the list of its CPU, removes
//! from any list, and can walk all of them.
//!
//! ```
//! use percpu_list::{PerCpuList, Refused};
//!
//! let sessions = PerCpuList::new();
//! let alice = sessions.insert("alice")?; // on this CPU's list, under this CPU's lock
//! let bob = sessions.insert("bob")?;
//!
//! for session in &sessions {
//!     println!("{}", *session?); // no lock is held here, and `session` keeps the value alive
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
//! | add | [`insert`](PerCpuList::insert) returns an [`Entry`] that borrows the list; [`insert_arc`](PerCpuList::insert_arc) returns an [`ArcEntry`] that can be stored anywhere, and changes the count of the list's `Arc`, on a cache line that all CPUs share |
//! | remove | drop the [`Entry`], or call [`Entry::remove`]; [`remove`](PerCpuList::remove) takes a [`Ref`] from a walk |
//! | keep a value alive | [`Entry::share`] returns a [`Ref`] |
//! | walk, with no lock held while your code runs | [`iter`](PerCpuList::iter) |
//! | see the whole list at one instant | [`lock_all`](PerCpuList::lock_all) returns a [`Snapshot`] |
//! | remove every entry | [`close`](PerCpuList::close), then [`drain`](PerCpuList::drain), which returns a [`Drain`] |
//! | count | [`len`](PerCpuList::len), [`stats`](PerCpuList::stats) |
//!
//! # Choosing
//!
//! - Walk with `iter` to print or visit entries. Use `lock_all` for an answer that was true at one
//!   moment ("were both there?").
//!
//! # An entry in a spawned thread or task
//!
//! An [`Entry`] borrows its list. If the list lives as long as the program, `insert` is enough, and no
//! count is shared:
//!
//! ```
//! use std::sync::LazyLock;
//!
//! use percpu_list::{Entry, PerCpuList};
//!
//! static SESSIONS: LazyLock<PerCpuList<String>> = LazyLock::new(PerCpuList::new);
//!
//! let list: &'static PerCpuList<String> = &SESSIONS;
//! let entry: Entry<&'static PerCpuList<String>> = list.insert("alice".into())?;
//! std::thread::spawn(move || drop(entry)).join().unwrap(); // removes it
//! assert!(list.is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
//! use percpu_list::{ArcEntry, PerCpuList, Refused};
//!
//! type Subscribers = PerCpuList<u32>;
//!
//! #[derive(Default)]
//! struct Topics {
//!     lists: RwLock<HashMap<String, Arc<Subscribers>>>,
//! }
//!
//! impl Topics {
//!     fn subscribe(&self, topic: &str, client: u32) -> Result<ArcEntry<u32>, Refused> {
//!         if let Some(list) = self.lists.read().unwrap().get(topic) {
//!             return Ok(list.insert_arc(client)?); // not exclusive, but the `RwLock` and the `Arc` have counts
//!         }
//!         let mut lists = self.lists.write().unwrap();
//!         Ok(lists.entry(topic.into()).or_default().insert_arc(client)?)
//!     }
//!
//!     fn unsubscribe(&self, topic: &str, subscription: ArcEntry<u32>) {
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
//! # Locks and waits
//!
//! Each CPU has a slot with a lock. "Slot in use" means that another thread adds, removes or walks
//! there.
//!
//! | call | locks | waits |
//! |---|---|---|
//! | add | the slot of this CPU | while the slot is in use |
//! | remove | the slot that the entry was added to | while the slot is in use |
//! | `iter`, `drain` | one slot at a time, once for every 32 entries | while that slot is in use |
//! | `lock_all` | all slots, in ascending order | while any slot is in use; until the snapshot is dropped, all calls of other threads wait |
//! | `len`, `is_empty`, `stats`, `is_closed`, clone and drop of a [`Ref`] | nothing; they are wait-free | never |
//!
//! A thread that waits makes a few attempts and then sleeps. Memory is allocated before a lock is
//! acquired, and freed after it is released. Values are dropped with no lock held. The only code of
//! the caller that runs under a lock is the code that runs while a snapshot exists.
//!
//! A walk sees every entry that is on the list during the whole walk exactly once. It sees an entry
//! that is added or removed during the walk once or not at all. An entry that a walk returns may
//! have been removed since.
//!
//! # Memory
//!
//! | | bytes |
//! |---|---|
//! | a list, for each slot | 136 |
//! | a list, for each slot that it has used, beside that | 256, and an array with 8 for each entry, in segments of at most 4 KiB |
//! | an entry of a [`PerCpuList`] | an allocation of 32 beside the value; an [`Entry`] is a pointer and a pointer to the list |
//! | a [`PerCpuList`], for each slot that it has used | up to 16 such allocations, pooled for the next values |
//!
//! An array frees its unused segments, except one. Slots are for possible CPUs. If a CPU goes
//! offline, its slot stays, and the entries there remain visible and removable.
//!
//! # Errors
//!
//! A refused call changes nothing, and returns what it was given: [`InsertError`] contains the
//! value, and [`RemoveError`] contains the entry. Every error has `errno()`, and converts into an
//! [`io::Error`](std::io::Error).
//!
//! | errno | error | returned by |
//! |---|---|---|
//! | `ESHUTDOWN` | [`Refused::Closed`] | add |
//! | `ENOMEM` | [`Refused::Alloc`], [`AllocError`] | add |
//! | `EDEADLK` | [`LockError::Deadlock`]: this thread has a snapshot of the list | all calls that lock |
//!
//! # Special cases
//!
//! - *A forgotten [`Entry`]* (`mem::forget`): its value stays on the list until the list is dropped
//!   or drained.
//! - *A forgotten snapshot*: all slots stay locked, and calls of other threads wait for ever. A
//!   forgotten walk keeps its position: from then on removals in that slot leave holes, which later
//!   adds fill.
//! - *Drop of the list*: it drops the values of forgotten entries; there are no others, because an
//!   entry borrows or holds the list.
//! - *A panic while a snapshot exists*: the slots are unlocked, and nothing is poisoned. A panic in
//!   the drop of a value propagates to the caller whose call dropped it; other values that the call
//!   drops are still dropped.
//! - *Drop of an [`Entry`] while its thread has a snapshot*: the entry is removed at the end of the
//!   snapshot.
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
//! - There are both kinds of walk: one that makes other threads wait only shortly, and one that
//!   shows an instant. A removal unlinks at once, under the lock of the entry's slot. So if one
//!   entry was removed before another, no snapshot shows the first and misses the second.
//! - The lists are dense arrays, so a walk reads adjacent pointers. While a walk has released the
//!   lock, no entry moves.

mod cells;
mod entry;
mod error;
#[cfg(doc)]
pub mod guide;
mod list;
mod snapshot;
mod stats;
mod walk;

pub use percpu::lglock::LockError;
pub use percpu::{AllocError, CpuId};

pub use self::entry::{ArcEntry, Entry, Ref};
pub use self::error::{InsertError, Refused, RemoveError};
pub use self::list::PerCpuList;
pub use self::snapshot::{Snapshot, SnapshotIter};
pub use self::stats::Stats;
pub use self::walk::{Drain, Iter};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
