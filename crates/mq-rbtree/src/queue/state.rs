//! The state under the lock: messages, waiters, permits and notifiers.
//!
//! A `&mut State` comes from the lock's guard, or from the queue's owner; either excludes all other
//! threads.
//!
//! # Invariants
//!
//! These hold whenever the lock is not held, unless a thread is about to lock it again because one
//! lock section cannot wake all waiters:
//!
//! 1. If a thread or task waits to receive, there are no more messages than receive permits.
//! 2. If a thread or task waits to send, its message has no room beside the room of the send
//!    permits, or a sender before it blocks it: see `first_admissible_sender`.
//! 3. If the queue is closed, no thread or task waits to send. If also no message is in a guard, none
//!    waits to receive.

use std::ptr::NonNull;
use std::sync::Arc;

use offlock_sync::AllocError;
use offlock_sync::{WordGuard, check, step};

use super::config::{Config, Section};
use super::deferred::{Deferred, catch_comparison};

use crate::core::{Core, Lent, Levels, Message, Preload};
use crate::error::{ReceiveError, SendRefused};
use crate::event::{EventNotifier, Interest};
use crate::staging::{Cursor, Next, Ring};
use crate::stats::Counters;
use crate::waiter::{Demand, WaitEnd, WaitList, Waiter, Wakeup};

pub(crate) type Node<T, P> = NonNull<Waiter<T, P>>;

#[repr(C)] // the fields that every message uses come first, beside the lock's word
pub(crate) struct State<T, L: Levels> {
    pub(crate) cursor: Cursor,
    pub(crate) closed: bool,
    /// The armed notifiers: one bit for each direction.
    pub(crate) armed: u8,
    pub(crate) receivers: WaitList<T, L::Priority>,
    pub(crate) senders: WaitList<T, L::Priority>,
    /// Tasks that were woken for a message and have not polled since.
    pub(crate) receive_permits: usize,
    /// Tasks that were woken for room and have not polled since.
    pub(crate) send_permits: usize,
    pub(crate) notifiers: [Option<Arc<EventNotifier>>; 2],
    pub(crate) counters: Counters,
    pub(crate) core: Core<T, L>,
}

// SAFETY: messages and wakers move between threads, and priorities are copied
// between them, for which `Send` suffices. The levels contain nothing but priorities.
unsafe impl<T: Send, L: Levels> Send for State<T, L> where L::Priority: Send {}

/// A refused message and the reason.
pub(crate) type Refused<T, P> = (Message<T, P>, SendRefused);

impl<T, L: Levels> State<T, L> {
    pub(crate) fn new(core: Core<T, L>, cursor: Cursor) -> Self {
        Self {
            cursor,
            core,
            closed: false,
            armed: 0,
            receivers: WaitList::new(),
            senders: WaitList::new(),
            receive_permits: 0,
            send_permits: 0,
            notifiers: [const { None }; 2],
            counters: Counters::default(),
        }
    }

    /// Sends a message into the queue, or directly to a waiting thread.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        message: Message<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> Result<(), Refused<T, L::Priority>> {
        if self.closed {
            return Err((message, SendRefused::Closed));
        }
        if !check!("send: no receiver waits", self.receivers.is_empty()) {
            return self.send_to_receivers(message, section);
        }
        self.push(message, section)?;
        if self.armed != 0 {
            self.signal_notifiers(section);
        }
        Ok(())
    }

    /// Returns the level to which a message can be appended at once.
    ///
    /// Returns `None` if a thread waits or a notifier is armed, if the queue is closed, or if room or memory
    /// is missing; then nothing has changed. The caller appends a message before any other call, because
    /// a new level is empty.
    #[inline(always)]
    pub(crate) fn level_at_once(
        &mut self,
        config: &Config<L>,
        priority: L::Priority,
    ) -> Option<L::Level> {
        let room = self.may_open() && self.core.occupied() < config.len_limit(priority);
        if room { self.core.get_or_insert_level_no_alloc(priority) } else { None }
    }

    /// Receives the next message. Returns `None` if there is none, if a thread or task waits or a
    /// notifier is armed, or if a sender must publish its message first.
    #[inline(always)]
    pub(crate) fn fast_receive(
        &mut self,
        ring: Option<&Ring<T, L::Priority>>,
        config: &Config<L>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        if !self.is_idle() {
            return None;
        }
        match ring {
            Some(ring) if !self.cursor.is_shut() => self.receive_staged(ring, config, preload),
            _ if self.cursor.is_drained() => self.core.pop_with(preload),
            _ => None,
        }
    }

    /// Returns whether a sender must publish its message in the open ring before a receive goes on.
    pub(crate) fn awaits_sender(&self, ring: &Ring<T, L::Priority>) -> bool {
        self.is_idle() && !self.cursor.is_shut() && ring.has_hole(&self.cursor)
    }

    /// Receives the next message of the store and the open ring.
    #[inline(always)]
    fn receive_staged(
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
    /// message alone does not go through the store.
    #[inline(always)]
    fn take_or_drain(
        &mut self,
        ring: &Ring<T, L::Priority>,
        priority: L::Priority,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let empty = self.core.is_empty();
        if check!("receive: the stored messages were sent before", empty) {
            let second = ring.second(&self.cursor);
            if let Next::Hole = second {
                return None; // the message before the hole stays in the ring
            }
            let alone = matches!(second, Next::Nothing);
            if check!("receive: drain before the choice", alone) {
                self.count_depth(self.core.occupied() + 1);
                // SAFETY: the lock is held, and `next` has returned a message.
                let value = unsafe { ring.take(&mut self.cursor) };
                return Some(Message { value, priority });
            }
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
    fn set_room(&self, ring: &Ring<T, L::Priority>, config: &Config<L>) {
        let most = config.max_messages.min(self.core.capacity());
        ring.set_room(&self.cursor, self.core.occupied(), most);
    }

    /// Publishes the room before the unlock, and opens the ring again if no thread or task waits and no
    /// notifier is armed.
    #[inline(always)]
    pub(crate) fn leave_ring(&mut self, ring: &Ring<T, L::Priority>, config: &Config<L>) {
        self.set_room(ring, config);
        let quiet = check!("leave: open the quiet ring only", self.may_open());
        if quiet && self.cursor.is_drained() {
            ring.reopen(&mut self.cursor);
        }
    }

    /// Returns whether senders may use the ring: no thread or task waits, no notifier is armed, and
    /// the queue is not closed.
    #[inline(always)]
    pub(super) fn may_open(&self) -> bool {
        self.is_idle() && !self.closed
    }

    /// Returns whether no thread or task waits and no notifier is armed.
    #[inline(always)]
    fn is_idle(&self) -> bool {
        self.receivers.is_empty() && self.senders.is_empty() && self.armed == 0
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
        section: &mut Section<'_, T, L>,
    ) -> Option<Result<(T, L::Priority), ReceiveError>> {
        match self.take_next(section) {
            Some(message) => Some(Ok((message.value, message.priority))),
            None => self.has_ended().then_some(Err(ReceiveError::Closed)),
        }
    }

    /// Takes the next message, and serves the senders that wait for its room.
    #[inline(always)]
    fn take_next(&mut self, section: &mut Section<'_, T, L>) -> Option<Message<T, L::Priority>> {
        let message = match self.core.pop_with(&mut section.preload) {
            Some(message) => message,
            None if self.senders.is_empty() => return None,
            None => {
                self.admit_past_permits(section);
                self.core.pop_with(&mut section.preload)?
            }
        };
        let waiting = !self.senders.is_empty() || self.armed != 0;
        if waiting {
            step!("receive: serve the waiting senders", self.serve_waiters(section));
        }
        Some(message)
    }

    /// Returns whether no message will come any more: the queue is closed, and no guard can put one
    /// back.
    #[inline(always)]
    pub(crate) fn has_ended(&self) -> bool {
        self.closed && self.core.lent() == 0
    }

    /// Stores the message of a waiting thread in a queue whose free room is reserved by permits.
    ///
    /// An empty queue may have waiting senders: the permits of tasks that have not polled yet reserve its
    /// room, or guards hold its messages. A receiver must not wait for those tasks, so the first thread
    /// whose message fits without the permits is served.
    #[cold]
    #[inline(never)]
    pub(super) fn admit_past_permits(&mut self, section: &mut Section<'_, T, L>) {
        if self.closed || !section.deferred.has_room() {
            return;
        }
        let len = self.core.occupied();
        let has_room = |demand: Demand<L::Priority>| len < demand.len_limit;
        let thread = self
            .senders
            .iter()
            .find(|(_, inner)| !inner.is_task() && inner.demand.is_some_and(has_room));
        if let Some((node, _)) = thread {
            // SAFETY: the node is on the list.
            unsafe { self.serve_sender(node, section) };
        }
    }

    #[inline(always)]
    fn push(
        &mut self,
        message: Message<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> Result<(), Refused<T, L::Priority>> {
        let priority = message.priority;
        let find_level = || self.level_for_send(priority, section);
        let level = match catch_comparison::<L, _>(find_level) {
            Ok(Ok(level)) => level,
            Ok(Err(reason)) => return Err((message, reason)),
            Err(panic) => {
                // Nothing has changed. `finish_send` does not look at the reason.
                section.deferred.set_panic(panic);
                return Err((message, SendRefused::NoMemory));
            }
        };
        // SAFETY: `level_for_send` has the level from `get_or_insert_level`, and nothing was called
        // since.
        let pushed = unsafe { self.core.push_to_level(level, message, &mut section.preload) };
        pushed.map_err(|message| (message, SendRefused::NoMemory))?;
        self.count_sent();
        Ok(())
    }

    /// Returns the level of a message, if the message has room.
    #[inline(always)]
    fn level_for_send(
        &mut self,
        priority: L::Priority,
        section: &mut Section<'_, T, L>,
    ) -> Result<L::Level, SendRefused> {
        if self.core.occupied() >= section.config.len_limit(priority) {
            return Err(SendRefused::Full);
        }
        self.core
            .get_or_insert_level(priority, &mut section.preload)
            .map_err(|AllocError { .. }| SendRefused::NoMemory)
    }

    #[cold]
    #[inline(never)]
    fn send_to_receivers(
        &mut self,
        message: Message<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> Result<(), Refused<T, L::Priority>> {
        // An empty queue without messages in guards has room.
        if self.core.occupied() == 0 {
            let first = self.receivers.iter().next().filter(|(_, inner)| !inner.is_task());
            if let Some((thread, _)) = first {
                // SAFETY: the node is the first of the list, and belongs to a thread.
                unsafe { self.hand_over(thread, message, &mut section.deferred) };
                // After the hand-over, so that the receiver need not wait for it.
                self.cursor.accept();
                return Ok(());
            }
        }
        self.push(message, section)?;
        self.serve_waiters(section);
        Ok(())
    }
}

// The service of waiting threads and tasks: hand-overs, permits and signals.

impl<T, L: Levels> State<T, L> {
    /// Ends the wait of a receiving thread with a message. `deferred` has room.
    ///
    /// # Safety
    ///
    /// `receiver` is on the list of receivers, and belongs to a thread.
    pub(super) unsafe fn hand_over(
        &mut self,
        receiver: Node<T, L::Priority>,
        message: Message<T, L::Priority>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: the caller guarantees that the node is on this list.
        unsafe { self.receivers.remove(receiver) };
        // SAFETY: the thread does not leave before `end_wait` below. `&mut self` excludes other threads,
        // and the reference ends in this line.
        unsafe { Waiter::inner_of(receiver) }.message = Some(message);
        // SAFETY: the node was taken off its list above.
        deferred.wake(unsafe { Waiter::end_wait(receiver, WaitEnd::Completed) });
        self.counters.handed_over += 1;
    }

    /// Restores the invariants after a message came or went, a permit was used or released, or room
    /// was made.
    #[cold]
    #[inline(never)]
    pub(crate) fn serve_waiters(&mut self, section: &mut Section<'_, T, L>) {
        while self.has_ended()
            && section.deferred.has_room()
            && self.dismiss_one(&mut section.deferred)
        {}
        loop {
            let receiver =
                self.receivers.first().filter(|_| self.core.len() > self.receive_permits);
            let sender = if receiver.is_none() {
                self.first_admissible_sender(section.config)
            } else {
                None
            };
            let all_dismissed = !self.has_ended() || self.receivers.is_empty();
            if receiver.is_none() && sender.is_none() && all_dismissed {
                break;
            }
            if !section.deferred.has_room() {
                section.deferred.request_section();
                break;
            }
            if let Some(node) = receiver {
                // SAFETY: the node is the first of the list.
                unsafe { self.serve_receiver(node, section) };
            } else if let Some(node) = sender {
                // SAFETY: `first_admissible_sender` returns a node of the list.
                unsafe { self.serve_sender(node, section) };
            }
        }
        if self.armed != 0 {
            self.signal_notifiers(section);
        }
    }

    /// Serves the first receiver; there are more messages than permits.
    ///
    /// # Safety
    ///
    /// `node` is on the list of receivers.
    unsafe fn serve_receiver(
        &mut self,
        node: Node<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) {
        // SAFETY: the caller guarantees a listed node. `&mut self` excludes other threads, and the
        // reference ends in this line.
        if unsafe { Waiter::inner_of(node) }.is_task() {
            // SAFETY: the caller guarantees that the node is on this list.
            unsafe { self.receivers.remove(node) };
            step!("receive permit: increment the count", self.receive_permits += 1);
            // SAFETY: the task's node was taken off its list above.
            section.deferred.wake(unsafe { grant_permit(node) });
            return;
        }
        // If a comparison panics, the receiver repeats it on its own thread, as the sender does in
        // `serve_sender`.
        let pop = || self.core.pop_with(&mut section.preload);
        match catch_comparison::<L, _>(pop) {
            // SAFETY: the node is on the list still, and belongs to a thread.
            Ok(Some(message)) => unsafe { self.hand_over(node, message, &mut section.deferred) },
            Ok(None) => {}
            Err(panic) => {
                section.deferred.discard(panic);
                // SAFETY: the node is on this list.
                unsafe { self.receivers.remove(node) };
                // SAFETY: the node was taken off its list above.
                section.deferred.wake(unsafe { Waiter::end_wait(node, WaitEnd::Retry) });
            }
        }
    }

    /// Serves a waiting sender, whose message has room.
    ///
    /// # Safety
    ///
    /// `node` is on the list of senders.
    pub(super) unsafe fn serve_sender(
        &mut self,
        node: Node<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) {
        // SAFETY: the node is on this list, so it is alive; its thread or future leaves only under
        // the lock or after `end_wait` below. `&mut self` excludes other threads, and the reference
        // ends before the next one is made.
        let inner = unsafe { Waiter::inner_of(node) };
        let demand = inner.demand;
        if inner.is_task() {
            // SAFETY: the caller guarantees that the node is on this list.
            unsafe { self.senders.remove(node) };
            step!("send permit: increment the count", self.send_permits += 1);
            // SAFETY: the task's node was taken off its list above.
            section.deferred.wake(unsafe { grant_permit(node) });
            return;
        }
        // If a comparison panics, nothing has changed. The sender repeats the comparison and the
        // panic on its own thread: the calling thread may be returning a message.
        let find_level = || {
            demand
                .map(|demand| self.core.get_or_insert_level(demand.priority, &mut section.preload))
        };
        let level = match catch_comparison::<L, _>(find_level) {
            Ok(level) => level,
            Err(panic) => {
                section.deferred.discard(panic);
                None
            }
        };
        // SAFETY: the node is on this list.
        unsafe { self.senders.remove(node) };
        // SAFETY: as above; the list uses the node no more.
        let in_node = &mut unsafe { Waiter::inner_of(node) }.message;
        let ended = match (level, in_node.take()) {
            (Some(Ok(level)), Some(message)) => {
                // SAFETY: the level has just been returned, and only the list was changed since.
                match unsafe { self.core.push_to_level(level, message, &mut section.preload) } {
                    Ok(()) => WaitEnd::Completed,
                    Err(message) => {
                        *in_node = Some(message);
                        WaitEnd::Retry
                    }
                }
            }
            // Memory is missing, or the comparison panicked. The sender retries with memory of its own,
            // and reports the error or repeats the panic on its own thread.
            (_, message) => {
                *in_node = message;
                WaitEnd::Retry
            }
        };
        if ended == WaitEnd::Completed {
            self.counters.taken_over += 1;
            self.count_sent();
        }
        // SAFETY: the node was taken off its list above.
        section.deferred.wake(unsafe { Waiter::end_wait(node, ended) });
    }

    /// Returns the first waiting sender whose message has room.
    ///
    /// A sender that only a reserve keeps out does not block those behind it.
    pub(super) fn first_admissible_sender(
        &self,
        config: &Config<L>,
    ) -> Option<Node<T, L::Priority>> {
        if self.closed {
            return None; // every waiting sender is about to be dismissed
        }
        let len = self.core.occupied() + self.send_permits;
        if len >= config.max_messages {
            return None;
        }
        for (node, inner) in self.senders.iter() {
            let demand = inner.demand?;
            if len < demand.len_limit {
                return Some(node);
            }
        }
        None
    }

    /// Ends a receive permit: its task has polled, or was dropped.
    pub(crate) fn release_receive_permit(&mut self) {
        step!("receive permit: decrement the count", self.receive_permits -= 1);
    }

    /// Ends a send permit: its task has polled, or was dropped.
    pub(crate) fn release_send_permit(&mut self) {
        step!("send permit: decrement the count", self.send_permits -= 1);
    }

    /// Ends the wait of one waiter of a closed queue, which tries again and finds the queue closed. A
    /// receiver waits on while messages are in guards. Returns false if there is none to dismiss.
    pub(crate) fn dismiss_one(&mut self, deferred: &mut Deferred) -> bool {
        let node = if let Some(node) = self.receivers.first().filter(|_| self.has_ended()) {
            // SAFETY: the node is the first of this list.
            unsafe { self.receivers.remove(node) };
            node
        } else if let Some(node) = self.senders.first() {
            // SAFETY: the node is the first of this list.
            unsafe { self.senders.remove(node) };
            node
        } else {
            return false;
        };
        // SAFETY: the node was taken off its list above.
        deferred.wake(unsafe { Waiter::end_wait(node, WaitEnd::Retry) });
        true
    }

    /// Defers the signals of the armed notifiers whose event has occurred, and disarms them.
    #[cold]
    #[inline(never)]
    pub(crate) fn signal_notifiers(&mut self, section: &mut Section<'_, T, L>) {
        let readable = !self.core.is_empty() || self.has_ended();
        let writable = self.core.occupied() < section.config.max_messages || self.closed;
        for (interest, due) in [(Interest::Readable, readable), (Interest::Writable, writable)] {
            let direction = interest as usize;
            if due && self.armed & (1 << direction) != 0 {
                self.armed &= !(1 << direction);
                if let Some(notifier) = &self.notifiers[direction] {
                    section.deferred.signal(direction, notifier.clone());
                }
            }
        }
    }
}

/// Gives a permit to a task.
///
/// # Safety
///
/// The node was taken off a list of the state in the lock section of the caller.
unsafe fn grant_permit<T, P: Copy>(node: Node<T, P>) -> Option<Wakeup> {
    // SAFETY: the node's future takes the lock before it is dropped. The caller holds the lock, and the
    // reference ends in this line.
    unsafe { Waiter::inner_of(node) }.permit = true;
    // SAFETY: the caller has taken the node off its list in this lock section.
    unsafe { Waiter::end_wait(node, WaitEnd::Completed) }
}

// Messages in guards, under the lock.

impl<T, L: Levels> State<T, L> {
    /// Lends the next message to a guard: see [`Core::lend`].
    pub(crate) fn lend(
        &mut self,
        section: &mut Section<'_, T, L>,
    ) -> Result<Option<Lent<T, L::Priority>>, AllocError> {
        if self.core.is_empty() && !self.senders.is_empty() {
            self.admit_past_permits(section);
        }
        self.core.lend(&mut section.preload)
    }

    /// Puts a lent message back, and wakes a receiver for it. Returns the message if a comparison
    /// panicked.
    ///
    /// # Safety
    ///
    /// As for [`Core::put_back`].
    pub(crate) unsafe fn put_back(
        &mut self,
        lent: &Lent<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> Option<T> {
        // SAFETY: the caller keeps the contract of `put_back`.
        let put_back = || unsafe { self.core.put_back(lent, &mut section.preload) };
        if let Err(panic) = catch_comparison::<L, _>(put_back) {
            section.deferred.set_panic(panic);
            // SAFETY: nothing has changed, so the message is lent still.
            return Some(unsafe { self.take_lent(lent, section) });
        }
        step!("guard dropped: wake a receiver", self.serve_waiters(section));
        None
    }

    /// Removes a lent message, and serves the senders that wait for its room.
    ///
    /// # Safety
    ///
    /// As for [`Core::take_lent`].
    pub(crate) unsafe fn take_lent(
        &mut self,
        lent: &Lent<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> T {
        // SAFETY: the caller keeps the contract of `take_lent`.
        let value = unsafe { self.core.take_lent(lent, &mut section.preload) };
        step!("guard accepted: serve the waiters", self.serve_waiters(section));
        value
    }
}

// The locked state of a queue, which leaves the ring as the unlocked queue needs it.

/// The locked state of a queue.
pub(crate) struct LockedState<'q, T, L: Levels> {
    pub(super) ring: Option<&'q Ring<T, L::Priority>>,
    pub(super) config: &'q Config<L>,
    pub(super) guard: WordGuard<'q, State<T, L>>,
}

impl<T, L: Levels> LockedState<'_, T, L> {
    /// Makes later sends take the lock.
    pub(crate) fn shut(&mut self) {
        if let Some(ring) = self.ring {
            ring.shut(&mut self.guard.cursor);
        }
    }

    /// Opens a ring that could not be drained, if no thread or task waits and no notifier is armed.
    pub(super) fn open_undrained(&mut self) {
        if let Some(ring) = self.ring {
            if self.guard.may_open() {
                ring.open_undrained(&mut self.guard.cursor);
            }
        }
    }

    /// Drains the ring: see [`State::drain`].
    #[inline]
    pub(crate) fn drain(&mut self, upto: u64) -> bool {
        match self.ring {
            Some(ring) => self.guard.drain(ring, upto),
            None => true,
        }
    }

    /// Returns the position below which senders have reported holes.
    pub(super) fn reported(&self) -> u64 {
        self.ring.map_or(0, Ring::reported)
    }
}

/// What the queue is locked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To see the messages whose sends have returned.
    Receive,
    /// To wait, or to arm a notifier.
    Wait,
    /// To send; a closed queue refuses that without a look at the ring.
    Send,
}

impl<T, L: Levels> std::ops::Deref for LockedState<'_, T, L> {
    type Target = State<T, L>;

    #[inline(always)]
    fn deref(&self) -> &State<T, L> {
        &self.guard
    }
}

impl<T, L: Levels> std::ops::DerefMut for LockedState<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State<T, L> {
        &mut self.guard
    }
}

impl<T, L: Levels> Drop for LockedState<'_, T, L> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(ring) = self.ring {
            self.guard.leave_ring(ring, self.config);
        }
    }
}
