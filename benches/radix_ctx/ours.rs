//! The measured table, with its values in its slots.

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id};

use crate::map::{Change, Map, Pack, Walk};
use crate::peers::fill;
use crate::seed::aio::Handle;
use crate::seed::list::{Context, Registry};

/// The message of `expect`: no insertion is refused.
const ROOM: &str = "memory for a context, and no limit";

/// radix-ctx: a [`CtxTable`] without limits.
pub(crate) struct Ctx<V: Send + Sync + 'static>(pub(crate) CtxTable<V>);

impl<V: Send + Sync + 'static> Map<V> for Ctx<V> {
    const NAME: &'static str = "radix-ctx";
    type Key = Id;
    type Guard<'g>
        = rcu::Guard
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Id>) {
        fill(Self(CtxTable::new()), n, value)
    }

    #[inline(always)]
    fn enter(&self) -> rcu::Guard {
        rcu::pin()
    }

    #[inline(always)]
    fn read<R>(&self, guard: &rcu::Guard, key: Id, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.get(key, guard).ok().map(f)
    }
}

impl<V: Send + Sync + 'static> Change<V> for Ctx<V> {
    fn insert(&self, _: u64, value: V) -> Id {
        self.0.insert(value).expect(ROOM)
    }

    fn remove(&self, key: Id) -> bool {
        self.0.remove(key).is_ok()
    }
}

impl Pack for Id {
    #[inline]
    fn pack(self) -> u64 {
        self.to_bits()
    }

    #[inline]
    fn unpack(bits: u64) -> Self {
        Self::from_bits(bits).expect("a packed key")
    }
}

impl<V: Send + Sync + 'static> Walk<V> for Ctx<V> {
    fn each(&self, mut f: impl FnMut(&V)) {
        self.0.iter(&rcu::pin()).for_each(|(_, value)| f(value));
    }
}

impl<V: Send + Sync + 'static> Ctx<V> {
    /// A counted reference.
    #[inline(always)]
    pub(crate) fn get_ref(&self, key: Id) -> Option<CtxRef<V>> {
        self.0.get_ref(key).ok()
    }
}

/// "After": the seed's contexts by their ids, each in the box that it had in the list.
pub(crate) struct Contexts(CtxTable<Box<Context>>);

impl Contexts {
    pub(crate) fn new() -> Self {
        Self(CtxTable::new())
    }

    pub(crate) fn insert(&self, context: Box<Context>) -> u64 {
        self.0.insert(context).expect(ROOM).to_bits()
    }
}

impl Registry for Contexts {
    #[inline(never)]
    fn find(&self, id: u64) -> Option<Handle> {
        let guard = rcu::pin();
        self.0.get(Id::from_bits(id)?, &guard).ok().map(|context| context.aio)
    }
}
