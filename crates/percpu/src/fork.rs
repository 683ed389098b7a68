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

/// When a structure was made: in which process of a line of parents and children.
///
/// Not covered by semantic versioning: for the other crates of the workspace, whose structures wait
/// for threads too.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u64);

impl Generation {
    /// The generation of this process. Wait-free but for the first call of all; later ones may be
    /// made in a signal handler.
    #[must_use]
    pub fn current() -> Self {
        let Some(word) = page() else { return Self(0) };
        // Ordering: Relaxed, here and below; the number is the whole message.
        let seen = word.load(Ordering::Relaxed);
        if seen != WIPED {
            return Self(seen - 1);
        }
        // Drawn before it is shown: a child of this child, at whatever moment, draws a later one.
        let drawn = DRAWN.fetch_add(1, Ordering::Relaxed) + 1;
        // Of threads that draw at the same time, or of a thread and its signal handler, one wins.
        match word.compare_exchange(WIPED, drawn + 1, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Self(drawn),
            Err(first) => Self(first - 1),
        }
    }

    /// A number that is larger in a child than in its parent.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// True if a structure made in this generation was copied by a fork since, and not adopted.
    #[must_use]
    pub fn is_inherited(self) -> bool {
        let here = Self::current();
        // Ordering: Relaxed; who misses an `adopt` of this moment refuses to wait once more.
        self != here && ADOPTED.load(Ordering::Relaxed) != here.0
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

/// The last number that a process of this line drew for itself; the first process has 0.
static DRAWN: AtomicU64 = AtomicU64::new(0);
/// The process of that number took what it inherited for its own.
static ADOPTED: AtomicU64 = AtomicU64::new(0);

/// What the word in the wiped page says before this process has drawn its number. After it the word
/// is one more than the number.
const WIPED: u64 = 0;

/// Makes every structure that this process inherited its own: call it in a fork child whose parent
/// had, at the fork, no other thread that used this crate.
///
/// Where that is not so, a later wait may last for ever. Outside a fork child it does nothing.
pub fn adopt() {
    // Ordering: Relaxed; see `is_inherited`.
    ADOPTED.store(Generation::current().0, Ordering::Relaxed);
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
        word.store(WIPED + 1, Ordering::Relaxed);
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
    fn inv15_all_threads_of_a_child_find_one_generation() {
        let here = Generation::current();
        for _ in 0..20 {
            assert!(in_child(|| {
                let threads = [(); 4].map(|()| std::thread::spawn(Generation::current));
                let found = threads.map(|thread| thread.join().unwrap());
                let (first, mine) = (found[0], Generation::current());
                first != here && mine == first && found.iter().all(|&other| other == first)
            }));
        }
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
