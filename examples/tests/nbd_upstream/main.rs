//! The device of an upstream NBD server (`nbd_server/upstream`) without the rest of the server: a
//! cache over it, and as upstream a scripted server in this process (`scripted`), qemu-nbd, or
//! nbdkit (`real`).

#[expect(dead_code, unused_imports, reason = "the server uses the rest")]
#[path = "../../nbd_server/upstream/mod.rs"]
mod upstream;

mod crash;
mod lanes;
mod limits;
mod power;
mod real;
mod scripted;
mod wrong_replies;
