//! The builder of a queue.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;

use offlock_sync::{WaitSet, WordLock};

use super::Queue;
use super::lock::{Config, Reserve, State};
use super::park::Spin;
use crate::core::{Bitmap, Core, Levels, MAX_MESSAGES, RbTree};
use crate::error::BuildError;
use crate::staging::{Cursor, Ring};

/// The nodes kept for reuse by default, 64 KiB or so.
const DEFAULT_SPARE_NODES: usize = 1024;

impl<T> Queue<T, Bitmap> {
    /// Creates a queue of up to `max_messages` messages, with priorities from 0 to 32,767.
    ///
    /// # Errors
    ///
    /// [`BuildError::Limits`] if `max_messages` is 0 or above 2^32 - 64.
    pub fn new(max_messages: usize) -> Result<Self, BuildError> {
        Self::builder(max_messages).build()
    }

    /// Returns a builder for a queue of up to `max_messages` messages, with priorities from 0 to
    /// 32,767.
    ///
    /// It sets further limits and options, or makes a [`channel`](Builder::channel).
    #[must_use]
    pub fn builder(max_messages: usize) -> Builder<T, Bitmap> {
        Builder::new(max_messages)
    }
}

impl<T, K: Ord + Copy + fmt::Debug> Queue<T, RbTree<K>> {
    /// Creates a queue of up to `max_messages` messages, with priorities of any ordered type that is `Copy`
    /// and `Debug`.
    ///
    /// The greatest priority is served first. The first send fixes the type of the priority.
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
    /// [`BuildError::Limits`] if `max_messages` is 0 or above 2^32 - 64.
    pub fn with_keys(max_messages: usize) -> Result<Self, BuildError> {
        Self::builder_with_keys(max_messages).build()
    }

    /// Returns a builder for a queue of up to `max_messages` messages, with priorities of any
    /// ordered type that is `Copy` and `Debug`.
    #[must_use]
    pub fn builder_with_keys(max_messages: usize) -> Builder<T, RbTree<K>> {
        Builder::new(max_messages)
    }
}

/// Sets the limits and options of a [`Queue`], and makes it.
///
/// It comes from [`Queue::builder`] or [`Queue::builder_with_keys`]. [`build`](Self::build) makes a
/// queue, and [`channel`](Self::channel) a queue behind a [`Sender`](crate::Sender) and a
/// [`Receiver`](crate::Receiver).
///
/// ```
/// use mq_rbtree::{Queue, SendRefused};
///
/// let queue = Queue::<String>::builder(2) // at most 2 messages
///     .reserve(30_000, 1)    // a place for messages of priority 30,000 and above
///     .no_alloc()            // allocate everything now
///     .build()?;
/// queue.send("a message".to_string(), 7)?;
/// let refused = queue.try_send("another".to_string(), 7).unwrap_err();
/// assert_eq!(refused.reason, SendRefused::Full);
/// queue.send("urgent".to_string(), 30_000)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Builder<T, L: Levels = Bitmap> {
    config: Config<L>,
    ageing: Option<NonZeroU32>,
    spare: usize,
    no_alloc: bool,
    spin: bool,
    messages: PhantomData<fn(T)>,
}

impl<T, L: Levels> Builder<T, L> {
    /// Creates a builder for a queue of up to `max_messages` messages.
    ///
    /// It is for code that is generic over the levels; other code calls [`Queue::builder`] or
    /// [`Queue::builder_with_keys`].
    #[must_use]
    pub fn new(max_messages: usize) -> Self {
        let config = Config { max_messages, reserves: Vec::new() };
        let (ageing, spare, no_alloc, spin) = (None, DEFAULT_SPARE_NODES, false, true);
        Self { config, ageing, spare, no_alloc, spin, messages: PhantomData }
    }

    /// Reserves `messages` places for messages of priority `from` and above.
    ///
    /// Messages below `from` find the queue full if only reserved places are left. Several reserves
    /// add up.
    #[must_use]
    pub fn reserve(mut self, from: L::Priority, messages: usize) -> Self {
        self.config.reserves.push(Reserve { from, messages });
        self
    }

    /// Prevents the starvation of low priorities: every `every`th receive serves the priorities in
    /// turn, from high to low, and not the highest.
    ///
    /// [`Core::set_ageing`] defines the order and the bound of the wait.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use mq_rbtree::Queue;
    ///
    /// let every = NonZeroU32::new(3).unwrap();
    /// let queue = Queue::builder(8).ageing(every).build()?;
    /// for n in 0..6 {
    ///     queue.send("high", 9)?;
    /// }
    /// queue.send("low", 1)?;
    /// let order: Vec<_> = (0..6).map(|_| queue.receive().unwrap().0).collect();
    /// assert_eq!(order, ["high", "high", "high", "high", "high", "low"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn ageing(mut self, every: NonZeroU32) -> Self {
        self.ageing = Some(every);
        self
    }

    /// Sets how many tree nodes are kept for reuse; the default is 1,024. A [`Bitmap`] has no
    /// nodes.
    #[must_use]
    pub fn spare_nodes(mut self, nodes: usize) -> Self {
        self.spare = nodes;
        self
    }

    /// Allocates all memory of the queue when it is made.
    ///
    /// No send or receive allocates later, except the first wait of each thread. These allocate always:
    /// [`drain`](Queue::drain), [`drain_filter`](Queue::drain_filter),
    /// [`Readiness::new`](crate::Readiness::new), and a batch whose vector has no room. The system provides
    /// the pages of a [`Bitmap`]'s table when they are first used.
    #[must_use]
    pub fn no_alloc(mut self) -> Self {
        self.no_alloc = true;
        self
    }

    /// Sets whether a waiting thread spins for some microseconds before it sleeps, where that
    /// helps.
    ///
    /// The default is true on more than one CPU. On one CPU threads never spin.
    #[must_use]
    pub fn spin(mut self, on: bool) -> Self {
        self.spin = on;
        self
    }

    /// Makes the queue.
    ///
    /// # Errors
    ///
    /// - [`BuildError::Limits`]: the most messages are 0 or above 2^32 - 64, or the reserves leave
    ///   no place for other messages.
    /// - [`BuildError::BadPriority`]: a reserve is for an invalid priority.
    /// - [`BuildError::NoMemory`]: memory is missing for [`no_alloc`](Self::no_alloc).
    pub fn build(self) -> Result<Queue<T, L>, BuildError> {
        let Self { config, ageing, spare, no_alloc, spin, .. } = self;
        let (max, reserves) = (config.max_messages, &config.reserves);
        let kept =
            reserves.iter().try_fold(0usize, |sum, reserve| sum.checked_add(reserve.messages));
        let reserved = kept.unwrap_or(usize::MAX);
        if max == 0 || max > MAX_MESSAGES || reserved >= max {
            return Err(BuildError::Limits { messages: max, reserved });
        }
        for reserve in reserves {
            L::check(reserve.from).map_err(|priority| BuildError::BadPriority { priority })?;
        }
        let mut core = Core::new(spare);
        core.set_limit(max);
        core.set_ageing(ageing);
        if no_alloc {
            core.reserve(max)?;
        }
        // A limit that depends on the message is kept under the lock, and a comparison that panics
        // must not block a ring.
        let staged = !L::COMPARES && config.reserves.is_empty();
        let ring = if staged { Ring::new(max) } else { None };
        let several = has_several_cpus();
        Ok(Queue {
            hint: core.hint(),
            state: WordLock::new(State::new(core, Cursor::new(ring.is_some()))),
            receivers: WaitSet::new(),
            senders: WaitSet::new(),
            ring,
            config,
            spin: Spin::new(spin && several),
            room_spin: Spin::new(spin && several),
        })
    }
}

/// Returns whether the calling thread may run on several CPUs. Allocates nothing, which
/// `std::thread::available_parallelism` does, and ends the process without memory.
fn has_several_cpus() -> bool {
    let mut cpus = [0_u64; 16];
    let mask = cpus.as_mut_ptr().cast::<libc::cpu_set_t>();
    // SAFETY: the call writes as many bytes as it is told, which `cpus` has.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&cpus), mask) };
    // The call is refused if the machine has more CPUs than fit into the array: 1,024.
    result != 0 || cpus.iter().map(|word| word.count_ones()).sum::<u32>() > 1
}

impl<T, L: Levels> fmt::Debug for Builder<T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("max_messages", &self.config.max_messages)
            .field("reserves", &self.config.reserves)
            .finish_non_exhaustive()
    }
}
