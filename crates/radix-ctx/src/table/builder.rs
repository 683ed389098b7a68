//! Makes a table with limits.

use std::marker::PhantomData;

use percpu::rcu::RetireHead;
use percpu::sync::quarantine::Watched;

use super::core::Core;
use super::ctx_table::CtxTable;
use super::ending::run_callback;
use super::quota::Quota;
use super::retire::SMALLEST;
use super::slab::MAX_INDEX;

/// Makes a [`CtxTable`] with limits. Returned by [`CtxTable::builder`].
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_contexts(1).build();
/// let first = table.insert("one").expect("it is empty");
/// let refused = table.insert("two").unwrap_err();
/// assert_eq!((refused.reason, refused.value), (InsertRefused::Quota { limit: 1 }, "two"));
/// table.remove(first).expect("it is there");
/// table.insert("two").expect("removed contexts do not count");
/// ```
#[derive(Debug)]
#[must_use = "`build` makes the table"]
pub struct Builder<T> {
    contexts: Option<u64>,
    max_index: u32,
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

    /// Sets the largest index of an id. The default is 2^32 - 3, which is also the largest value.
    ///
    /// With a small one, inserts may be refused although few contexts are live, until readers let the
    /// table use the indexes of removed contexts again.
    pub fn max_index(mut self, index: u32) -> Self {
        self.max_index = index.min(MAX_INDEX);
        self
    }

    /// Makes a table with these limits.
    #[must_use]
    pub fn build(self) -> CtxTable<T> {
        // SAFETY: `run_callback` is for the callbacks of cores, and this head becomes one.
        let callback = unsafe { RetireHead::new(run_callback::<T>) };
        let core = Core::new(self.max_index, Quota::new(self.contexts), callback, SMALLEST);
        CtxTable::from_core(Core::place(Box::new(Watched::new(core))))
    }
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Makes an empty table without limits.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Returns a builder, for a table with limits.
    pub fn builder() -> Builder<T> {
        Builder { contexts: None, max_index: MAX_INDEX, _makes: PhantomData }
    }
}

impl<T: Send + Sync + 'static> Default for CtxTable<T> {
    fn default() -> Self {
        Self::new()
    }
}
