//! How this crate works.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`reaping`] | completions are reaped in the call that submits |

#[doc = include_str!("guide/reaping.md")]
pub mod reaping {}
