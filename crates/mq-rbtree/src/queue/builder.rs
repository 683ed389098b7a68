//! Making a queue with more limits than one.

use std::fmt;
use std::num::NonZeroU32;

use percpu::sync::WordLock;

use super::Queue;
use super::config::{Config, Reserve};
use super::spin::Spin;
use super::state::State;
use crate::core::{Bitmap, Core, Levels, MAX_MESSAGES, RbTree};
use crate::error::BuildError;
use crate::quota::Quota;

/// Nodes kept for priorities to come, where nothing is said: 64 KiB of them or so.
const DEFAULT_SPARE_NODES: usize = 1024;

impl<T> Queue<T, Bitmap> {
    /// A queue for up to `max_messages` messages, with priorities from 0 to 32,767.
    ///
    /// # Errors
    ///
    /// [`BuildError::Limits`] for none or too many, [`BuildError::NoMemory`].
    pub fn new(max_messages: usize) -> Result<Self, BuildError> {
        Self::builder(max_messages).build()
    }

    /// The same, with more limits than one, or as a [`channel`](Builder::channel).
    #[must_use]
    pub fn builder(max_messages: usize) -> Builder<T, Bitmap> {
        Builder::new(max_messages)
    }
}

impl<T, K: Ord + Copy + fmt::Debug> Queue<T, RbTree<K>> {
    /// A queue for up to `max_messages` messages, with priorities of any type with an order: the
    /// greatest first. Which type that is follows from the first send.
    ///
    /// ```
    /// use std::cmp::Reverse;
    /// use mq_rbtree::Queue;
    ///
    /// let queue = Queue::with_keys(8)?; // the nearest first
    /// queue.send("the castle", (Reverse(700), 'b'))?;
    /// queue.send("the bridge", (Reverse(300), 'a'))?;
    /// assert_eq!(queue.receive()?, ("the bridge", (Reverse(300), 'a')));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`new`](Queue::new).
    pub fn with_keys(max_messages: usize) -> Result<Self, BuildError> {
        Self::builder_with_keys(max_messages).build()
    }

    /// The same, with more limits than one, or as a [`channel`](Builder::channel).
    #[must_use]
    pub fn builder_with_keys(max_messages: usize) -> Builder<T, RbTree<K>> {
        Builder::new(max_messages)
    }
}

/// Limits and habits of a [`Queue`] to be made: [`Queue::builder`], [`Queue::builder_with_keys`].
pub struct Builder<T, L: Levels = Bitmap> {
    config: Config<T, L>,
    reserves: Vec<Reserve<L::Priority>>,
    ageing: Option<NonZeroU32>,
    spare: usize,
    no_alloc: bool,
    spin: bool,
    quota: Option<Quota>,
}

impl<T, L: Levels> Builder<T, L> {
    /// For a queue of up to `max_messages` messages, of whichever levels: for code that is generic over
    /// them.
    #[must_use]
    pub fn new(max_messages: usize) -> Self {
        let config = Config {
            max_messages,
            max_bytes: u64::MAX,
            max_message_bytes: u32::MAX,
            measure: None,
            reserves: Box::default(),
            fair_bytes: false,
            time_lock: false,
        };
        let reserves = Vec::new();
        let (ageing, spare, no_alloc, spin, quota) = (None, DEFAULT_SPARE_NODES, false, true, None);
        Self { config, reserves, ageing, spare, no_alloc, spin, quota }
    }

    /// Has messages measured: `measure` says how many bytes a message has, for the limits on them. Runs
    /// once for each send, outside the lock.
    #[must_use]
    pub fn measure(mut self, measure: fn(&T) -> usize) -> Self {
        self.config.measure = Some(measure);
        self
    }

    /// Most bytes of all messages together, and so of one; without [`measure`](Self::measure) each has
    /// 0. See [`fair_bytes`](Self::fair_bytes).
    #[must_use]
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.config.max_bytes = bytes;
        self
    }

    /// Lets no sender overtake one that waits for bytes, unless it has more
    /// [urgency](crate::Wait::urgency), nor take bytes that a task was told of and has not taken yet: it
    /// waits behind them, or finds the queue full, though there be room for it.
    ///
    /// Without this a message is sent whenever there is room for it; a stream of short ones that does
    /// not end may keep a long one waiting for ever. With it a future that waits to send holds others
    /// up until it is polled or dropped: do not keep one that you do not poll.
    #[must_use]
    pub fn fair_bytes(mut self) -> Self {
        self.config.fair_bytes = true;
        self
    }

    /// Most bytes of one message; a longer one is refused.
    #[must_use]
    pub fn max_message_bytes(mut self, bytes: u32) -> Self {
        self.config.max_message_bytes = bytes;
        self
    }

    /// Keeps room for `messages` messages of priority `from` or above: those below find the queue full
    /// while no more than that is left. Several reserves add up.
    #[must_use]
    pub fn reserve(mut self, from: L::Priority, messages: usize) -> Self {
        self.reserves.push(Reserve { from, messages });
        self
    }

    /// Lets low priorities not starve: every `every`th receive serves the priorities in turn, from high
    /// to low, rather than the highest. See [`Core::set_ageing`].
    #[must_use]
    pub fn ageing(mut self, every: NonZeroU32) -> Self {
        self.ageing = Some(every);
        self
    }

    /// Keeps up to `nodes` freed nodes for priorities to come, where they are nodes of a tree: 1,024
    /// if nothing is said.
    #[must_use]
    pub fn spare_nodes(mut self, nodes: usize) -> Self {
        self.spare = nodes;
        self
    }

    /// Gets all memory that the queue can need now: no operation allocates later, but for the first
    /// wait of a thread, once.
    #[must_use]
    pub fn no_alloc(mut self) -> Self {
        self.no_alloc = true;
        self
    }

    /// Whether a thread looks for some microseconds before it sleeps, where that pays. It does on more
    /// than one CPU if nothing is said; never on one.
    #[must_use]
    pub fn spin(mut self, on: bool) -> Self {
        self.spin = on;
        self
    }

    /// Measures how long the lock is held, for [`QueueStats::longest_hold`](crate::QueueStats): two
    /// looks at the clock for each operation.
    #[must_use]
    pub fn time_lock(mut self) -> Self {
        self.config.time_lock = true;
        self
    }

    /// Charges the queue to a quota until it is dropped: the most bytes that its messages may have, and
    /// their places.
    #[must_use]
    pub fn quota(mut self, quota: &Quota) -> Self {
        self.quota = Some(quota.clone());
        self
    }

    /// Makes it.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn build(self) -> Result<Queue<T, L>, BuildError> {
        let Self { mut config, reserves, ageing, spare, no_alloc, spin, quota } = self;
        let max = config.max_messages;
        let kept =
            reserves.iter().try_fold(0usize, |sum, reserve| sum.checked_add(reserve.messages));
        if max == 0 || max > MAX_MESSAGES || kept.is_none_or(|kept| kept >= max) {
            return Err(BuildError::Limits);
        }
        if !reserves.iter().all(|reserve| L::is_valid(reserve.from)) {
            return Err(BuildError::BadPriority);
        }
        config.reserves = reserves.into();
        // What is longer than all messages may be together would wait for ever, and others behind it.
        let most = u32::try_from(config.max_bytes).unwrap_or(u32::MAX);
        config.max_message_bytes = config.max_message_bytes.min(most);
        let charge = quota.map(|quota| quota.charge(config.max_memory())).transpose()?;
        let mut core = Core::try_new(if no_alloc { spare.max(max) } else { spare })?;
        core.set_limit(max);
        core.set_ageing(ageing);
        if no_alloc {
            core.reserve(max)?;
        }
        let several = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        Ok(Queue {
            hint: core.hint(),
            state: WordLock::new(State::new(core)),
            config,
            spin: Spin::new(spin && several),
            charge,
        })
    }
}

impl<T, L: Levels> fmt::Debug for Builder<T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("max_messages", &self.config.max_messages)
            .field("max_bytes", &self.config.max_bytes)
            .field("max_message_bytes", &self.config.max_message_bytes)
            .field("reserves", &self.reserves)
            .finish_non_exhaustive()
    }
}
