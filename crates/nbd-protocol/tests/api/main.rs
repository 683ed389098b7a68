//! The protocol: its rules one by one, its properties on random input, and the corpus of the fuzz target.

mod client;
#[path = "../driven/mod.rs"]
mod driven;
mod handshake;
mod meta;
mod properties;
mod request;
mod tls;
