//! Registries of live objects, one list per CPU: add where you run, remove from anywhere, walk
//! everything.
//!
//! ```
//! use percpu_list::{PerCpuList, Refused};
//!
//! let sessions = PerCpuList::new();
//! let alice = sessions.insert("alice")?; // on this CPU's list, under this CPU's lock
//! let bob = sessions.insert("bob")?;
//!
//! for session in &sessions {
//!     println!("{}", *session?); // no lock is held here, and the value stays while this is here
//! }
//! drop(alice); // takes it off, wherever the thread runs now
//!
//! sessions.close()?; // from now on additions are refused, and get their value back
//! let refused = sessions.insert("carol").unwrap_err();
//! assert_eq!((refused.value, refused.reason), ("carol", Refused::Closed));
//! for session in sessions.drain() {
//!     assert_eq!(*session?, "bob"); // told to end; its entry is no longer linked
//! }
//! assert!(sessions.is_empty() && !bob.is_linked());
//! println!("{}", sessions.stats()); // who removed what, and from how far away
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to | in a [`PerCpuList`], which owns values | in an [`IntrusiveList`], of items that embed a [`Link`] |
//! |---|---|---|
//! | make one | [`new`](PerCpuList::new), with others in a [`Domain`]: [`new_in`](PerCpuList::new_in) | [`new`](IntrusiveList::new), [`new_in`](IntrusiveList::new_in) |
//! | add | [`insert`](PerCpuList::insert): an [`Entry`] that borrows the list; [`insert_arc`](PerCpuList::insert_arc): one that goes anywhere | [`insert`](IntrusiveList::insert), of a pinned item: allocates nothing for it |
//! | remove | drop the [`Entry`], or [`Entry::remove`] and its kin; [`remove`](PerCpuList::remove), of what a walk found | [`remove`](IntrusiveList::remove), [`Link::remove`]; the item's drop does it too |
//! | hold on to | [`Entry::share`]: a [`Ref`] | the item is its owner's |
//! | walk, no lock held while the caller's code runs | [`iter`](PerCpuList::iter) | [`iter_pinned`](IntrusiveList::iter_pinned) |
//! | walk under each slot's lock | [`for_each`](PerCpuList::for_each) | [`for_each`](IntrusiveList::for_each), [`retain`](IntrusiveList::retain) |
//! | see one instant of the whole | [`lock_all`](PerCpuList::lock_all): a [`Snapshot`] | [`lock_all`](IntrusiveList::lock_all): an [`IntrusiveSnapshot`] |
//! | take everything off | [`close`](PerCpuList::close), then [`drain`](PerCpuList::drain): a [`Drain`] | [`close`](IntrusiveList::close), then [`drain`](IntrusiveList::drain) |
//! | name the CPU (replays, tests) | [`insert_on`](PerCpuList::insert_on), [`Entry::remove_on`] | [`insert_on`](IntrusiveList::insert_on), [`remove_on`](IntrusiveList::remove_on) |
//! | count | [`len`](PerCpuList::len), [`stats`](PerCpuList::stats) | [`len`](IntrusiveList::len), [`stats`](IntrusiveList::stats) |
//!
//! Take the owning list unless the objects are pinned already and an allocation for each is too dear.
//! Take `iter` to print or to visit, `lock_all` for an answer that was true at one moment ("were both
//! there?"), `for_each` for a few instructions on each. A [`SlotPolicy`] makes fewer slots than CPUs:
//! one for each node, or a fixed number; with one it is a plain locked list.
//!
//! # Who waits for whom
//!
//! Each CPU has a slot with a lock. Lists of one [`Domain`] share the locks, not the entries.
//!
//! | | takes | waits for |
//! |---|---|---|
//! | add | this CPU's slot | who adds, removes or walks in that slot just now, in any list of the domain |
//! | remove | the slot that the entry was added to | the same, of that slot |
//! | [`try_remove`](Entry::try_remove), [`Link::try_remove`] | that slot, if it is free | nobody |
//! | [`Entry::defer_remove`] | no lock: lock-free | nobody |
//! | `iter`, `iter_pinned`, `drain` | a slot for 32 entries, again and again | as add, of each slot in turn |
//! | `for_each`, `retain`, the intrusive `drain` | a slot for all its entries | as add, of each slot in turn |
//! | `lock_all` | all slots, in ascending order | everybody; and everybody waits until it is dropped |
//! | `len`, `is_empty`, `stats`, `is_closed`, clone and drop of a [`Ref`] | nothing: wait-free | nobody |
//!
//! Waiting is a few attempts, then sleeping. Memory is allocated before a lock is taken and freed after
//! it is released, and values are dropped with no lock held. What is called under a lock is only what
//! is handed to `for_each`, `retain` and `iter_pinned`, and the methods of a snapshot.
//!
//! An entry that is on the list throughout is seen by a walk exactly once. One that comes or goes
//! meanwhile is seen once or not at all, and what a walk gives out may have been removed just now.
//!
//! # Memory
//!
//! | | bytes |
//! |---|---|
//! | a domain, for each slot | 128 |
//! | a list in it, for each slot that it never used | 8 |
//! | a list, for each slot that it used | 256, and the array: 8 for each entry, in segments of at most 4 KiB |
//! | an entry of a [`PerCpuList`] | an allocation of 32 beside the value; an [`Entry`] is a pointer, and the list's |
//! | a [`PerCpuList`], for each slot that it used | up to 16 such allocations more, kept for the next values |
//! | a [`Link`] | 24 |
//!
//! An array gives segments back as it empties, all but one. Slots are for possible CPUs: those of a CPU
//! that went offline stay as they are, and their entries can be seen and removed.
//!
//! # Errors
//!
//! What is refused comes back, and nothing has changed: a value in an [`InsertError`], an entry in a
//! [`RemoveError`]. Each has `errno()`, and becomes an [`io::Error`](std::io::Error).
//!
//! | errno | | from |
//! |---|---|---|
//! | `ESHUTDOWN` | [`Refused::Closed`] | add |
//! | `EEXIST` | [`Refused::Linked`] | add, intrusive |
//! | `EXDEV` | [`Refused::OtherDomain`] | add, intrusive |
//! | `ENOMEM` | [`Refused::Alloc`], [`AllocError`] | add, `try_new` |
//! | `EDEADLK` | [`LockError::Deadlock`]: this thread holds the slot, in a locked walk or a snapshot | all that locks |
//! | `EAGAIN` | [`LockError::WouldBlock`] | the `try_` methods |
//! | `EINVAL` | [`LockError::NoSuchCpu`] | `insert_on`, `remove_on` |
//!
//! # What happens when
//!
//! - *An [`Entry`] is forgotten* (`mem::forget`): its value stays on the list until that is dropped, or
//!   drained. A forgotten item (`mem::forget` of its box) stays on its list for ever.
//! - *A snapshot is forgotten*: all slots stay locked, and everybody waits for ever. A forgotten walk
//!   keeps its place: removals in that slot leave holes from then on, which later additions fill.
//! - *The list is dropped*: a [`PerCpuList`] drops what was forgotten on it, since all other entries
//!   borrow or hold it. An [`IntrusiveList`] takes its items off; they are their owners'.
//! - *What the caller gave panics* under a lock: the lock is released, nothing is poisoned, and slots
//!   that were not reached are as they were. The drop of a value that panics passes it on to whoever
//!   dropped it; others that were to be dropped with it are.
//! - *An entry is dropped inside a locked walk or a snapshot* of its own thread: it is removed when that
//!   ends, or, if it is of another list of the domain, by whoever locks its slot next. An intrusive item
//!   cannot wait for that: if it is on a list then, and its slot is held or must be waited for, the
//!   process ends with a message.
//! - *A signal handler* may call [`Entry::defer_remove`], [`IntrusiveList::try_remove`] and
//!   [`Link::try_remove`], and nothing else here.
//! - *The process forks*: the child may only exec or exit.
//!
//! # What it is not for
//!
//! - Finding an entry by a key: that is a map's work, or `radix-ctx`'s for ids.
//! - Order: within a slot it changes with each removal.
//! - Walks as often as changes: a list that is walked all the time and changed seldom is better under
//!   RCU.
//! - One CPU, or lists that change some hundred times a second: a mutex around a slab does.
//!
//! What it costs beside such lists, the rows it loses included: `cargo bench --bench percpu_list`.
//!
//! # Source
//!
//! The idea is that of "fs: scale files_lock" (Linux, 2010): a list of open files for each CPU and
//! super-block, each file knowing which one it is on, and a lock over all for who must see the whole.
//! The idea of walking with the lock dropped is that of dlock-list (posted for Linux 2016 to 2023).
//! What we changed:
//!
//! - There are both kinds of walk: one that holds nobody up, and one that shows an instant. Removal
//!   unlinks at once under the entry's own slot, so no snapshot misses one of two and shows the other
//!   that was removed before.
//! - Dense arrays instead of linked lists: a walk reads pointers in a row. While somebody walks with the
//!   lock dropped nothing moves behind him.
//! - An entry's home changes only under both slots' locks, and who locked a slot looks again: no owner
//!   need keep track of who may add or remove it just now.

mod anchor;
mod array;
mod chunk;
mod core;
mod cursor;
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

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
