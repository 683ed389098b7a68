//! What one client and all clients together may use.

use std::time::Duration;

use clap::Args;

/// The limits of a server.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Clients at a time.
    #[arg(long, default_value_t = 1024)]
    pub(crate) clients: u64,

    /// Topics that one client may subscribe to.
    #[arg(long, default_value_t = 16)]
    pub(crate) topics: usize,

    /// Messages below the urgent priorities that may wait for one client; answers and urgent messages that
    /// find their own places taken use these too.
    #[arg(long, default_value_t = 64)]
    pub(crate) messages: usize,

    /// Seconds that a client has to read its last lines after QUIT or Ctrl-C.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "2")]
    pub(crate) farewell: Duration,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}
