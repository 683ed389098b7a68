//! Makes a table with limits.

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

/// Makes a [`CtxTable`] with limits. Returned by [`CtxTable::builder`].
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
    /// Limits the number of live contexts. The default is the number of indexes.
    ///
    /// A removed context does not count, although readers may still use it. While a reader stays, each
    /// removal and insert takes more memory; only [`max_index`](Self::max_index) limits that.
    ///
    /// A removal happens before the insert that takes its place.
    pub fn max_contexts(mut self, contexts: u64) -> Self {
        self.contexts = Some(contexts);
        self
    }

    /// Limits the sum of the weights of the live contexts, in a unit of the caller's choice. The weight
    /// is an argument of [`insert_weighted`](CtxTable::insert_weighted). Takes 8 bytes for each slot.
    pub fn max_weight(mut self, weight: u64) -> Self {
        self.weight = Some(weight);
        self
    }

    /// Sets the largest index of an id. The default is 2^32 - 3, which is also the largest value.
    ///
    /// With a small one, inserts may be refused although few contexts are live, until readers let the
    /// table use the indexes of removed contexts again.
    pub fn max_index(mut self, index: u32) -> Self {
        self.limits.max_index = index.min(MAX_INDEX);
        self
    }

    /// Sets the number of contexts that an index can have, one after the other: from 1 to 2^30 - 2, which
    /// is the default.
    ///
    /// An exhausted index keeps the memory of its slot. When a block of 64 neighbouring indexes is
    /// entirely vacant, its memory may be freed, and its indexes continue from the highest generation
    /// among them; so an index can have fewer contexts than this number. Indexes that were never used
    /// lose none.
    ///
    /// Ids are then below `(generations + 1) << 32`, for a field that cannot hold larger numbers.
    pub fn generation_limit(mut self, generations: u32) -> Self {
        self.limits.generations = generations.clamp(1, MAX_GENERATION - 1) + 1;
        self
    }

    /// Makes a table with these limits.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for it.
    pub fn build(self) -> Result<CtxTable<T>, AllocError> {
        let quota = Quota::try_new(self.contexts, self.weight)?;
        // SAFETY: `run_callback` is for the callbacks of cores, and this head becomes one.
        let callback = unsafe { RetireHead::new(run_callback::<T>) };
        let core = Watched::new(Core::new(self.limits, quota, callback, SMALLEST));
        let core = try_box(core).map_err(|_| AllocError::new())?;
        Ok(CtxTable::from_core(Core::place(core)))
    }
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Makes an empty table without limits. Allocates.
    ///
    /// # Aborts
    ///
    /// Aborts like `Box::new` if there is no memory; [`Builder::build`] returns an error instead.
    #[must_use]
    pub fn new() -> Self {
        let made = Self::builder().build();
        made.unwrap_or_else(
            |_| std::alloc::handle_alloc_error(std::alloc::Layout::new::<Core<T>>()),
        )
    }

    /// Returns a builder, for a table with limits, or to handle a lack of memory.
    pub fn builder() -> Builder<T> {
        Builder { contexts: None, weight: None, limits: Limits::NONE, _makes: PhantomData }
    }
}

impl<T: Send + Sync + 'static> Default for CtxTable<T> {
    fn default() -> Self {
        Self::new()
    }
}
