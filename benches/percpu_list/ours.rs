//! The list of `percpu-list`.

use percpu_list::{ArcEntry, Entry, PerCpuList};

use crate::registry::{Registry, Walk};

/// The message of `expect`: no call is refused.
const FREE: &str = "there is memory, and no thread walks";

/// The list that owns what is on it: an object is a number here, and made anew by each addition.
pub(crate) struct Owning(pub(crate) PerCpuList<u64>);

impl Registry for Owning {
    const NAME: &'static str = "PerCpuList";
    type Object = u64;
    type Ticket<'a> = Entry<'a, u64>;

    fn new() -> Self {
        Self(PerCpuList::new())
    }

    fn object(&self, number: u64) -> u64 {
        number
    }

    #[inline(always)]
    fn add<'a>(&'a self, number: &u64) -> Self::Ticket<'a> {
        self.0.insert(*number).expect(FREE)
    }

    #[inline(always)]
    fn remove<'a>(&'a self, _: &u64, ticket: Self::Ticket<'a>) -> bool {
        ticket.remove().expect(FREE)
    }
}

impl Walk for Owning {
    fn each(&self, mut f: impl FnMut(u64)) {
        self.0.lock_all().expect(FREE).for_each(|number| f(*number));
    }
}

/// The list with entries that do not borrow it, as a spawned task keeps them.
pub(crate) struct Shared(PerCpuList<u64>);

impl Registry for Shared {
    const NAME: &'static str = "PerCpuList, insert_arc";
    type Object = u64;
    type Ticket<'a> = ArcEntry<u64>;

    fn new() -> Self {
        Self(PerCpuList::new())
    }

    fn object(&self, number: u64) -> u64 {
        number
    }

    #[inline(always)]
    fn add(&self, number: &u64) -> ArcEntry<u64> {
        self.0.insert_arc(*number).expect(FREE)
    }

    #[inline(always)]
    fn remove(&self, _: &u64, ticket: ArcEntry<u64>) -> bool {
        ticket.remove().expect(FREE)
    }
}
