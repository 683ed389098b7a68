//! Looking at a queue, and taking out what is not next.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Deferred, Queue, Received};
use crate::core::{Levels, Preload};
use crate::stats::QueueStats;

impl<T, L: Levels> Queue<T, L> {
    /// Messages in the queue. Locks; there is no number that all CPUs would write.
    pub fn len(&self) -> usize {
        self.lock().core.len()
    }

    /// True if there is no message.
    pub fn is_empty(&self) -> bool {
        self.lock().core.is_empty()
    }

    /// True if there is no room for any message. One may find too little otherwise: too few bytes, or
    /// only what is reserved for others.
    pub fn is_full(&self) -> bool {
        let state = self.lock();
        self.config.is_full(state.core.len(), state.core.bytes())
    }

    /// Messages of one priority.
    pub fn len_at(&self, priority: L::Priority) -> usize {
        if !L::is_valid(priority) {
            return 0;
        }
        self.lock().core.len_at(priority)
    }

    /// Bytes of the messages in the queue, as measured.
    pub fn bytes(&self) -> u64 {
        self.lock().core.bytes()
    }

    /// Whether it refuses messages.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Most messages it takes.
    #[doc(alias = "capacity")]
    pub fn max_messages(&self) -> usize {
        self.config.max_messages
    }

    /// Most bytes that one message may have.
    pub fn max_message_bytes(&self) -> usize {
        self.config.max_message_bytes as usize
    }

    /// Bytes that it has of its quota.
    pub fn charged(&self) -> u64 {
        self.charge.as_ref().map_or(0, crate::quota::Charge::bytes)
    }

    /// Shows `look` the message that is next by priority; ageing is not looked at. `look` runs under
    /// the lock: whatever it does, others wait meanwhile, and it must not use this queue.
    pub fn peek<R>(&self, look: impl FnOnce(&T, L::Priority) -> R) -> Option<R> {
        let mut state = self.lock();
        state.core.peek().map(|(value, priority)| look(value, priority))
    }

    /// Takes out every message that `take` wants, the highest priority first.
    ///
    /// `take` runs under the lock, once for each message: as long as that takes, others wait, and it
    /// must not use this queue. If it panics, what it had not looked at stays, and what it had taken is
    /// dropped.
    pub fn drain_filter(&self, take: impl FnMut(&T, L::Priority) -> bool) -> Vec<Received<T, L>> {
        let mut out = Vec::new();
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        let mut state = loop {
            // Room for all is made before the lock.
            let state = self.lock();
            let len = state.core.len();
            if len <= out.capacity() {
                break state;
            }
            drop(state);
            out.reserve(len + len / 8);
        };
        let all = &mut *state;
        let extract = || {
            all.core.extract(&mut preload, take, |message| {
                out.push((message.value, message.priority));
            });
        };
        // The senders that wait for the room go on also if `take` panics. That panic goes on in
        // `run_deferred`: it is the first, so that of a waker is dropped.
        let extracted = catch_unwind(AssertUnwindSafe(extract));
        state.serve_waiters(&self.config, &mut preload, &mut deferred);
        if let Err(panic) = extracted {
            deferred.set_panic(panic);
        }
        drop(state);
        self.run_deferred(&mut deferred);
        out
    }

    /// Takes out every message, the highest priority first.
    pub fn drain(&self) -> Vec<Received<T, L>> {
        self.drain_filter(|_, _| true)
    }

    /// What it did and what it holds.
    pub fn stats(&self) -> QueueStats {
        let state = self.lock();
        let counters = state.counters;
        QueueStats {
            depth: state.core.len(),
            bytes: state.core.bytes(),
            peak: counters.peak,
            sent: counters.sent,
            received: counters.sent - state.core.len() as u64,
            handed_over: counters.handed_over,
            taken_over: counters.taken_over,
            send_waits: counters.send_waits,
            receive_waits: counters.receive_waits,
            spun: self.spin.in_time(),
            timeouts: counters.timeouts,
            waiting: (state.senders.len(), state.receivers.len()),
            levels: state.core.level_stats(),
            slab_fallback: state.core.slab_fallback(),
            longest_hold: self.config.time_lock.then_some(counters.longest_hold),
        }
    }

    /// Checks every invariant that can be checked at rest; tests call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        let state = self.lock();
        state.core.validate();
        state.receivers.validate();
        state.senders.validate();
        let len = state.core.len();
        assert!(len <= self.config.max_messages, "more messages than there may be");
        assert!(state.core.bytes() <= self.config.max_bytes, "more bytes than there may be");
        let counters = state.counters;
        assert!(counters.sent >= len as u64, "messages that nobody sent");
        let idle = state.receivers.is_empty() || len <= state.receive_permits;
        assert!(idle, "somebody waits to receive beside a message");
        assert!(
            state.first_admissible_sender(&self.config).is_none(),
            "somebody waits to send beside room"
        );
        if state.closed {
            assert!(
                state.receivers.is_empty() && state.senders.is_empty(),
                "a wait on a closed queue"
            );
        }
    }
}
