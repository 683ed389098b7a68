//! How this crate works.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`lists`] | cells for each CPU, a sequence without a lock, and an entry that is the address of its cell |

#[doc = include_str!("guide/lists.md")]
pub mod lists {}
