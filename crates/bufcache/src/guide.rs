//! How this crate works, an idea at a time.
//!
//! | chapter | the idea |
//! |---|---|
//! | [`hazard_slots`] | a hit writes one slot of its thread, and nothing else |
//! | [`write_back`] | dirty, unsynced, durable: what may be lost at which moment |

#[doc = include_str!("guide/hazard_slots.md")]
pub mod hazard_slots {}
#[doc = include_str!("guide/write_back.md")]
pub mod write_back {}
