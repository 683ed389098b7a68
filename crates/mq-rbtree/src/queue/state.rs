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
//!    permits.
//! 3. If the queue is closed, no thread or task waits to send. If also no message is in a guard, none
//!    waits to receive.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::task::Waker;

use percpu::AllocError;
use percpu::sync::{Arc, check, step};

use super::config::Config;
use super::deferred::{Deferred, Notification};
use crate::core::{Core, Levels, Message, Preload};
use crate::error::SendRefused;
use crate::event::{EventNotifier, READABLE, WRITABLE};
use crate::staging::{Cursor, Next, Ring};
use crate::stats::Counters;
use crate::waiter::{Demand, Rank, WaitEnd, WaitList, Waiter, Wake};

pub(crate) type Node<T, P> = NonNull<Waiter<T, P>>;

#[repr(C)] // the fields that every message uses come first, beside the lock's word
pub(crate) struct State<T, L: Levels> {
    pub(crate) cursor: Cursor,
    pub(crate) closed: bool,
    /// The armed notifiers: one bit for each direction.
    pub(crate) armed: u8,
    pub(crate) notification: Option<Notification>,
    pub(crate) receivers: WaitList<T, L::Priority>,
    pub(crate) senders: WaitList<T, L::Priority>,
    /// Tasks that were woken for a message and have not polled since.
    pub(crate) receive_permits: usize,
    /// Tasks that were woken for room and have not polled since; and the bytes they need.
    pub(crate) send_permits: usize,
    pub(crate) send_permit_bytes: u64,
    pub(crate) notifiers: [Option<Arc<EventNotifier>>; 2],
    pub(crate) counters: Counters,
    pub(crate) core: Core<T, L>,
}

// SAFETY: messages, notifications and wakers move between threads, and priorities are copied
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
            send_permit_bytes: 0,
            notification: None,
            notifiers: [const { None }; 2],
            counters: Counters::default(),
        }
    }

    /// Sends a message into the queue, or directly to a waiting thread. `rank` is the sender's
    /// position.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        config: &Config<T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Result<(), Refused<T, L::Priority>> {
        if self.closed {
            return Err((message, SendRefused::Closed));
        }
        if !check!("send: no receiver waits", self.receivers.is_empty()) {
            return self.send_to_receivers(config, message, rank, preload, deferred);
        }
        self.push(config, message, rank, preload, deferred)?;
        if self.core.len() == 1 {
            self.notify_unless_awaited(deferred);
        }
        if self.armed != 0 {
            self.signal_notifiers(config, deferred);
        }
        Ok(())
    }

    /// Returns the level of a message for [`finish_fast_send`](Self::finish_fast_send).
    ///
    /// Returns `None` if a thread waits or is to be notified, or if room or memory is missing; then
    /// nothing has changed.
    #[inline(always)]
    pub(crate) fn begin_fast_send(
        &mut self,
        config: &Config<T, L>,
        priority: L::Priority,
        bytes: u32,
    ) -> Option<L::Level> {
        let idle = self.is_idle() && !self.closed && self.notification.is_none();
        // With `fair_bytes`, the room of a permit is not free.
        let idle = idle && self.send_permits == 0;
        let demand = || config.demand(priority, bytes);
        let room = idle && config.has_room(self.core.occupied(), self.core.bytes(), demand());
        if room { self.core.get_or_insert_level_no_alloc(priority) } else { None }
    }

    /// Appends a message to the level that [`begin_fast_send`](Self::begin_fast_send) has just
    /// returned.
    ///
    /// # Safety
    ///
    /// `begin_fast_send` has returned `level`, and nothing else was called since.
    #[inline(always)]
    pub(crate) unsafe fn finish_fast_send(
        &mut self,
        level: L::Level,
        message: Message<T, L::Priority>,
    ) {
        // SAFETY: `begin_fast_send` has the level from `get_or_insert_level_no_alloc`, and the
        // caller guarantees that nothing was called since.
        unsafe { self.core.push_to_level_no_alloc(level, message) };
        self.count_sent();
    }

    /// Receives the next message, unless a thread waits or is to be notified, or a sender must
    /// publish its message first; then no message was taken.
    #[inline(always)]
    pub(crate) fn fast_receive(
        &mut self,
        ring: Option<&Ring<T, L::Priority>>,
        config: &Config<T, L>,
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

    /// Receives the next message of the store and the open ring.
    #[inline(always)]
    fn receive_staged(
        &mut self,
        ring: &Ring<T, L::Priority>,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let message = match ring.next(&self.cursor, 0, u64::MAX) {
            Next::Hole => return None,
            Next::Nothing => self.core.pop_with(preload)?,
            Next::Message(priority) => {
                let alone = matches!(ring.next(&self.cursor, 1, u64::MAX), Next::Nothing);
                if check!("receive: drain before the choice", alone) && self.core.passes(priority) {
                    // SAFETY: the lock is held, and `next` has just returned a message.
                    let value = unsafe { ring.take(&mut self.cursor) };
                    self.count_depth(self.core.occupied() + 1);
                    Message { value, priority, bytes: 0 }
                } else {
                    if !self.drain(ring, u64::MAX) {
                        return None;
                    }
                    self.core.pop_with(preload)?
                }
            }
        };
        self.set_room(ring, config);
        Some(message)
    }

    /// Moves the messages of the ring into the store. Returns false if a sender must publish one
    /// first; then the store may have changed, but no message that is behind it was moved.
    ///
    /// A message whose send returned before this call is drained, if this returns true. With an
    /// earlier value of [`Ring::reported`] as `upto` this holds for the sends that had returned then.
    /// Does not allocate.
    #[inline(never)]
    pub(crate) fn drain(&mut self, ring: &Ring<T, L::Priority>, upto: u64) -> bool {
        let mut complete = true;
        // Senders may go on meanwhile, but no message beyond a whole ring was sent before the call.
        for _ in 0..ring.slots() {
            match ring.next(&self.cursor, 0, upto) {
                Next::Nothing => break,
                Next::Hole => {
                    complete = false;
                    break;
                }
                Next::Message(priority) => {
                    // SAFETY: the lock is held, and `next` has just returned a message.
                    let value = unsafe { ring.take(&mut self.cursor) };
                    self.core.push_stored(Message { value, priority, bytes: 0 });
                }
            }
        }
        self.count_depth(self.core.occupied());
        complete
    }

    /// Tells the senders of the ring about the room.
    #[inline(always)]
    fn set_room(&self, ring: &Ring<T, L::Priority>, config: &Config<T, L>) {
        let most = config.max_messages.min(self.core.capacity());
        ring.set_room(&self.cursor, self.core.occupied(), most);
    }

    /// Leaves the ring before the unlock: tells about the room, and opens the ring again if no
    /// thread or task waits or is to be notified.
    #[inline(always)]
    pub(crate) fn leave_ring(&mut self, ring: &Ring<T, L::Priority>, config: &Config<T, L>) {
        self.set_room(ring, config);
        let quiet = self.is_idle() && self.notification.is_none() && !self.closed;
        let quiet = check!("leave: open the quiet ring only", quiet);
        if quiet && self.cursor.is_drained() {
            ring.reopen(&mut self.cursor);
        }
    }

    /// Returns whether no thread or task waits and no notifier is armed.
    #[inline(always)]
    fn is_idle(&self) -> bool {
        self.receivers.is_empty() && self.senders.is_empty() && self.armed == 0
    }

    /// Counts a message that was added to the queue.
    #[inline(always)]
    fn count_sent(&mut self) {
        self.cursor.accept();
        self.count_depth(self.core.occupied());
    }

    #[inline(always)]
    fn count_depth(&mut self, len: usize) {
        if len > self.counters.peak {
            self.counters.peak = len;
        }
    }

    /// Receives the next message, and serves the senders that wait for its room.
    #[inline(always)]
    pub(crate) fn receive(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Option<Message<T, L::Priority>> {
        let message = match self.core.pop_with(preload) {
            Some(message) => message,
            None if self.senders.is_empty() => return None,
            None => {
                self.admit_past_permits(config, preload, deferred);
                self.core.pop_with(preload)?
            }
        };
        let waiting = !self.senders.is_empty() || self.armed != 0;
        if waiting {
            step!(
                "receive: serve the waiting senders",
                self.serve_waiters_of(config, preload, deferred, false)
            );
        }
        Some(message)
    }

    /// Returns whether no message will come any more: the queue is closed, and no guard can put one
    /// back.
    #[inline(always)]
    pub(crate) fn has_ended(&self) -> bool {
        self.closed && self.core.lent() == 0
    }

    /// Stores the message of a waiting thread, although others have a permit for the room.
    ///
    /// A thread waits beside an empty queue if the room belongs to tasks with a permit that have
    /// not polled yet. These do not keep the message from a receiver. Or messages are in guards.
    #[cold]
    #[inline(never)]
    pub(super) fn admit_past_permits(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        let mut at = self.senders.first().filter(|_| !self.closed && deferred.has_room());
        while let Some(node) = at {
            // SAFETY: the node is on the list, so it is alive.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: `&mut self` excludes other threads, and the reference ends in this line.
            let Some(demand) = (unsafe { waiter.inner() }).demand else { return };
            let (len, bytes) = (self.core.occupied(), self.core.bytes());
            // SAFETY: the node is on the list.
            if !unsafe { is_task(node) } && config.has_room(len, bytes, demand) {
                // SAFETY: the node is on the list.
                unsafe { self.serve_sender(node, preload, deferred) };
                break;
            }
            // SAFETY: the node is on the list.
            at = unsafe { self.senders.next(node) };
        }
    }

    /// Puts a node on the list of receivers, and counts the wait.
    ///
    /// # Safety
    ///
    /// As for [`WaitList::add`].
    pub(crate) unsafe fn wait_to_receive(
        &mut self,
        node: Node<T, L::Priority>,
        waker: Option<Waker>,
    ) {
        self.counters.receive_waits += 1;
        // SAFETY: the caller keeps the contract of `add`, which is also the contract of this
        // function.
        unsafe { self.receivers.add(node, waker) };
    }

    /// Puts a node on the list of senders, and counts the wait.
    ///
    /// # Safety
    ///
    /// As for [`WaitList::add`].
    pub(crate) unsafe fn wait_to_send(&mut self, node: Node<T, L::Priority>, waker: Option<Waker>) {
        self.counters.send_waits += 1;
        // SAFETY: the caller keeps the contract of `add`, which is also the contract of this
        // function.
        unsafe { self.senders.add(node, waker) };
    }

    #[inline(always)]
    fn push(
        &mut self,
        config: &Config<T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Result<(), Refused<T, L::Priority>> {
        let Message { priority, bytes, .. } = message;
        let level = if L::COMPARES {
            // If a comparison panics, nothing has changed. The message is returned, and dropped
            // after the unlock when the panic resumes. `refuse_or_unwind` does not look at the
            // reason then.
            let enter =
                AssertUnwindSafe(|| self.level_for_send(config, priority, bytes, rank, preload));
            catch_unwind(enter).unwrap_or_else(|panic| {
                deferred.set_panic(panic);
                Err(SendRefused::NoMemory)
            })
        } else {
            self.level_for_send(config, priority, bytes, rank, preload)
        };
        let level = match level {
            Ok(level) => level,
            Err(reason) => return Err((message, reason)),
        };
        // SAFETY: `level_for_send` has the level from `get_or_insert_level`, and nothing was called
        // since.
        let pushed = unsafe { self.core.push_to_level(level, message, preload) };
        pushed.map_err(|message| (message, SendRefused::NoMemory))?;
        self.count_sent();
        Ok(())
    }

    /// Returns the level of a message, if the message has room.
    #[inline(always)]
    fn level_for_send(
        &mut self,
        config: &Config<T, L>,
        priority: L::Priority,
        bytes: u32,
        rank: Rank,
        preload: &mut Preload<T, L>,
    ) -> Result<L::Level, SendRefused> {
        let demand = config.demand(priority, bytes);
        if !config.has_room(self.core.occupied(), self.core.bytes(), demand)
            || (config.fair_bytes && self.would_overtake(config, demand, rank))
        {
            return Err(SendRefused::Full);
        }
        self.core
            .get_or_insert_level(priority, preload)
            .map_err(|AllocError { .. }| SendRefused::NoMemory)
    }

    /// Returns whether a send, whose message has room, would take that room from other senders:
    /// from tasks with a permit, or from a waiter before it that needs more room.
    #[cold]
    #[inline(never)]
    fn would_overtake(
        &self,
        config: &Config<T, L>,
        demand: Demand<L::Priority>,
        rank: Rank,
    ) -> bool {
        let len = self.core.occupied() + self.send_permits;
        let bytes = self.core.bytes() + self.send_permit_bytes;
        if !config.has_room(len, bytes, demand) {
            return true;
        }
        let mut at = self.senders.first();
        while let Some(node) = at {
            // SAFETY: the node is on the list, so it is alive.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: `&self` comes from the lock's guard, and the reference ends in this turn.
            let inner = unsafe { waiter.inner() };
            if inner.rank() > rank {
                return false;
            }
            // A waiter that fits here is about to be served, or only a reserve keeps it out;
            // neither is overtaken, as in `first_admissible_sender`.
            let fits = |theirs| config.fits_without_reserves(len, bytes, theirs);
            if !inner.demand.is_some_and(fits) {
                return true;
            }
            // SAFETY: the node is on the list.
            at = unsafe { self.senders.next(node) };
        }
        false
    }

    #[cold]
    #[inline(never)]
    fn send_to_receivers(
        &mut self,
        config: &Config<T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Result<(), Refused<T, L::Priority>> {
        // Without messages in guards, there is room.
        if self.core.occupied() == 0 {
            // SAFETY: the node is the first of the list.
            let is_thread = |&node: &Node<_, _>| !unsafe { is_task(node) };
            if let Some(thread) = self.receivers.first().filter(is_thread) {
                // SAFETY: the node is the first of the list, and belongs to a thread.
                unsafe { self.hand_over(thread, message, deferred) };
                // This comes after the hand-over: the counters are on other cache lines, and the
                // receiver need not wait for them.
                self.cursor.accept();
                return Ok(());
            }
        }
        self.push(config, message, rank, preload, deferred)?;
        self.serve_waiters(config, preload, deferred);
        Ok(())
    }

    /// Ends the wait of a receiving thread with a message. `deferred` has room.
    ///
    /// # Safety
    ///
    /// `thread` is on the list of receivers, and belongs to a thread.
    unsafe fn hand_over(
        &mut self,
        thread: Node<T, L::Priority>,
        message: Message<T, L::Priority>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: the caller guarantees that the node is on this list.
        unsafe { self.receivers.remove(thread) };
        // SAFETY: the thread does not leave before `end_wait` below.
        let waiter = unsafe { thread.as_ref() };
        // SAFETY: `&mut self` excludes other threads, and the reference ends in this line.
        unsafe { waiter.inner() }.message = Some(message);
        // SAFETY: the node was taken off its list above.
        deferred.wake(unsafe { Waiter::end_wait(thread, WaitEnd::Completed) });
        self.counters.handed_over += 1;
    }

    /// Restores the invariants after a message came or went, a permit was used or released, or room
    /// was made.
    #[cold]
    #[inline(never)]
    pub(crate) fn serve_waiters(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        self.serve_waiters_of(config, preload, deferred, self.core.is_empty());
    }

    /// Restores the invariants. `was_empty` tells whether other threads last saw the queue empty.
    #[cold]
    #[inline(never)]
    pub(super) fn serve_waiters_of(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
        mut was_empty: bool,
    ) {
        while self.has_ended() && deferred.has_room() && self.dismiss_one(deferred) {}
        loop {
            let receiver =
                self.receivers.first().filter(|_| self.core.len() > self.receive_permits);
            let sender =
                if receiver.is_none() { self.first_admissible_sender(config) } else { None };
            let dismissed = !self.has_ended() || self.receivers.is_empty();
            if receiver.is_none() && sender.is_none() && dismissed {
                break;
            }
            if !deferred.has_room() {
                deferred.request_section();
                break;
            }
            if let Some(node) = receiver {
                // SAFETY: the node is the first of the list.
                unsafe { self.serve_receiver(node, preload, deferred) };
            } else if let Some(node) = sender {
                // SAFETY: `first_admissible_sender` returns a node of the list.
                unsafe { self.serve_sender(node, preload, deferred) };
                if was_empty && !self.core.is_empty() {
                    was_empty = false;
                    self.notify_unless_awaited(deferred);
                }
            }
        }
        if self.armed != 0 {
            self.signal_notifiers(config, deferred);
        }
    }

    /// Defers the notification of a first message, unless a receiver waits for the message: one on
    /// the list, or a task with a permit that has not polled yet.
    #[inline(always)]
    pub(super) fn notify_unless_awaited(&mut self, deferred: &mut Deferred) {
        let awaited = !self.receivers.is_empty() || self.receive_permits != 0;
        if self.notification.is_some() && !awaited {
            step!(
                "send: notify of the first message",
                deferred.set_notification(self.notification.take())
            );
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
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: the caller guarantees that the node is on this list.
        if unsafe { is_task(node) } {
            // SAFETY: the caller guarantees that the node is on this list.
            unsafe { self.receivers.remove(node) };
            step!("receive permit: increment the count", self.receive_permits += 1);
            // SAFETY: the task's node was taken off its list above.
            deferred.wake(unsafe { grant_permit(node) });
            return;
        }
        // If a comparison panics, the receiver tries again by itself, as the sender in
        // `serve_sender`.
        let pop = || self.core.pop_with(preload);
        match catch_unwind(AssertUnwindSafe(pop)) {
            // SAFETY: the node is on the list still, and belongs to a thread.
            Ok(Some(message)) => unsafe { self.hand_over(node, message, deferred) },
            Ok(None) => {}
            Err(panic) => {
                deferred.discard(panic);
                // SAFETY: the node is on this list.
                unsafe { self.receivers.remove(node) };
                // SAFETY: the node was taken off its list above.
                deferred.wake(unsafe { Waiter::end_wait(node, WaitEnd::Retry) });
            }
        }
    }

    /// Serves a waiting sender, whose message has room.
    ///
    /// # Safety
    ///
    /// `node` is on the list of senders.
    unsafe fn serve_sender(
        &mut self,
        node: Node<T, L::Priority>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: the node is on this list, so it is alive; its thread or future leaves only under
        // the lock or after `end_wait` below.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: `&mut self` excludes other threads, and the reference ends in this line.
        let demand = unsafe { waiter.inner() }.demand;
        // SAFETY: the caller guarantees that the node is on this list.
        if unsafe { is_task(node) } {
            // SAFETY: the caller guarantees that the node is on this list.
            unsafe { self.senders.remove(node) };
            step!("send permit: increment the count", self.send_permits += 1);
            self.send_permit_bytes += demand.map_or(0, |demand| u64::from(demand.bytes));
            // SAFETY: the task's node was taken off its list above.
            deferred.wake(unsafe { grant_permit(node) });
            return;
        }
        // If a comparison panics, nothing has changed. The sender repeats the comparison and the
        // panic by itself: the calling thread may be returning a message.
        let enter = || demand.map(|demand| self.core.get_or_insert_level(demand.priority, preload));
        let level = match catch_unwind(AssertUnwindSafe(enter)) {
            Ok(level) => level,
            Err(panic) => {
                deferred.discard(panic);
                None
            }
        };
        // SAFETY: the node is on this list.
        unsafe { self.senders.remove(node) };
        // SAFETY: `&mut self` excludes other threads, and no other reference to the node is in use.
        let slot = &mut unsafe { waiter.inner() }.message;
        let ended = match (level, slot.take()) {
            (Some(Ok(level)), Some(message)) => {
                // SAFETY: the level has just been returned, and only the list was changed since.
                match unsafe { self.core.push_to_level(level, message, preload) } {
                    Ok(()) => WaitEnd::Completed,
                    Err(message) => {
                        *slot = Some(message);
                        WaitEnd::Retry
                    }
                }
            }
            // Memory is missing here: the sender tries with memory of its own, and reports if there
            // is none.
            (_, message) => {
                *slot = message;
                WaitEnd::Retry
            }
        };
        if ended == WaitEnd::Completed {
            self.counters.taken_over += 1;
            self.count_sent();
        }
        // SAFETY: the node was taken off its list above.
        deferred.wake(unsafe { Waiter::end_wait(node, ended) });
    }

    /// Returns the first waiting sender whose message has room.
    ///
    /// A sender that only a reserve keeps out does not block those behind it; any other sender
    /// without room does.
    pub(super) fn first_admissible_sender(
        &self,
        config: &Config<T, L>,
    ) -> Option<Node<T, L::Priority>> {
        if self.closed {
            return None; // every waiter is about to be dismissed
        }
        let len = self.core.occupied() + self.send_permits;
        let bytes = self.core.bytes() + self.send_permit_bytes;
        let mut at = self.senders.first();
        while let Some(node) = at {
            // SAFETY: the node is on the list, so it is alive.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: `&self` comes from the lock's guard, and the reference ends in this line.
            let demand = unsafe { waiter.inner() }.demand?;
            if config.has_room(len, bytes, demand) {
                return Some(node);
            }
            if !config.fits_without_reserves(len, bytes, demand) {
                return None;
            }
            // SAFETY: the node is on the list.
            at = unsafe { self.senders.next(node) };
        }
        None
    }

    /// Ends a receive permit: its task has polled, or was dropped.
    pub(crate) fn release_receive_permit(&mut self) {
        step!("receive permit: decrement the count", self.receive_permits -= 1);
    }

    /// Ends a send permit: its task has polled, or was dropped.
    pub(crate) fn release_send_permit(&mut self, bytes: u32) {
        step!("send permit: decrement the count", self.send_permits -= 1);
        self.send_permit_bytes -= u64::from(bytes);
    }

    /// Takes one waiter of a closed queue off its list, to try again and see that. A receiver waits on
    /// while messages are in guards. Returns false if there is none.
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
    pub(crate) fn signal_notifiers(&mut self, config: &Config<T, L>, deferred: &mut Deferred) {
        let readable = !self.core.is_empty() || self.has_ended();
        let writable = !config.is_full(self.core.occupied(), self.core.bytes()) || self.closed;
        for (direction, due) in [(READABLE, readable), (WRITABLE, writable)] {
            if due && self.armed & (1 << direction) != 0 {
                self.armed &= !(1 << direction);
                if let Some(notifier) = &self.notifiers[direction] {
                    deferred.signal(direction, Arc::clone(notifier));
                }
            }
        }
    }
}

/// Returns whether a node belongs to a task.
///
/// # Safety
///
/// The node is on a list of the state that the caller has locked.
unsafe fn is_task<T, P: Copy>(node: Node<T, P>) -> bool {
    // SAFETY: the caller guarantees that the node is on a list, so it is alive.
    let waiter = unsafe { node.as_ref() };
    // SAFETY: the caller holds the lock, and the reference ends in this line.
    unsafe { waiter.inner() }.is_task()
}

/// Gives a permit to a task.
///
/// # Safety
///
/// The node was taken off a list of the state in the lock section of the caller.
unsafe fn grant_permit<T, P: Copy>(node: Node<T, P>) -> Option<Wake> {
    // SAFETY: the node's future takes the lock before it is dropped, and the caller holds the lock.
    let waiter = unsafe { node.as_ref() };
    // SAFETY: the caller holds the lock, and the reference ends in this line.
    unsafe { waiter.inner() }.permit = true;
    // SAFETY: the caller has taken the node off its list in this lock section.
    unsafe { Waiter::end_wait(node, WaitEnd::Completed) }
}
