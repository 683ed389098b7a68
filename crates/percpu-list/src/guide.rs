//! How this crate works.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`lists`] | a list and a lock for each CPU, and an entry that remembers its list |

#[doc = include_str!("guide/lists.md")]
pub mod lists {}
