//! How much the live contexts of a table may be together.
//!
//! Both limits are [`LimitedCounter`]s: exact at the limit, and per CPU away from it. A context
//! counts from before it is published until it is removed, whether or not somebody still uses it: so
//! a removal and a new context never meet a quota that is not full.

use percpu::{AllocError, Forked, LimitError, LimitedCounter};

use super::error::InsertRefused;
use percpu::alloc::try_box;

/// The limits of a table; boxed, so that one without limits is small.
#[derive(Debug, Default)]
pub(super) struct Quota {
    contexts: Option<Box<LimitedCounter>>,
    weight: Option<Box<Weight>>,
}

#[derive(Debug)]
struct Weight {
    counter: LimitedCounter,
    limit: u64,
}

/// What the live contexts of a table are together. From [`CtxTable::usage`](super::CtxTable::usage).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// How many there are, reserved ones included.
    pub contexts: u64,
    /// The sum of their weights; `None` for a table without a limit for it, which does not add them
    /// up.
    pub weight: Option<u64>,
}

impl Quota {
    pub(super) fn try_new(contexts: Option<u64>, weight: Option<u64>) -> Result<Self, AllocError> {
        fn boxed<T>(value: T) -> Result<Box<T>, AllocError> {
            try_box(value).map_err(|_| AllocError::new())
        }
        let counter = |limit| LimitedCounter::try_new(limit);
        let contexts = contexts.map(|limit| boxed(counter(limit)?)).transpose()?;
        let weighted = |limit| boxed(Weight { counter: counter(limit)?, limit });
        Ok(Self { contexts, weight: weight.map(weighted).transpose()? })
    }

    #[inline(always)]
    pub(super) fn is_limited(&self) -> bool {
        self.contexts.is_some() || self.weight.is_some()
    }

    pub(super) fn is_weighted(&self) -> bool {
        self.weight.is_some()
    }

    /// Counts one more context, or nothing. Size, then quota.
    #[inline]
    pub(super) fn take(&self, weight: u64) -> Result<(), InsertRefused> {
        if let Some(limited) = &self.weight {
            if weight > limited.limit {
                return Err(InsertRefused::TooHeavy);
            }
        }
        if let Some(contexts) = &self.contexts {
            contexts.try_add(1)?;
        }
        if let Some(limited) = &self.weight {
            if let Err(error) = limited.counter.try_add(weight) {
                self.give_back_context();
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Undoes [`take`](Self::take).
    #[inline]
    pub(super) fn give_back(&self, weight: u64) {
        self.give_back_context();
        if let Some(limited) = &self.weight {
            given_back(limited.counter.try_sub(weight));
        }
    }

    fn give_back_context(&self) {
        if let Some(contexts) = &self.contexts {
            given_back(contexts.try_sub(1));
        }
    }

    /// The number of contexts, if it is limited; and the sum of weights, if that is.
    pub(super) fn usage(&self) -> Result<(Option<u64>, Option<u64>), Forked> {
        let value = |counter: &LimitedCounter| match counter.value() {
            Ok(value) => Ok(value),
            Err(LimitError::Forked(forked)) => Err(forked),
            Err(_) => Ok(0), // a value is within its limits
        };
        let contexts = self.contexts.as_deref().map(value).transpose()?;
        let weight = self.weight.as_ref().map(|limited| value(&limited.counter)).transpose()?;
        Ok((contexts, weight))
    }
}

/// What was added can be taken back, but for a fork child that lost the counter's lock: there it
/// stays added.
fn given_back(result: Result<(), LimitError>) {
    debug_assert!(matches!(result, Ok(()) | Err(LimitError::Forked(_))), "{result:?}");
}
