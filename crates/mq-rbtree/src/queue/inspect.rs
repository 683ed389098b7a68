//! Looking at a queue, and taking out what is not next.

use std::panic::{AssertUnwindSafe, catch_unwind};

use percpu::Forked;

use super::{After, Queue, Received};
use crate::core::{Levels, Preload};
use crate::stats::QueueStats;

impl<T, L: Levels> Queue<T, L> {
    /// Messages in the queue. Locks; there is no number that all CPUs would write.
    ///
    /// # Errors
    ///
    /// As for every operation: [`Forked`] in a fork child whose parent's threads waited here.
    pub fn len(&self) -> Result<usize, Forked> {
        Ok(self.lock()?.core.len())
    }

    /// True if there is no message.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn is_empty(&self) -> Result<bool, Forked> {
        Ok(self.lock()?.core.is_empty())
    }

    /// True if there is no room for any message. One may find too little otherwise: too few bytes, or
    /// only what is reserved for others.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn is_full(&self) -> Result<bool, Forked> {
        let state = self.lock()?;
        Ok(self.config.is_full(state.core.len(), state.core.bytes()))
    }

    /// Messages of one priority.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn len_at(&self, priority: L::Priority) -> Result<usize, Forked> {
        if !L::is_valid(priority) {
            return Ok(0);
        }
        Ok(self.lock()?.core.len_at(priority))
    }

    /// Bytes of the messages in the queue, as measured.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn bytes(&self) -> Result<u64, Forked> {
        Ok(self.lock()?.core.bytes())
    }

    /// Whether it refuses messages.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn is_closed(&self) -> Result<bool, Forked> {
        Ok(self.lock()?.closed)
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
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn peek<R>(&self, look: impl FnOnce(&T, L::Priority) -> R) -> Result<Option<R>, Forked> {
        let mut state = self.lock()?;
        Ok(state.core.peek().map(|(value, priority)| look(value, priority)))
    }

    /// Takes out every message that `take` wants, the highest priority first.
    ///
    /// `take` runs under the lock, once for each message: as long as that takes, others wait, and it
    /// must not use this queue. If it panics, what it had not looked at stays, and what it had taken is
    /// dropped.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn drain_filter(
        &self,
        take: impl FnMut(&T, L::Priority) -> bool,
    ) -> Result<Vec<Received<T, L>>, Forked> {
        let mut out = Vec::new();
        let mut preload = Preload::new();
        let mut after = After::new();
        let mut state = loop {
            // Room for all is made before the lock.
            let state = self.lock()?;
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
        // `finish`: it is the first, so that of a waker is dropped.
        let extracted = catch_unwind(AssertUnwindSafe(extract));
        state.settle(&self.config, &mut preload, &mut after);
        if let Err(panic) = extracted {
            after.set_panic(panic);
        }
        drop(state);
        self.finish(&mut after);
        Ok(out)
    }

    /// Takes out every message, the highest priority first.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn drain(&self) -> Result<Vec<Received<T, L>>, Forked> {
        self.drain_filter(|_, _| true)
    }

    /// What it did and what it holds.
    ///
    /// # Errors
    ///
    /// As [`len`](Self::len).
    pub fn stats(&self) -> Result<QueueStats, Forked> {
        let state = self.lock()?;
        let counters = state.counters;
        Ok(QueueStats {
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
            longest_hold: self.config.timed.then_some(counters.longest_hold),
        })
    }

    /// Checks every invariant that can be checked at rest; tests call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold, or in a fork child.
    #[doc(hidden)]
    pub fn validate(&self) {
        let state = self.lock().expect("the queue is this process's own");
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
        assert!(state.admissible(&self.config).is_none(), "somebody waits to send beside room");
        if state.closed {
            assert!(
                state.receivers.is_empty() && state.senders.is_empty(),
                "a wait on a closed queue"
            );
        }
    }
}
