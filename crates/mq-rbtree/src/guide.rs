//! How this crate works, an idea at a time.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`allocation`] | memory is allocated before the lock and freed after it |
//! | [`staged_sends`] | a ring in front of the ordered store, so that a send takes no lock |

#[doc = include_str!("guide/allocation.md")]
pub mod allocation {}
#[doc = include_str!("guide/staged_sends.md")]
pub mod staged_sends {}
