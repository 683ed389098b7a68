//! Statistics of a queue.

use std::fmt;

/// Statistics of the levels, the priorities that have messages.
///
/// ```
/// use mq_rbtree::Queue;
///
/// let queue = Queue::with_keys(8)?;
/// for round in 0..10 {
///     queue.send("a message", round)?;
///     queue.receive()?;
/// }
/// let levels = queue.stats().levels;
/// assert_eq!((levels.from_preload, levels.from_cache), (1, 9)); // the node is reused
/// assert_eq!((levels.live, levels.kept, levels.fallback), (0, 1, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LevelStats {
    /// Priorities that have messages.
    pub live: usize,
    /// Nodes kept for reuse.
    pub kept: usize,
    /// How often a priority got its first message with a kept node, or in a bitmap. Messages that are
    /// received from the staging ring have no level.
    pub from_cache: u64,
    /// How often the node was allocated before the lock.
    pub from_preload: u64,
    /// How often a node was allocated under the lock, because there was no other.
    pub fallback: u64,
}

/// Statistics of a queue, from one consistent moment: what it holds, and counts since it was made.
///
/// ```
/// let queue: mq_rbtree::Queue<&str> = mq_rbtree::Queue::new(8)?;
/// queue.send("one", 1)?;
/// queue.send("two", 2)?;
/// queue.receive()?;
/// let stats = queue.stats();
/// assert_eq!((stats.depth, stats.peak, stats.sent, stats.received), (1, 2, 2, 1));
/// assert_eq!((stats.levels.live, stats.levels.fallback), (1, 0));
/// println!("{stats}"); // several lines of text
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Messages in the queue.
    pub depth: usize,
    /// The most messages that were in the queue and in guards at one time. A message that is sent behind an unfinished send is counted when that
    /// send has finished, without the guards that were accepted before.
    pub peak: usize,
    /// Messages accepted.
    pub sent: u64,
    /// Messages received or drained.
    pub received: u64,
    /// Messages in a [`MessageGuard`](crate::MessageGuard): neither in the queue nor received.
    pub guarded: usize,
    /// Sends that had to wait.
    pub send_waits: u64,
    /// Receives that had to wait.
    pub receive_waits: u64,
    /// Waits that ended by their deadline.
    pub timeouts: u64,
    /// Threads and tasks that wait now: to send, and to receive.
    pub waiting: (usize, usize),
    /// Statistics of the levels.
    pub levels: LevelStats,
    /// Chunks of message slots allocated under the lock.
    pub slab_fallback: u64,
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
        let Self { depth, peak, sent, received, guarded, .. } = self;
        let Self { send_waits, receive_waits, timeouts, waiting, .. } = self;
        writeln!(f, "depth      {depth} messages; at most {peak}")?;
        writeln!(f, "messages   {sent} sent, {received} received, {guarded} in guards")?;
        write!(f, "waits      {send_waits} to send, {receive_waits} to receive; ")?;
        writeln!(f, "{timeouts} timed out; now {} and {}", waiting.0, waiting.1)?;
        write!(f, "levels     {}; places {} under the lock", self.levels, self.slab_fallback)
    }
}
