//! The service of waiting threads and tasks: hand-overs, permits and signals.

use percpu::sync::step;

use super::config::Config;
use super::deferred::{Deferred, catch_comparison};
use super::section::Section;
use super::state::{Node, State};
use crate::core::{Levels, Message};
use crate::event::Interest;
use crate::waiter::{WaitEnd, Waiter, Wakeup};

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
