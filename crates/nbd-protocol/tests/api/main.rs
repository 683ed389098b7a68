//! The protocol: its rules one by one, its properties on random input, and the corpus of the fuzz target.

mod client;
mod corpus;
#[path = "../driven/mod.rs"]
mod driven;
mod extended;
mod handshake;
mod meta;
mod properties;
mod request;
mod tls;
