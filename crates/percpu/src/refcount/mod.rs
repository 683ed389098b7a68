//! A reference count that many CPUs can use at once, and that still ends in one release.
//!
//! While the object is live nobody needs to know how many references there are, only that there
//! are some: one is held by the count itself until [`PercpuRef::kill`]. So every CPU counts in a
//! word of its own. A kill closes those words, folds them into one atomic and drops the initial
//! reference; from then on the atomic counts, and whoever takes it to zero runs the release
//! closure.
//!
//! ```text
//!   percpu mode                                         atomic mode
//!   gate = 0                                            gate = 1
//!   words:  | cpu 0: +3 | cpu 1: -1 | ...   -- fold --> words: closed
//!   remote: 0   (threads without a CPU id)              remote: CLOSED
//!   atomic: BIAS + initial                              atomic: the count, and DEAD after a kill
//! ```
//!
//! The idea is that of the Linux kernel's `lib/percpu-refcount.c` (3.11). The protocol is another:
//! the kernel waits for a grace period between closing the words and summing them; here the words
//! of one CPU are changed by rseq sections that test the gate, so that one
//! [`heavy_rseq`](crate::fence) is all the waiting there is, or, where no sections run, by
//! fetch-and-adds that a `swap` to `CLOSED` cuts off. What is added to a closed word is void, and is
//! never taken back: the taking back could land after the word was opened again.
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` since the last fold, plus
//! `atomic / ONE`, less `BIAS / ONE` in percpu mode.
//!
//! 1. A change of a word or of `remote` counts only while that is open, and in exactly one fold: a
//!    section commits only while `gate` is 0, and a fetch-and-add counts only if the value that it
//!    returns is open.
//! 2. While a word or `remote` is open, `atomic` carries the bias: it is added before they open
//!    and taken away, together with their sum, after they closed. So `atomic / ONE` is 0 only if
//!    there is no reference.
//! 3. `DEAD` is part of `atomic`: a `try_get` counts on a word that is open, so before the
//!    fold of a kill, or by a compare-exchange from a value without `DEAD`.
//! 4. `atomic` is `DEAD` and nothing else exactly between the last put and the moment when its
//!    thread has taken the closure out and stores `DEAD | RELEASED`. In between nobody else
//!    touches `release`; after it that thread touches nothing of the `PercpuRef`.
//! 5. `mode` is held while the mode changes, and never while a closure of the caller runs. Who
//!    holds several took them by ascending address.
//!
//! # Who excludes whom
//!
//! | | get, put | kill, resurrect, reinit, switch | last put |
//! |---|---|---|---|
//! | get, put | never | never | the last put is the last |
//! | kill, resurrect, reinit, switch | never | `mode` | reinit: invariant 4; others hold or find a reference |
//!
//! # exit, forget, panic
//!
//! A thread that exits owes nothing: counts belong to CPUs, not to threads. A forgotten [`Reference`] is a reference for
//! ever, and the release closure never runs. A panic of the release closure reaches whoever put
//! the last reference, or killed; one of the closure given to [`PercpuRef::kill_and_confirm`]
//! reaches its caller, after the initial reference was dropped all the same. A release closure that
//! panics on a thread that unwinds already aborts the process, as any panic of a drop does there.

mod block;
mod error;
mod many;
mod owned;
mod percpu_ref;
mod switch;
mod words;

pub use self::block::RefBlock;
pub use self::error::{KillError, ReinitError, ReinitRefused, ResurrectError};
pub use self::owned::ArcReference;
pub use self::percpu_ref::{PercpuRef, Reference};

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
