//! The messages of one priority, oldest first: a list linked through the slab.

/// The index that stands for no message.
pub(crate) const NIL: u32 = u32::MAX;

/// The list of the messages of one priority: indices into the slab, [`NIL`] if the list is empty.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fifo {
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) len: u32,
}

impl Fifo {
    pub(crate) const EMPTY: Self = Self { head: NIL, tail: NIL, len: 0 };

    pub(crate) fn is_empty(&self) -> bool {
        self.head == NIL
    }
}
