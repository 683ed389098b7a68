//! The list of `percpu-list`.

use percpu_list::{Entry, PerCpuList};

use crate::registry::{Registry, Walk};

/// The message of `expect`: no call is refused.
const FREE: &str = "there is memory, and no thread walks";

/// The list that owns what is on it: an object is a number here, and made anew by each addition.
pub(crate) struct Owning(pub(crate) PerCpuList<u64>);

impl Registry for Owning {
    const NAME: &'static str = "PerCpuList";
    type Object = u64;
    type Ticket<'a> = Entry<u64>;

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
