//! A radix tree of words, below the table.
//!
//! ```text
//!  root word -> | slot 0 .. slot 63 | head, bits |    level 1 (shift 6)
//!                  |         |
//!                  |         +----> | slot 0 .. slot 63 | head, bits |    level 0: entries
//!                  +-> ...
//! ```
//!
//! A key consists of groups of 6 bits. Each group selects a slot, the highest group first. The root word
//! contains the number of levels, so small keys take few loads. A single entry at key 0 is in the root
//! word itself. A *word* is an untyped pointer:
//!
//! | word | meaning |
//! |---|---|
//! | odd | absent, and a floor |
//! | low bits 10, in the root | a node and its level |
//! | any other in the root (for key 0) or at level 0 | an entry |
//! | any other above level 0 | a node |
//!
//! So an entry is even with bit 1 clear.
//!
//! A *floor* is the lowest generation that the absent keys below its slot may use. A node without an entry
//! leaves the tree, and its highest floor goes into its parent's slot. A node that replaces a floor is
//! filled with it.
//!
//! # Exclusion
//!
//! Readers take no lock. A reader is in an RCU section, or it is the writer. The writer is the thread that
//! has the [`Edit`] of the tree. The owner of the tree has a lock that admits one writer at a time.
//!
//! # Invariants
//!
//! 1. The shift of a node and its offset in its parent never change. Growth puts a new root above the old
//!    one. Shrinking replaces a root that has only child 0 by this child.
//! 2. A node that was in the tree is freed a grace period after it left the tree, and keeps its slots until
//!    then. A reader in the node continues there, and finds the entries that were present when its search
//!    began.
//! 3. Between edits each node has an entry below it, and the root has more children than child 0.
//! 4. The full bit that a node has for a child is the AND of the child's full bits. An absent key has none.
//! 5. The floor of a key above the root's range is `top_floor`.

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

pub(crate) use self::edit::Edit;
pub(crate) use self::radix::Tree;
pub(crate) use self::search::Cursor;
pub(crate) use self::word::{floor_in, floor_word};
