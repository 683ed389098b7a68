//! Ctrl-C as a future.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// Returns a future that is ready at the first SIGINT after this call. The signal no longer ends the
/// process.
pub(crate) fn interrupted() -> io::Result<impl Future<Output = ()>> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    Ok(async move {
        interrupts.recv().await;
    })
}
