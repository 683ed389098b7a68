//! How this crate works.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`generations`] | ids that become stale, and lookups without a lock |

#[doc = include_str!("guide/generations.md")]
pub mod generations {}
