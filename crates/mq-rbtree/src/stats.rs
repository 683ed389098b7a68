//! What a queue counts.

use std::fmt;
use std::time::{Duration, Instant};

/// What the levels of a queue consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelStats {
    /// Levels with messages.
    pub live: usize,
    /// Nodes or pages kept for levels to come.
    pub kept: usize,
    /// Levels that took a kept node, or a page that was there.
    pub from_cache: u64,
    /// Levels that took a node or page made before the lock.
    pub from_preload: u64,
    /// Nodes or pages allocated under the lock, because nothing else was there.
    pub fallback: u64,
}

/// What a queue did so far, and what it holds now: one consistent moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Messages in it.
    pub depth: usize,
    /// Their bytes, as measured.
    pub bytes: u64,
    /// The most messages that were ever in it.
    pub peak: usize,
    /// Messages that were accepted.
    pub sent: u64,
    /// Messages that were received, or drained.
    pub received: u64,
    /// Messages that went to a waiting thread.
    pub handed_over: u64,
    /// Messages that were taken from a waiting thread.
    pub taken_over: u64,
    /// Sends that had to wait.
    pub send_waits: u64,
    /// Receives that had to wait.
    pub receive_waits: u64,
    /// Waits of threads that ended before the thread slept.
    pub spun: u64,
    /// Waits that a deadline ended.
    pub timeouts: u64,
    /// Who waits now, to send and to receive.
    pub waiting: (usize, usize),
    /// What became of priorities.
    pub levels: LevelStats,
    /// Chunks of message places allocated under the lock.
    pub slab_fallback: u64,
    /// The longest time that the lock was held, if the queue was told to look.
    pub longest_hold: Option<Duration>,
}

/// What is counted under the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) peak: usize,
    /// What was received is this less what is there.
    pub(crate) sent: u64,
    pub(crate) handed_over: u64,
    pub(crate) taken_over: u64,
    pub(crate) send_waits: u64,
    pub(crate) receive_waits: u64,
    pub(crate) timeouts: u64,
    pub(crate) longest_hold: Duration,
}

impl Counters {
    /// Notes how long the lock was held, just before it is not any more.
    #[cold]
    #[inline(never)]
    pub(crate) fn record_hold(&mut self, since: Instant) {
        self.longest_hold = self.longest_hold.max(since.elapsed());
    }
}

impl fmt::Display for LevelStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { live, kept, from_cache, from_preload, fallback } = self;
        write!(f, "{live} live, {kept} kept; from cache {from_cache}, ")?;
        write!(f, "made before the lock {from_preload}, under it {fallback}")
    }
}

impl fmt::Display for QueueStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depth, bytes, peak, sent, received, handed_over, taken_over, .. } = self;
        let Self { send_waits, receive_waits, spun, timeouts, waiting, .. } = self;
        writeln!(f, "depth      {depth} messages, {bytes} bytes; at most {peak} messages")?;
        writeln!(f, "messages   {sent} sent, {received} received")?;
        writeln!(f, "direct     {handed_over} to waiting threads, {taken_over} from them")?;
        write!(
            f,
            "waits      {send_waits} to send, {receive_waits} to receive; {spun} without sleep, "
        )?;
        writeln!(f, "{timeouts} timed out; now {} and {}", waiting.0, waiting.1)?;
        write!(f, "levels     {}; places {} under the lock", self.levels, self.slab_fallback)?;
        match self.longest_hold {
            Some(longest) => write!(f, "\nlock       held {longest:?} at most"),
            None => Ok(()),
        }
    }
}
