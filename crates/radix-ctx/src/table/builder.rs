//! How a table is made.

use std::marker::PhantomData;

use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::rcu::RetireHead;
use percpu::sync::quarantine::Watched;

use super::core::{Core, Limits};
use super::ctx_table::CtxTable;
use super::ending::run_callback;
use super::id::MAX_GENERATION;
use super::quota::Quota;
use super::retire::SMALLEST;
use super::slab::MAX_INDEX;

/// What a [`CtxTable`] is to allow. From [`CtxTable::builder`].
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_contexts(1).build()?;
/// let first = table.insert("one").expect("it is empty");
/// let refused = table.insert("two").unwrap_err();
/// assert_eq!((refused.reason, refused.value), (InsertRefused::Quota, "two"));
/// table.remove(first).expect("it is there");
/// table.insert("two").expect("removed contexts do not count");
/// # Ok::<(), radix_ctx::AllocError>(())
/// ```
#[derive(Debug)]
#[must_use = "`build` makes the table"]
pub struct Builder<T> {
    contexts: Option<u64>,
    weight: Option<u64>,
    limits: Limits,
    _makes: PhantomData<fn() -> T>,
}

impl<T: Send + Sync + 'static> Builder<T> {
    /// How many contexts may be live at a time; without it as many as there are indexes. One that
    /// was removed does not count, though it may be in use still: under a reader that stays, memory
    /// grows with each removal and insert, and only [`max_index`](Self::max_index) bounds that.
    pub fn max_contexts(mut self, contexts: u64) -> Self {
        self.contexts = Some(contexts);
        self
    }

    /// How much the live contexts may weigh together, in units of the caller's: what
    /// [`insert_weighted`](CtxTable::insert_weighted) is told. Costs 8 bytes for each slot.
    pub fn max_weight(mut self, weight: u64) -> Self {
        self.weight = Some(weight);
        self
    }

    /// The largest index of an id, 2^32 - 3 at most, which is what it is if not set.
    ///
    /// With a small one the table may have to wait for readers before it can use an index again:
    /// inserts are refused meanwhile, though few contexts are live.
    pub fn max_index(mut self, index: u32) -> Self {
        self.limits.max_index = index.min(MAX_INDEX);
        self
    }

    /// How many contexts may have the same index, one after the other, until it is used no more;
    /// 2^30 - 2 at most, which is what it is if not set, and 1 at least.
    ///
    /// An index that is used up keeps its slot's memory; and counts for `max_index`.
    ///
    /// A group of 64 neighbouring indexes that are all vacant may give its memory back, and then its
    /// indexes go on from the highest generation among them: an index may have fewer contexts than this
    /// says. Indexes above all that were used before lose none.
    ///
    /// Ids are then below `(generations + 1) << 32`, for those who have no room for larger ones.
    pub fn generation_limit(mut self, generations: u32) -> Self {
        self.limits.generations = generations.clamp(1, MAX_GENERATION - 1) + 1;
        self
    }

    /// Makes the table.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for it.
    pub fn build(self) -> Result<CtxTable<T>, AllocError> {
        let quota = Quota::try_new(self.contexts, self.weight)?;
        // SAFETY: `run_callback` is for the ticks of cores, of which this will be one.
        let callback = unsafe { RetireHead::new(run_callback::<T>) };
        let core = Watched::new(Core::new(self.limits, quota, callback, SMALLEST));
        let core = try_box(core).map_err(|_| AllocError::new())?;
        Ok(CtxTable::from_core(Core::place(core)))
    }
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// An empty table without limits.
    ///
    /// # Aborts
    ///
    /// As `Box::new`, if there is no memory; [`Builder::build`] returns that.
    #[must_use]
    pub fn new() -> Self {
        let made = Self::builder().build();
        made.unwrap_or_else(
            |_| std::alloc::handle_alloc_error(std::alloc::Layout::new::<Core<T>>()),
        )
    }

    /// For a table with limits, or whose making may fail.
    pub fn builder() -> Builder<T> {
        Builder { contexts: None, weight: None, limits: Limits::NONE, _makes: PhantomData }
    }
}

impl<T: Send + Sync + 'static> Default for CtxTable<T> {
    fn default() -> Self {
        Self::new()
    }
}
