//! The core of both faces: a radix tree of words.
//!
//! ```text
//!  root word -> | slot 0 .. slot 63 | head, bits |    level 1 (shift 6)
//!                  |         |
//!                  |         +----> | slot 0 .. slot 63 | head, bits |    level 0: entries
//!                  +-> ...
//! ```
//!
//! A key is cut into groups of [`BITS`] bits, the highest first; each picks a slot. The root word says
//! how many levels there are, so that small keys take few loads, and a single entry at key 0 is in the
//! root word itself. A *word* is a pointer without a type:
//!
//! | word | means |
//! |---|---|
//! | null, in a tree without floors | absent |
//! | odd, in a tree with floors | absent, and a floor: see below |
//! | low bits 10, in the root | a node, and the number of its level |
//! | any other in the root (then of key 0) or at level 0 | an entry, present |
//! | any other above level 0 | a node |
//!
//! So an entry is even with bit 1 clear, or odd in a tree without floors.
//!
//! A *floor* says from which generation on the absent keys it covers may be used: all keys below its
//! slot. A node without an entry dies and leaves the highest of its floors in its parent's slot; a
//! node made in the place of a floor is filled with it.
//!
//! # Who excludes whom
//!
//! Readers take no lock; they are in an RCU section, or are the writer. There is one writer at a time,
//! who has an [`Edit`]; whose lock that is, is up to the tree's owner.
//!
//! # Invariants
//!
//! 1. A node's shift, and its offset in its parent, never change. Growth puts a new root above the old
//!    one, shrinking makes the root's only child, number 0, the root.
//! 2. A node that was in the tree is freed a grace period after it was unlinked. It keeps its slots as
//!    they were: a reader inside goes on from there and finds what was present when it began.
//! 3. Between edits no node is without an entry below it, and the root has more than child 0.
//! 4. An ancestor's mark bit is the OR of its child's, its full bit the AND of its child's. An absent
//!    key has neither.
//! 5. What is not covered by the root is covered by `top_floor`.

mod bits;
mod edit;
mod node;
mod pool;
mod radix;
mod search;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod validate;
mod word;

pub(crate) use self::edit::{Edit, Slot};
pub(crate) use self::radix::Tree;
pub(crate) use self::search::{Cursor, Which};
pub(crate) use self::word::{Word, floor_in, floor_word};
