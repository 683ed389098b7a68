//! Batches: many messages in one lock section.

use std::collections::VecDeque;

use super::{Access, Queue, Received, refuse_message};
use crate::core::{Levels, Message};
use crate::deadline::Wait;
use crate::error::{BatchError, ReceiveError, SendError, SendRefused};
use crate::waiter::rank_of_new;

/// The most messages of one lock section; a guess: a few microseconds.
const SECTION: usize = 64;

impl<T, L: Levels> Queue<T, L> {
    /// Sends messages from the front of `batch`, many in one lock section. Returns how many were
    /// sent, which is all of them.
    ///
    /// For each message that finds no room it waits as `wait` says. Other threads may send in
    /// between.
    ///
    /// ```
    /// use std::collections::VecDeque;
    /// use mq_rbtree::{Queue, SendRefused, Wait};
    ///
    /// let queue: Queue<u32> = Queue::new(2)?;
    /// let mut batch: VecDeque<_> = (0..3).map(|n| (n, 7)).collect(); // messages with priorities
    /// let error = queue.send_batch(&mut batch, Wait::NO).unwrap_err();
    /// assert_eq!((error.sent, error.reason), (2, SendRefused::Full));
    /// assert_eq!(batch, [(2, 7)]); // still to be sent
    ///
    /// let mut out = Vec::new();
    /// assert_eq!(queue.receive_batch(&mut out, 100, Wait::NO)?, 2);
    /// assert_eq!(out, [(0, 7), (1, 7)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BatchError`] tells why a message was not sent, and how many were sent before it. That
    /// message is at the front of `batch`.
    pub fn send_batch(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
    ) -> Result<usize, BatchError> {
        let mut sent = 0;
        while !batch.is_empty() {
            let Err((message, reason)) = self.send_section(batch, wait, &mut sent) else {
                continue;
            };
            let priority = message.priority;
            let waited = match reason {
                SendRefused::Full if !wait.is_no() => self.wait_to_send(message, wait),
                _ => Err(refuse_message((message, reason))),
            };
            match waited {
                Ok(()) => sent += 1,
                Err(SendError { value, reason }) => {
                    batch.push_front((value, priority));
                    return Err(BatchError { sent, reason });
                }
            }
        }
        Ok(sent)
    }

    /// Sends some messages, at least one, or returns the first one with the reason.
    fn send_section(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
        sent: &mut usize,
    ) -> Result<(), (Message<T, L::Priority>, SendRefused)> {
        let mut sizes = [0; SECTION];
        let mut count = 0;
        for (value, priority) in batch.iter().take(SECTION) {
            match self.config.check(value, *priority) {
                Ok(bytes) => sizes[count] = bytes,
                Err(_) if count > 0 => break, // it is the first of the next section
                Err(reason) => {
                    let Some((value, priority)) = batch.pop_front() else { return Ok(()) };
                    return Err((Message { value, priority, bytes: 0 }, reason));
                }
            }
            count += 1;
        }
        let mut section = self.section();
        let rank = rank_of_new(wait.urgency_level());
        let mut result = Ok(());
        {
            let Some(mut state) = self.lock_to_send(&mut section.preload, wait.deadline()) else {
                let Some((value, priority)) = batch.pop_front() else { return Ok(()) };
                let message = Message { value, priority, bytes: sizes[0] };
                self.count_timeout();
                return Err((message, SendRefused::Timeout));
            };
            for (nth, &bytes) in sizes[..count].iter().enumerate() {
                // The preload was allocated for the first message only.
                if nth > 0 && (self.hint.needs_memory() || !section.deferred.has_room()) {
                    break;
                }
                let Some((value, priority)) = batch.pop_front() else { break };
                let message = Message { value, priority, bytes };
                match state.send(message, rank, &mut section) {
                    Ok(()) => *sent += 1,
                    // The message becomes the first of the next section; or its comparison
                    // panicked, and the panic resumes below.
                    Err((back, _)) if nth > 0 || section.deferred.panics() => {
                        batch.push_front((back.value, back.priority));
                        break;
                    }
                    Err(refused) => {
                        result = Err(refused);
                        break;
                    }
                }
            }
        }
        self.run_deferred(&mut section.deferred);
        result
    }

    /// Receives up to `most` messages into `out`, many in one lock section. Returns how many were
    /// received: at least one, unless `most` is 0.
    ///
    /// It waits for the first message as `wait` says, and then takes what is in the queue. See
    /// [`send_batch`](Self::send_batch) for an example.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if it received no message.
    pub fn receive_batch(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
        wait: Wait,
    ) -> Result<usize, ReceiveError> {
        let before = out.len();
        while out.len() - before < most {
            let room = SECTION.min(most - (out.len() - before));
            out.reserve(room); // allocates before the lock
            let mut section = self.section();
            let empty = {
                let Some(mut state) = self.lock_until(Access::Receive, wait.deadline()) else {
                    if out.len() > before {
                        break;
                    }
                    self.count_timeout();
                    return Err(ReceiveError::Timeout);
                };
                let mut taken = 0;
                loop {
                    if taken == room || !section.deferred.has_room() {
                        break false;
                    }
                    match state.receive(&mut section) {
                        Some(message) => out.push((message.value, message.priority)),
                        None => break true,
                    }
                    taken += 1;
                }
            };
            self.run_deferred(&mut section.deferred);
            if empty {
                if out.len() > before {
                    break;
                }
                out.push(self.receive_with(wait)?);
            }
        }
        Ok(out.len() - before)
    }
}
