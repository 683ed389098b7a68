//! What the lock protects: messages, who waits, and who is to be told.
//!
//! # Invariants
//!
//! Whenever the lock is not held, and nobody is about to lock it again because it had more to wake
//! than one section of the lock takes:
//!
//! 1. If somebody waits to receive, there are no more messages than tasks with a permit to receive.
//! 2. If somebody waits to send, there is no room for it beside what tasks with a permit to send want.
//! 3. If the queue is closed, nobody waits.

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
use crate::stats::Counters;
use crate::waiter::{Demand, Rank, WaitEnd, WaitList, Waiter, Wake};

pub(crate) type Node<T, P> = NonNull<Waiter<T, P>>;

#[repr(C)] // what every message needs comes first, beside the lock's word
pub(crate) struct State<T, L: Levels> {
    pub(crate) closed: bool,
    /// A notifier of either direction is to be rung: bits by direction.
    pub(crate) armed: u8,
    pub(crate) notification: Option<Notification>,
    pub(crate) receivers: WaitList<T, L::Priority>,
    pub(crate) senders: WaitList<T, L::Priority>,
    /// Tasks that were told of a message, and have not looked yet.
    pub(crate) receive_permits: usize,
    /// Tasks that were told of room, and have not looked yet; and the bytes they want.
    pub(crate) send_permits: usize,
    pub(crate) send_permit_bytes: u64,
    pub(crate) notifiers: [Option<Arc<EventNotifier>>; 2],
    pub(crate) counters: Counters,
    pub(crate) core: Core<T, L>,
}

// SAFETY: messages, notifications and wakers move between threads; priorities are copied there. The
// levels hold priorities alone.
unsafe impl<T: Send, L: Levels> Send for State<T, L> where L::Priority: Send {}

/// A message that was not put in, and why.
pub(crate) type Refused<T, P> = (Message<T, P>, SendRefused);

impl<T, L: Levels> State<T, L> {
    pub(crate) fn new(core: Core<T, L>) -> Self {
        Self {
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

    /// Puts a message in, or into the hands of who waits for one; `rank` is its sender's.
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

    /// The level for a message that [`finish_fast_send`](Self::finish_fast_send) puts there next, if nobody
    /// waits or is to be told and there is room and memory; else nothing has changed.
    #[inline(always)]
    pub(crate) fn begin_fast_send(
        &mut self,
        config: &Config<T, L>,
        priority: L::Priority,
        bytes: u32,
    ) -> Option<L::Level> {
        let idle = self.is_idle() && !self.closed && self.notification.is_none();
        let idle = idle && self.send_permits == 0; // in turn, what is promised is not there
        let demand = || config.demand(priority, bytes);
        let room = idle && config.has_room(self.core.len(), self.core.bytes(), demand());
        if room { self.core.get_or_insert_level_no_alloc(priority) } else { None }
    }

    /// Puts a message into its level, which was entered just now.
    #[inline(always)]
    pub(crate) fn finish_fast_send(&mut self, level: L::Level, message: Message<T, L::Priority>) {
        self.core.push_to_level_no_alloc(level, message);
        self.count_sent();
    }

    /// Takes the next message out, if there is one and nobody waits or is to be told; else nothing has
    /// changed.
    #[inline(always)]
    pub(crate) fn fast_receive(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        if self.is_idle() { self.core.pop_with(preload) } else { None }
    }

    /// Whether nobody waits, and no notifier is to be rung.
    #[inline(always)]
    fn is_idle(&self) -> bool {
        self.receivers.is_empty() && self.senders.is_empty() && self.armed == 0
    }

    /// Counts a message that was put in.
    #[inline(always)]
    fn count_sent(&mut self) {
        self.counters.sent += 1;
        let len = self.core.len();
        if len > self.counters.peak {
            self.counters.peak = len;
        }
    }

    /// Takes the next message out; whoever waits to send may go on.
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
            None => self.receive_from_sender(config, preload, deferred)?,
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

    /// The message of a thread that waits although the queue is empty: room was promised to tasks
    /// that have not looked yet. They keep nobody from receiving.
    #[cold]
    #[inline(never)]
    fn receive_from_sender(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Option<Message<T, L::Priority>> {
        let mut at = self.senders.first().filter(|_| !self.closed && deferred.has_room());
        while let Some(node) = at {
            // SAFETY: on the list, so it lives; we have the lock.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: as above.
            let demand = unsafe { waiter.inner() }.demand?;
            if !is_task(node) && config.has_room(0, 0, demand) {
                self.serve_sender(node, preload, deferred);
                break;
            }
            // SAFETY: on the list.
            at = unsafe { self.senders.next(node) };
        }
        self.core.pop_with(preload)
    }

    /// Puts a node on a list.
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
        // SAFETY: as the caller says.
        unsafe { self.receivers.add(node, waker) };
    }

    /// The same, to send.
    ///
    /// # Safety
    ///
    /// As for [`WaitList::add`].
    pub(crate) unsafe fn wait_to_send(&mut self, node: Node<T, L::Priority>, waker: Option<Waker>) {
        self.counters.send_waits += 1;
        // SAFETY: as the caller says.
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
            // If that panics nothing was changed. The message goes back, to be dropped after the unlock
            // as the panic goes on: any reason does, see `refuse_or_unwind`.
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
        let filled = self.core.push_to_level(level, message, preload);
        filled.map_err(|message| (message, SendRefused::NoMemory))?;
        self.count_sent();
        Ok(())
    }

    /// The level for a message, if it has room.
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
        if !config.has_room(self.core.len(), self.core.bytes(), demand)
            || (config.fair_bytes && self.would_overtake(config, demand, rank))
        {
            return Err(SendRefused::Full);
        }
        self.core
            .get_or_insert_level(priority, preload)
            .map_err(|AllocError { .. }| SendRefused::NoMemory)
    }

    /// Whether a sender of this rank that has room takes it from others: from tasks that it was
    /// promised to, or from who is before it and waits for more. Its place would be behind them.
    #[cold]
    #[inline(never)]
    fn would_overtake(
        &self,
        config: &Config<T, L>,
        demand: Demand<L::Priority>,
        rank: Rank,
    ) -> bool {
        let len = self.core.len() + self.send_permits;
        let bytes = self.core.bytes() + self.send_permit_bytes;
        if !config.has_room(len, bytes, demand) {
            return true;
        }
        let mut at = self.senders.first();
        while let Some(node) = at {
            // SAFETY: on the list, so it lives; we have the lock.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: as above.
            let inner = unsafe { waiter.inner() };
            if inner.rank() > rank {
                return false;
            }
            // Whom a reserve alone keeps out holds up nobody, as in `first_admissible_sender`. Who is about to be
            // served has its room, or will be.
            let fits = |theirs| config.fits_without_reserves(len, bytes, theirs);
            if !inner.demand.is_some_and(fits) {
                return true;
            }
            // SAFETY: on the list.
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
        if self.core.is_empty() {
            if let Some(thread) = self.receivers.first().filter(|&node| !is_task(node)) {
                self.hand_over(thread, message, deferred);
                // After it was told: these are on other lines, for which it would wait.
                self.counters.sent += 1;
                return Ok(());
            }
        }
        self.push(config, message, rank, preload, deferred)?;
        self.serve_waiters(config, preload, deferred);
        Ok(())
    }

    /// Ends the wait of a thread that waits to receive with a message. `deferred` has room.
    fn hand_over(
        &mut self,
        thread: Node<T, L::Priority>,
        message: Message<T, L::Priority>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: the first of this list, so it lives.
        unsafe { self.receivers.remove(thread) };
        // SAFETY: nobody told it yet; we have the lock.
        let waiter = unsafe { thread.as_ref() };
        // SAFETY: as above.
        unsafe { waiter.inner() }.message = Some(message);
        // SAFETY: taken off the list above.
        deferred.wake(unsafe { Waiter::end_wait(thread, WaitEnd::Completed) });
        self.counters.handed_over += 1;
    }

    /// Makes the invariants true again after a message came or went, a permit was used or given up,
    /// or room was made.
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

    /// The same, of a queue that was empty, as far as anybody could see, or not.
    #[cold]
    #[inline(never)]
    fn serve_waiters_of(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
        mut was_empty: bool,
    ) {
        loop {
            let receiver =
                self.receivers.first().filter(|_| self.core.len() > self.receive_permits);
            let sender =
                if receiver.is_none() { self.first_admissible_sender(config) } else { None };
            if receiver.is_none() && sender.is_none() {
                break;
            }
            if !deferred.has_room() {
                deferred.request_section();
                break;
            }
            if let Some(node) = receiver {
                self.serve_receiver(node, preload, deferred);
            } else if let Some(node) = sender {
                self.serve_sender(node, preload, deferred);
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

    /// Has the notification made for a message that came into the empty queue, unless a receiver
    /// waits for it: one on the list, or a task that was told of a message and has not looked yet.
    #[inline(always)]
    fn notify_unless_awaited(&mut self, deferred: &mut Deferred) {
        let awaited = !self.receivers.is_empty() || self.receive_permits != 0;
        if self.notification.is_some() && !awaited {
            step!(
                "send: notify of the first message",
                deferred.set_notification(self.notification.take())
            );
        }
    }

    /// There are more messages than permits.
    fn serve_receiver(
        &mut self,
        node: Node<T, L::Priority>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        if is_task(node) {
            // SAFETY: the first of this list, so it lives.
            unsafe { self.receivers.remove(node) };
            step!("receive permit: increment the count", self.receive_permits += 1);
            deferred.wake(grant_permit(node));
            return;
        }
        // Of comparisons that panic the receiver finds out by itself, as in `serve_sender`.
        let pop = || self.core.pop_with(preload);
        match catch_unwind(AssertUnwindSafe(pop)) {
            Ok(Some(message)) => self.hand_over(node, message, deferred),
            Ok(None) => {}
            Err(panic) => {
                deferred.discard(panic);
                // SAFETY: on this list.
                unsafe { self.receivers.remove(node) };
                // SAFETY: taken off the list above.
                deferred.wake(unsafe { Waiter::end_wait(node, WaitEnd::Retry) });
            }
        }
    }

    /// There is room for what it wants to send.
    fn serve_sender(
        &mut self,
        node: Node<T, L::Priority>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) {
        // SAFETY: on this list, so it lives; nobody tells it anything without the lock.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: we have the lock, and the reference ends in this line.
        let demand = unsafe { waiter.inner() }.demand;
        if is_task(node) {
            // SAFETY: on this list.
            unsafe { self.senders.remove(node) };
            step!("send permit: increment the count", self.send_permits += 1);
            self.send_permit_bytes += demand.map_or(0, |demand| u64::from(demand.bytes));
            deferred.wake(grant_permit(node));
            return;
        }
        // Comparisons are the user's code, and may panic: then nothing was changed, and the sender
        // finds out by itself, rather than this thread, which may have a message at hand.
        let enter = || demand.map(|demand| self.core.get_or_insert_level(demand.priority, preload));
        let level = match catch_unwind(AssertUnwindSafe(enter)) {
            Ok(level) => level,
            Err(panic) => {
                deferred.discard(panic);
                None
            }
        };
        // SAFETY: on this list.
        unsafe { self.senders.remove(node) };
        // SAFETY: we have the lock; no other reference is left.
        let slot = &mut unsafe { waiter.inner() }.message;
        let ended = match (level, slot.take()) {
            (Some(Ok(level)), Some(message)) => {
                match self.core.push_to_level(level, message, preload) {
                    Ok(()) => WaitEnd::Completed,
                    Err(message) => {
                        *slot = Some(message);
                        WaitEnd::Retry
                    }
                }
            }
            // No memory here: it tries with its own, and says so if there is none.
            (_, message) => {
                *slot = message;
                WaitEnd::Retry
            }
        };
        if ended == WaitEnd::Completed {
            self.counters.sent += 1;
            self.counters.taken_over += 1;
            self.counters.peak = self.counters.peak.max(self.core.len());
        }
        // SAFETY: taken off the list above.
        deferred.wake(unsafe { Waiter::end_wait(node, ended) });
    }

    /// The first who waits to send and may: whom only a reserve keeps out holds up nobody behind it.
    pub(super) fn first_admissible_sender(
        &self,
        config: &Config<T, L>,
    ) -> Option<Node<T, L::Priority>> {
        if self.closed {
            return None; // they are about to be told
        }
        let len = self.core.len() + self.send_permits;
        let bytes = self.core.bytes() + self.send_permit_bytes;
        let mut at = self.senders.first();
        while let Some(node) = at {
            // SAFETY: on the list, so it lives; we have the lock.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: as above.
            let demand = unsafe { waiter.inner() }.demand?;
            if config.has_room(len, bytes, demand) {
                return Some(node);
            }
            if !config.fits_without_reserves(len, bytes, demand) {
                return None;
            }
            // SAFETY: on the list.
            at = unsafe { self.senders.next(node) };
        }
        None
    }

    /// Uses up a permit to receive, or gives it back.
    pub(crate) fn release_receive_permit(&mut self) {
        step!("receive permit: decrement the count", self.receive_permits -= 1);
    }

    /// Uses up a permit to send, or gives it back.
    pub(crate) fn release_send_permit(&mut self, bytes: u32) {
        step!("send permit: decrement the count", self.send_permits -= 1);
        self.send_permit_bytes -= u64::from(bytes);
    }

    /// Takes the first of those who wait off their lists, to look again: the queue is closed.
    /// Returns false when none is left.
    pub(crate) fn dismiss_one(&mut self, deferred: &mut Deferred) -> bool {
        let node = if let Some(node) = self.receivers.first() {
            // SAFETY: on the list, so it lives.
            unsafe { self.receivers.remove(node) };
            node
        } else if let Some(node) = self.senders.first() {
            // SAFETY: as above.
            unsafe { self.senders.remove(node) };
            node
        } else {
            return false;
        };
        // SAFETY: taken off its list just now.
        deferred.wake(unsafe { Waiter::end_wait(node, WaitEnd::Retry) });
        true
    }

    /// Rings the notifiers that are due.
    #[cold]
    #[inline(never)]
    pub(crate) fn signal_notifiers(&mut self, config: &Config<T, L>, deferred: &mut Deferred) {
        let readable = !self.core.is_empty() || self.closed;
        let writable = !config.is_full(self.core.len(), self.core.bytes()) || self.closed;
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

/// Whether a node on a list is a task's.
fn is_task<T, P: Copy>(node: Node<T, P>) -> bool {
    // SAFETY: on a list, so it lives; the caller has the lock.
    let waiter = unsafe { node.as_ref() };
    // SAFETY: as above.
    unsafe { waiter.inner() }.is_task()
}

/// Gives a task that was taken off its list a permit.
fn grant_permit<T, P: Copy>(node: Node<T, P>) -> Option<Wake> {
    // SAFETY: its future takes the lock before it goes, and we have that.
    let waiter = unsafe { node.as_ref() };
    // SAFETY: as above.
    unsafe { waiter.inner() }.permit = true;
    // SAFETY: taken off its list by the caller.
    unsafe { Waiter::end_wait(node, WaitEnd::Completed) }
}
