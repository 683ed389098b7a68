//! SIGINT, SIGTERM and SIGHUP end the children first and then this program.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use super::groups::interrupt;

/// Starts one thread per signal, which waits for its signal in a pipe.
///
/// The program does not end here: the commands that were running fail, and the caller reports that
/// and exits.
pub(crate) fn handle() -> io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let (mut received, sender) = UnixStream::pair()?;
        pipe::register(signal, sender)?;
        thread::spawn(move || {
            while received.read_exact(&mut [0]).is_ok() {
                interrupt(signal);
            }
        });
    }
    Ok(())
}
