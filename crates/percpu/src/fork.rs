//! Objects that a `fork` copied: their locks may belong to threads that the child does not have.
//!
//! A fork child has one thread, and a copy of everything: also of the locks that the other threads
//! held at that moment, which nobody in the child will ever unlock. Every structure of this crate
//! that waits for other threads remembers the generation it was made in. Where it would have to
//! wait in a later one it gives [`Forked`] instead; what needs no waiting goes on.
//!
//! The generation is a word in a page that the kernel wipes for a child (`MADV_WIPEONFORK`), so
//! that a raw `clone` is seen as well as libc's `fork`. It is looked at before waiting and never on
//! a fast path. A `vfork` child shares its parent's memory and must call nothing of this crate.
//!
//! A program that forks while it has one thread only (a daemon that detaches) has no such locks:
//! its child says so by [`adopt`], and everything is as if made by it.

use std::ptr::{self, NonNull};

use crate::error::Forked;
use crate::sync::native::OnceLock;
use crate::sync::native::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// When a structure was made: how many forks there were between this process and the first one
/// that asked.
///
/// Not covered by semantic versioning: for the other crates of the workspace, whose structures wait
/// for threads too.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u64);

impl Generation {
    /// The generation of this process.
    #[must_use]
    pub fn current() -> Self {
        settle();
        // Ordering: Relaxed; a number that only grows, and `settle` ordered what it counts.
        Self(NUMBER.load(Ordering::Relaxed))
    }

    /// How many forks that is: never the same in a child as in its parent.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// True if a structure made in this generation was copied by a fork since, and not adopted.
    #[must_use]
    pub fn is_inherited(self) -> bool {
        settle();
        // Ordering: Relaxed, both; written by `settle` and `adopt` before this process has a
        // structure or a thread to wait for.
        let adopted = ADOPTED.load(Ordering::Relaxed);
        let number = NUMBER.load(Ordering::Relaxed);
        (adopted..number).contains(&self.0)
    }

    /// Locks a mutex of a structure made in this generation; refuses to wait for it if the
    /// structure is inherited, since its holder may not exist.
    ///
    /// # Errors
    ///
    /// [`Forked`], where it would wait.
    pub fn lock<T>(self, mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>, Forked> {
        match mutex.try_lock() {
            Some(held) => Ok(held),
            None if self.is_inherited() => Err(Forked::new()),
            None => Ok(mutex.lock()),
        }
    }
}

/// Forks seen so far.
static NUMBER: AtomicU64 = AtomicU64::new(0);
/// Structures of generations below this one count as made by this process.
static ADOPTED: AtomicU64 = AtomicU64::new(0);

/// What the word in the wiped page says.
const WIPED: u64 = 0;
const SETTLED: u64 = 1;
const SETTLING: u64 = 2;

/// Makes every structure that this process inherited its own: call it in a fork child whose parent
/// had, at the fork, no other thread that used this crate.
///
/// Where that is not so, a later wait may last for ever. Outside a fork child it does nothing.
pub fn adopt() {
    settle();
    // Ordering: Relaxed, both; see `is_inherited`.
    ADOPTED.store(NUMBER.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Counts the fork, if there was one since the last call.
fn settle() {
    let Some(word) = page() else { return };
    // Ordering: Acquire pairs with the Release below; it carries NUMBER and ADOPTED.
    while word.load(Ordering::Acquire) != SETTLED {
        let ours =
            word.compare_exchange(WIPED, SETTLING, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if ours {
            // Ordering: Relaxed, both; published by the Release below.
            NUMBER.fetch_add(1, Ordering::Relaxed);
            ADOPTED.store(0, Ordering::Relaxed);
            // Ordering: Release pairs with the Acquire above.
            word.store(SETTLED, Ordering::Release);
        }
        // Else another thread of this child is between the two: a fork in between wipes the page,
        // so its child does not wait for that thread.
        std::hint::spin_loop();
    }
}

/// The word that a fork child finds wiped; `None` if the kernel refused the page, and then no fork
/// is seen.
fn page() -> Option<&'static AtomicU64> {
    static PAGE: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
    *PAGE.get_or_init(|| {
        let len = size_of::<AtomicU64>(); // the kernel rounds up to a page
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the mapping just made, whose pages nobody else uses.
        if unsafe { libc::madvise(at, len, libc::MADV_WIPEONFORK) } != 0 {
            // SAFETY: the mapping just made, of which nobody has the address.
            unsafe { libc::munmap(at, len) };
            return None;
        }
        let word = NonNull::new(at.cast::<AtomicU64>())?;
        // SAFETY: zeroed memory is an `AtomicU64` of 0; it is never unmapped.
        let word = unsafe { word.as_ref() };
        // Ordering: Relaxed; the `OnceLock` publishes it.
        word.store(SETTLED, Ordering::Relaxed);
        Some(word)
    })
}

#[cfg(test)]
#[path = "../tests/common/child.rs"]
pub(crate) mod child;

#[cfg(test)]
mod tests {
    use super::child::in_child;
    use super::*;

    #[test]
    fn inv15_a_fork_child_knows_what_it_inherited_until_it_adopts_it() {
        let here = Generation::current();
        assert!(!here.is_inherited());
        assert!(in_child(|| {
            let seen = here.is_inherited() && !Generation::current().is_inherited();
            adopt();
            seen && !here.is_inherited()
        }));
        assert!(!here.is_inherited(), "the parent goes on");
        assert_eq!(Generation::current(), here);
    }

    #[test]
    fn inv15_a_child_of_a_child_adopts_anew() {
        let first = Generation::current();
        assert!(in_child(|| {
            adopt();
            let second = Generation::current();
            in_child(|| first.is_inherited() && second.is_inherited())
                && !first.is_inherited()
                && !second.is_inherited()
        }));
    }
}
