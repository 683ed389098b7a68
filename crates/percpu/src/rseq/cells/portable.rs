//! Builds without sections: there are no values of [`Sections`].

use super::{Block, Cell, Head, Refused};

/// The sections of this build, a type without values.
#[derive(Clone, Copy, Debug)]
pub enum Sections {}

#[expect(clippy::missing_safety_doc, reason = "no function of this type can be called")]
impl Sections {
    pub fn find() -> Option<Self> {
        None
    }

    pub unsafe fn insert<T>(
        self,
        _: *const Head,
        _: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused> {
        match self {}
    }

    pub unsafe fn refill(self, _: *const Block) -> Result<(), Refused> {
        match self {}
    }

    pub unsafe fn remove<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }

    pub unsafe fn remove_remote<T>(
        self,
        _: *const Head,
        _: *const Block,
        _: u32,
        _: *mut Cell<T>,
    ) -> Result<(), Refused> {
        match self {}
    }
}
