//! Many messages in one section of the lock.

use std::collections::VecDeque;

use super::{Deferred, Queue, Received, refuse_message};
use crate::core::{Levels, Message, Preload};
use crate::deadline::Wait;
use crate::error::{BatchError, ReceiveError, SendError, SendRefused};
use crate::waiter::rank_of_new;

/// Most messages of one section of the lock; a guess: a few microseconds.
const SECTION: usize = 64;

impl<T, L: Levels> Queue<T, L> {
    /// Sends messages from the front of `batch`, many in one section of the lock; waits as `wait` says
    /// for each of them. Returns how many were sent: all.
    ///
    /// Others may send in between.
    ///
    /// # Errors
    ///
    /// [`BatchError`]: why a message could not be sent, and how many were before it. It is at the front
    /// of `batch`.
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

    /// Sends some messages, at least one; or gives back the first with the reason.
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
                Err(_) if count > 0 => break, // the first of the next section
                Err(reason) => {
                    let Some((value, priority)) = batch.pop_front() else { return Ok(()) };
                    return Err((Message { value, priority, bytes: 0 }, reason));
                }
            }
            count += 1;
        }
        let mut preload = Preload::new();
        let mut deferred = Deferred::new();
        if let Some(&(_, priority)) = batch.front() {
            self.hint.preload(priority, &mut preload);
        }
        let rank = rank_of_new(wait.urgency_level());
        let mut result = Ok(());
        {
            let mut state = self.lock();
            for (nth, &bytes) in sizes[..count].iter().enumerate() {
                let Some(&(_, priority)) = batch.front() else { break };
                // What was made before the lock was for the first of them.
                if nth > 0 && (self.hint.needs_memory(priority) || !deferred.has_room()) {
                    break;
                }
                let Some((value, priority)) = batch.pop_front() else { break };
                let message = Message { value, priority, bytes };
                match state.send(&self.config, message, rank, &mut preload, &mut deferred) {
                    Ok(()) => *sent += 1,
                    // The first of the next section; or a panic of its order goes on below.
                    Err((back, _)) if nth > 0 || deferred.panics() => {
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
        self.run_deferred(&mut deferred);
        result
    }

    /// Receives up to `most` messages into `out`, many in one section of the lock. Waits as `wait` says
    /// for the first, and takes then what is there. Returns how many it were: at least one, unless
    /// `most` is 0.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if there was not even one.
    pub fn receive_batch(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
        wait: Wait,
    ) -> Result<usize, ReceiveError> {
        let before = out.len();
        while out.len() - before < most {
            let section = SECTION.min(most - (out.len() - before));
            out.reserve(section); // before the lock
            let mut preload = Preload::new();
            let mut deferred = Deferred::new();
            let empty = {
                let mut state = self.lock();
                let mut taken = 0;
                loop {
                    if taken == section || !deferred.has_room() {
                        break false;
                    }
                    match state.receive(&self.config, &mut preload, &mut deferred) {
                        Some(message) => out.push((message.value, message.priority)),
                        None => break true,
                    }
                    taken += 1;
                }
            };
            self.run_deferred(&mut deferred);
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
