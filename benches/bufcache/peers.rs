//! The peers, at the versions of `benches/Cargo.toml`.

use std::collections::HashMap;
use std::hash::Hash;
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

/// quick_cache, by a page's number or by an address.
pub(crate) struct Quick<K, V: ?Sized>(
    pub(crate) quick_cache::sync::Cache<K, Arc<V>, quick_cache::UnitWeighter, FxBuildHasher>,
);

impl<K: Hash + Eq + Copy, V: AsRef<[u8]> + ?Sized> Quick<K, V> {
    pub(crate) fn with_room(room: usize) -> Self {
        let (weighter, lifecycle) = (quick_cache::UnitWeighter, Default::default());
        let most = room as u64;
        Self(quick_cache::sync::Cache::with(room, most, weighter, FxBuildHasher, lifecycle))
    }

    /// Returns eight bytes of a value, which `make` makes if it is not there.
    #[inline(always)]
    pub(crate) fn word(&self, key: K, at: usize, make: impl FnOnce() -> Arc<V>) -> u64 {
        match self.0.get(&key) {
            Some(value) => word((*value).as_ref(), at),
            None => self.miss(key, at, make),
        }
    }

    #[cold]
    #[inline(never)]
    fn miss(&self, key: K, at: usize, make: impl FnOnce() -> Arc<V>) -> u64 {
        let make = || Ok::<_, std::convert::Infallible>(make());
        word((*self.0.get_or_insert_with(&key, make).expect("infallible")).as_ref(), at)
    }
}

/// quick_cache with pages.
pub(crate) type QuickPages = Quick<u64, Page>;

impl Pages for QuickPages {
    const NAME: &'static str = "quick_cache";

    fn new(room: usize) -> Self {
        Self::with_room(room)
    }

    #[inline(always)]
    fn read(&self, number: u64, at: usize) -> u64 {
        self.word(number, at, || made(number))
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
