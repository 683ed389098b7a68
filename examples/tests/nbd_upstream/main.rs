//! The device over an upstream NBD server (`nbd_server/upstream`), standing alone: a cache over it, and as upstream
//! a scripted server in this process (`scripted`), qemu-nbd, or nbdkit (`real`).
#![expect(dead_code, unused_imports, reason = "the server uses what is left")]

#[path = "../../nbd_server/upstream/mod.rs"]
mod upstream;

mod crash;
mod lanes;
mod limits;
mod power;
mod real;
mod scripted;
mod wrong_replies;
