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

use super::after::{After, Notification};
use super::config::Config;
use crate::core::{Core, Levels, Message, Preload};
use crate::error::SendRefused;
use crate::event::{Bell, READABLE, WRITABLE};
use crate::stats::Counters;
use crate::waiter::{Ended, Rank, WaitList, Waiter, Wake, Wanted};

pub(crate) type Node<T, P> = NonNull<Waiter<T, P>>;

#[repr(C)] // what every message needs comes first, beside the lock's word
pub(crate) struct State<T, L: Levels> {
    pub(crate) closed: bool,
    /// A bell of either direction is to be rung: bits by direction.
    pub(crate) armed: u8,
    pub(crate) notification: Option<Notification>,
    pub(crate) receivers: WaitList<T, L::Priority>,
    pub(crate) senders: WaitList<T, L::Priority>,
    /// Tasks that were told of a message, and have not looked yet.
    pub(crate) receive_permits: usize,
    /// Tasks that were told of room, and have not looked yet; and the bytes they want.
    pub(crate) send_permits: usize,
    pub(crate) send_permit_bytes: u64,
    pub(crate) bells: [Option<Arc<Bell>>; 2],
    pub(crate) counters: Counters,
    pub(crate) core: Core<T, L>,
}

// SAFETY: messages, notifications and wakers move between threads; priorities are copied there. The
// levels hold priorities alone.
unsafe impl<T: Send, L: Levels> Send for State<T, L> where L::Priority: Send {}

/// A message that was not put in, and why.
pub(crate) type NotPut<T, P> = (Message<T, P>, SendRefused);

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
            bells: [const { None }; 2],
            counters: Counters::default(),
        }
    }

    /// Puts a message in, or into the hands of who waits for one; `rank` is its sender's.
    #[inline(always)]
    pub(crate) fn put(
        &mut self,
        config: &Config<T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) -> Result<(), NotPut<T, L::Priority>> {
        if self.closed {
            return Err((message, SendRefused::Closed));
        }
        if !check!("send: no receiver waits", self.receivers.is_empty()) {
            return self.put_beside_receivers(config, message, rank, preload, after);
        }
        self.push(config, message, rank, preload, after)?;
        if self.core.len() == 1 {
            self.notify_unless_awaited(after);
        }
        if self.armed != 0 {
            self.ring(config, after);
        }
        Ok(())
    }

    /// The level for a message that [`fill_at_once`](Self::fill_at_once) puts there next, if nobody
    /// waits or is to be told and there is room and memory; else nothing has changed.
    #[inline(always)]
    pub(crate) fn enter_at_once(
        &mut self,
        config: &Config<T, L>,
        priority: L::Priority,
        bytes: u32,
    ) -> Option<L::Place> {
        let quiet = self.is_quiet() && !self.closed && self.notification.is_none();
        let quiet = quiet && self.send_permits == 0; // in turn, what is promised is not there
        let wanted = || config.wanted(priority, bytes);
        let room = quiet && config.has_room(self.core.len(), self.core.bytes(), wanted());
        if room { self.core.enter_at_once(priority) } else { None }
    }

    /// Puts a message into its level, which was entered just now.
    #[inline(always)]
    pub(crate) fn fill_at_once(&mut self, place: L::Place, message: Message<T, L::Priority>) {
        self.core.fill_at_once(place, message);
        self.count_sent();
    }

    /// Takes the next message out, if there is one and nobody waits or is to be told; else nothing has
    /// changed.
    #[inline(always)]
    pub(crate) fn take_at_once(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        if self.is_quiet() { self.core.pop_with(preload) } else { None }
    }

    /// Whether nobody waits, and no bell is to be rung.
    #[inline(always)]
    fn is_quiet(&self) -> bool {
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
    pub(crate) fn take(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) -> Option<Message<T, L::Priority>> {
        let message = match self.core.pop_with(preload) {
            Some(message) => message,
            None if self.senders.is_empty() => return None,
            None => self.take_from_sender(config, preload, after)?,
        };
        let waiting = !self.senders.is_empty() || self.armed != 0;
        if waiting {
            step!(
                "take: let those that wait to send go on",
                self.go_on(config, preload, after, false)
            );
        }
        Some(message)
    }

    /// The message of a thread that waits although the queue is empty: room was promised to tasks
    /// that have not looked yet. They keep nobody from receiving.
    #[cold]
    #[inline(never)]
    fn take_from_sender(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) -> Option<Message<T, L::Priority>> {
        let mut at = self.senders.first().filter(|_| !self.closed && after.has_room());
        while let Some(node) = at {
            // SAFETY: on the list, so it lives; we have the lock.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: as above.
            let wanted = unsafe { waiter.inner() }.wanted?;
            if !is_task(node) && config.has_room(0, 0, wanted) {
                self.serve_sender(node, preload, after);
                break;
            }
            // SAFETY: on the list.
            at = unsafe { self.senders.behind(node) };
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
        after: &mut After,
    ) -> Result<(), NotPut<T, L::Priority>> {
        let Message { priority, bytes, .. } = message;
        let place = if L::COMPARES {
            // If that panics nothing was changed. The message goes back, to be dropped after the unlock
            // as the panic goes on: any reason does, see `refuse_put`.
            let enter = AssertUnwindSafe(|| self.enter(config, priority, bytes, rank, preload));
            catch_unwind(enter).unwrap_or_else(|panic| {
                after.set_panic(panic);
                Err(SendRefused::NoMemory)
            })
        } else {
            self.enter(config, priority, bytes, rank, preload)
        };
        let place = match place {
            Ok(place) => place,
            Err(reason) => return Err((message, reason)),
        };
        let filled = self.core.fill(place, message, preload);
        filled.map_err(|message| (message, SendRefused::NoMemory))?;
        self.count_sent();
        Ok(())
    }

    /// The level for a message, if it has room.
    #[inline(always)]
    fn enter(
        &mut self,
        config: &Config<T, L>,
        priority: L::Priority,
        bytes: u32,
        rank: Rank,
        preload: &mut Preload<T, L>,
    ) -> Result<L::Place, SendRefused> {
        let wanted = config.wanted(priority, bytes);
        if !config.has_room(self.core.len(), self.core.bytes(), wanted)
            || (config.fair_bytes && self.would_overtake(config, wanted, rank))
        {
            return Err(SendRefused::Full);
        }
        self.core.enter(priority, preload).map_err(|AllocError { .. }| SendRefused::NoMemory)
    }

    /// Whether a sender of this rank that has room takes it from others: from tasks that it was
    /// promised to, or from who is before it and waits for more. Its place would be behind them.
    #[cold]
    #[inline(never)]
    fn would_overtake(
        &self,
        config: &Config<T, L>,
        wanted: Wanted<L::Priority>,
        rank: Rank,
    ) -> bool {
        let len = self.core.len() + self.send_permits;
        let bytes = self.core.bytes() + self.send_permit_bytes;
        if !config.has_room(len, bytes, wanted) {
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
            // Whom a reserve alone keeps out holds up nobody, as in `admissible`. Who is about to be
            // served has its room, or will be.
            let fits = |theirs| config.would_fit_but_for_reserves(len, bytes, theirs);
            if !inner.wanted.is_some_and(fits) {
                return true;
            }
            // SAFETY: on the list.
            at = unsafe { self.senders.behind(node) };
        }
        false
    }

    #[cold]
    #[inline(never)]
    fn put_beside_receivers(
        &mut self,
        config: &Config<T, L>,
        message: Message<T, L::Priority>,
        rank: Rank,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) -> Result<(), NotPut<T, L::Priority>> {
        if self.core.is_empty() {
            if let Some(thread) = self.receivers.first().filter(|&node| !is_task(node)) {
                self.hand_over(thread, message, after);
                // After it was told: these are on other lines, for which it would wait.
                self.counters.sent += 1;
                return Ok(());
            }
        }
        self.push(config, message, rank, preload, after)?;
        self.settle(config, preload, after);
        Ok(())
    }

    /// Ends the wait of a thread that waits to receive with a message. `after` has room.
    fn hand_over(
        &mut self,
        thread: Node<T, L::Priority>,
        message: Message<T, L::Priority>,
        after: &mut After,
    ) {
        // SAFETY: the first of this list, so it lives.
        unsafe { self.receivers.remove(thread) };
        // SAFETY: nobody told it yet; we have the lock.
        let waiter = unsafe { thread.as_ref() };
        // SAFETY: as above.
        unsafe { waiter.inner() }.cargo = Some(message);
        // SAFETY: taken off the list above.
        after.wake(unsafe { Waiter::end(thread, Ended::Done) });
        self.counters.handed_over += 1;
    }

    /// Makes the invariants true again after a message came or went, a permit was used or given up,
    /// or room was made.
    #[cold]
    #[inline(never)]
    pub(crate) fn settle(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) {
        self.go_on(config, preload, after, self.core.is_empty());
    }

    /// The same, of a queue that was empty, as far as anybody could see, or not.
    #[cold]
    #[inline(never)]
    fn go_on(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        after: &mut After,
        mut was_empty: bool,
    ) {
        loop {
            let receiver =
                self.receivers.first().filter(|_| self.core.len() > self.receive_permits);
            let sender = if receiver.is_none() { self.admissible(config) } else { None };
            if receiver.is_none() && sender.is_none() {
                break;
            }
            if !after.has_room() {
                after.come_again();
                break;
            }
            if let Some(node) = receiver {
                self.serve_receiver(node, preload, after);
            } else if let Some(node) = sender {
                self.serve_sender(node, preload, after);
                if was_empty && !self.core.is_empty() {
                    was_empty = false;
                    self.notify_unless_awaited(after);
                }
            }
        }
        if self.armed != 0 {
            self.ring(config, after);
        }
    }

    /// Has the notification made for a message that came into the empty queue, unless a receiver
    /// waits for it: one on the list, or a task that was told of a message and has not looked yet.
    #[inline(always)]
    fn notify_unless_awaited(&mut self, after: &mut After) {
        let awaited = !self.receivers.is_empty() || self.receive_permits != 0;
        if self.notification.is_some() && !awaited {
            step!(
                "send: notify of the first message",
                after.set_notification(self.notification.take())
            );
        }
    }

    /// There are more messages than permits.
    fn serve_receiver(
        &mut self,
        node: Node<T, L::Priority>,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) {
        if is_task(node) {
            // SAFETY: the first of this list, so it lives.
            unsafe { self.receivers.remove(node) };
            step!("serve a receiving task: count its permit", self.receive_permits += 1);
            after.wake(permit(node));
            return;
        }
        // Of comparisons that panic the receiver finds out by itself, as in `serve_sender`.
        let pop = || self.core.pop_with(preload);
        match catch_unwind(AssertUnwindSafe(pop)) {
            Ok(Some(message)) => self.hand_over(node, message, after),
            Ok(None) => {}
            Err(panic) => {
                after.discard(panic);
                // SAFETY: on this list.
                unsafe { self.receivers.remove(node) };
                // SAFETY: taken off the list above.
                after.wake(unsafe { Waiter::end(node, Ended::Again) });
            }
        }
    }

    /// There is room for what it wants to send.
    fn serve_sender(
        &mut self,
        node: Node<T, L::Priority>,
        preload: &mut Preload<T, L>,
        after: &mut After,
    ) {
        // SAFETY: on this list, so it lives; nobody tells it anything without the lock.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: we have the lock, and the reference ends in this line.
        let wanted = unsafe { waiter.inner() }.wanted;
        if is_task(node) {
            // SAFETY: on this list.
            unsafe { self.senders.remove(node) };
            step!("serve a sending task: count its permit", self.send_permits += 1);
            self.send_permit_bytes += wanted.map_or(0, |wanted| u64::from(wanted.bytes));
            after.wake(permit(node));
            return;
        }
        // Comparisons are the user's code, and may panic: then nothing was changed, and the sender
        // finds out by itself, rather than this thread, which may have a message at hand.
        let enter = || wanted.map(|wanted| self.core.enter(wanted.priority, preload));
        let place = match catch_unwind(AssertUnwindSafe(enter)) {
            Ok(place) => place,
            Err(panic) => {
                after.discard(panic);
                None
            }
        };
        // SAFETY: on this list.
        unsafe { self.senders.remove(node) };
        // SAFETY: we have the lock; no other reference is left.
        let cargo = &mut unsafe { waiter.inner() }.cargo;
        let ended = match (place, cargo.take()) {
            (Some(Ok(place)), Some(message)) => match self.core.fill(place, message, preload) {
                Ok(()) => Ended::Done,
                Err(message) => {
                    *cargo = Some(message);
                    Ended::Again
                }
            },
            // No memory here: it tries with its own, and says so if there is none.
            (_, message) => {
                *cargo = message;
                Ended::Again
            }
        };
        if ended == Ended::Done {
            self.counters.sent += 1;
            self.counters.taken_over += 1;
            self.counters.peak = self.counters.peak.max(self.core.len());
        }
        // SAFETY: taken off the list above.
        after.wake(unsafe { Waiter::end(node, ended) });
    }

    /// The first who waits to send and may: whom only a reserve keeps out holds up nobody behind it.
    pub(super) fn admissible(&self, config: &Config<T, L>) -> Option<Node<T, L::Priority>> {
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
            let wanted = unsafe { waiter.inner() }.wanted?;
            if config.has_room(len, bytes, wanted) {
                return Some(node);
            }
            if !config.would_fit_but_for_reserves(len, bytes, wanted) {
                return None;
            }
            // SAFETY: on the list.
            at = unsafe { self.senders.behind(node) };
        }
        None
    }

    /// Uses up a permit to receive, or gives it back.
    pub(crate) fn end_receive_permit(&mut self) {
        step!("end of a permit to receive: count it out", self.receive_permits -= 1);
    }

    /// Uses up a permit to send, or gives it back.
    pub(crate) fn end_send_permit(&mut self, bytes: u32) {
        step!("end of a permit to send: count it out", self.send_permits -= 1);
        self.send_permit_bytes -= u64::from(bytes);
    }

    /// Takes the first of those who wait off their lists, to look again: the queue is closed.
    /// Returns false when none is left.
    pub(crate) fn dismiss_one(&mut self, after: &mut After) -> bool {
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
        after.wake(unsafe { Waiter::end(node, Ended::Again) });
        true
    }

    /// Rings the bells that are due.
    #[cold]
    #[inline(never)]
    pub(crate) fn ring(&mut self, config: &Config<T, L>, after: &mut After) {
        let readable = !self.core.is_empty() || self.closed;
        let writable = !config.is_full(self.core.len(), self.core.bytes()) || self.closed;
        for (which, due) in [(READABLE, readable), (WRITABLE, writable)] {
            if due && self.armed & (1 << which) != 0 {
                self.armed &= !(1 << which);
                if let Some(bell) = &self.bells[which] {
                    after.ring(which, Arc::clone(bell));
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
fn permit<T, P: Copy>(node: Node<T, P>) -> Option<Wake> {
    // SAFETY: its future takes the lock before it goes, and we have that.
    let waiter = unsafe { node.as_ref() };
    // SAFETY: as above.
    unsafe { waiter.inner() }.permit = true;
    // SAFETY: taken off its list by the caller.
    unsafe { Waiter::end(node, Ended::Done) }
}
