//! The page that the bench `seeds` writes.

mod page;
mod plot;

pub use self::page::Page;
