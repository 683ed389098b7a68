//! What is built and checked, one module for each concern. `ci` puts them in order.

use std::fs::{self, File};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::process::Cmd;
use crate::workspace::Scratch;

pub(crate) mod adopt;
pub(crate) mod benches;
pub(crate) mod fallbacks;
pub(crate) mod fuzz;
pub(crate) mod lint;
pub(crate) mod models;
pub(crate) mod stress;
pub(crate) mod tests;

/// Runs a command that others run beside, and prints its output once it has ended.
fn logged(folder: &Scratch, cmd: Cmd, printing: &Mutex<()>) -> Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Ordering: Relaxed; the counter makes the names of files differ and publishes nothing.
    let path = folder.path.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    let failed = |error| Error::io(path.display(), error);
    let log = File::create(&path).map_err(failed)?;
    let outcome = cmd.log(Arc::new(log)).run();
    let said = fs::read(&path).map_err(failed)?;
    let _one_at_a_time = printing.lock();
    let _ = io::stdout().write_all(&said);
    outcome
}
