//! The unit tests inside the modules of nbd_server.
//!
//! An example that is tested (`test = true`) is no longer built as a program by `cargo test`, and
//! the trials in `nbd_clients` need the program; so its modules are compiled once more here.
#![expect(dead_code, reason = "only main.rs, which is not here, uses everything")]

#[path = "../nbd_server/admission.rs"]
mod admission;
#[path = "../nbd_server/args.rs"]
mod args;
#[path = "../nbd_server/blocks/mod.rs"]
mod blocks;
#[path = "../nbd_server/busy_poll.rs"]
mod busy_poll;
#[path = "../nbd_server/calls.rs"]
mod calls;
#[path = "../nbd_server/commands/mod.rs"]
mod commands;
#[path = "../nbd_server/conn.rs"]
mod conn;
#[path = "../nbd_server/connection_limits.rs"]
mod connection_limits;
#[path = "../nbd_server/contexts.rs"]
mod contexts;
#[path = "../nbd_server/counters.rs"]
mod counters;
#[path = "../nbd_server/demo/mod.rs"]
mod demo;
#[path = "../nbd_server/export/mod.rs"]
mod export;
#[path = "../nbd_server/extents.rs"]
mod extents;
#[path = "../nbd_server/flushes.rs"]
mod flushes;
#[path = "../nbd_server/folder.rs"]
mod folder;
#[path = "../nbd_server/image_spec.rs"]
mod image_spec;
#[path = "../nbd_server/listeners.rs"]
mod listeners;
#[path = "../nbd_server/lock.rs"]
mod lock;
#[path = "../nbd_server/memory.rs"]
mod memory;
#[path = "../nbd_server/metrics.rs"]
mod metrics;
#[path = "../nbd_server/notifier.rs"]
mod notifier;
#[path = "../nbd_server/open_images.rs"]
mod open_images;
#[path = "../nbd_server/operation.rs"]
mod operation;
#[path = "../nbd_server/peer.rs"]
mod peer;
#[path = "../nbd_server/registry.rs"]
mod registry;
#[path = "../nbd_server/report.rs"]
mod report;
#[path = "../nbd_server/requests.rs"]
mod requests;
#[path = "../nbd_server/run_command.rs"]
mod run_command;
#[path = "../nbd_server/server/mod.rs"]
mod server;
#[path = "../nbd_server/session.rs"]
mod session;
#[path = "../nbd_server/tasks.rs"]
mod tasks;
#[path = "../nbd_server/tls.rs"]
mod tls;
#[path = "../nbd_server/worker/mod.rs"]
mod worker;
