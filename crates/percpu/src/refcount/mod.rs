//! A reference count that every CPU keeps in its own word, and that ends in exactly one release.
//!
//! The count itself holds an initial reference until [`PercpuRef::kill`]. So the number of
//! references does not matter while the object is live, and every CPU counts in its own word. A
//! kill closes those words, folds them into one atomic and drops the initial reference. From then
//! on the atomic is the count, and the thread that takes it to zero runs the release closure.
//!
//! ```text
//!   percpu mode                                         atomic mode
//!   gate = 0                                            gate = 1
//!   words:  | cpu 0: +3 | cpu 1: -1 | ...   -- fold --> words: closed
//!   remote: 0   (threads without a CPU id)              remote: CLOSED
//!   atomic: BIAS + initial                              atomic: the count, and DEAD after a kill
//! ```
//!
//! The design is that of the Linux kernel's `lib/percpu-refcount.c` (3.11), which waits for a grace
//! period between closing the words and summing them. Here the rseq sections that change the words
//! test the gate, so one [`heavy_rseq`](crate::fence) suffices. Where no sections run,
//! fetch-and-adds change the words, and a `swap` to `CLOSED` ends them. An add to a closed word is
//! void. It is never undone, because the undo could land after the word was opened again.
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` since the last fold, plus
//! `atomic / ONE`, less `BIAS / ONE` in percpu mode.
//!
//! 1. A change of a word or of `remote` counts only while that word is open, and in exactly one
//!    fold. A section commits only while `gate` is 0, and a fetch-and-add counts only if the value
//!    that it returns is open.
//! 2. While a word or `remote` is open, `atomic` includes the bias. The bias is added before they
//!    open, and subtracted together with the addition of their sum after they closed. So `atomic /
//!    ONE` is 0 only if there is no reference.
//! 3. `DEAD` is part of `atomic`. A `try_get` counts either on an open word, and so before the fold
//!    of a kill, or by a compare-exchange from a value without `DEAD`.
//! 4. `atomic` is exactly `DEAD` from the last put until the thread of that put has taken the
//!    closure out and stores `DEAD | RELEASED`. In between no other thread accesses `release`, and
//!    afterwards that thread accesses nothing in the `PercpuRef`.
//! 5. A mode change holds `mode`. No closure of the user runs while `mode` is held.
//!
//! # Exclusion
//!
//! | | get, put | kill, resurrect, reinit, switch | last put |
//! |---|---|---|---|
//! | get, put | never | never | no put follows the last put |
//! | kill, resurrect, reinit, switch | never | `mode` | reinit: invariant 4; the other operations hold or find a reference |
//!
//! # Thread exit, forgotten references, panics
//!
//! A thread may exit at any time, because counts belong to CPUs and not to threads. A forgotten
//! [`Reference`] is never put, so the release closure never runs. A panic of the release closure
//! unwinds from the put of the last reference, or from the kill. If that thread already unwinds, the
//! process aborts, like for any panic in a drop.

mod block;
mod error;
mod owned;
mod percpu_ref;
mod switch;
mod words;

pub use self::block::RefBlock;
pub use self::error::{KillError, ReinitError, ResurrectError};
pub use self::owned::ArcReference;
pub use self::percpu_ref::{PercpuRef, Reference};

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
