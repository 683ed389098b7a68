//! How this crate works, an idea at a time.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`sections`] | a word for each CPU, changed without a locked instruction |
//! | [`fences`] | a fence that costs nothing on the side that runs often |
//! | [`mod@rcu`] | readers that never wait, and a number that says when memory may be freed |
//!
//! The other crates of the workspace have chapters of their own: lists per CPU (`percpu-list`), allocation
//! outside the lock and staged sends (`mq-rbtree`), hazard slots and write-back (`bufcache`), reaping after
//! submitting (`aio-reap`).

#[doc = include_str!("guide/fences.md")]
pub mod fences {}
#[doc = include_str!("guide/rcu.md")]
pub mod rcu {}
#[doc = include_str!("guide/sections.md")]
pub mod sections {}
