//! The protocol library from outside: its rules one by one, its properties on random input, and
//! the fuzz target's corpus.

mod corpus;
mod handshake;
mod meta;
mod properties;
mod request;
