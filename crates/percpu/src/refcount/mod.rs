//! A reference count that every CPU keeps in its own word, and that ends in exactly one release.
//!
//! The count itself holds an initial reference until [`PercpuRef::kill`]. So the number of
//! references does not matter while the object is live, and every CPU counts in its own word. A
//! kill closes those words, folds them into one atomic and drops the initial reference. From then
//! on the atomic is the count, and the thread that takes it to zero runs the release closure.
//!
//! ```text
//!   live                                                killed
//!   gate = 0                                            gate = 1
//!   words:  | cpu 0: +3 | cpu 1: -1 | ...   -- fold --> words: closed
//!   remote: 0   (threads without a CPU id)              remote: CLOSED
//!   atomic: BIAS + initial                              atomic: the count
//! ```
//!
//! The design is that of the Linux kernel's `lib/percpu-refcount.c` (3.11), which waits for a grace
//! period between closing the words and summing them. Here the rseq sections that change the words
//! test the gate, so one [`heavy_rseq`](crate::fence) suffices. Where no sections run,
//! fetch-and-adds change the words, and a `swap` to `CLOSED` ends them. An add to a closed word is
//! void, and is not undone.
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` until the fold, plus `atomic`, less
//! `BIAS` until the fold.
//!
//! 1. A change of a word or of `remote` counts only while that word is open, and in the fold. A
//!    section commits only while `gate` is 0, and a fetch-and-add counts only if the value that it
//!    returns is open.
//! 2. Until the fold `atomic` includes the bias. After it `atomic` is the number of references, and
//!    only the holder of a reference adds to it. So it reaches 0 once, by the kill or by one put,
//!    and stays 0.
//! 3. A `try_get` counts on open words only, and so before the fold of a kill.
//! 4. Only the thread that takes `atomic` to 0 accesses `release`. It takes the closure out before it
//!    calls it, and accesses nothing in the `PercpuRef` afterwards.
//!
//! # Thread exit, forgotten references, panics
//!
//! A thread may exit at any time, because counts belong to CPUs and not to threads. A forgotten
//! [`Reference`] is never put, so the release closure never runs. A panic of the release closure
//! unwinds from the put of the last reference, or from the kill. If that thread already unwinds, the
//! process aborts, like for any panic in a drop.

mod block;
mod error;
mod percpu_ref;
mod words;

pub use self::block::RefBlock;
pub use self::error::KillError;
pub use self::percpu_ref::{PercpuRef, Reference};
