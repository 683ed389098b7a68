//! Child processes that never outlive this program.
//!
//! Each child leads a process group of its own ([`groups`]), which is ended when the child exceeds
//! its time, when this program gets SIGINT, SIGTERM or SIGHUP ([`signals`]), and when this program
//! is killed ([`guard`]).

mod command;
mod groups;
pub(crate) mod guard;
pub(crate) mod lanes;
pub(crate) mod signals;

pub(crate) use self::command::{Cmd, Deadline};
pub(crate) use self::groups::interrupted;
