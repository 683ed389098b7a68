//! The peers, at the versions of `benches/Cargo.toml`.

use std::collections::HashMap;
use std::sync::Arc;

use rustc_hash::FxBuildHasher;

use crate::pages::{Page, Pages, fill, word};

/// A page of a peer's, filled. As [`Arc::new`] it would go over the stack.
fn made(number: u64) -> Arc<Page> {
    let mut page = Arc::<Page>::new_uninit();
    let at = Arc::get_mut(&mut page).expect("just made");
    // SAFETY: bytes of which all values are valid are about to be overwritten, and not looked at
    // before that.
    fill(number, unsafe { at.assume_init_mut() });
    // SAFETY: all of it was filled.
    unsafe { page.assume_init() }
}

/// A hash map of boxes: enough for a single thread that never evicts. It is
/// filled once, and then only read.
pub(crate) struct Bare {
    map: HashMap<u64, Box<Page>, FxBuildHasher>,
}

impl Pages for Bare {
    const NAME: &'static str = "hash map";

    fn new(room: usize) -> Self {
        Self { map: HashMap::with_capacity_and_hasher(room, FxBuildHasher) }
    }

    #[inline(always)]
    fn read(&self, number: u64, at: usize) -> u64 {
        word(&self.map[&number][..], at)
    }

    fn filled(n: usize, room: usize) -> Self {
        let mut pages = Self::new(room);
        for number in 0..n as u64 {
            let mut page: Box<Page> = vec![0; size_of::<Page>()].try_into().expect("a page's size");
            fill(number, &mut page[..]);
            pages.map.insert(number, page);
        }
        pages
    }
}

/// quick_cache.
pub(crate) struct Quick(
    quick_cache::sync::Cache<u64, Arc<Page>, quick_cache::UnitWeighter, FxBuildHasher>,
);

impl Pages for Quick {
    const NAME: &'static str = "quick_cache";

    fn new(room: usize) -> Self {
        Self(quick_cache::sync::Cache::with(
            room,
            room as u64,
            quick_cache::UnitWeighter,
            FxBuildHasher,
            Default::default(),
        ))
    }

    #[inline(always)]
    fn read(&self, number: u64, at: usize) -> u64 {
        match self.0.get(&number) {
            Some(page) => word(&page[..], at),
            None => self.miss(number, at),
        }
    }
}

impl Quick {
    #[cold]
    #[inline(never)]
    fn miss(&self, number: u64, at: usize) -> u64 {
        let make = || Ok::<_, std::convert::Infallible>(made(number));
        word(&self.0.get_or_insert_with(&number, make).expect("infallible")[..], at)
    }
}

/// moka.
pub(crate) struct Moka(moka::sync::Cache<u64, Arc<Page>, FxBuildHasher>);

impl Pages for Moka {
    const NAME: &'static str = "moka";

    fn new(room: usize) -> Self {
        let builder = moka::sync::Cache::builder().max_capacity(room as u64).initial_capacity(room);
        Self(builder.build_with_hasher(FxBuildHasher))
    }

    #[inline(always)]
    fn read(&self, number: u64, at: usize) -> u64 {
        match self.0.get(&number) {
            Some(page) => word(&page[..], at),
            None => self.miss(number, at),
        }
    }
}

impl Moka {
    #[cold]
    #[inline(never)]
    fn miss(&self, number: u64, at: usize) -> u64 {
        word(&self.0.get_with(number, || made(number))[..], at)
    }
}
