//! The state under the lock: messages, the ring's cursor and notifiers.
//!
//! A `&mut State` comes from the lock's guard, or from the queue's owner; either excludes all other
//! threads. What the unlock does for waiters is in [`LockedState`](super::LockedState).

use std::sync::Arc;

use offlock_sync::AllocError;
use offlock_sync::check;

use super::builder::Config;
use crate::core::{Core, Levels, Message, Preload};
use crate::error::{ReceiveError, SendRefused};
use crate::readiness::{EventNotifier, Interest};
use crate::staging::{Cursor, Next, Ring};
use crate::stats::Counters;

#[repr(C)] // the fields that every message uses come first, beside the lock's word
pub(crate) struct State<T, L: Levels> {
    pub(crate) cursor: Cursor,
    pub(crate) closed: bool,
    /// The armed notifiers: one bit for each direction.
    pub(crate) armed: u8,
    pub(crate) notifiers: [Option<Arc<EventNotifier>>; 2],
    pub(crate) counters: Counters,
    pub(crate) core: Core<T, L>,
}

// SAFETY: messages move between threads, and priorities are copied between them, for which `Send` suffices. The levels contain nothing but priorities.
unsafe impl<T: Send, L: Levels> Send for State<T, L> where L::Priority: Send {}

impl<T, L: Levels> State<T, L> {
    pub(crate) fn new(core: Core<T, L>, cursor: Cursor) -> Self {
        Self {
            cursor,
            core,
            closed: false,
            armed: 0,
            notifiers: [const { None }; 2],
            counters: Counters::default(),
        }
    }

    /// Takes the message into the store. If it is refused, or if a comparison panics, nothing has changed. The
    /// message is in the caller's frame, where an unwind drops it after the unlock.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        message: &mut Option<Message<T, L::Priority>>,
        config: &Config<L>,
        preload: &mut Preload<T, L>,
    ) -> Result<(), SendRefused> {
        let Some(priority) = message.as_ref().map(|message| message.priority) else {
            return Ok(());
        };
        if self.closed {
            return Err(SendRefused::Closed);
        }
        if self.core.occupied() >= config.len_limit(priority) {
            return Err(SendRefused::Full);
        }
        let level = self.core.get_or_insert_level(priority, preload);
        let level = level.map_err(|AllocError { .. }| SendRefused::NoMemory)?;
        let Some(sent) = message.take() else { unreachable!("it has a priority") };
        // SAFETY: `get_or_insert_level` has just returned the level.
        if let Err(refused) = unsafe { self.core.push_to_level(level, sent, preload) } {
            *message = Some(refused);
            return Err(SendRefused::NoMemory);
        }
        self.count_sent();
        Ok(())
    }

    /// Returns whether a sender must publish its message in the open ring before a receive goes on.
    pub(crate) fn awaits_sender(&self, ring: &Ring<T, L::Priority>) -> bool {
        !self.cursor.is_shut() && ring.has_hole(&self.cursor)
    }

    /// Receives the next message of the store and the open ring. Returns `None` if there is none, or if a
    /// sender must publish its message first.
    #[inline(always)]
    pub(super) fn receive_staged(
        &mut self,
        ring: &Ring<T, L::Priority>,
        config: &Config<L>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let message = match ring.next(&self.cursor, u64::MAX) {
            Next::Hole => return None,
            Next::Nothing => self.core.pop_with(preload)?,
            Next::Message(priority) => self.take_or_drain(ring, priority, preload)?,
        };
        self.set_room(ring, config);
        Some(message)
    }

    /// Receives the next message of the store and the open ring, whose first message has this priority. A
    /// message alone goes through the store only if that has messages.
    #[inline(always)]
    fn take_or_drain(
        &mut self,
        ring: &Ring<T, L::Priority>,
        priority: L::Priority,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let second = ring.second(&self.cursor);
        let empty = self.core.is_empty();
        let empty = check!("receive: the stored messages were sent before", empty);
        if empty && matches!(second, Next::Hole) {
            return None; // the message before the hole stays in the ring
        }
        let alone = matches!(second, Next::Nothing);
        if check!("receive: drain before the choice", alone) {
            self.count_depth(self.core.occupied() + 1);
            // SAFETY: the lock is held, and `next` has returned a message.
            let value = unsafe { ring.take(&mut self.cursor) };
            let message = Message { value, priority };
            if empty {
                return Some(message);
            }
            // A drain would look at the slots again.
            self.core.push_stored(message);
            return self.core.pop_with(preload);
        }
        if self.drain(ring, u64::MAX) { self.core.pop_with(preload) } else { None }
    }

    /// Moves the published messages of the ring into the store. Returns true if every message is moved
    /// whose send returned before this call, or before `upto` was read from [`Ring::reported`]. Returns
    /// false at a hole; the messages before the hole are moved. Does not allocate.
    #[inline(never)]
    pub(crate) fn drain(&mut self, ring: &Ring<T, L::Priority>, upto: u64) -> bool {
        let mut complete = true;
        // Senders may go on meanwhile; at most a whole ring of messages was sent before the call.
        for _ in 0..ring.slots() {
            match ring.next(&self.cursor, upto) {
                Next::Nothing => break,
                Next::Hole => {
                    complete = false;
                    break;
                }
                Next::Message(priority) => {
                    // SAFETY: the lock is held, and `next` has just returned a message.
                    let value = unsafe { ring.take(&mut self.cursor) };
                    self.core.push_stored(Message { value, priority });
                }
            }
        }
        self.count_depth(self.core.occupied());
        complete
    }

    /// Publishes the room to the senders of the ring.
    #[inline(always)]
    pub(super) fn set_room(&self, ring: &Ring<T, L::Priority>, config: &Config<L>) {
        let most = config.max_messages.min(self.core.capacity());
        ring.set_room(&self.cursor, self.core.occupied(), most);
    }

    /// Counts a message that was added to the queue.
    #[inline(always)]
    pub(super) fn count_sent(&mut self) {
        self.cursor.accept();
        self.count_depth(self.core.occupied());
    }

    #[inline(always)]
    fn count_depth(&mut self, len: usize) {
        if len > self.counters.peak {
            self.counters.peak = len;
        }
    }

    /// Receives the next message, or the error that none will come. Returns `None` if there is none yet.
    #[inline(always)]
    pub(crate) fn receive(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Result<(T, L::Priority), ReceiveError>> {
        match self.core.pop_with(preload) {
            Some(message) => Some(Ok((message.value, message.priority))),
            None => self.has_ended().then_some(Err(ReceiveError::Closed)),
        }
    }

    /// Returns whether no message will come any more: the queue is closed, and no guard can put one
    /// back.
    #[inline(always)]
    pub(crate) fn has_ended(&self) -> bool {
        self.closed && self.core.lent() == 0
    }

    /// Signals the armed notifiers whose event has occurred, and disarms them.
    pub(super) fn signal_notifiers(&mut self, config: &Config<L>) {
        let readable = !self.core.is_empty() || self.has_ended();
        let writable = self.core.occupied() < config.max_messages || self.closed;
        for (interest, due) in [(Interest::Readable, readable), (Interest::Writable, writable)] {
            let direction = interest as usize;
            if due && self.armed & (1 << direction) != 0 {
                self.armed &= !(1 << direction);
                if let Some(notifier) = &self.notifiers[direction] {
                    notifier.signal();
                }
            }
        }
    }
}
