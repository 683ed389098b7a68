//! Inspection of a queue, and removal of messages out of order.

use super::{Queue, Received};
use crate::core::{Levels, Preload};
use crate::stats::QueueStats;

impl<T, L: Levels> Queue<T, L> {
    /// Returns the number of messages, without those in a [`MessageGuard`](crate::MessageGuard). Takes the lock, because no separate counter is kept that all
    /// CPUs would write. It may wait for a sender to finish: see [Progress](crate#progress).
    pub fn len(&self) -> usize {
        self.lock().core.len()
    }

    /// Returns true if there is no message.
    pub fn is_empty(&self) -> bool {
        self.lock().core.is_empty()
    }

    /// Returns true if no message has room, of any priority.
    ///
    /// When it is false, a send may still be refused, because the room is reserved.
    pub fn is_full(&self) -> bool {
        self.lock().core.occupied() >= self.config.max_messages
    }

    /// Returns whether the queue refuses messages because it was closed.
    pub fn is_closed(&self) -> bool {
        self.lock_undrained().closed
    }

    /// Returns the most messages that the queue holds.
    #[doc(alias = "capacity")]
    pub fn max_messages(&self) -> usize {
        self.config.max_messages
    }

    /// Removes and returns every message that `take` selects, highest priority first.
    ///
    /// `take` runs under the lock, once for each message: it delays other threads, and must not use
    /// this queue. If it panics, the messages it has not examined stay, and those it has selected
    /// are dropped; so are these if the waker of a waiting task panics. The vector for all messages is
    /// allocated before. If there is no memory for it, the process ends as by [`Vec::reserve`];
    /// [`try_receive`](Self::try_receive) needs none.
    ///
    /// ```
    /// let queue: mq_rbtree::Queue<u32> = mq_rbtree::Queue::new(8)?;
    /// for n in 0..4 {
    ///     queue.send(n, n)?;
    /// }
    /// assert_eq!(queue.drain_filter(|&n, _| n % 2 == 1), [(3, 3), (1, 1)]);
    /// assert_eq!(queue.len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain_filter(&self, take: impl FnMut(&T, L::Priority) -> bool) -> Vec<Received<T, L>> {
        let mut out = Vec::new();
        let mut preload = Preload::new();
        let mut state = loop {
            // The space for all messages is allocated before the lock.
            let state = self.lock();
            let len = state.core.len();
            if len <= out.capacity() {
                break state;
            }
            drop(state);
            out.reserve(len + len / 8);
        };
        state.core.extract(&mut preload, take, |message| {
            out.push((message.value, message.priority));
        });
        drop(state); // a panic of a waker drops the messages
        out
    }

    /// Removes and returns every message, highest priority first, except those in
    /// [guards](crate::MessageGuard), which may come back later.
    ///
    /// As for [`drain_filter`](Self::drain_filter), they are dropped if the waker of a waiting task panics,
    /// and the process ends if there is no memory for the vector.
    pub fn drain(&self) -> Vec<Received<T, L>> {
        self.drain_filter(|_, _| true)
    }

    /// Returns statistics of the queue. Takes the lock.
    pub fn stats(&self) -> QueueStats {
        let state = self.lock();
        QueueStats {
            depth: state.core.len(),
            peak: state.peak,
            sent: state.cursor.accepted(),
            received: state.cursor.accepted() - state.core.occupied() as u64,
            guarded: state.core.lent(),
            send_waits: self.senders.begun(),
            receive_waits: self.receivers.begun() + state.spun_receives,
            timeouts: state.timeouts,
            waiting: (self.senders.waiting(), self.receivers.waiting()),
            levels: state.core.level_stats(),
            slab_fallback: state.core.slab_fallback(),
        }
    }

    /// Claims a slot of the ring as a send does, and returns the function that publishes the message:
    /// for tests of a sender that is stopped in between. Returns `None` if a send would take the lock.
    #[doc(hidden)]
    pub fn claim(&self, value: T, priority: L::Priority) -> Option<impl FnOnce()> {
        let ring = self.ring.as_ref()?;
        // What is drained under the lock can be stored without memory.
        if L::check(priority).is_err() || self.hint.needs_memory() {
            return None;
        }
        ring.refresh();
        let position = ring.claim()?;
        // SAFETY: the position has just been claimed, and the function is called once.
        Some(move || unsafe { ring.publish(position, value, priority) })
    }

    /// Checks every invariant that holds between operations. Tests call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the invariant that is violated.
    #[doc(hidden)]
    pub fn validate(&self) {
        let state = self.lock();
        state.core.validate();
        let occupied = state.core.occupied();
        assert!(occupied <= self.config.max_messages, "more messages than there may be");
        assert!(state.cursor.accepted() >= occupied as u64, "more messages than were sent");
    }
}
