//! Batches: many messages in one lock section.

use std::collections::VecDeque;

use offlock_sync::AllocError;

use super::{Access, Queue, Received, Wait};
use crate::core::{Levels, Message, Preload};
use crate::error::{BatchError, ReceiveError, SendError, SendRefused};

/// The most messages of one lock section. A few microseconds.
const SECTION: usize = 64;

impl<T, L: Levels> Queue<T, L> {
    /// Sends messages from the front of `batch`, many in one lock section. Returns how many were
    /// sent, which is all of them.
    ///
    /// It waits for the room of each message. Other threads may send in between.
    ///
    /// ```
    /// use std::collections::VecDeque;
    /// use mq_rbtree::{Queue, SendRefused};
    ///
    /// let queue: Queue<u32> = Queue::new(2)?;
    /// let mut batch: VecDeque<_> = (0..3).map(|n| (n, 7)).collect(); // messages with priorities
    /// let error = queue.try_send_batch(&mut batch).unwrap_err();
    /// assert_eq!((error.sent, error.reason), (2, SendRefused::Full));
    /// assert_eq!(batch, [(2, 7)]); // still to be sent
    ///
    /// let mut out = Vec::new();
    /// assert_eq!(queue.receive_batch(&mut out, 100)?, 2);
    /// assert_eq!(out, [(0, 7), (1, 7)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BatchError`] tells why a message was not sent, and how many were sent before it. That
    /// message is at the front of `batch`.
    pub fn send_batch(&self, batch: &mut VecDeque<Received<T, L>>) -> Result<usize, BatchError> {
        self.send_batch_by(batch, Wait::Forever)
    }

    /// Sends the messages at the front of `batch` that need not wait. Returns how many were sent, which is
    /// all of them: see [`send_batch`](Self::send_batch).
    ///
    /// # Errors
    ///
    /// [`BatchError`], as for [`send_batch`](Self::send_batch).
    pub fn try_send_batch(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
    ) -> Result<usize, BatchError> {
        self.send_batch_by(batch, Wait::No)
    }

    fn send_batch_by(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
    ) -> Result<usize, BatchError> {
        let mut sent = 0;
        loop {
            let section = self.send_section(batch, wait);
            let section = section.map_err(|reason| BatchError { sent, reason })?;
            sent += section;
            if section > 0 {
                continue;
            }
            let Some((value, priority)) = batch.pop_front() else { return Ok(sent) };
            match self.send_by(value, priority, &wait) {
                Ok(()) => sent += 1,
                Err(SendError { value, reason }) => {
                    batch.push_front((value, priority));
                    return Err(BatchError { sent, reason });
                }
            }
        }
    }

    /// Sends the messages at the front that need not wait, up to a section. Returns how many were sent,
    /// or that there is no room and the caller does not wait.
    fn send_section(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
    ) -> Result<usize, SendRefused> {
        let valid = |&&(_, priority): &&Received<T, L>| L::check(priority).is_ok();
        let count = batch.iter().take(SECTION).take_while(valid).count();
        if count == 0 {
            return Ok(0);
        }
        let (mut sent, mut message, mut preload) = (0, None, Preload::new());
        let mut refused = None;
        let Some(mut state) = self.lock_to_send(&mut preload, wait) else { return Ok(0) };
        // The preload was allocated for the first message only.
        while sent < count && (sent == 0 || !self.hint.needs_memory()) {
            message = batch.pop_front().map(|(value, priority)| Message { value, priority });
            if let Err(reason) = state.send(&mut message, &self.config, &mut preload) {
                refused = Some(reason);
                break;
            }
            sent += 1;
        }
        drop(state);
        if let Some(Message { value, priority }) = message {
            batch.push_front((value, priority));
        }
        match refused {
            // A second attempt would double the time of a caller that polls a full queue.
            Some(SendRefused::Full) if sent == 0 && wait == Wait::No => Err(SendRefused::Full),
            _ => Ok(sent),
        }
    }

    /// Receives up to `most` messages into `out`, many in one lock section, and at most
    /// [`max_messages`](Self::max_messages): beside senders that do not stop, it ends. Returns how many
    /// were received: at least one, unless `most` is 0.
    ///
    /// It waits for the first message, and then takes what is in the queue. See
    /// [`send_batch`](Self::send_batch) for an example.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if it received no message: [`NoMemory`](ReceiveError::NoMemory) if `out` is full
    /// and cannot grow.
    pub fn receive_batch(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
    ) -> Result<usize, ReceiveError> {
        self.receive_batch_by(out, most, Wait::Forever)
    }

    /// Receives up to `most` messages that are in the queue now: see
    /// [`receive_batch`](Self::receive_batch).
    ///
    /// # Errors
    ///
    /// [`ReceiveError`], as for [`receive_batch`](Self::receive_batch).
    pub fn try_receive_batch(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
    ) -> Result<usize, ReceiveError> {
        self.receive_batch_by(out, most, Wait::No)
    }

    fn receive_batch_by(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
        wait: Wait,
    ) -> Result<usize, ReceiveError> {
        let most = most.min(self.config.max_messages);
        if most == 0 {
            return Ok(0);
        }
        let (before, end) = (out.len(), out.len() + most);
        let more = self.receive_more(out, end, wait);
        if out.len() == before {
            more.map_err(|AllocError { .. }| ReceiveError::NoMemory)?;
            out.push(self.receive_by(&wait)?);
            let _no_memory_for_more = self.receive_more(out, end, wait);
        }
        Ok(out.len() - before)
    }

    /// Receives the messages that are in the queue now, until `out` holds `end`. Stops early if the deadline
    /// passes while a sender has yet to publish. Returns an error only if `out` is full and cannot grow. If it
    /// has looked at the queue and received no message, `out` has room for one.
    pub(crate) fn receive_more(
        &self,
        out: &mut Vec<Received<T, L>>,
        end: usize,
        wait: Wait,
    ) -> Result<(), AllocError> {
        let mut empty = false;
        while !empty && out.len() < end {
            let wanted = SECTION.min(end - out.len());
            let reserved = out.try_reserve(wanted); // allocates before the lock
            let room = wanted.min(out.capacity() - out.len());
            if room == 0 {
                return reserved.map_err(|_| AllocError::new());
            }
            let mut preload = Preload::new();
            let Some(mut state) = self.lock_until(Access::Receive, wait) else { break };
            for _ in 0..room {
                let Some(Ok(received)) = state.receive(&mut preload) else {
                    empty = true;
                    break;
                };
                out.push(received);
            }
        }
        Ok(())
    }
}
