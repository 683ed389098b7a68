//! The interface of every implementation, and the loops that all of them run.

use std::hint::black_box;
use std::sync::Arc;

use harness::Case;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// The value that peers keep.
pub(crate) type Page = [u8; PAGE];

/// Something that keeps pages, known by numbers.
pub(crate) trait Pages: Send + Sync + Sized + 'static {
    /// The name in the tables.
    const NAME: &'static str;

    /// None yet, and room for so many.
    fn new(room: usize) -> Self;

    /// Eight bytes of a page, `at` bytes behind its beginning. A page that is not there is filled and
    /// kept; another one goes for it.
    fn read(&self, number: u64, at: usize) -> u64;

    /// Returns one with room for `room` pages, filled with 0 to `n`.
    fn filled(n: usize, room: usize) -> Self {
        let pages = Self::new(room);
        (0..n as u64).for_each(|number| assert_eq!(pages.read(number, place(number)), number));
        pages
    }
}

/// Fills a page: each word with its number.
#[inline(never)]
pub(crate) fn fill(number: u64, page: &mut [u8]) {
    page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&number.to_ne_bytes()));
}

/// Returns the offset that is read in a page. Lookups in a page of a tree or a directory end anywhere in it. With one
/// offset for all, pages that are aligned to their size would share a few sets of the CPU's caches.
#[inline(always)]
pub(crate) fn place(number: u64) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize & (PAGE - 8)
}

/// The eight bytes `at` bytes behind the beginning.
#[inline(always)]
pub(crate) fn word(page: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(page[at..at + 8].try_into().expect("8 bytes"))
}

/// Reads along `keys`, whose number is a power of two; each thread begins elsewhere.
pub(crate) fn reads<'a, P: Pages>(pages: &Arc<P>, keys: &'a [u32], threads: usize) -> Case<'a> {
    assert!(keys.len().is_power_of_two());
    let pages = Arc::clone(pages);
    Case::new(P::NAME, threads, move |thread| {
        let pages = Arc::clone(&pages);
        let first = thread * keys.len() / threads;
        move |count| {
            let number = u64::from(keys[(first + count as usize) & (keys.len() - 1)]);
            black_box(pages.read(number, place(number)));
        }
    })
}
